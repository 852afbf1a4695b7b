"""The journal of a folder of results: writing, reading, sharing and refusing it. NumPy only."""

from __future__ import annotations

import json
import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from journals import (
    CHUNKS,
    FUNCTION,
    HEADER,
    append,
    check_whole,
    place_of,
    run_alone,
    squares,
    untouched,
    write_missing,
)
from journals import written as written

import devicemap
from devicemap.errors import JournalError, MissingRowsError
from devicemap.store import segments
from devicemap.store.chunks import pack_arrays
from devicemap.store.journal import open_journal
from devicemap.store.records import JOURNAL, header_line, read_journal, write_line


def test_written_and_opened_again(tmp_path: Path) -> None:
    directory = tmp_path / "new" / "out"
    assert write_missing(directory) == CHUNKS
    check_whole(directory)
    with untouched(directory):
        assert write_missing(directory) == []


def test_many_threads_write_chunks_in_any_order(tmp_path: Path) -> None:
    chunks = [(start, start + 4) for start in range(0, 160, 4)]
    with open_journal(tmp_path, replace(HEADER, rows=160)) as journal:
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda chunk: append(journal, *chunk), reversed(chunks)))
        assert journal.missing(0, 160) == []
        journal.finish(160)
        journal.finish(160)  # adds no second line
    check_whole(tmp_path, chunks)
    assert len((tmp_path / JOURNAL).read_bytes().splitlines()) == 1 + len(chunks) + 1


def test_a_file_is_written_by_one_run_until_it_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chunk = len(pack_arrays(squares(0, 4)))
    monkeypatch.setattr(segments, "_FULL_BYTES", 2 * chunk - 1)
    write_missing(tmp_path, CHUNKS[:1], finish=False)
    write_missing(tmp_path, [(4, 6), (6, 8), (8, 10), (10, 12)])
    places = [(entry.file, entry.offset) for entry in read_journal(tmp_path).entries]
    small = len(pack_arrays(squares(4, 6)))
    assert places == [(0, 0), (1, 0), (1, small), (1, 2 * small), (2, 0)]
    check_whole(tmp_path, [(0, 4), (4, 6), (6, 8), (8, 10), (10, 12)])


def test_the_format_stays_the_same(written: Path) -> None:
    """A change of the format needs another number: folders outlive releases."""
    head, *chunks, end = [json.loads(line) for line in (written / JOURNAL).read_text().splitlines()]
    assert (head["devicemap journal"], head["name"], head["function"]) == (2, "f", FUNCTION)
    assert [tuple(chunk[:2]) for chunk in chunks] == CHUNKS
    assert end["rows"] == 12
    path, place = place_of(written, 1)
    shapes, values = path.read_bytes()[place].split(b"\n", 1)
    assert json.loads(shapes) == [[4]]
    assert np.frombuffer(values, "<i8").tolist() == [16, 25, 36, 49]


def test_opening_alone_writes_nothing(tmp_path: Path) -> None:
    with open_journal(tmp_path, HEADER):
        assert (tmp_path / JOURNAL).read_bytes() == b""
    assert os.listdir(tmp_path) == [JOURNAL]


# Other writers and other folders


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


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"mine\n", "is not a journal of devicemap"),
        (b"mine", "is not a journal of devicemap"),
        (b'{"devicemap journal": 1}\n', "the first line of .* is damaged"),
        (b'{"devicemap journey', "is not a journal of devicemap"),
        (write_line({"devicemap journal": 3, **vars(HEADER)}), "another version of devicemap"),
    ],
)
def test_another_journal_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / JOURNAL).write_bytes(content)
    with pytest.raises(JournalError, match=f"{message}.*delete this one to start anew"), untouched(tmp_path):
        open_journal(tmp_path, HEADER)
    with pytest.raises(JournalError, match=message):
        devicemap.open_results(tmp_path)


def test_another_name_and_version_of_tensorflow_are_no_difference(tmp_path: Path) -> None:
    write_missing(tmp_path, [(0, 4)], finish=False)
    other = replace(HEADER, name="g", function={**FUNCTION, "tensorflow": "of tomorrow"})
    with open_journal(tmp_path, other) as journal:
        assert journal.missing(0, 12) == [(4, 12)]


def test_a_folder_without_results_takes_any_call(tmp_path: Path) -> None:
    """A call that fails on its first chunk does not block a later call."""
    (tmp_path / JOURNAL).write_bytes(header_line(replace(HEADER, batch_size=9, function={"graph": "other"})))
    assert write_missing(tmp_path) == CHUNKS
    check_whole(tmp_path)


def test_errors_of_the_operating_system(written: Path) -> None:
    results = devicemap.open_results(written)
    path, _ = place_of(written, 0)
    path.rename(written / "elsewhere")
    with pytest.raises(MissingRowsError, match=r"rows 0 to 3 are missing: .*No such file.*Run again"):
        results.load()
    shutil.rmtree(written)
    written.touch()
    with pytest.raises(JournalError, match=r"reading rows 0 to 3 from .* failed") as caught:
        results.load()
    assert caught.value.errno is not None
