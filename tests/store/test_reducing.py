"""`DeviceMap.reduce` with a directory: after a full disk, a later run counts each row once; other folders are refused."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from stored import DATA, Counted, damage, full_disk, untouched

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


class Reduced(Counted):
    """A mapper that records which rows it computes for a reduction."""

    def __init__(self, fn: Callable[..., Any] = _fn, data: Any = DATA, **options: Any):
        super().__init__(fn, data, **options)

    def reduce(self, reducer: Any, directory: Path | None = None) -> Any:
        self.computed.clear()
        return self.mapper.reduce(self.data, reducer, directory)


SAMPLES = tf.data.Dataset.from_tensor_slices(DATA)
SOURCES: dict[str, Callable[[], Reduced]] = {
    "in memory": Reduced,
    "in memory, without batch_size": lambda: Reduced(batch_size=None),
    "samples": lambda: Reduced(data=SAMPLES),
    "batches": lambda: Reduced(data=SAMPLES.batch(4), batched=True, batch_size=None),
}


@pytest.mark.parametrize("reducer", REDUCERS)
@pytest.mark.parametrize("source", SOURCES)
def test_each_row_is_counted_once(source: str, reducer: str, tmp_path: Path) -> None:
    """Also if a run ends with a full disk, or is interrupted after some chunks."""
    counted = SOURCES[source]()
    wanted = counted.reduce(REDUCERS[reducer])
    with full_disk(pages=3), pytest.raises(JournalError, match="disk is full"):
        counted.reduce(REDUCERS[reducer], tmp_path)
    close = partial(np.testing.assert_allclose, rtol=1e-6)
    for expected in [range(64), range(8, 12), range(0)]:
        tf.nest.map_structure(close, counted.reduce(REDUCERS[reducer], tmp_path), wanted)
        if source != "in memory, without batch_size":  # whose chunks are measured
            assert sorted(counted.computed) == [*expected]
            if len(expected) == 64:
                damage(tmp_path, 8)


def test_no_rows(tmp_path: Path) -> None:
    counted = Reduced(data=DATA[:0])
    for _ in range(2):
        result = counted.reduce({"row": "sum", "root": "mean"}, tmp_path)
        assert int(result["row"]) == 0
        assert np.isnan(result["root"])


def _later(a: Any, b: Any) -> Any:
    return tf.nest.map_structure(lambda x, y: x + 2 * y, a, b)


OTHERS: dict[str, tuple[Callable[[], Reduced], Any, str]] = {
    "data": (lambda: Reduced(data=DATA + 1), REDUCERS["a Reducer"], "other data"),
    "function": (lambda: Reduced(lambda row: _fn(row + 0)), REDUCERS["a Reducer"], "function"),
    "reducer": (Reduced, "sum", "reducer"),
    "step": (Reduced, Reducer(ZEROS, _later, _add), "function"),
    "merge": (Reduced, Reducer(ZEROS, _add, _later), "function"),
    "initial": (Reduced, Reducer({**ZEROS, "root": np.float32(1)}, _add, _add), "function"),
    "batch_size": (lambda: Reduced(batch_size=8), REDUCERS["a Reducer"], "batch_size"),
}


@pytest.fixture(scope="module")
def reduced(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of states of a `Reducer`."""
    folder = tmp_path_factory.mktemp("states")
    Reduced().reduce(REDUCERS["a Reducer"], folder)
    return folder


@pytest.mark.in_ci(3)
@pytest.mark.parametrize("other", OTHERS)
def test_states_of_another_reduction_are_refused(other: str, reduced: Path) -> None:
    make, reducer, word = OTHERS[other]
    counted = make()
    with untouched(reduced), pytest.raises(JournalError, match=word):
        counted.reduce(reducer, reduced)
    assert counted.computed == []


def test_states_can_be_finished_in_another_way(reduced: Path) -> None:
    counted = Reduced()
    assert int(counted.reduce(Reducer(ZEROS, _add, _add, lambda sums: -sums["row"]), reduced)) == -sum(range(64))
    assert counted.computed == []


def test_states_are_not_rows(reduced: Path, tmp_path: Path) -> None:
    with pytest.raises(JournalError, match="partial"):
        open_results(reduced)
    with untouched(reduced), pytest.raises(JournalError, match="reducer"):
        Reduced().mapper.write(DATA, reduced)
    Reduced().mapper.write(DATA, tmp_path)
    with untouched(tmp_path), pytest.raises(JournalError, match="reducer"):
        Reduced().reduce("sum", tmp_path)
