"""`DeviceMap.write` after kills, damage, interruptions and faults: a later run computes only what is missing."""

from __future__ import annotations

import errno
import gc
import os
import shutil
import signal
import sqlite3
import threading
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from processes import run
from stored import DATA, Counted, read_rows, untouched, write_chunks

import devicemap
from devicemap import Reducer
from devicemap.errors import JournalError, OptionError
from devicemap.events import ChunkFinished, Event
from devicemap.store import connection, database
from devicemap.store.database import DATABASE, Header, StoredChunk, open_for_writing
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


class Failing(connection.Connection):
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
            patch.setattr(connection, "Connection", Failing)
            with pytest.raises((JournalError, KeyboardInterrupt)) as raised:
                Counted(_triple).write(directory)
        if error is FULL:
            assert raised.value.errno == errno.ENOSPC
        stored = read_rows(directory).keys()
        assert Counted(_triple).write(directory) == [row for row in range(64) if row not in stored]


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


@pytest.mark.parametrize(
    ("statements", "call"),
    [
        ("BEGIN EXCLUSIVE", devicemap.open_results),
        ("BEGIN EXCLUSIVE", Counted(_triple).write),
        ("BEGIN; SELECT count(*) FROM chunks", Counted(_triple).write),
    ],
    ids=["a reader waits for a writer", "a writer waits for a writer", "a commit waits for a reader"],
)
def test_ctrl_c_while_another_program_holds_a_lock(statements: str, call: Any, tmp_path: Path) -> None:
    Counted(_triple, DATA[:40]).write(tmp_path)
    with closing(sqlite3.connect(tmp_path / DATABASE)) as other:
        other.executescript(statements)
        start = time.monotonic()
        threading.Timer(1.0, signal.raise_signal, [signal.SIGINT]).start()
        with pytest.raises(KeyboardInterrupt):
            call(tmp_path)
        assert time.monotonic() - start < 10
    assert len(Counted(_triple).write(tmp_path)) == 24


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


def _add(a: Any, b: Any) -> Any:
    return tf.nest.map_structure(tf.add, a, b)


def _add_twice(a: Any, b: Any) -> Any:
    return tf.nest.map_structure(lambda x, y: x + 2 * y, a, b)


def _pair(row: Any) -> Any:
    return {"row": row, "root": tf.sqrt(tf.cast(row, tf.float32))}


def _write_batches(directory: Path, *shapes: list[int]) -> None:
    """Write a dataset of batches of these shapes beside another directory."""
    spec = tf.TensorSpec([None, None], tf.float64)
    data = tf.data.Dataset.from_generator(lambda: map(np.zeros, shapes), output_signature=spec)
    devicemap.DeviceMap(_triple, devices=["CPU:1"], batched=True).write(data, directory.with_name("batches"))


ZEROS, ONES = ({"row": np.int64(n), "root": np.float32(n)} for n in (0, 1))
ADDED = Reducer(ZEROS, _add, _add)
CHANGED = np.where(DATA == 40, 7, DATA)


def _other_calls(rows: Path, sums: Path) -> list[tuple[str, Callable[[], object]]]:
    """Calls that are refused: what the error says, and the call."""
    trusted = {"trust_function": True}
    return [
        ("other data: rows 40 to 43 were not the same", lambda: Counted(_triple, CHANGED).write(rows)),
        ("of 64 rows or more, and the data has 63 now", lambda: Counted(_triple, DATA[:63]).write(rows)),
        (r"\[None\]} there, and is {'dense': 'float32'", lambda: Counted(_triple, DATA.astype(np.float32)).write(rows)),
        ("inputs was {'dense': 'int64'.* there, and is {'tuple'", lambda: Counted(_triple, (DATA,)).write(rows)),
        ("batch_size was 4 there, and is 8 now", lambda: Counted(_triple, batch_size=8).write(rows)),
        ("batched was False there", lambda: Counted(_triple, batched=True).write(rows)),
        ("results was {'dense': 'int64'", lambda: Counted(lambda row: (row, row)).write(rows, **trusted)),
        ("seed was", lambda: Counted(lambda row, seed: row, seed=1).write(rows, **trusted)),
        ("chunk_rows was 5 there, and is 4", lambda: _write_batches(rows, [4, 2], [4, 2], [2, 2])),
        ("rows 5 to 9 were not the same", lambda: _write_batches(rows, [5, 2], [2, 2], [5, 3])),
        ("reducer", lambda: Counted(_triple).reduce("sum", rows)),
        ("reducer", lambda: Counted(_pair).write(sums)),
        ("reducer", lambda: Counted(_pair).reduce("sum", sums)),
        ("other data", lambda: Counted(_pair, DATA + 1).reduce(ADDED, sums)),
        ("function", lambda: Counted(lambda row: _pair(row + 0)).reduce(ADDED, sums)),
        ("function", lambda: Counted(_pair).reduce(Reducer(ZEROS, _add_twice, _add), sums)),
        ("function", lambda: Counted(_pair).reduce(Reducer(ZEROS, _add, _add_twice), sums)),
        ("function", lambda: Counted(_pair).reduce(Reducer(ONES, _add, _add), sums)),
        ("batch_size", lambda: Counted(_pair, batch_size=8).reduce(ADDED, sums)),
        ("partial", lambda: devicemap.open_results(sums)),
    ]


def test_another_call_is_refused_and_nothing_is_touched(tmp_path: Path) -> None:
    rows, sums = tmp_path / "rows", tmp_path / "sums"
    Counted(_triple).write(rows)
    for shapes in ([[3, 2]], [[5, 2]], [[5, 2], [5, 2]]):  # a dataset that was shorter than a batch may grow
        _write_batches(rows, *shapes)
    Counted(_pair).reduce(ADDED, sums)
    for message, call in _other_calls(rows, sums):
        with untouched(tmp_path), pytest.raises(JournalError, match=message):
            call()
    assert Counted(_triple).write(rows) == []
    reduction = Counted(_pair)
    finished = reduction.reduce(Reducer(ZEROS, _add, _add, lambda sums: -sums["row"]), sums)
    assert (int(finished), reduction.computed) == (-sum(range(64)), [])


def test_reductions_of_no_rows(tmp_path: Path) -> None:
    for _ in range(2):
        result = Counted(_pair, DATA[:0]).reduce({"row": "sum", "root": "mean"}, tmp_path)
        assert (int(result["row"]), np.isnan(result["root"])) == (0, True)


def test_directories_of_something_else(tmp_path: Path) -> None:
    for name in "abcd":
        (tmp_path / name).write_text("mine")
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / DATABASE).write_text("something else")
    write_chunks(tmp_path / "new", tf.TensorSpec([None], tf.string), [], 1)
    written_to = "Is this a directory that devicemap has written to"
    for call, directory, message in (
        (
            Counted(_triple).write,
            tmp_path,
            "holds a, b, c, and no results of devicemap. Write to a new or empty directory",
        ),
        (Counted(_triple).write, tmp_path / "a", "FileExistsError.*must be"),
        (Counted(_triple).write, tmp_path / "a" / "b", "NotADirectoryError"),
        (Counted(_triple).write, Path("gs://bucket/out"), "is a URL; write the results to a local directory"),
        (devicemap.open_results, tmp_path, f"unable to open.* {written_to}"),
        (devicemap.open_results, tmp_path / "none", f"FileNotFoundError.* {written_to}"),
        (devicemap.open_results, tmp_path / "new", "holds no results yet"),
        (devicemap.open_results, tmp_path / "text", "file is not a database"),
    ):
        with untouched(tmp_path), pytest.raises(JournalError, match=message):
            call(directory)
    entry, *_ = os.scandir(os.fsencode(tmp_path))  # its path is bytes
    for wrong in (3, entry):
        with pytest.raises(OptionError, match="expected a path, after the data"):
            Counted(_triple).write(wrong)
    with pytest.raises(OptionError, match="directory=None; expected a path"):
        devicemap.open_results(None)  # type: ignore[arg-type]
    # A call that fails on its first chunk does not block a later call.
    assert Counted(_triple).write(tmp_path / "new") == list(range(64))


def test_results_after_the_working_directory_has_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    results = devicemap.DeviceMap(_triple).write(DATA, "results")
    monkeypatch.chdir(tmp_path / "results")
    np.testing.assert_array_equal(results.load(), _triple(DATA))
    moving = devicemap.DeviceMap(_triple, progress=lambda event: os.chdir(tmp_path))
    np.testing.assert_array_equal(moving.write(DATA, "rows").load(), _triple(DATA))
    os.chdir(tmp_path / "results")
    assert moving.reduce(DATA, "sum", "sum").numpy().tolist() == _triple(DATA).sum(0).tolist()


def test_a_commit_that_was_interrupted_in_a_directory_that_is_read_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    devicemap.DeviceMap(_triple).write(DATA, tmp_path / "a")
    with closing(sqlite3.connect(tmp_path / "a" / DATABASE, isolation_level=None)) as writer:
        for statement in ("PRAGMA cache_size=1", "BEGIN", "INSERT INTO parts VALUES (99, zeroblob(999999))"):
            writer.execute(statement)
        shutil.copytree(tmp_path / "a", tmp_path / "b")
    connected = database.connected
    with monkeypatch.context() as patch:
        patch.setattr(database, "connected", lambda path, mode, *others: connected(path, "ro", *others))
        with pytest.raises(JournalError, match="b is read-only, and a commit to it was interrupted"):
            devicemap.open_results(tmp_path / "b")
    np.testing.assert_array_equal(devicemap.open_results(tmp_path / "b").load(), _triple(DATA))
