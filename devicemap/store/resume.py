"""Reading data again for a run that was interrupted: which rows are still to be computed, and is it the same data?"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from itertools import groupby

import tensorflow as tf

from devicemap.data.rows import HOST, Rows, take_rows
from devicemap.data.sources import Chunk, Source
from devicemap.errors import JournalError
from devicemap.store.digests import RowDigest, digest_ranges
from devicemap.store.entries import Entry
from devicemap.store.journal import Journal
from devicemap.store.records import START_ANEW

_ROWS_PER_SKIP = 256
"""Finished rows are read in pieces of this size, however few rows a device asks for. A dataset holds a piece in memory."""

_ROWS_AT_ONCE = 2**14
"""Cutting and encoding rows costs as much for one chunk as for many, and twice the memory of the rows."""


def check_rows(rows: Rows, journal: Journal) -> None:
    """Compare in-memory data with what every finished chunk was computed from, before anything runs.

    Raises:
        JournalError: the folder holds results of other rows.
    """
    for _, near in groupby(journal.entries, lambda entry: entry.start // _ROWS_AT_ONCE):
        entries = [*near]
        first = entries[0].start
        with tf.device(HOST):
            leaves = [take_rows(leaf, first, entries[-1].stop) for leaf in rows.leaves]
        digests = digest_ranges(leaves, ((entry.start - first, entry.stop - first) for entry in entries))
        for entry, digest in zip(entries, digests):
            if digest != entry.inputs:
                raise _other_data(journal, entry)


def checked(chunks: Iterable[Chunk], journal: Journal) -> Iterator[Chunk]:
    """The same chunks, compared in passing with what the finished ones were computed from.

    For data that cannot be read ahead of the run. It yields nothing before the first finished chunk has been compared,
    and holds what it reads until then: seldom more than was in flight when the earlier run died. So other data is
    refused before anything is written, unless it begins with the same rows.

    Args:
        chunks: in order, from row 0 on; where they are cut may differ from the earlier run.

    Raises:
        JournalError: the folder holds results of other rows, or of another number of them.
    """
    finished = deque(journal.entries)
    held: list[Chunk] = []
    compared = not finished
    digest, rows = RowDigest(), 0
    for chunk in chunks:
        rows = chunk.start + chunk.count
        if journal.rows is not None and rows > journal.rows:
            raise _other_number(journal, f"{journal.rows} rows", f"at least {rows}")
        while finished and finished[0].start < rows:
            entry = finished[0]
            digest.update(chunk.cut(max(entry.start, chunk.start), min(entry.stop, rows)).leaves)
            if entry.stop > rows:  # it goes on in the next chunk
                break
            if digest.hexdigest() != entry.inputs:
                raise _other_data(journal, entry)
            digest, compared = RowDigest(), True
            finished.popleft()
        held.append(chunk)
        if compared:
            yield from held
            held.clear()
    if finished or journal.rows not in (None, rows):
        expected = f"{journal.rows}" if journal.rows is not None else f"at least {finished[-1].stop}"
        raise _other_number(journal, f"{expected} rows", str(rows))


def unfinished(chunks: Iterable[Chunk], journal: Journal) -> Iterator[Chunk]:
    """The chunks, or the parts of them, whose results are missing."""
    for chunk in chunks:
        for start, stop in journal.missing(chunk.start, chunk.start + chunk.count):
            yield chunk.cut(start, stop)


class Unfinished:
    """What is missing of a source, as a source."""

    def __init__(self, source: Source, journal: Journal, compared: bool):
        """`compared` says that the data has been compared with what the journal holds; otherwise it is in passing."""
        self.specs, self.key = source.specs, source.key
        self._finished_left = sum(entry.stop - entry.start for entry in journal.entries)
        self.rows = None if source.rows is None else source.rows - self._finished_left
        self.reads = source.reads
        self.rows_read = 0
        self._source, self._journal = source, journal
        self._rows_wanted = 1
        chunks = self._read()
        self._missing = unfinished(chunks if compared else checked(chunks, journal), journal)

    @property
    def chunk_rows(self) -> int | None:
        return self._source.chunk_rows

    def take(self, rows: int) -> Chunk | None:
        self._rows_wanted = rows
        return next(self._missing, None)

    def rows_left(self) -> int | None:
        left = self._source.rows_left()
        return None if left is None else max(0, left - self._finished_left)

    def close(self) -> None:
        self._source.close()

    def _read(self) -> Iterator[Chunk]:
        while True:
            missing = self._journal.missing(self.rows_read, self.rows_read + _ROWS_PER_SKIP)
            finished = missing[0][0] - self.rows_read if missing else _ROWS_PER_SKIP
            chunk = self._source.take(finished or self._rows_wanted)
            if chunk is None:
                return
            self.rows_read = chunk.start + chunk.count
            missing = self._journal.missing(chunk.start, self.rows_read)
            self._finished_left -= chunk.count - sum(stop - start for start, stop in missing)
            yield chunk


def _other_number(journal: Journal, expected: str, rows: str) -> JournalError:
    return JournalError(
        f"{journal.directory} holds results of other data: of {expected}, and the data has {rows} now. {START_ANEW}"
    )


def _other_data(journal: Journal, entry: Entry) -> JournalError:
    return JournalError(
        f"{journal.directory} holds results of other data: rows {entry.start} to {entry.stop - 1} were not the same when "
        f"they were computed. {START_ANEW}"
    )
