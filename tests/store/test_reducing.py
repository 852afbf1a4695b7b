"""`DeviceMap.reduce` with a directory: after a full disk, a later run counts each row once; other folders are refused."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from journals import full_disk, untouched

from devicemap import DeviceMap, Reducer, open_results
from devicemap.errors import JournalError
from devicemap.events import ChunkFinished, Event

DATA = np.arange(64)


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


class Counted:
    """A mapper that records which rows it computes."""

    def __init__(self, fn: Callable[..., Any] = _fn, data: Any = DATA, **options: Any):
        self.computed: list[int] = []
        self.mapper = DeviceMap(fn, devices=["CPU:1", "CPU:2"], progress=self._observe, **{"batch_size": 4, **options})
        self.data = data

    def reduce(self, reducer: Any, directory: Path | None = None) -> Any:
        self.computed.clear()
        return self.mapper.reduce(self.data, reducer, directory)

    def _observe(self, event: Event) -> None:
        if isinstance(event, ChunkFinished):
            self.computed += range(event.shard.start, event.shard.stop)


SAMPLES = tf.data.Dataset.from_tensor_slices(DATA)
SOURCES: dict[str, Callable[[], Counted]] = {
    "in memory": Counted,
    "in memory, without batch_size": lambda: Counted(batch_size=None),
    "samples": lambda: Counted(data=SAMPLES),
    "batches": lambda: Counted(data=SAMPLES.batch(4), batched=True, batch_size=None),
}


@pytest.mark.parametrize("chunks", [0, 1, 5])
@pytest.mark.parametrize("reducer", REDUCERS)
@pytest.mark.parametrize("source", SOURCES)
def test_each_row_is_counted_once(source: str, reducer: str, chunks: int, tmp_path: Path) -> None:
    counted = SOURCES[source]()
    wanted = counted.reduce(REDUCERS[reducer])
    with full_disk(chunks), pytest.raises(JournalError, match="No space"):
        counted.reduce(REDUCERS[reducer], tmp_path)
    done = counted.computed.copy()
    assert chunks or not done  # the error may come before the event of a chunk that was written
    close = partial(np.testing.assert_allclose, rtol=1e-6)
    tf.nest.map_structure(close, counted.reduce(REDUCERS[reducer], tmp_path), wanted)
    counts = Counter(done + counted.computed)  # a call that fails omits chunks that end after the error
    assert {*counts} <= {*DATA.tolist()}
    assert {*counts.values()} == {1}
    tf.nest.map_structure(close, counted.reduce(REDUCERS[reducer], tmp_path), wanted)
    assert counted.computed == []


def test_no_rows(tmp_path: Path) -> None:
    counted = Counted(data=DATA[:0])
    for _ in range(2):
        result = counted.reduce({"row": "sum", "root": "mean"}, tmp_path)
        assert int(result["row"]) == 0
        assert np.isnan(result["root"])


def _later(a: Any, b: Any) -> Any:
    return tf.nest.map_structure(lambda x, y: x + 2 * y, a, b)


OTHERS: dict[str, tuple[Callable[[], Counted], Any, str]] = {
    "data": (lambda: Counted(data=DATA + 1), REDUCERS["a Reducer"], "other data"),
    "function": (lambda: Counted(lambda row: _fn(row + 0)), REDUCERS["a Reducer"], "function"),
    "reducer": (Counted, "sum", "reducer"),
    "step": (Counted, Reducer(ZEROS, _later, _add), "function"),
    "merge": (Counted, Reducer(ZEROS, _add, _later), "function"),
    "initial": (Counted, Reducer({**ZEROS, "root": np.float32(1)}, _add, _add), "function"),
    "batch_size": (lambda: Counted(batch_size=8), REDUCERS["a Reducer"], "batch_size"),
}


@pytest.fixture(scope="module")
def reduced(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of states of a `Reducer`."""
    folder = tmp_path_factory.mktemp("states")
    Counted().reduce(REDUCERS["a Reducer"], folder)
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
    counted = Counted()
    assert int(counted.reduce(Reducer(ZEROS, _add, _add, lambda sums: -sums["row"]), reduced)) == -sum(range(64))
    assert counted.computed == []


def test_states_are_no_rows(reduced: Path, tmp_path: Path) -> None:
    with pytest.raises(JournalError, match="partial"):
        open_results(reduced)
    with untouched(reduced), pytest.raises(JournalError, match="reducer"):
        Counted().mapper.write(DATA, reduced)
    Counted().mapper.write(DATA, tmp_path)
    with untouched(tmp_path), pytest.raises(JournalError, match="reducer"):
        Counted().reduce("sum", tmp_path)
