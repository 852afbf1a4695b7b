"""The folder of results, as it is written, read, shared and refused. NumPy only."""

from __future__ import annotations

import json
import os
import shutil
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from journals import (
    CHUNKS,
    FUNCTION,
    HEADER,
    SPEC,
    append,
    check_whole,
    place_of,
    read,
    run_alone,
    squares,
    untouched,
    write_missing,
)
from journals import written as written

from devicemap.errors import DeviceMapError, JournalError, MissingRowsError
from devicemap.store import segments
from devicemap.store.chunks import pack_arrays
from devicemap.store.entries import Entry, missing_rows
from devicemap.store.journal import open_journal
from devicemap.store.records import JOURNAL, header_line, read_journal, write_line


def test_written_and_opened_again(tmp_path: Path) -> None:
    directory = tmp_path / "new" / "out"
    assert write_missing(directory) == CHUNKS
    check_whole(directory)
    with untouched(directory):
        assert write_missing(directory) == []


def test_chunks_in_any_order_and_an_empty_folder(tmp_path: Path) -> None:
    with open_journal(tmp_path, HEADER) as journal:
        for chunk in [(8, 12), (0, 4), (4, 8)]:
            append(journal, *chunk)
        assert [entry.start for entry in journal.entries] == [0, 4, 8]
        journal.finish(12)
        journal.finish(12)  # says nothing new
    check_whole(tmp_path)
    assert len((tmp_path / JOURNAL).read_bytes().splitlines()) == 1 + 3 + 1


def test_many_threads(tmp_path: Path) -> None:
    with open_journal(tmp_path, replace(HEADER, rows=160)) as journal:
        chunks = [(start, start + 4) for start in range(0, 160, 4)]

        def work(i: int) -> None:
            for chunk in chunks[i::8]:
                append(journal, *chunk)

        threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert journal.missing(0, 160) == []
    assert [(entry.start, entry.stop) for entry in read_journal(tmp_path).entries] == chunks
    for entry in read_journal(tmp_path).entries:
        assert read(tmp_path, entry).tolist() == [n * n for n in range(entry.start, entry.stop)]
    assert sorted(os.listdir(tmp_path)) == ["chunks-000000.bin", JOURNAL]


def test_a_file_is_written_by_one_run_until_it_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chunk = len(pack_arrays(squares(0, 4)))
    monkeypatch.setattr(segments, "_FULL_BYTES", 2 * chunk - 1)
    write_missing(tmp_path, CHUNKS[:1], finish=False)
    write_missing(tmp_path, [(4, 6), (6, 8), (8, 10), (10, 12)])
    places = [(entry.file, entry.offset) for entry in read_journal(tmp_path).entries]
    small = len(pack_arrays(squares(4, 6)))
    assert places == [(0, 0), (1, 0), (1, small), (1, 2 * small), (2, 0)]
    check_whole(tmp_path, [(0, 4), (4, 6), (6, 8), (8, 10), (10, 12)])


def test_a_chunk_is_its_shapes_and_its_arrays(written: Path) -> None:
    path, place = place_of(written, 1)
    shapes, values = path.read_bytes()[place].split(b"\n", 1)
    assert json.loads(shapes) == [[4]]
    assert np.frombuffer(values, "<i8").tolist() == [16, 25, 36, 49]


def test_the_journal_is_lines_of_json(written: Path) -> None:
    head, *chunks, end = [json.loads(line) for line in (written / JOURNAL).read_text().splitlines()]
    assert (head["devicemap journal"], head["name"], head["function"]) == (2, "f", FUNCTION)
    assert [tuple(chunk[:2]) for chunk in chunks] == CHUNKS
    assert end["rows"] == 12


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
    entries = [Entry(first, last, 0, 0, 0, "", "") for first, last in [(2, 4), (4, 6), (9, 10)]]
    assert missing_rows(entries, start, stop) == missing
    assert missing_rows([], start, stop) == ([(start, stop)] if stop > start else [])


# Who else is there


def test_a_second_writer_is_refused(tmp_path: Path) -> None:
    with open_journal(tmp_path, HEADER) as journal:
        append(journal, 0, 4)
        with untouched(tmp_path):
            with pytest.raises(JournalError, match="is being written to, by another call or another process"):
                open_journal(tmp_path, HEADER)
            code = """
import json
try: open_journal(sys.argv[2], header(12))
except OSError as error: print(json.dumps([type(error).__name__, str(error)]))
"""
            name, message = run_alone(code, tmp_path)
            assert name == "JournalError"
            assert message.startswith(f"{tmp_path} is being written to")
        append(journal, 4, 8)
    assert write_missing(tmp_path) == [(8, 12)]
    check_whole(tmp_path)


def test_a_folder_of_something_else_is_refused(tmp_path: Path) -> None:
    for name in "abcd":
        (tmp_path / name).write_text("mine")
    expected = r"holds a, b, c and 1 more, and no journal of devicemap. Write to a new or an empty directory"
    with pytest.raises(JournalError, match=expected), untouched(tmp_path):
        open_journal(tmp_path, HEADER)
    with pytest.raises(JournalError, match="is a file; expected a directory"), untouched(tmp_path):
        open_journal(tmp_path / "a", HEADER)
    with pytest.raises(JournalError, match="failed: NotADirectoryError"), untouched(tmp_path):
        open_journal(tmp_path / "a" / "b", HEADER)


@pytest.mark.parametrize("content", [b"mine\n", b"mine", b'{"devicemap journal": 1}\n', b'{"devicemap journey'])
def test_a_journal_of_something_else_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / JOURNAL).write_bytes(content)
    with pytest.raises(JournalError, match="delete this one to start anew"), untouched(tmp_path):
        open_journal(tmp_path, HEADER)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("results", {"dense": "float32", "shape": [None], "stored": "f4"}),
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
    write_missing(tmp_path, [(0, 4)] if not finish else CHUNKS, finish)
    with pytest.raises(JournalError, match="another call, of 'f': ") as caught, untouched(tmp_path):
        open_journal(tmp_path, replace(HEADER, **{name: value}), trusted=True)
    assert f"{name} was {getattr(HEADER, name)!r} there, and is {value!r} now" in str(caught.value)
    assert "delete this one to start anew" in str(caught.value)
    if not finish:
        assert write_missing(tmp_path) == CHUNKS[1:]


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"graph": "another", "parts": ["1 x Sqrt"]}, "1 x Square there, 1 x Sqrt now"),
        ({"graph": "another"}, "put together in another way"),
        ({"jit_compile": True}, "jit_compile was False there, and is True now"),
    ],
)
def test_another_function_is_refused_unless_it_is_trusted(tmp_path: Path, change: Any, told: str) -> None:
    write_missing(tmp_path, [(0, 4)], finish=False)
    other = replace(HEADER, function=FUNCTION | change)
    with pytest.raises(JournalError, match=f"another function, of 'f': .*{told}.*trust_function=True"):
        open_journal(tmp_path, other)
    for header in (other, replace(HEADER, name="g", function={**FUNCTION, "tensorflow": "of tomorrow"})):
        with open_journal(tmp_path, header, trusted=header is other) as journal:
            assert journal.missing(0, 12) == [(4, 12)]


def test_a_folder_without_results_takes_any_call(tmp_path: Path) -> None:
    """A call that failed on its first chunk does not bar the call that comes after it."""
    (tmp_path / JOURNAL).write_bytes(header_line(replace(HEADER, batch_size=9, function={"graph": "other"})))
    assert write_missing(tmp_path) == CHUNKS
    check_whole(tmp_path)


@pytest.mark.parametrize("version", [1, 3, "2"])
def test_another_format_is_refused(written: Path, version: Any) -> None:
    first, rest = (written / JOURNAL).read_bytes().split(b"\n", 1)
    head = json.loads(first)
    del head["checksum"]
    (written / JOURNAL).write_bytes(write_line(head | {"devicemap journal": version}) + rest)
    with pytest.raises(JournalError, match="another version of devicemap"), untouched(written):
        open_journal(written, HEADER)
    with pytest.raises(JournalError, match="another version of devicemap"):
        read_journal(written)


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
    path, _ = place_of(written, 0)
    path.rename(written / "elsewhere")
    with pytest.raises(MissingRowsError, match=r"rows 0 to 3 are missing: .*No such file.*Run again"):
        read(written, entry)
    written.rename(written.parent / "a file")
    written.touch()
    with pytest.raises(JournalError, match=r"reading rows 0 to 3 from .* failed") as caught:
        read(written, entry)
    assert caught.value.errno is not None
