"""A folder of results that was damaged at any of its bytes: what is not whole is computed again, and nothing else."""

from __future__ import annotations

import io
import json
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from journals import CHUNKS, HEADER, append, check_whole, place_of, untouched, write_missing
from journals import written as written

from devicemap.errors import JournalError
from devicemap.store.entries import Entry, latest
from devicemap.store.journal import open_journal
from devicemap.store.records import JOURNAL, parse_journal, read_journal, read_line, write_line


@pytest.mark.parametrize("chunk", range(3))
def test_a_chunk_damaged_at_any_byte_is_computed_again(written: Path, chunk: int) -> None:
    path, place = place_of(written, chunk)
    good = path.read_bytes()
    for offset in range(place.start, place.stop):
        path.write_bytes(good[:offset] + bytes([good[offset] ^ 0xFF]) + good[offset + 1 :])
        _check_missing(written, CHUNKS[chunk], CHUNKS[chunk])
        path.write_bytes(good[:offset])
        _check_missing(written, CHUNKS[chunk], CHUNKS[-1])  # those behind it are cut off, too
    path.write_bytes(good[: place.stop - 1] + b"?" + good[place.stop :])
    assert write_missing(written) == [CHUNKS[chunk]]
    check_whole(written)
    path.unlink()
    assert write_missing(written) == [other for other in CHUNKS if other != CHUNKS[chunk]]
    check_whole(written)


def _check_missing(directory: Path, first: tuple[int, int], last: tuple[int, int]) -> None:
    with open_journal(directory, HEADER) as journal:
        assert journal.missing(0, 12) == [(first[0], last[1])]


@pytest.mark.parametrize("change", ["inverted", "newline", "lowest bit"])
def test_a_journal_damaged_at_any_byte(written: Path, change: str) -> None:
    """A damaged line is not believed, all others are; without the first line nothing is."""
    path = written / JOURNAL
    good, (segment, _) = path.read_bytes(), place_of(written, 0)
    chunks = segment.read_bytes()
    for offset in range(len(good)):
        byte = {"inverted": good[offset] ^ 0xFF, "newline": 10, "lowest bit": good[offset] ^ 1}[change]
        if byte == good[offset]:
            continue
        path.write_bytes(good[:offset] + bytes([byte]) + good[offset + 1 :])
        line = good[:offset].count(b"\n")
        if line == 0:
            with pytest.raises(JournalError, match="delete this one to start anew"), untouched(written):
                open_journal(written, HEADER)
            continue
        lost = {line, line + 1} if good[offset] == 10 else {line}  # without its end, it takes the next one with it
        missing = [(entry.start, entry.stop) for i, entry in enumerate(_entries(good)) if i + 1 in lost]
        contents = read_journal(written)
        left = [(entry.start, entry.stop) for entry in contents.entries]
        assert left == [chunk for chunk in CHUNKS if chunk not in missing]
        assert contents.ended == (4 not in lost)
        if offset % 29 == 0:
            with untouched(written), open_journal(written, HEADER) as journal:
                assert [(entry.start, entry.stop) for entry in journal.entries] == left
            assert write_missing(written) == [chunk for chunk in CHUNKS if chunk not in left]
            check_whole(written)
            segment.write_bytes(chunks)


def _entries(journal: bytes) -> tuple[Entry, ...]:
    return parse_journal(io.BytesIO(journal), Path()).entries


def test_a_journal_cut_at_any_byte(written: Path, tmp_path: Path) -> None:
    path = written / JOURNAL
    good, (segment, _) = path.read_bytes(), place_of(written, 0)
    chunks = segment.read_bytes()
    header = good.index(b"\n") + 1
    bare = tmp_path / "bare"
    bare.mkdir()
    for size in range(len(good)):
        path.write_bytes(good[:size])
        if size < header:  # with results beside it, that was no kill; without, it was one at the very beginning
            with pytest.raises(JournalError, match="has no beginning"), untouched(written):
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
            assert write_missing(written) == CHUNKS[lines:]
            check_whole(written)
            segment.write_bytes(chunks)
    (bare / JOURNAL).write_bytes(good[: header // 2])
    assert write_missing(bare) == CHUNKS
    check_whole(bare)


def test_lines_have_checksums() -> None:
    line = write_line({"rows": 3})
    assert line.endswith(b'"}\n')
    assert json.loads(line)["rows"] == 3
    assert read_line(line[:-1]) is not None
    assert read_line(line.replace(b"3", b"4", 1)[:-1]) is None
    assert read_line(b"") is None


def test_a_damaged_chunk_is_replaced_by_others(written: Path) -> None:
    """Chunks of other sizes, as batch_size="auto" finds them, and the old one does not come back."""
    path, place = place_of(written, 1)
    good = path.read_bytes()
    path.write_bytes(good[: place.stop - 1] + b"?" + good[place.stop :])
    with open_journal(written, HEADER) as journal:
        append(journal, 4, 5)
    path.write_bytes(good)
    assert write_missing(written, [(0, 7), (7, 12)]) == [(5, 7), (7, 8)]
    check_whole(written, [(0, 4), (4, 5), (5, 7), (7, 8), (8, 12)])


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 4)), max_size=9))
def test_the_latest_lines_count(lines: list[tuple[int, int]]) -> None:
    """Of lines about the same rows: nothing is there twice, and nothing is lost that no later line is about."""
    entries = [Entry(start, start + rows, 0, 0, 0, str(i), "") for i, (start, rows) in enumerate(lines)]
    kept = latest(entries)
    assert all(one.stop <= other.start for one, other in pairwise(kept))
    for i, entry in enumerate(entries):
        if not any(entry.start < later.stop and later.start < entry.stop for later in entries[i + 1 :]):
            assert entry in kept
