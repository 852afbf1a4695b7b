"""Read data again after an interrupted run: the rows that are still to be computed, and a comparison with the earlier data."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from devicemap.data.join import join
from devicemap.data.rows import HOST
from devicemap.data.sources import Chunk, Source
from devicemap.errors import FunctionError, JournalError
from devicemap.store.chunks import StoredChunk, missing_rows
from devicemap.store.encoding import START_AGAIN, encode_leaves

_ROWS_PER_SKIP = 256
"""Finished rows of a dataset are read in pieces of this size, however few rows a device requests."""


def digest_rows(leaves: Sequence[Any]) -> str:
    """Return a digest of the shapes and values of input rows; their dtypes are in the header."""
    digest = hashlib.blake2b(digest_size=16)
    for (leaf, name), array in encode_leaves(leaves).items():
        digest.update(f"{leaf} {name} {array.shape} ".encode())
        digest.update(array.reshape(-1).view(np.uint8).data)
    return digest.hexdigest()


def compared(
    chunks: Iterable[Chunk], stored: Sequence[StoredChunk], total: int | None, directory: Path
) -> Iterator[Chunk]:
    """Yield chunks in order, and compare their rows with the inputs of stored chunks, which may be cut differently.

    Rows that differ, or are fewer than the `total` of the earlier run, are a `JournalError`. Chunks are held until the first
    stored chunk has been compared, so other data is refused before anything is computed, unless it begins with the same rows.
    """
    left = deque(stored)
    held: list[Chunk] = []
    pieces: list[tuple[Any, ...]] = []
    rows = 0
    for chunk in chunks:
        rows = chunk.start + chunk.count
        while left and left[0].start < rows:
            start, stop, inputs = left[0][:3]
            pieces.append(chunk.cut(max(start, chunk.start), min(stop, rows)).leaves)
            if stop > rows:
                break
            if _digest_pieces(pieces) != inputs:
                failed = "" if left[0].error is None else " when it failed; retry_failed=True computes it"
                raise _other_data(directory, f"rows {start} to {stop - 1} were not the same{failed}")
            left.popleft()
            pieces = []
        held.append(chunk)
        if not stored or len(left) < len(stored):
            yield from held
            held.clear()
    check_total(max(total or 0, left[-1].stop if left else 0), rows, directory)


def check_total(total: int | None, rows: int | None, directory: Path) -> None:
    """Raise `JournalError` if there are fewer than `total` rows; `None` is an unknown number."""
    if total is not None and rows is not None and rows < total:
        raise _other_data(directory, f"of {total} rows or more, and the data has {rows} now")


def _other_data(directory: Path, difference: str) -> JournalError:
    return JournalError(f"{directory} holds results of other data: {difference}. {START_AGAIN}")


class Unfinished:
    """A source of the rows of another source that no stored chunk holds."""

    def __init__(
        self, source: Source, stored: Sequence[StoredChunk], total: int | None, directory: Path, compare: bool
    ):
        """With `compare`, rows are compared while they are read: see `compared`."""
        self.specs, self.key, self.reads = source.specs, source.key, source.reads
        self.rows_read = 0
        self._source, self._stored = source, stored
        self._finished_left = sum(chunk.stop - chunk.start for chunk in stored)
        self.rows = None if source.rows is None else source.rows - self._finished_left
        self._rows_wanted = 1
        chunks = compared(self._read(), stored, total, directory) if compare else self._read()
        self._missing = (chunk.cut(*gap) for chunk in chunks for gap in self._gaps(chunk.start, chunk.count))

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
            gaps = self._gaps(self.rows_read, _ROWS_PER_SKIP)
            finished = gaps[0][0] - self.rows_read if gaps else _ROWS_PER_SKIP
            chunk = self._source.take(finished or self._rows_wanted)
            if chunk is None:
                return
            self.rows_read = chunk.start + chunk.count
            self._finished_left -= chunk.count - sum(b - a for a, b in self._gaps(chunk.start, chunk.count))
            yield chunk

    def _gaps(self, start: int, count: int) -> list[tuple[int, int]]:
        return missing_rows(self._stored, start, start + count)


def _digest_pieces(pieces: Sequence[tuple[Any, ...]]) -> str:
    try:
        with tf.device(HOST):
            return digest_rows([join(parts) for parts in zip(*pieces)])
    except FunctionError:  # the pieces have different shapes, and those of one stored chunk have not
        return ""
