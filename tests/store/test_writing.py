"""`DeviceMap.write` after kills, damage, interruptions and faults: a later run computes only what is missing."""

from __future__ import annotations

import errno
import gc
import os
import sqlite3
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from processes import run
from stored import DATA, Counted, read_rows, untouched, write_chunks

import devicemap
from devicemap.errors import JournalError
from devicemap.events import ChunkFinished, Event
from devicemap.store.database import Header, StoredChunk, open_for_writing
from devicemap.store.encoding import describe_nest


def _triple(row: Any) -> Any:
    return 3 * row + 1


KILLED = """
import itertools, os, signal, sqlite3, sys
import tensorflow as tf
import devicemap
from devicemap.types import ChunkFinished

def run(directory, method, moment):
    devicemap.simulate_devices(2)
    computed, moments = [], itertools.count(1)
    def happened(_):
        if next(moments) == moment:  # an atomic step
            os.kill(os.getpid(), signal.SIGKILL)
    def observe(event):
        if isinstance(event, ChunkFinished):
            computed.append(len(event.shard))
            happened(event)
    def connect(*args, **options):
        connection = whole_connect(*args, **options)
        connection.set_trace_callback(happened)
        return connection
    whole_connect, sqlite3.connect = sqlite3.connect, connect
    mapper = devicemap.DeviceMap(lambda n: n, batch_size=4, progress=observe)
    if method == "write":
        result = tf.reduce_sum(mapper.write(tf.data.Dataset.range(101), directory).load())
    else:
        result = mapper.reduce(tf.data.Dataset.range(101), "sum", directory)
    return sum(computed), int(result)

def stored(directory):
    if not os.path.exists(f"{directory}/results.sqlite"):
        return 0
    connection = sqlite3.connect(f"{directory}/results.sqlite")
    tables = connection.execute("SELECT * FROM sqlite_master").fetchall()
    return connection.execute("SELECT total(stop - start) FROM chunks").fetchone()[0] if tables else 0

directory, method, step = sys.argv[1:]
for moment in range(2, 70, int(step)):
    child = os.fork()  # TensorFlow has not started
    if not child:
        run(directory, method, moment)
        os._exit(1)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL
    print(int(stored(directory)))
print(*run(directory, method, None))
"""


@pytest.mark.parametrize("step", [13, pytest.param(4, marks=pytest.mark.nightly)], ids=["some", "many"])
@pytest.mark.parametrize("method", ["write", "reduce"])
def test_killed(method: str, step: int, tmp_path: Path) -> None:
    """At chunks and statements of SQL: what is stored remains, and the last run computes exactly the rest."""
    *counts, last = run(KILLED, str(tmp_path / "out"), method, str(step))
    stored = [int(count) for count in counts]
    assert stored == sorted(stored)
    assert [*map(int, last.split())] == [101 - stored[-1], sum(range(101))]


class Failing(sqlite3.Connection):
    """Statements raise an error once a number of them have run."""

    left, error = 0, Exception()

    def execute(self, *arguments: Any) -> Any:
        Failing.left -= 1
        if Failing.left < 0:
            raise Failing.error
        return super().execute(*arguments)


FULL = sqlite3.OperationalError("database or disk is full")


@pytest.mark.parametrize("error", [FULL, KeyboardInterrupt(), MemoryError()], ids=["full disk", "Ctrl-C", "no memory"])
def test_a_statement_that_fails(error: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was committed before remains, and the next run computes the other rows."""
    for count in range(1, 50, 4):
        directory, (Failing.left, Failing.error) = tmp_path / str(count), (count, error)
        with monkeypatch.context() as patch:
            patch.setattr(sqlite3, "connect", partial(sqlite3.connect, factory=Failing))
            with pytest.raises((JournalError, KeyboardInterrupt)) as raised:
                Counted(_triple).write(directory)
        if error is FULL:
            assert raised.value.errno == errno.ENOSPC
        stored = read_rows(directory).keys()
        assert Counted(_triple).write(directory) == [row for row in range(64) if row not in stored]


def test_a_dataset_that_was_shorter_than_a_batch_may_grow(tmp_path: Path) -> None:
    mapper = devicemap.DeviceMap(lambda batch: batch * 2, devices=["CPU:1"], batched=True)
    for rows, added in ((5, 5), (20, 15), (30, 10)):
        results = mapper.write(tf.data.Dataset.range(rows).batch(8), tmp_path / "out")
        np.testing.assert_array_equal(results.load(), range(0, 2 * rows, 2))
        assert mapper.report.rows == added
    with pytest.raises(JournalError, match="chunk_rows was 8 there, and is 4 now"):
        mapper.write(tf.data.Dataset.range(30).batch(4), tmp_path / "out")


def test_workers_wait_while_many_bytes_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("devicemap.store.database._QUEUE_BYTES", 1)
    stored: list[bool] = []

    def observe(event: Event) -> None:
        if isinstance(event, ChunkFinished):
            start, stop = event.shard.start, event.shard.stop
            rows = devicemap.open_results(tmp_path)[start:stop]
            stored.append(np.array_equal(rows, 3 * DATA[start:stop] + 1))

    devicemap.DeviceMap(_triple, devices=["CPU:1", "CPU:2"], batch_size=4, progress=observe).write(DATA, tmp_path)
    assert stored == [True] * 16


# Other writers


SECOND_WRITER = """
import sys
import devicemap
try:
    devicemap.DeviceMap(lambda n: 3 * n + 1, batch_size=4).write(range(64), sys.argv[1])
except devicemap.errors.JournalError as error:
    print(error)
"""


def test_a_second_writer_is_refused_and_readers_are_not(tmp_path: Path) -> None:
    Counted(_triple, DATA[:40]).write(tmp_path)
    refused: list[str] = []

    def observe(event: Event) -> None:
        if isinstance(event, ChunkFinished) and not refused:
            np.testing.assert_array_equal(devicemap.open_results(tmp_path)[:40], 3 * DATA[:40] + 1)
            with pytest.raises(JournalError) as caught:
                Counted(_triple).write(tmp_path)
            refused.extend([str(caught.value), *run(SECOND_WRITER, str(tmp_path))])

    mapper = devicemap.DeviceMap(_triple, devices=["CPU:1", "CPU:2"], batch_size=4, progress=observe)
    np.testing.assert_array_equal(mapper.write(DATA, tmp_path).load(), 3 * DATA + 1)
    assert len(refused) == 2
    assert all(f"{tmp_path} is being written to, by another call or another process" in text for text in refused)
    assert Counted(_triple).write(tmp_path) == []


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
def test_a_forked_child_does_not_disturb_its_parent(tmp_path: Path) -> None:
    header = Header({"results": describe_nest(tf.TensorSpec([None], tf.int32)), "reducer": None}, 9)
    opened = open_for_writing(tmp_path)
    gc.collect()  # in a child, the destructor of a dataset's iterator would wait for a thread that is not there
    gc.freeze()  # a collection in a child would copy all pages of the objects of other tests
    with opened as writer:
        for start in range(9):
            writer.put(header, (StoredChunk(start, start + 1, ""), [np.array([start], "<i4")]))
            child = os.fork()
            if not child:
                opened.__exit__(None, None, None)
                del opened, writer
                gc.collect()
                os._exit(0)
            assert os.waitpid(child, 0)[1] == 0
            with pytest.raises(JournalError, match="is being written to"), open_for_writing(tmp_path):
                pass
    writer.put(header, (StoredChunk(9, 10, ""), [np.array([9], "<i4")]))
    with pytest.raises(JournalError, match="closed database"):
        writer.flush()
    assert devicemap.open_results(tmp_path).load().tolist() == list(range(9))


# Refusals and faults


def test_another_call_is_refused_and_nothing_is_touched(tmp_path: Path) -> None:
    Counted(_triple).write(tmp_path)
    other_data = DATA.copy()
    other_data[40] = 7
    trusted: dict[str, Any] = {"trust_function": True}
    others: list[tuple[str, Counted, dict[str, Any]]] = [
        ("other data: rows 40 to 43 were not the same", Counted(_triple, other_data), {}),
        (
            r"results was {'dense': 'int64', 'shape': \[None\]} there, and is {'dense': 'float32'",
            Counted(_triple, DATA.astype(np.float32)),
            {},
        ),
        (r"another call.*inputs was {'dense': 'int64'.* there, and is {'tuple'", Counted(_triple, (DATA,)), {}),
        ("another call.*batch_size was 4 there, and is 8 now", Counted(_triple, batch_size=8), {}),
        ("another call.*batched was False there", Counted(_triple, batched=True), {}),
        ("of 64 rows or more, and the data has 63 now", Counted(_triple, DATA[:63]), {}),
        ("another call.*results was {'dense': 'int64'", Counted(lambda row: (row, row)), trusted),
        ("another call.*seed was", Counted(lambda row, seed: row, seed=1), trusted),
    ]
    for message, counted, options in others:
        with untouched(tmp_path), pytest.raises(JournalError, match=message + ".*delete this one to start again"):
            counted.write(tmp_path, **options)
    assert Counted(_triple).write(tmp_path) == []


def test_directories_of_something_else(tmp_path: Path) -> None:
    for name in "abcd":
        (tmp_path / name).write_text("mine")
    message = "holds a, b, c, and no results of devicemap. Write to a new or empty directory"
    paths = {tmp_path: message, tmp_path / "a": "FileExistsError.*must be", tmp_path / "a" / "b": "NotADirectoryError"}
    paths[Path("gs://bucket/out")] = "gs:/bucket/out is a URL; write the results to a local directory"
    for directory, expected in paths.items():
        with untouched(tmp_path), pytest.raises(JournalError, match=expected):
            Counted(_triple).write(directory)
    # A call that fails on its first chunk does not block a later call.
    write_chunks(tmp_path / "new", tf.TensorSpec([None], tf.string), [], 1)
    assert Counted(_triple).write(tmp_path / "new") == list(range(64))


def test_results_after_the_working_directory_has_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    results = devicemap.DeviceMap(_triple).write(DATA, "results")
    monkeypatch.chdir(tmp_path / "results")
    np.testing.assert_array_equal(results.load(), _triple(DATA))
