"""The folder of results, as it is written: killed, full, damaged, shared and someone else's. NumPy only."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import devicemap
from devicemap.errors import DeviceMapError, JournalError, MissingRowsError
from devicemap.journal import writing as journal_module
from devicemap.journal.records import (
    JOURNAL,
    Entry,
    Header,
    header_line,
    missing_rows,
    parse_journal,
    read_chunk,
    read_journal,
    read_line,
    write_line,
)
from devicemap.journal.storage import pack_arrays, unpack_arrays, write_synced
from devicemap.journal.writing import Journal, open_journal

SPEC = {"dense": "int64", "shape": [None]}
HEADER = Header(
    results=SPEC, inputs=SPEC, batched=False, batch_size=4, chunk_rows=None, seed=None, rows=12, function="f"
)
CHUNKS = [(0, 4), (4, 8), (8, 12)]


def _rows(start: int, stop: int) -> dict[str, Any]:
    return {"0.values": np.arange(start, stop) ** 2}


def _append(journal: Journal, start: int, stop: int) -> None:
    journal.append(start, stop, _rows(start, stop), f"digest of {start}")


def _write(directory: Path, chunks: list[tuple[int, int]] = CHUNKS, finish: bool = True) -> list[tuple[int, int]]:
    """Write what is missing of the chunks; returns what that was."""
    computed = []
    with open_journal(directory, HEADER) as journal:
        for start, stop in chunks:
            for gap in journal.missing(start, stop):
                _append(journal, *gap)
                computed.append(gap)
        if finish:
            journal.finish(12)
    return computed


def _check_whole(directory: Path, ranges: list[tuple[int, int]] = CHUNKS) -> None:
    """All rows are there and right, and nothing else is in the folder."""
    contents = read_journal(directory)
    assert contents.ended
    assert contents.rows == 12
    assert [(entry.start, entry.stop) for entry in contents.entries] == ranges
    assert sorted(os.listdir(directory)) == [JOURNAL, *(entry.file for entry in contents.entries)]
    for entry in contents.entries:
        arrays = unpack_arrays(read_chunk(directory, entry))
        np.testing.assert_array_equal(arrays["0.values"], np.arange(entry.start, entry.stop) ** 2)


def _snapshot(directory: Path) -> Any:
    return {path: (path.stat().st_mtime_ns, path.is_file() and path.read_bytes()) for path in directory.rglob("*")}


@contextmanager
def _untouched(directory: Path) -> Iterator[None]:
    before = _snapshot(directory)
    try:
        yield
    finally:
        assert _snapshot(directory) == before


@pytest.fixture
def written(tmp_path: Path) -> Path:
    directory = tmp_path / "written"
    assert _write(directory) == CHUNKS
    return directory


def test_written_and_opened_again(tmp_path: Path) -> None:
    directory = tmp_path / "new" / "out"
    assert _write(directory) == CHUNKS
    _check_whole(directory)
    with _untouched(directory):
        assert _write(directory) == []


def test_chunks_in_any_order_and_an_empty_folder(tmp_path: Path) -> None:
    with open_journal(tmp_path, HEADER) as journal:
        for chunk in [(8, 12), (0, 4), (4, 8)]:
            _append(journal, *chunk)
        assert [entry.start for entry in journal.entries] == [0, 4, 8]
        journal.finish(12)
        journal.finish(12)  # says nothing new
    _check_whole(tmp_path)
    assert len((tmp_path / JOURNAL).read_bytes().splitlines()) == 1 + 3 + 1


def test_many_threads(tmp_path: Path) -> None:
    with open_journal(tmp_path, replace(HEADER, rows=160)) as journal:
        chunks = [(start, start + 4) for start in range(0, 160, 4)]

        def work(i: int) -> None:
            for chunk in chunks[i::8]:
                _append(journal, *chunk)

        threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert journal.missing(0, 160) == []
    assert [(entry.start, entry.stop) for entry in read_journal(tmp_path).entries] == chunks
    assert len(os.listdir(tmp_path)) == 41


def test_the_same_arrays_make_the_same_file() -> None:
    assert pack_arrays(_rows(0, 9)).tobytes() == pack_arrays(_rows(0, 9)).tobytes()
    assert list(unpack_arrays(pack_arrays({}))) == []


def test_a_file_is_an_npz_without_pickles(written: Path) -> None:
    with np.load(written / "rows-000000000004-000000000008.npz", allow_pickle=False) as archive:
        assert archive["0.values"].tolist() == [16, 25, 36, 49]


def test_the_journal_is_lines_of_json(written: Path) -> None:
    records = [json.loads(line) for line in (written / JOURNAL).read_text().splitlines()]
    assert records[0]["devicemap journal"] == 1
    assert records[0]["function"] == "f"
    assert [(record["start"], record["stop"]) for record in records[1:-1]] == CHUNKS
    assert records[-1]["rows"] == 12


@pytest.mark.parametrize(
    ("start", "stop", "missing"),
    [
        (0, 20, [(0, 2), (6, 9), (10, 20)]),
        (2, 6, []),
        (3, 5, []),
        (5, 9, [(6, 9)]),
        (6, 9, [(6, 9)]),
        (7, 8, [(7, 8)]),
        (0, 0, []),
        (15, 17, [(15, 17)]),
    ],
)
def test_missing_rows(start: int, stop: int, missing: list[tuple[int, int]]) -> None:
    entries = [Entry(first, last, 0, "", "") for first, last in [(2, 4), (4, 6), (9, 10)]]
    assert missing_rows(entries, start, stop) == missing
    assert missing_rows([], start, stop) == ([(start, stop)] if stop > start else [])


# Damage


@pytest.mark.parametrize("chunk", range(3))
def test_a_chunk_damaged_at_any_byte_is_computed_again(written: Path, chunk: int) -> None:
    path = written / read_journal(written).entries[chunk].file
    good = path.read_bytes()
    for offset in range(len(good)):
        path.write_bytes(good[:offset] + bytes([good[offset] ^ 0xFF]) + good[offset + 1 :])
        _check_missing(written, [CHUNKS[chunk]])
        path.write_bytes(good[:offset])
        _check_missing(written, [CHUNKS[chunk]])
    path.write_bytes(good + b"\0")
    _check_missing(written, [CHUNKS[chunk]])
    assert _write(written) == [CHUNKS[chunk]]
    _check_whole(written)
    path.unlink()
    assert _write(written) == [CHUNKS[chunk]]
    _check_whole(written)


def _check_missing(directory: Path, missing: list[tuple[int, int]]) -> None:
    with open_journal(directory, HEADER) as journal:
        assert journal.missing(0, 12) == missing


@pytest.mark.parametrize("change", ["inverted", "newline", "lowest bit"])
def test_a_journal_damaged_at_any_byte(written: Path, change: str) -> None:
    """A damaged line is not believed, all others are; without the first line nothing is."""
    path = written / JOURNAL
    good = path.read_bytes()
    for offset in range(len(good)):
        byte = {"inverted": good[offset] ^ 0xFF, "newline": 10, "lowest bit": good[offset] ^ 1}[change]
        if byte == good[offset]:
            continue
        path.write_bytes(good[:offset] + bytes([byte]) + good[offset + 1 :])
        line = good[:offset].count(b"\n")
        if line == 0:
            with pytest.raises(JournalError, match="delete this one to start anew"), _untouched(written):
                open_journal(written, HEADER)
            continue
        lost = {line, line + 1} if good[offset] == 10 else {line}  # without its end, it takes the next one with it
        missing = [(entry.start, entry.stop) for i, entry in enumerate(_entries(good)) if i + 1 in lost]
        contents = parse_journal(path.read_bytes(), written)
        left = [(entry.start, entry.stop) for entry in contents.entries]
        assert left == [chunk for chunk in CHUNKS if chunk not in missing]
        assert contents.ended == (4 not in lost)
        if offset % 29 == 0:
            with _untouched(written), open_journal(written, HEADER) as journal:
                assert [(entry.start, entry.stop) for entry in journal.entries] == left
            assert _write(written) == [chunk for chunk in CHUNKS if chunk not in left]
            _check_whole(written)


def _entries(journal: bytes) -> tuple[Entry, ...]:
    return parse_journal(journal, Path()).entries


def test_a_journal_cut_at_any_byte(written: Path, tmp_path: Path) -> None:
    path = written / JOURNAL
    good = path.read_bytes()
    header = good.index(b"\n") + 1
    bare = tmp_path / "bare"
    bare.mkdir()
    for size in range(len(good)):
        path.write_bytes(good[:size])
        if size < header:  # with results beside it, that was no kill; without, it was one at the very beginning
            with pytest.raises(JournalError, match="has no beginning"), _untouched(written):
                open_journal(written, HEADER)
            for zeros in [b"", b"\0" * 5]:
                (bare / JOURNAL).write_bytes(good[:size] + zeros)
                with open_journal(bare, HEADER) as journal:
                    assert journal.missing(0, 12) == [(0, 12)]
            continue
        lines = good[:size].count(b"\n") - 1
        with open_journal(written, HEADER) as journal:
            assert [(entry.start, entry.stop) for entry in journal.entries] == CHUNKS[:lines]
        if size % 29 == 0:
            assert _write(written) == CHUNKS[lines:]
            _check_whole(written)
    (bare / JOURNAL).write_bytes(good[: header // 2])
    assert _write(bare) == CHUNKS
    _check_whole(bare)


def test_lines_have_checksums() -> None:
    line = write_line({"rows": 3})
    assert line.endswith(b'"}\n')
    assert json.loads(line)["rows"] == 3
    assert read_line(line[:-1]) is not None
    assert read_line(line.replace(b"3", b"4", 1)[:-1]) is None
    assert read_line(b"") is None


def test_a_damaged_chunk_is_replaced_by_others(written: Path) -> None:
    """Chunks of other sizes, as batch_size="auto" finds them, and the old one does not come back."""
    path = written / read_journal(written).entries[1].file
    good = path.read_bytes()
    path.write_bytes(good[:-1])
    with open_journal(written, HEADER) as journal:
        _append(journal, 4, 5)
    assert not path.exists()
    path.write_bytes(good)
    assert _write(written, [(0, 7), (7, 12)]) == [(5, 7), (7, 8)]
    _check_whole(written, [(0, 4), (4, 5), (5, 7), (7, 8), (8, 12)])


# Kills


_LIGHT = """
import os, sys, types
package = types.ModuleType("devicemap")  # its modules, without its __init__, which imports TensorFlow
package.__path__ = [sys.argv[1]]
sys.modules["devicemap"] = package
import numpy as np
from devicemap.journal.writing import open_journal
from devicemap.journal.records import Header
assert "tensorflow" not in sys.modules
SPEC = {"dense": "int64", "shape": [None]}
def header(rows): return Header(SPEC, SPEC, False, 4, None, None, rows, "f")
def write(directory, rows):
    computed = 0
    with open_journal(directory, header(rows)) as journal:
        for start in range(0, rows, 4):
            for gap in journal.missing(start, start + 4):
                journal.append(*gap, {"0.values": np.arange(*gap) ** 2}, f"digest of {start}")
                computed += 1
        journal.finish(rows)
    return computed
"""


def _run(code: str, *arguments: Any) -> Any:
    """Run code in a process of its own that has the journal and no TensorFlow; returns what it printed, as JSON."""
    command = [sys.executable, "-c", _LIGHT + code, str(Path(devicemap.__file__).parent), *map(str, arguments)]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True, timeout=100).stdout)


needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")


@needs_fork
def test_killed_at_every_step(tmp_path: Path) -> None:
    """A process is killed before each call of the operating system in turn, and halfway through each write."""
    code = """
import itertools, json, signal
def die(): os.kill(os.getpid(), signal.SIGKILL)
def dying(name, call, steps, fatal):
    def wrapped(*args):
        if next(steps) == fatal:
            if name == "write": call(args[0], args[1][: len(args[1]) // 2])
            die()
        return call(*args)
    return wrapped
def child(directory, fatal):
    steps = itertools.count()
    for name in ["open", "write", "fsync", "replace", "ftruncate", "listdir", "close"]:
        setattr(os, name, dying(name, getattr(os, name), steps, fatal))
    write(directory, 12)
    os._exit(0)
found = []
for fatal in itertools.count():
    directory = f"{sys.argv[2]}/{fatal}"
    pid = os.fork()
    if not pid: child(directory, fatal)
    if os.waitpid(pid, 0)[1] == 0: break
    left = len(os.listdir(directory)) if os.path.exists(directory) else 0
    found.append((left, write(directory, 12)))
print(json.dumps(found))
"""
    found = _run(code, tmp_path)
    assert len(found) > 30  # steps
    computed = [count for _, count in found]
    assert computed == sorted(computed, reverse=True)  # the later it died, the less is missing
    assert set(computed) == {0, 1, 2, 3}
    for fatal in range(len(found) + 1):
        _check_whole(tmp_path / str(fatal))


@needs_fork
def test_killed_at_random_moments(tmp_path: Path) -> None:
    """Again and again in one folder: nothing that was finished is lost, nothing is computed twice."""
    code = """
import json, random, signal, time
random.seed(7)
rows, left = 4 * 300, []
for _ in range(20):
    pid = os.fork()
    if not pid:
        write(sys.argv[2], rows)
        os._exit(0)
    time.sleep(random.uniform(0, 0.05))
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    with open_journal(sys.argv[2], header(rows)) as journal:
        left.append(len(journal.missing(0, rows)) and rows - sum(e.stop - e.start for e in journal.entries))
print(json.dumps([left, write(sys.argv[2], rows)]))
"""
    left, computed = _run(code, tmp_path)
    assert left == sorted(left, reverse=True)
    assert computed == left[-1] // 4
    contents = read_journal(tmp_path)
    assert [(entry.start, entry.stop) for entry in contents.entries] == [(i, i + 4) for i in range(0, 1200, 4)]
    assert contents.rows == 1200
    lines = (tmp_path / JOURNAL).read_bytes().splitlines()
    assert len(lines) == 1 + 300 + 1  # each chunk was recorded once
    assert sorted(os.listdir(tmp_path)) == [JOURNAL, *(entry.file for entry in contents.entries)]
    for entry in contents.entries:
        values = unpack_arrays(read_chunk(tmp_path, entry))["0.values"]
        assert values.tolist() == [i * i for i in range(entry.start, entry.stop)]


# A full disk


class Disk:
    """A disk that is full at a scripted call of the operating system, for once or from then on."""

    CALLS = ["open", "write", "fsync", "replace", "ftruncate"]

    def __init__(self, monkeypatch: pytest.MonkeyPatch, full_at: int, lasting: bool):
        self.calls = 0
        self.failed = False
        for name in self.CALLS:
            monkeypatch.setattr(os, name, self._failing(name, getattr(os, name), full_at, lasting))

    def _failing(self, name: str, call: Any, full_at: int, lasting: bool) -> Any:
        def failing(*args: Any) -> Any:
            self.calls += 1
            if self.calls - 1 == full_at or (lasting and self.calls - 1 > full_at):
                self.failed = True
                if name == "write":
                    call(args[0], args[1][: len(args[1]) // 2])
                raise OSError(errno.ENOSPC, "No space left on device")
            return call(*args)

        return failing


@pytest.mark.parametrize("lasting", [False, True], ids=["once", "from then on"])
@pytest.mark.parametrize("reopen", [False, True], ids=["same journal", "opened again"])
def test_a_full_disk_at_every_step(tmp_path: Path, lasting: bool, reopen: bool) -> None:
    errors: list[JournalError] = []
    for full_at in range(100):
        directory = tmp_path / str(full_at)
        recorded: list[tuple[int, int]] = []
        journal = None
        with pytest.MonkeyPatch.context() as patch:
            disk = Disk(patch, full_at, lasting)
            try:
                journal = open_journal(directory, HEADER)
                for chunk in CHUNKS:
                    _append(journal, *chunk)
                    recorded.append(chunk)
                journal.finish(12)
            except JournalError as error:
                errors.append(error)
        if not disk.failed:
            assert journal is not None
            journal.close()
            break
        left = os.listdir(directory) if directory.exists() else []
        assert not any(name.endswith(".tmp") for name in left)
        if journal is not None and not reopen:
            assert [(entry.start, entry.stop) for entry in journal.entries] == recorded
            for chunk in CHUNKS[len(recorded) :]:
                _append(journal, *chunk)
            journal.finish(12)
        if journal is not None:
            journal.close()
        if reopen:
            computed = _write(directory)
            # A line that was written, and could not be synced, may be believed or not: nobody was told that it is done.
            assert computed in (CHUNKS[len(recorded) :], CHUNKS[len(recorded) + 1 :])
        elif journal is None:
            assert _write(directory) == CHUNKS
        _check_whole(directory)
    assert len(errors) == full_at > 20
    for error in errors:
        assert error.errno == errno.ENOSPC
        assert "No space left on device" in str(error)
        assert "run write again" in str(error) or "written to and locked" in str(error)


def test_an_interruption_leaves_no_temporary_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(path: Path, data: Any) -> None:
        path.write_bytes(b"half")
        raise KeyboardInterrupt

    with open_journal(tmp_path, HEADER) as journal:
        monkeypatch.setattr(journal_module, "write_synced", interrupted)
        with pytest.raises(KeyboardInterrupt):
            _append(journal, 0, 4)
    assert os.listdir(tmp_path) == [JOURNAL]
    monkeypatch.undo()
    assert _write(tmp_path) == CHUNKS


def test_leftovers_are_taken_away_before_the_next_write(written: Path) -> None:
    """Temporary files, and chunks without a line; but not what somebody else has put there."""
    lines = (written / JOURNAL).read_bytes().splitlines(keepends=True)
    (written / JOURNAL).write_bytes(b"".join(lines[:3]) + lines[3][:-9])
    (written / "rows-000000000008-000000000012.npz.123.tmp").write_bytes(b"half")
    (written / "notes.txt").write_text("mine")
    with _untouched(written), open_journal(written, HEADER) as journal:
        assert journal.missing(0, 12) == [(8, 12)]
    assert _write(written, [(0, 9), (9, 12)]) == [(8, 9), (9, 12)]
    assert (written / "notes.txt").read_text() == "mine"
    (written / "notes.txt").unlink()
    _check_whole(written, [(0, 4), (4, 8), (8, 9), (9, 12)])


def test_closed_while_a_chunk_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that cannot be stopped may finish its chunk after the call has ended, and the folder is another's."""
    journal = open_journal(tmp_path, HEADER)

    def closed_meanwhile(path: Path, data: Any) -> None:
        write_synced(path, data)
        journal.close()

    monkeypatch.setattr(journal_module, "write_synced", closed_meanwhile)
    with pytest.raises(JournalError, match="is closed"):
        _append(journal, 0, 4)
    with pytest.raises(JournalError, match="is closed"):
        _append(journal, 4, 8)
    with pytest.raises(JournalError, match="is closed"):
        journal.finish(0)
    assert os.listdir(tmp_path) == [JOURNAL]
    journal.close()


# Who else is there


def test_a_second_writer_is_refused(tmp_path: Path) -> None:
    with open_journal(tmp_path, HEADER) as journal:
        _append(journal, 0, 4)
        with _untouched(tmp_path):
            with pytest.raises(JournalError, match="is being written to, by another call or another process"):
                open_journal(tmp_path, HEADER)
            code = """
import json
try: open_journal(sys.argv[2], header(12))
except OSError as error: print(json.dumps([type(error).__name__, str(error)]))
"""
            name, message = _run(code, tmp_path)
            assert name == "JournalError"
            assert message.startswith(f"{tmp_path} is being written to")
        _append(journal, 4, 8)
    assert _write(tmp_path) == [(8, 12)]
    _check_whole(tmp_path)


def test_a_folder_of_something_else_is_refused(tmp_path: Path) -> None:
    for name in "abcd":
        (tmp_path / name).write_text("mine")
    expected = r"holds a, b, c and 1 more, and no journal of devicemap. Write to a new or an empty directory"
    with pytest.raises(JournalError, match=expected), _untouched(tmp_path):
        open_journal(tmp_path, HEADER)
    with pytest.raises(JournalError, match="is a file; expected a directory"), _untouched(tmp_path):
        open_journal(tmp_path / "a", HEADER)
    with pytest.raises(JournalError, match="failed: NotADirectoryError"), _untouched(tmp_path):
        open_journal(tmp_path / "a" / "b", HEADER)


@pytest.mark.parametrize("content", [b"mine\n", b"mine", b'{"devicemap journal": 1}\n', b'{"devicemap journey'])
def test_a_journal_of_something_else_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / JOURNAL).write_bytes(content)
    with pytest.raises(JournalError, match="delete this one to start anew"), _untouched(tmp_path):
        open_journal(tmp_path, HEADER)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("results", {"dense": "float32", "shape": [None]}),
        ("inputs", {"tuple": [SPEC, SPEC]}),
        ("batched", True),
        ("batch_size", 8),
        ("batch_size", "auto"),
        ("chunk_rows", 4),
        ("seed", 3),
        ("rows", 13),
    ],
)
@pytest.mark.parametrize("finish", [False, True])
def test_another_call_is_refused(tmp_path: Path, name: str, value: Any, finish: bool) -> None:
    _write(tmp_path, [(0, 4)] if not finish else CHUNKS, finish)
    with pytest.raises(JournalError, match="another call, of 'f': ") as caught, _untouched(tmp_path):
        open_journal(tmp_path, replace(HEADER, **{name: value}))
    assert f"{name} was {getattr(HEADER, name)!r} there, and is {value!r} now" in str(caught.value)
    assert "delete this one to start anew" in str(caught.value)
    if not finish:
        assert _write(tmp_path) == CHUNKS[1:]


def test_another_function_is_refused(tmp_path: Path) -> None:
    _write(tmp_path, [(0, 4)], finish=False)
    with pytest.raises(JournalError, match="function was 'f' there, and is 'g' now"):
        open_journal(tmp_path, replace(HEADER, function="g"))


def test_a_folder_without_results_takes_any_call(tmp_path: Path) -> None:
    """A call that failed on its first chunk does not bar the call that comes after it."""
    (tmp_path / JOURNAL).write_bytes(header_line(replace(HEADER, results={"dense": "float32", "shape": [None]})))
    assert _write(tmp_path) == CHUNKS
    _check_whole(tmp_path)


def test_another_format_is_refused(written: Path) -> None:
    first, rest = (written / JOURNAL).read_bytes().split(b"\n", 1)
    head = json.loads(first)
    del head["checksum"]
    (written / JOURNAL).write_bytes(write_line(head | {"devicemap journal": 2}) + rest)
    with pytest.raises(JournalError, match="another version of devicemap"), _untouched(written):
        open_journal(written, HEADER)


def test_opening_alone_writes_nothing(tmp_path: Path) -> None:
    with open_journal(tmp_path, HEADER):
        assert (tmp_path / JOURNAL).read_bytes() == b""
    assert os.listdir(tmp_path) == [JOURNAL]
    shutil.rmtree(tmp_path)
    with pytest.raises(JournalError, match=r"Is this a directory that devicemap has written to\?"):
        read_journal(tmp_path)


def test_no_rows(tmp_path: Path) -> None:
    with open_journal(tmp_path, replace(HEADER, rows=None)) as journal:
        assert journal.rows is None
        journal.finish(0)
    contents = read_journal(tmp_path)
    assert (contents.rows, contents.entries, contents.ended) == (0, (), True)


def test_errors_are_of_the_operating_system_too(written: Path) -> None:
    assert issubclass(JournalError, OSError)
    assert issubclass(MissingRowsError, JournalError)
    assert issubclass(JournalError, DeviceMapError)
    entry = read_journal(written).entries[0]
    (written / entry.file).unlink()
    with pytest.raises(MissingRowsError, match=r"rows 0 to 3 are missing: .*No such file.*Run write again"):
        read_chunk(written, entry)
    (written / entry.file).mkdir()
    with pytest.raises(JournalError, match=r"reading .* failed: .*It holds rows 0 to 3") as caught:
        read_chunk(written, entry)
    assert caught.value.errno is not None
