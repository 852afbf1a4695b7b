"""Stored chunks: rows of the data with their results on disk, or one row that failed. Pure."""

from __future__ import annotations

import bisect
import json
import zlib
from collections.abc import Sequence
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np

from devicemap.store.encoding import Array, Arrays


class StoredChunk(NamedTuple):
    """A row of the table of chunks."""

    start: int
    stop: int
    inputs: str
    """The digest of the rows that it was computed from."""

    checksum: int
    """CRC-32 of the other columns, and of the shapes and bytes of its arrays. BLAKE2b takes 2.5 times as long."""

    first_array: int = 0
    last_array: int = 0

    device: str | None = None
    error: str | None = None
    """Where and why it failed, for a row without results; otherwise `None`."""


def chunk_of(start: int, stop: int, inputs: str, arrays: Arrays, check: int | None = None) -> StoredChunk:
    """Return a chunk with its checksum, by the checksum of all bytes if it is known."""
    if check is None:
        check = 0
        for array in arrays.values():
            check = zlib.crc32(bytes_of(array), check)
    shapes = [[*key, array.shape] for key, array in arrays.items()]
    return StoredChunk(start, stop, inputs, checksum(start, stop, inputs, shapes, check))


def failed_row(row: int, inputs: str, device: str, error: str) -> StoredChunk:
    """Return a row without results, as a chunk without arrays."""
    check = checksum(row, row + 1, inputs, device, error)
    return StoredChunk(row, row + 1, inputs, check, device=device, error=error)


def checksum(*values: Any) -> int:
    """Return the CRC-32 of JSON values."""
    return zlib.crc32(json.dumps(values).encode())


def missing_rows(chunks: Sequence[StoredChunk], start: int, stop: int) -> list[tuple[int, int]]:
    """Return the `(start, stop)` of those of rows `start` to `stop - 1` that are in none of these sorted chunks.

    >>> missing_rows([StoredChunk(2, 4, "", 0), StoredChunk(4, 6, "", 0)], 0, 8)
    [(0, 2), (6, 8)]
    """
    edges = [start, *(edge for chunk in overlapping(chunks, start, stop) for edge in chunk[:2]), stop]
    return [(low, high) for low, high in zip(edges[::2], edges[1::2]) if low < high]


def overlapping(chunks: Sequence[StoredChunk], start: int, stop: int) -> Sequence[StoredChunk]:
    """Return those of the sorted chunks that have some of rows `start` to `stop - 1`."""
    first = bisect.bisect_right(chunks, start, key=attrgetter("stop"))
    return chunks[first : bisect.bisect_left(chunks, stop, key=attrgetter("start"))]


def bytes_of(array: Array) -> memoryview:
    """Return the little-endian bytes of an array."""
    return np.asarray(array, array.dtype.newbyteorder("<"), order="C").reshape(-1).view(np.uint8).data
