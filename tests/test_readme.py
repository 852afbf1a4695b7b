"""The Python blocks of the README and of `docs/` run, those of a page one after another, as a program of a user's."""

from __future__ import annotations

import pathlib
import re
import runpy
import subprocess
import sys
from dataclasses import fields

import pytest

import devicemap
from devicemap.options import Options

ROOT = pathlib.Path(__file__).parent.parent
README = ROOT / "README.md"
PAGES = sorted((ROOT / "docs").glob("*.md"))
WITHOUT_CODE = ("gallery", "glossary", "guarantees", "index", "internals", "limits", "mirrored", "reference")
LONG = ("explaining", "pipelines", "reduce", "state")
"""Pages that take several seconds."""

OF_NEW_PROCESSES = (
    [README],
    [ROOT / "docs" / "coming-from.md", ROOT / "docs" / "training.md"],
    [ROOT / "docs" / "scaling.md"],
)
"""Pages that share a process; the first of them creates its devices, and the others use these."""

RUN_ALL = "import runpy, sys\nfor program in sys.argv[1:]:\n    runpy.run_path(program, run_name='__main__')"


def _program(page: pathlib.Path, folder: pathlib.Path) -> str:
    """A file of the Python code of a page, as autograph reads the source of what it converts.

    Every other kind of block says what it is.
    """
    text = page.read_text(encoding="utf-8")
    fences = re.findall(r"^```(.*)$", text, re.M)
    assert {*fences[::2]} <= {"python", "console", "text", "diff"}, fences
    assert not any(fences[1::2]), fences
    blocks = re.findall(r"^```python\n(.*?)^```$", text, re.M | re.S)
    assert bool(blocks) == (page.stem not in WITHOUT_CODE)
    program = folder / f"{page.stem}_page.py"
    program.write_text("\n".join(blocks), encoding="utf-8")
    return str(program)


@pytest.mark.parametrize(
    "pages",
    [
        pytest.param(pages, id=pages[0].stem, marks=[pytest.mark.nightly] * (pages != [README]))
        for pages in OF_NEW_PROCESSES
    ],
)
def test_pages_run_in_a_new_process(pages: list[pathlib.Path], tmp_path: pathlib.Path) -> None:
    command = [sys.executable, "-c", RUN_ALL, *(_program(page, tmp_path) for page in pages)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr  # pages assert what they show
    if README in pages:
        assert done.stdout == "".join(re.findall(r"^```text\n(.*?)^```$", README.read_text("utf-8"), re.M | re.S))


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, id=page.stem, marks=[pytest.mark.nightly] * (page.stem in LONG))
        for page in sorted({*PAGES}.difference(*OF_NEW_PROCESSES))
    ],
)
def test_pages_run(page: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The eight devices of the tests are those that these pages ask for."""
    monkeypatch.chdir(tmp_path)
    runpy.run_path(_program(page, tmp_path))


def test_pages_are_linked() -> None:
    """From the index, and all links between files of this repository lead somewhere."""
    for page in (README, *PAGES):
        links = re.findall(r"\]\(([^)#]+)", page.read_text(encoding="utf-8"))
        for link in links:
            assert link.startswith("http") or (page.parent / link).exists(), f"{page.name}: {link}"
        if page.stem == "index":
            assert {other.name for other in PAGES if other != page} <= {*links}


def test_citation_has_the_version() -> None:
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert f"\nversion: {devicemap.__version__}\n" in citation


def test_every_option_is_in_the_table() -> None:
    page = (ROOT / "docs" / "using.md").read_text(encoding="utf-8")
    assert re.findall(r"^\| `(\w+)` \|", page, re.M) == [field.name for field in fields(Options)]
