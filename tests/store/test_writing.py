"""`DeviceMap.write`: killed, on a full disk, damaged, shared, interrupted and faulty; run again, it computes what is missing.

How the folder alone behaves, at each of its bytes and steps, is in test_journal and its neighbours.
"""

from __future__ import annotations

import errno
import itertools
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from journals import files_of, place_of

import devicemap
from devicemap.compile.compiled import Compiled
from devicemap.errors import JournalError
from devicemap.events import ChunkFinished, Event, short_name
from devicemap.store import segments
from devicemap.store.entries import Entry
from devicemap.store.records import JOURNAL, read_journal
from devicemap.store.segments import segment_name
from devicemap.store.storage import write_all

DEVICES = ["CPU:1", "CPU:2"]
DATA = np.arange(64)


class Counted:
    """A mapper of `3 * row + 1` that tells which rows it computed."""

    def __init__(self, data: Any = DATA, **options: Any):
        self.computed: list[int] = []
        self.finished: list[int] = []
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


def _datasets() -> dict[str, Callable[[], Counted]]:
    return {
        "in memory": lambda: Counted(batch_size=4),
        "samples": lambda: Counted(tf.data.Dataset.from_tensor_slices(DATA), batch_size=4),
        "batches": lambda: Counted(tf.data.Dataset.from_tensor_slices(DATA).batch(4), batched=True),
    }


@pytest.fixture(params=list(_datasets()))
def counted(request: pytest.FixtureRequest) -> Counted:
    """The same rows in chunks of 4, from in-memory data and from datasets."""
    return _datasets()[request.param]()


def _snapshot(directory: Path) -> Any:
    return {path.name: (path.stat().st_mtime_ns, path.read_bytes()) for path in directory.iterdir()}


def _entries(directory: Path) -> tuple[Entry, ...]:
    return read_journal(directory).entries


# Killed

KILLED = """
import os, sys, time
import numpy as np
import tensorflow as tf
import devicemap

folder, log, *order = sys.argv[1:]
devicemap.simulate_devices(2)
data = np.arange(240).reshape(120, 2)
computed = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

def slow(name):
    def body(rows):
        time.sleep(0.05)
        return 3 * rows + 1
    def fn(rows):
        results = tf.py_function(body, [rows], tf.int64)
        return tf.ensure_shape(results, rows.shape)
    return fn

def observe(name):
    def tell(event):
        if type(event).__name__ == "ChunkStarted":
            print("running", flush=True)
        if type(event).__name__ == "ChunkFinished":
            os.write(computed, f"{name} {event.shard.start} {event.shard.stop}\\n".encode())
    return tell

for name in order:
    rows = data if name == "memory" else tf.data.Dataset.from_tensor_slices(data)
    mapper = devicemap.DeviceMap(slow(name), batched=name == "memory", batch_size=2, progress=observe(name))
    results = mapper.write(rows, os.path.join(folder, name))
    np.testing.assert_array_equal(results.load(), 3 * data + 1)
print("done", flush=True)
"""

_KILLS = 2


@pytest.mark.nightly
def test_killed_at_random_moments(tmp_path: Path, record_property: Callable[..., None]) -> None:
    """SIGKILL, again and again: what the journal holds is never computed again, and in the end all is there and right."""
    draw = random.Random(os.urandom(8))
    program, log, folder = tmp_path / "killed.py", tmp_path / "log", tmp_path / "results"
    program.write_text(KILLED)
    finished: dict[str, set[int]] = {"memory": set(), "dataset": set()}
    progress = []
    data = np.arange(240).reshape(120, 2)
    second = devicemap.DeviceMap(_triple, batch_size=2)
    second(data[:2])  # traced before, so that it comes while the first process still writes
    for run in range(_KILLS + 1):
        log.write_bytes(b"")
        order = ["dataset", "memory"] if run % 2 else ["memory", "dataset"]
        command = [sys.executable, program, folder, log, *order]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
            try:
                assert process.stdout is not None
                assert process.stdout.readline() == "running\n"
                if run == 0:  # another process may not write meanwhile
                    with pytest.raises(JournalError, match="is being written to"):
                        second.write(data, folder / "memory")
                if run < _KILLS:
                    time.sleep(draw.uniform(0.0, 0.9))
                else:
                    output, error = process.communicate(timeout=60)
                    assert output.endswith("done\n"), error
            finally:
                process.kill()
        for line in log.read_text().splitlines():
            name, start, stop = line.split()
            assert finished[name].isdisjoint(range(int(start), int(stop)))
        for name, rows in finished.items():
            if (folder / name / JOURNAL).exists():
                ours = {row for entry in _entries(folder / name) for row in range(entry.start, entry.stop)}
                assert rows <= ours
                rows |= ours
        progress.append(tuple(map(len, finished.values())))
    record_property(
        "usage",
        f"rows in memory and of a dataset, 120 each, that were finished after each of {_KILLS} kills: {progress}",
    )
    assert progress[-1] == (120, 120)
    assert len(set(progress)) > 1
    for name in finished:
        assert sorted(os.listdir(folder / name)) == files_of(folder / name)
        np.testing.assert_array_equal(devicemap.open_results(folder / name).load(), 3 * data + 1)


# A full disk


@pytest.mark.parametrize("nth", [0, 1, 7, 15])
def test_a_full_disk(counted: Counted, tmp_path: Path, nth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The n-th chunk, and all after it, find no room: half of it is written."""
    written: list[int] = []

    def full(descriptor: int, data: Any, offset: int) -> None:
        if len(written) >= nth:
            os.pwrite(descriptor, data[: len(data) // 2], offset)
            raise OSError(errno.ENOSPC, "No space left on device")
        written.append(offset)
        write_all(descriptor, data, offset)

    folder = tmp_path / "out"
    with monkeypatch.context() as patch:
        patch.setattr(segments, "write_all", full)
        with pytest.raises(JournalError, match=r"No space left on device.*run again") as caught:
            counted.write(folder)
    assert caught.value.errno == errno.ENOSPC
    done = {row for entry in _entries(folder) for row in range(entry.start, entry.stop)}
    assert counted.write(folder) == [row for row in range(64) if row not in done]


# Damage


def test_damaged_chunks_are_computed_again(counted: Counted, tmp_path: Path) -> None:
    """Each chunk in turn, damaged in another way; no other chunk is computed."""
    counted.write(tmp_path)
    assert counted.write(tmp_path) == []
    chunks = [(entry.start, entry.stop) for entry in _entries(tmp_path)]
    assert sum(stop - start for start, stop in chunks) == 64
    for i, part in enumerate((0.0, 0.3, 0.6, 0.999)):
        start, stop = chunks[i % len(chunks)]
        (chunk,) = (k for k, entry in enumerate(_entries(tmp_path)) if entry.start == start)
        path, place = place_of(tmp_path, chunk)
        data = bytearray(path.read_bytes())
        data[place.start + int((place.stop - place.start) * part)] ^= 1
        path.write_bytes(data)
        assert counted.write(tmp_path) == list(range(start, stop))
    for damage in (Path.unlink, lambda path: os.truncate(path, 3)):  # of a file: all chunks in it
        path, _ = place_of(tmp_path, 0)
        lost = [range(e.start, e.stop) for e in _entries(tmp_path) if segment_name(e.file) == path.name]
        damage(path)
        assert counted.write(tmp_path) == sorted(itertools.chain(*lost))


def test_a_journal_that_is_cut_anywhere(tmp_path: Path) -> None:
    """Lines that are lost cost their chunks; a half line costs one; nothing else is computed."""
    counted = Counted(batch_size=4)
    whole = tmp_path / "whole"
    counted.write(whole)
    lines = (whole / JOURNAL).read_bytes().splitlines(keepends=True)
    for keep in (1, 2, 3, len(lines) // 2, len(lines) - 1, len(lines)):
        for cut in (0, 10, len(lines[keep - 1]) - 1):
            folder = tmp_path / f"{keep}-{cut}"
            shutil.copytree(whole, folder)
            good = b"".join(lines[: keep - 1]) + (lines[keep - 1][: len(lines[keep - 1]) - cut])
            (folder / JOURNAL).write_bytes(good)
            if keep == 1 and cut:  # no header: nobody knows what the chunks are
                with pytest.raises(JournalError, match="no beginning"):
                    counted.write(folder)
                continue
            done = {row for entry in _entries(folder) for row in range(entry.start, entry.stop)}
            assert counted.write(folder) == [row for row in range(64) if row not in done]


# What is refused


def test_another_call_is_refused_and_nothing_is_touched(tmp_path: Path) -> None:
    Counted(batch_size=4).write(tmp_path)
    before = _snapshot(tmp_path)
    other_data = DATA.copy()
    other_data[40] = 7
    others: list[tuple[str, Counted]] = [
        ("other data: row.*40", Counted(other_data, batch_size=4)),
        ("another call.*rows was 64", Counted(DATA[:60], batch_size=4)),
        ("another call.*results was", Counted(DATA.astype(np.float32), batch_size=4)),
        ("another call.*batch_size was 4", Counted(batch_size=8)),
        ("another call.*batched was False", Counted(batch_size=4, batched=True)),
    ]
    for message, other in others:
        with pytest.raises(JournalError, match=message + ".*to start anew"):
            other.write(tmp_path)
        assert other.computed == []
        assert _snapshot(tmp_path) == before
    pairs = devicemap.DeviceMap(lambda row: (row, row), devices=DEVICES, batch_size=4)
    seeded = devicemap.DeviceMap(lambda row, seed: row, devices=DEVICES, batch_size=4, seed=1)
    for mapper, name in ((pairs, "results"), (seeded, "seed")):
        with pytest.raises(JournalError, match=f"another call.*{name} was.*to start anew"):
            mapper.write(DATA, tmp_path)
        assert _snapshot(tmp_path) == before
    assert Counted(batch_size=4).write(tmp_path) == []


def test_batches_of_another_size_are_refused(tmp_path: Path) -> None:
    """`fn` gets them as they are, so they may decide what it returns."""
    dataset = tf.data.Dataset.from_tensor_slices(DATA)
    Counted(dataset.batch(4), batched=True).write(tmp_path)
    before = _snapshot(tmp_path)
    with pytest.raises(JournalError, match=r"chunk_rows was 4 there, and is 8 now.*to start anew"):
        Counted(dataset.batch(8), batched=True).write(tmp_path)
    assert _snapshot(tmp_path) == before


def test_a_folder_of_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("all of it")
    before = _snapshot(tmp_path)
    with pytest.raises(
        JournalError, match=r"holds thesis.tex, and no journal of devicemap. Write to a new or an empty"
    ):
        Counted(batch_size=4).write(tmp_path)
    assert _snapshot(tmp_path) == before


def test_two_writers(tmp_path: Path) -> None:
    """The second is refused, whatever it would write, and the first is not disturbed."""
    refused: list[str] = []

    def observe(event: Event) -> None:
        if isinstance(event, ChunkFinished) and not refused:
            with pytest.raises(JournalError, match="is being written to") as caught:
                Counted(batch_size=4).write(tmp_path)
            refused.append(str(caught.value))

    mapper = devicemap.DeviceMap(_triple, devices=DEVICES, batch_size=4, progress=observe)
    np.testing.assert_array_equal(mapper.write(DATA, tmp_path).load(), 3 * DATA + 1)
    assert len(refused) == 1
    assert Counted(batch_size=4).write(tmp_path) == []


# Interrupted, and faulty


@pytest.mark.parametrize("how", ["ctrl-c", "observer"])
def test_an_interruption_keeps_what_was_finished(tmp_path: Path, how: str) -> None:
    finished: list[int] = []
    interrupted: list[float] = []

    def observe(event: Event) -> None:
        if isinstance(event, ChunkFinished):
            finished.extend(range(event.shard.start, event.shard.stop))
            if len(finished) >= 24 and not interrupted:
                interrupted.append(time.monotonic())
                if how == "observer":
                    raise ZeroDivisionError("the observer's own")
                os.kill(os.getpid(), signal.SIGINT)

    mapper = devicemap.DeviceMap(_slow, devices=DEVICES, batched=True, batch_size=4, progress=observe, name="_triple")
    with pytest.raises(KeyboardInterrupt if how == "ctrl-c" else ZeroDivisionError):
        mapper.write(DATA, tmp_path)
    assert time.monotonic() - interrupted[0] < 1
    assert [thread.name for thread in threading.enumerate() if thread.name.startswith("devicemap")] == []
    done = {row for entry in _entries(tmp_path) for row in range(entry.start, entry.stop)}
    assert done >= set(finished)
    assert len(done) < 64
    again = Counted(batched=True, batch_size=4)
    assert again.write(tmp_path, trust_function=True) == [row for row in range(64) if row not in done]


def _slow(rows: Any) -> Any:
    def wait(rows: Any) -> Any:
        time.sleep(0.02)
        return rows

    return 3 * tf.ensure_shape(tf.py_function(wait, [rows], rows.dtype), rows.shape) + 1


def test_devices_that_fail_while_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One runs out of memory, one breaks: each row is still written once, and nothing is left to compute."""
    functions = Compiled.functions

    def scripted(self: Compiled, *args: Any) -> Any:
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
        patch.setattr(Compiled, "functions", scripted)
        with pytest.warns(RuntimeWarning, match="CPU:2 kept failing"):
            assert Counted(batch_size=4).write(tmp_path) == list(range(64))
    assert {entry.stop - entry.start for entry in _entries(tmp_path)} == {1}
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
    done = {row for entry in _entries(tmp_path) for row in range(entry.start, entry.stop)}
    assert done == set(counted.computed)
    fails.clear()
    fails.append(False)
    assert counted.write(tmp_path) == [row for row in range(64) if row not in done]
