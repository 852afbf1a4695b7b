"""Let the n-th operation on the disk or statement of SQL fail, for each n until none fails. SQLite tests itself this way.

After each fault the directory holds only right rows, and the next run computes each of the others once.
"""

from __future__ import annotations

import errno
import itertools
import shutil
import sqlite3
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from faults import Disk, Statements
from stored import ComputedRows, damage, read_rows, rows_of

import devicemap
from devicemap.errors import JournalError

pytestmark = pytest.mark.usefixtures("no_thread_stays")

X = np.arange(16)
BAD = 9
"""This row fails."""

RIGHT = {int(row): 3 * int(row) + 1 for row in X if row != BAD}
WIDTH = 5000
"""The results of a chunk take more than one page of the database."""

_computed = ComputedRows()


def _wide(row: Any) -> Any:
    with tf.control_dependencies([tf.debugging.assert_none_equal(row, tf.constant(BAD, tf.int64))]):
        return tf.fill([WIDTH], 3 * row + 1)


MAPPER = devicemap.DeviceMap(
    _wide, devices=["CPU:1", "CPU:2"], batch_size=4, on_error="skip", vectorize=False, progress=_computed.observe
)


def _write(directory: Path) -> list[int]:
    _computed.clear()
    return _rows(MAPPER.write(X, directory))


def _rows(results: devicemap.types.Results) -> list[int]:
    loaded = results.load()
    assert loaded.shape == (len(results), WIDTH)
    return [int(row[-1]) for row in loaded]


def _reduce(directory: Path) -> list[int]:
    _computed.clear()
    return [int(MAPPER.reduce(X, "sum", directory)[-1])]


def _read(directory: Path) -> list[int]:
    return _rows(devicemap.open_results(directory))


def _write_some(directory: Path) -> None:
    """Write fewer rows, and damage some of them."""
    MAPPER.write(X[:10], directory)
    damage(directory, 4)


def _write_all(directory: Path) -> None:
    MAPPER.write(X, directory)


CALLS: dict[str, tuple[Callable[[Path], None] | None, Callable[[Path], list[int]], list[int]]] = {
    # what is in the directory, the call, and its result
    "write": (None, _write, [*RIGHT.values()]),
    "continue": (_write_some, _write, [*RIGHT.values()]),
    "reduce": (None, _reduce, [sum(RIGHT.values())]),
    "read": (_write_all, _read, [*RIGHT.values()]),
}


FAULTS: dict[str, Callable[[], tuple[Any, bool]]] = {  # what fails, and whether everything after it fails, too
    "disk, once": lambda: (Disk(), False),
    "disk, from then on": lambda: (Disk(), True),
    "full disk": lambda: (Disk(full=True), True),
    "Ctrl-C in a statement": lambda: (Statements(KeyboardInterrupt), False),
    "no memory for a statement": lambda: (Statements(MemoryError), False),
}


@pytest.mark.filterwarnings("ignore:.*failed in earlier runs:RuntimeWarning")
@pytest.mark.parametrize("step", [3, pytest.param(1, marks=pytest.mark.nightly)], ids=["some", "all"])
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("name", CALLS)
def test_a_later_run_computes_what_is_missing(name: str, fault: str, step: int, tmp_path: Path) -> None:
    before, call, wanted = CALLS[name]
    faulty, goes_on = FAULTS[fault]()
    if before is not None:
        before(tmp_path / "before")
    directory, errors = tmp_path / "out", list[BaseException]()
    for n in itertools.count(1, step):
        if before is not None:
            shutil.copytree(tmp_path / "before", directory)
        try:
            with faulty.failing(range(n, sys.maxsize if goes_on else n + 1)):
                assert call(directory) == wanted
        except (JournalError, KeyboardInterrupt) as error:
            errors.append(error)
        if faulty.count < n:
            break
        finished = _finished(directory, name)
        _computed.clear()
        assert call(directory) == wanted
        assert sorted(_computed) == [row for row in X if row not in finished and name != "read"]
        shutil.rmtree(directory, ignore_errors=True)
    full = [str(error) for error in errors if getattr(error, "errno", None) == errno.ENOSPC]
    assert bool(full) == (fault == "full disk" and name != "read")  # which writes nothing
    assert n > 10 or (name, fault) == ("read", "full disk")
    assert all("disk is full" in message and "run again to compute the missing" in message for message in full)


def _finished(directory: Path, name: str) -> set[int]:
    """The rows that are in a directory, of which a reader gets the right results."""
    if name == "reduce":
        with suppress(sqlite3.OperationalError):  # no table
            return rows_of(directory)
        return set()
    found = read_rows(directory)
    failed = {BAD} & {*found}
    assert "InvalidArgumentError" in found.pop(BAD, "InvalidArgumentError")
    for row, result in found.items():
        assert result.tolist() == [RIGHT[row]] * WIDTH
    return failed | {*found}
