"""`DeviceMap.reduce` with a directory: a later run counts each row once; other folders are refused."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from stored import DATA, Counted, damage, untouched

from devicemap import Reducer, open_results
from devicemap.errors import JournalError


def _fn(row: Any) -> Any:
    return {"row": row, "root": tf.sqrt(tf.cast(row, tf.float32))}


def _add(a: Any, b: Any) -> Any:
    return tf.nest.map_structure(tf.add, a, b)


ZEROS = {"row": np.int64(0), "root": np.float32(0)}
REDUCERS = {
    "an op": "sum",
    "a nest": {"row": "max", "root": "mean"},
    "a Reducer": Reducer(ZEROS, _add, _add, lambda sums: sums["root"]),
}


_counted = partial(Counted, _fn)


@pytest.mark.parametrize("reducer", REDUCERS)
@pytest.mark.parametrize("options", [{}, {"batch_size": None}], ids=["chunks of 4 rows", "chunks of any size"])
def test_each_row_is_counted_once(options: dict[str, Any], reducer: str, tmp_path: Path) -> None:
    """Also if an earlier run counted all rows, or all that are not damaged now."""
    counted = _counted(**options)
    wanted = counted.reduce(REDUCERS[reducer])
    close = partial(np.testing.assert_allclose, rtol=1e-6)
    for find in (lambda: range(64), lambda: damage(tmp_path, 0), lambda: ()):
        computed = find()
        tf.nest.map_structure(close, counted.reduce(REDUCERS[reducer], tmp_path), wanted)
        assert sorted(counted.computed) == [*computed]


def test_no_rows(tmp_path: Path) -> None:
    for _ in range(2):
        result = _counted(data=DATA[:0]).reduce({"row": "sum", "root": "mean"}, tmp_path)
        assert (int(result["row"]), np.isnan(result["root"])) == (0, True)


def _later(a: Any, b: Any) -> Any:
    return tf.nest.map_structure(lambda x, y: x + 2 * y, a, b)


A_REDUCER = REDUCERS["a Reducer"]
OTHERS: list[tuple[Callable[[], Counted], Any, str]] = [
    (lambda: _counted(data=DATA + 1), A_REDUCER, "other data"),
    (lambda: Counted(lambda row: _fn(row + 0)), A_REDUCER, "function"),
    (_counted, "sum", "reducer"),
    (_counted, Reducer(ZEROS, _later, _add), "function"),
    (_counted, Reducer(ZEROS, _add, _later), "function"),
    (_counted, Reducer({**ZEROS, "root": np.float32(1)}, _add, _add), "function"),
    (lambda: _counted(batch_size=8), A_REDUCER, "batch_size"),
]


def test_only_states_of_the_same_reduction_are_continued(tmp_path: Path) -> None:
    _counted().reduce(A_REDUCER, tmp_path / "states")
    _counted().mapper.write(DATA, tmp_path / "rows")
    with untouched(tmp_path):
        for make, reducer, word in OTHERS:
            with pytest.raises(JournalError, match=word):
                make().reduce(reducer, tmp_path / "states")
        with pytest.raises(JournalError, match="reducer"):
            _counted().mapper.write(DATA, tmp_path / "states")
        with pytest.raises(JournalError, match="reducer"):
            _counted().reduce("sum", tmp_path / "rows")
        with pytest.raises(JournalError, match="partial"):
            open_results(tmp_path / "states")
        counted = _counted()
        finished = counted.reduce(Reducer(ZEROS, _add, _add, lambda sums: -sums["row"]), tmp_path / "states")
        assert (int(finished), counted.computed) == (-sum(range(64)), [])
