"""Directories that releases have written are read and continued by later ones, or refused with the version that reads them.

`tests/golden` holds them by version. `python tests/store/test_golden.py` adds those of the current one.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from stored import NEST, ROWS, ComputedRows, nest_of, query

import devicemap
from devicemap.errors import JournalError

GOLDEN = Path(__file__).parent.parent / "golden"
BAD = 5
"""This row fails in "failed rows" and "unfinished"."""

_computed = ComputedRows()


def _failing(row: Any) -> Any:
    with tf.control_dependencies([tf.debugging.assert_none_equal(row, BAD)]):
        return 3 * row + 1


LEAVES = devicemap.DeviceMap(nest_of, batched=True, batch_size=4, devices=["CPU:0"], progress=_computed.observe)
FAILING = devicemap.DeviceMap(_failing, batch_size=4, devices=["CPU:0"], on_error="skip", progress=_computed.observe)


def _parts(nest: Any) -> list[Any]:
    return [np.asarray(part).tolist() for part in tf.nest.flatten(nest, expand_composites=True)]


def _write(directory: Path, name: str, rows: int) -> None:
    """Write, and check all rows. Another version of TensorFlow may trace another graph, so the function is trusted."""
    mapper = LEAVES if name == "all kinds of leaves" else FAILING
    results = mapper.write(tf.range(rows), directory, trust_function=True)
    if mapper is LEAVES:
        assert _parts(results.load()) == _parts(NEST)
        return
    assert results.load().tolist() == [3 * row + 1 for row in range(rows) if row != BAD]
    assert [failed.row for failed in results.failed_rows] == [BAD] * (rows > BAD)
    assert all("InvalidArgumentError" in failed.error for failed in results.failed_rows)


CASES = {"all kinds of leaves": ROWS, "failed rows": ROWS, "unfinished": 4}
"""Rows that the directory holds, of `ROWS`."""


@pytest.mark.parametrize("path", [pytest.param(path, id=str(path.relative_to(GOLDEN))) for path in GOLDEN.glob("*/*")])
def test_results_of_earlier_releases(path: Path, tmp_path: Path) -> None:
    shutil.unpack_archive(path, tmp_path)
    stored = CASES[path.stem]
    results = devicemap.open_results(tmp_path)
    assert len(results) + len(results.failed_rows) == stored
    _computed.clear()
    _write(tmp_path, path.stem, ROWS)
    assert sorted(_computed) == [*range(stored, ROWS)]


def test_every_case_is_kept_for_this_version() -> None:
    assert {path.stem for path in (GOLDEN / devicemap.__version__).glob("*.zip")} == {*CASES}


def test_another_format_is_refused_with_its_version(tmp_path: Path) -> None:
    _write(tmp_path, "failed rows", ROWS)
    query(tmp_path, "PRAGMA user_version=1002003")
    query(tmp_path, "ALTER TABLE header ADD COLUMN other")
    for call in (devicemap.open_results, lambda path: _write(path, "failed rows", ROWS)):
        with pytest.raises(JournalError, match=r"Read them with devicemap 1\.2\.3"):
            call(tmp_path)


if __name__ == "__main__":
    for name, rows in CASES.items():
        with tempfile.TemporaryDirectory() as directory:
            _write(Path(directory), name, rows)
            shutil.make_archive(str(GOLDEN / devicemap.__version__ / name), "zip", directory)
