"""Finished chunks in the order of their rows: what of them counts, and which rows are missing."""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from operator import attrgetter
from typing import NamedTuple


class Entry(NamedTuple):
    """A chunk that the journal says is finished."""

    start: int
    """Global index of the first row."""

    stop: int
    """Global index after the last row."""

    file: int
    """The number of the file that it is in."""

    offset: int
    """Where in that file it begins, in bytes."""

    size_bytes: int
    """Its size."""

    checksum: str
    """`storage.checksum` of its bytes."""

    inputs: str
    """`digests.RowDigest` of the rows that it was computed from."""


def latest(entries: Sequence[Entry]) -> list[Entry]:
    """The entries in the order of their rows, without those whose rows are in a later one, too.

    A chunk that was found to be damaged is written again, perhaps in other pieces.

    >>> entries = [Entry(*rows, 0, 0, 0, "", "") for rows in [(4, 8), (0, 4), (8, 9), (3, 5)]]
    >>> [entry[:2] for entry in latest(entries)]
    [(3, 5), (8, 9)]
    """
    kept: list[int] = []  # the lines that they are in
    for line in sorted(range(len(entries)), key=lambda line: entries[line].start):
        start = entries[line].start
        while kept and entries[kept[-1]].stop > start and kept[-1] < line:
            kept.pop()
        if not kept or entries[kept[-1]].stop <= start:
            kept.append(line)
    return [entries[line] for line in kept]


def insert_entry(entries: list[Entry], entry: Entry) -> None:
    """Put an entry at its place; none of its rows are in `entries`."""
    first, after_last = _range(entries, entry.start, entry.stop)
    assert first == after_last
    entries.insert(first, entry)


def missing_rows(entries: Sequence[Entry], start: int, stop: int) -> list[tuple[int, int]]:
    """The `(start, stop)` of what is not finished of rows `start` to `stop - 1`; entries as in `Contents`.

    >>> missing_rows([Entry(2, 4, 0, 0, 0, "", ""), Entry(4, 6, 0, 0, 0, "", "")], 0, 8)
    [(0, 2), (6, 8)]
    """
    gaps = []
    for entry in overlapping(entries, start, stop):
        if start < entry.start:
            gaps.append((start, entry.start))
        start = entry.stop
    if start < stop:
        gaps.append((start, stop))
    return gaps


def overlapping(entries: Sequence[Entry], start: int, stop: int) -> Sequence[Entry]:
    """Those of the entries, which are as in `Contents`, that have some of the rows."""
    first, after_last = _range(entries, start, stop)
    return entries[first:after_last]


def _range(entries: Sequence[Entry], start: int, stop: int) -> tuple[int, int]:
    """Where they are; empty, and at their place, where there are none."""
    first = bisect.bisect_right(entries, start, key=attrgetter("stop"))
    return first, bisect.bisect_left(entries, stop, key=attrgetter("start"))
