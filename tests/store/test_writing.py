"""`DeviceMap.write` after kills, full disks, damage, interruptions and faults: a later run computes only what is missing.

The journal alone, at each of its bytes and steps, is tested in test_journal and its neighbours.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from journals import files_of, flip, full_disk, place_of, untouched
from processes import run

import devicemap
from devicemap.compile.compiled import CompiledMap
from devicemap.errors import JournalError
from devicemap.events import ChunkFinished, Event, short_name
from devicemap.store.records import read_journal

DEVICES = ["CPU:1", "CPU:2"]
DATA = np.arange(64)


class Counted:
    """A mapper of `3 * row + 1` that records which rows it computes."""

    def __init__(self, data: Any = DATA, **options: Any):
        self.computed: list[int] = []
        self._data = data
        self._mapper = devicemap.DeviceMap(_triple, devices=DEVICES, progress=self._observe, **options)

    def write(self, directory: Path, **options: Any) -> list[int]:
        """Write, check what is there, and return the rows that were computed for it."""
        self.computed.clear()
        results = self._mapper.write(self._data, directory, **options)
        np.testing.assert_array_equal(results.load(), 3 * DATA + 1)
        assert sorted(os.listdir(directory)) == files_of(directory)
        return sorted(self.computed)

    def _observe(self, event: Event) -> None:
        if isinstance(event, ChunkFinished):
            self.computed += range(event.shard.start, event.shard.stop)


def _triple(row: Any) -> Any:
    return 3 * row + 1


SOURCES: dict[str, Callable[[], Counted]] = {
    "in memory": lambda: Counted(batch_size=4),
    "samples": lambda: Counted(tf.data.Dataset.from_tensor_slices(DATA), batch_size=4),
    "batches": lambda: Counted(tf.data.Dataset.from_tensor_slices(DATA).batch(4), batched=True),
}


@pytest.fixture(params=list(SOURCES))
def counted(request: pytest.FixtureRequest) -> Counted:
    """The same rows in chunks of 4, from in-memory data and from datasets."""
    return SOURCES[request.param]()


def _stored(directory: Path) -> set[int]:
    """The rows that the journal lists."""
    return {row for entry in read_journal(directory).entries for row in range(entry.start, entry.stop)}


def _others(done: set[int]) -> list[int]:
    return [row for row in range(64) if row not in done]


KILLED = """
import os, signal, sys
import tensorflow as tf
import devicemap
from devicemap.types import ChunkFinished

def run(moment):
    devicemap.simulate_devices(2)
    finished = []
    def observe(event):
        if isinstance(event, ChunkFinished):
            finished.append(len(event.shard))
            if len(finished) == moment:
                print(sum(finished), flush=True)
                os.kill(os.getpid(), signal.SIGKILL)
    mapper = devicemap.DeviceMap(lambda n: n, batch_size=4, progress=observe)
    if sys.argv[2] == "write":
        result = tf.reduce_sum(mapper.write(tf.data.Dataset.range(101), sys.argv[1]).load())
    else:
        result = mapper.reduce(tf.data.Dataset.range(101), "sum", sys.argv[1])
    print(sum(finished), flush=True)
    print(int(result))

for moment in (1, 7):
    child = os.fork()  # TensorFlow has not started
    if not child:
        run(moment)
    os.waitpid(child, 0)
run(None)
"""


@pytest.mark.parametrize("method", ["write", "reduce"])
def test_killed(method: str, tmp_path: Path) -> None:
    """Chunks that were reported as finished are kept."""
    first, second, last, total = map(int, run(KILLED, str(tmp_path / "out"), method))
    assert min(first, second) > 0
    assert last <= 101 - first - second
    assert total == sum(range(101))


@pytest.mark.parametrize("chunks", [0, 1, 15])
def test_a_full_disk(counted: Counted, tmp_path: Path, chunks: int) -> None:
    folder = tmp_path / "out"
    with full_disk(chunks), pytest.raises(JournalError, match=r"No space left on device.*run again") as caught:
        counted.write(folder)
    assert caught.value.errno == errno.ENOSPC
    done = _stored(folder)
    assert counted.write(folder) == _others(done)


def test_damaged_chunks_are_computed_again(counted: Counted, tmp_path: Path) -> None:
    counted.write(tmp_path)
    assert counted.write(tmp_path) == []
    assert _stored(tmp_path) == {*range(64)}
    entry = read_journal(tmp_path).entries[2]
    flip(tmp_path, 2)
    assert counted.write(tmp_path) == list(range(entry.start, entry.stop))
    path, _ = place_of(tmp_path, 0)
    lost = {row for e in read_journal(tmp_path).entries if e.file == 0 for row in range(e.start, e.stop)}
    path.unlink()
    assert counted.write(tmp_path) == sorted(lost)


def test_another_call_is_refused_and_nothing_is_touched(tmp_path: Path) -> None:
    Counted(batch_size=4).write(tmp_path)
    other_data = DATA.copy()
    other_data[40] = 7
    pairs = devicemap.DeviceMap(lambda row: (row, row), devices=DEVICES, batch_size=4)
    seeded = devicemap.DeviceMap(lambda row, seed: row, devices=DEVICES, batch_size=4, seed=1)
    others: list[tuple[str, Callable[[Path], Any]]] = [
        ("other data: row.*40", Counted(other_data, batch_size=4).write),
        ("another call, of '_triple': rows was 64 there, and is 60 now", Counted(DATA[:60], batch_size=4).write),
        ("another call.*results was", Counted(DATA.astype(np.float32), batch_size=4).write),
        ("another call.*inputs was", Counted((DATA,), batch_size=4).write),
        ("another call.*batch_size was 4", Counted(batch_size=8).write),
        ("another call.*batched was False", Counted(batch_size=4, batched=True).write),
        ("another call.*results was", lambda folder: pairs.write(DATA, folder, trust_function=True)),
        ("another call.*seed was", lambda folder: seeded.write(DATA, folder, trust_function=True)),
    ]
    for message, write in others:
        with untouched(tmp_path), pytest.raises(JournalError, match=message + ".*delete this one to start anew"):
            write(tmp_path)
    assert Counted(batch_size=4).write(tmp_path) == []


def test_batches_of_another_size_are_refused(tmp_path: Path) -> None:
    """The results of `fn` may depend on the size of its batches."""
    dataset = tf.data.Dataset.from_tensor_slices(DATA)
    Counted(dataset.batch(4), batched=True).write(tmp_path)
    message = r"chunk_rows was 4 there, and is 8 now.*to start anew"
    with untouched(tmp_path), pytest.raises(JournalError, match=message):
        Counted(dataset.batch(8), batched=True).write(tmp_path)


def test_an_interruption_keeps_what_was_finished(tmp_path: Path) -> None:
    finished: list[int] = []

    def observe(event: Event) -> None:
        if isinstance(event, ChunkFinished):
            finished.extend(range(event.shard.start, event.shard.stop))
            if len(finished) >= 24:
                raise ZeroDivisionError("the observer's own")

    mapper = devicemap.DeviceMap(_triple, devices=["CPU:1"], batch_size=4, prefetch=1, progress=observe)
    with pytest.raises(ZeroDivisionError):
        mapper.write(DATA, tmp_path)
    done = _stored(tmp_path)
    assert {*finished} <= done
    assert len(done) < 64
    assert Counted(batch_size=4).write(tmp_path) == _others(done)


def test_devices_that_fail_while_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One device runs out of memory, and one breaks: each row is still written once."""
    functions = CompiledMap.chunk_functions

    def scripted(self: CompiledMap, *args: Any) -> Any:
        def around(device: str, begin: Callable[[], Callable[..., Any]]) -> Callable[..., Any]:
            function = begin()

            def call(rows: Any) -> Any:
                if device.endswith("1") and len(rows) > 1:
                    raise tf.errors.ResourceExhaustedError(None, None, "")
                if device.endswith("2"):
                    raise tf.errors.InternalError(None, None, "broken")
                time.sleep(0.005)
                return function(rows)

            return call

        return {device: partial(around, short_name(device), begin) for device, begin in functions(self, *args).items()}

    with monkeypatch.context() as patch:
        patch.setattr(CompiledMap, "chunk_functions", scripted)
        with pytest.warns(RuntimeWarning, match="CPU:2 kept failing"):
            assert Counted(batch_size=4).write(tmp_path) == list(range(64))
    assert {entry.stop - entry.start for entry in read_journal(tmp_path).entries} == {1}
    assert Counted(batch_size=4).write(tmp_path) == []


def test_a_dataset_that_ends_with_an_error_goes_on_later(tmp_path: Path) -> None:
    fails = [True]

    def rows() -> Iterator[int]:
        yield from DATA[:40].tolist()
        if fails[0]:
            raise OSError("the network share")
        yield from DATA[40:].tolist()

    dataset = tf.data.Dataset.from_generator(rows, output_signature=tf.TensorSpec([], tf.int64))
    counted = Counted(dataset, batch_size=4)
    with pytest.raises(tf.errors.UnknownError, match="the network share"):
        counted.write(tmp_path)
    done = _stored(tmp_path)
    assert done == set(counted.computed)
    fails[0] = False
    assert counted.write(tmp_path) == _others(done)
