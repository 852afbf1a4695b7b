"""A folder of results with damage at any byte: only the damaged chunks are missing, and are computed again."""

from __future__ import annotations

from pathlib import Path

import pytest
from journals import CHUNKS, HEADER, append, check_whole, flip, place_of, untouched, write_missing
from journals import written as written

import devicemap
from devicemap.errors import JournalError, MissingRowsError
from devicemap.store.journal import open_journal
from devicemap.store.records import JOURNAL, read_journal


def _check_missing(directory: Path, missing: tuple[int, int]) -> None:
    with open_journal(directory, HEADER) as journal:
        assert journal.missing(0, 12) == [missing]


def test_a_chunk_damaged_at_any_byte_is_missing(written: Path) -> None:
    path, place = place_of(written, 1)
    good = path.read_bytes()
    results = devicemap.open_results(written)
    for offset in range(place.stop - place.start):
        flip(written, 1, offset)
        _check_missing(written, (4, 8))
        with pytest.raises(MissingRowsError, match=r"rows 4 to 7 are damaged: .* computes them, and only them, again"):
            results.load()
        assert results[:4].tolist() == [0, 1, 4, 9]
        path.write_bytes(good[: place.start + offset])
        _check_missing(written, (4, 12))  # the chunk behind it is cut off, too
        path.write_bytes(good)
    flip(written, 1)
    assert write_missing(written) == [(4, 8)]
    check_whole(written)
    path.unlink()
    assert write_missing(written) == [(0, 4), (8, 12)]
    check_whole(written)


@pytest.mark.parametrize("newline", [False, True])
def test_a_journal_damaged_at_any_byte(written: Path, newline: bool) -> None:
    """A damaged line is ignored, and all others count. A folder without its first line is refused."""
    path = written / JOURNAL
    good, (segment, _) = path.read_bytes(), place_of(written, 0)
    chunks = segment.read_bytes()
    for offset in range(len(good)):
        byte = 10 if newline else good[offset] ^ 1
        if byte == good[offset]:
            continue
        path.write_bytes(good[:offset] + bytes([byte]) + good[offset + 1 :])
        line = good[:offset].count(b"\n")
        if line == 0:
            with pytest.raises(JournalError, match="delete this one to start anew"), untouched(written):
                open_journal(written, HEADER)
            continue
        lost = {line, line + 1} if good[offset] == 10 else {line}  # a line without its end takes the next one with it
        left = [chunk for i, chunk in enumerate(CHUNKS) if i + 1 not in lost]
        contents = read_journal(written)
        assert [(entry.start, entry.stop) for entry in contents.entries] == left
        assert contents.ended == (4 not in lost)
        if offset % 29 == 0:
            assert write_missing(written) == [chunk for chunk in CHUNKS if chunk not in left]
            check_whole(written)
            segment.write_bytes(chunks)


def test_a_journal_cut_at_any_byte(written: Path, tmp_path: Path) -> None:
    path = written / JOURNAL
    good, (segment, _) = path.read_bytes(), place_of(written, 0)
    chunks = segment.read_bytes()
    header = good.index(b"\n") + 1
    bare = tmp_path / "bare"
    bare.mkdir()
    for size in range(len(good)):
        path.write_bytes(good[:size])
        if size < header:  # an interrupted run leaves this only in a folder without chunks
            with pytest.raises(JournalError, match="has no beginning"), untouched(written):
                open_journal(written, HEADER)
            for zeros in [b"", b"\0" * 5]:  # some file systems fill what was not synced with zeros
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


def test_chunks_of_other_sizes_replace_a_damaged_chunk(written: Path) -> None:
    """`batch_size="auto"` finds other sizes. The old chunk does not come back when its file is restored."""
    path, _ = place_of(written, 1)
    good = path.read_bytes()
    flip(written, 1)
    with open_journal(written, HEADER) as journal:
        append(journal, 4, 5)
    path.write_bytes(good)
    assert write_missing(written, [(0, 7), (7, 12)]) == [(5, 7), (7, 8)]
    check_whole(written, [(0, 4), (4, 5), (5, 7), (7, 8), (8, 12)])
