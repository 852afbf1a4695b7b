"""`DeviceMap.reduce` with a directory: killed, on a full disk and refused; run again, each row is counted once."""

from __future__ import annotations

import errno
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from journals import untouched
from processes import run

from devicemap import DeviceMap, Reducer, open_results
from devicemap.errors import JournalError
from devicemap.events import ChunkFinished, Event
from devicemap.store import segments
from devicemap.store.storage import write_all

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
    """A mapper that tells which rows it has computed."""

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


@pytest.mark.parametrize("nth", [0, 1, 5])
@pytest.mark.parametrize("reducer", REDUCERS)
@pytest.mark.parametrize("source", SOURCES)
def test_each_row_is_counted_once(
    source: str, reducer: str, nth: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The n-th state, and all after it, find no room on the disk at first."""
    written: list[int] = []

    def full(descriptor: int, data: Any, offset: int) -> None:
        if len(written) >= nth:
            raise OSError(errno.ENOSPC, "No space left on device")
        written.append(offset)
        write_all(descriptor, data, offset)

    counted = SOURCES[source]()
    wanted = counted.reduce(REDUCERS[reducer])
    with monkeypatch.context() as patch:
        patch.setattr(segments, "write_all", full)
        with pytest.raises(JournalError, match="No space"):
            counted.reduce(REDUCERS[reducer], tmp_path)
    done = counted.computed.copy()
    assert nth or not done  # the error may arrive before the event of a chunk that was written
    close = partial(np.testing.assert_allclose, rtol=1e-6)
    tf.nest.map_structure(close, counted.reduce(REDUCERS[reducer], tmp_path), wanted)
    counts = Counter(done + counted.computed)  # a call that fails tells nothing of chunks that end meanwhile
    assert {*counts} <= {*DATA.tolist()}
    assert {*counts.values()} == {1}
    tf.nest.map_structure(close, counted.reduce(REDUCERS[reducer], tmp_path), wanted)
    assert counted.computed == []


KILLED = """
import os, signal, sys
import tensorflow as tf
import devicemap
from devicemap.types import ChunkFinished

def reduce(moment):
    devicemap.simulate_devices(2)
    finished = []
    def observe(event):
        if isinstance(event, ChunkFinished):
            finished.append(len(event.shard))
            if len(finished) == moment:
                print(sum(finished), flush=True)
                os.kill(os.getpid(), signal.SIGKILL)
    mapper = devicemap.DeviceMap(lambda n: n, batch_size=4, progress=observe)
    result = mapper.reduce(tf.data.Dataset.range(101), "sum", sys.argv[1])
    print(sum(finished), flush=True)
    print(int(result))

for moment in (1, 7):
    child = os.fork()  # TensorFlow has not started
    if not child:
        reduce(moment)
    os.waitpid(child, 0)
reduce(None)
"""


def test_killed(tmp_path: Path) -> None:
    """What a run has told of is kept."""
    first, second, last, total = map(int, run(KILLED, str(tmp_path / "sums")))
    assert min(first, second) > 0
    assert last <= 101 - first - second
    assert total == sum(range(101))


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
