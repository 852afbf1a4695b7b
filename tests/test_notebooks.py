"""The notebooks in `docs/notebooks` run, and print what is stored in them. `jupyter execute --inplace` stores the output."""

from __future__ import annotations

import pathlib
from typing import Any

import nbclient
import nbformat
import pytest

NOTEBOOKS = sorted((pathlib.Path(__file__).parent.parent / "docs" / "notebooks").glob("*.ipynb"))


def _printed(notebook: Any) -> list[str]:
    """The text that each cell prints, without warnings and logs."""
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    return ["".join(each.text for each in cell.outputs if each.get("name") == "stdout") for cell in cells]


@pytest.mark.parametrize(
    "path",
    [pytest.param(path, id=path.stem, marks=[pytest.mark.nightly] * (path.stem != "quickstart")) for path in NOTEBOOKS],
)
def test_notebooks_run(path: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    notebook = nbformat.read(path, as_version=4)
    stored = _printed(notebook)
    nbclient.NotebookClient(notebook, timeout=240, resources={"metadata": {"path": str(tmp_path)}}).execute()
    assert _printed(notebook) == stored
