"""Data for the chunk engine without TensorFlow: rows whose one leaf is the row's index."""

from __future__ import annotations

from bisect import bisect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from devicemap.data.sources import Chunk


class IndexChunk(Chunk):
    """Rows of an `IndexSource`."""

    def cut(self, start: int, stop: int) -> Chunk:
        return IndexChunk(start, stop - start, (self.leaves[0][start - self.start : stop - self.start],))


@dataclass
class IndexSource:
    """Rows 0 to `rows - 1`, in memory or read from elsewhere, in chunks of a fixed or any size."""

    rows: int | None
    chunk_rows: int | None = 1
    reads: bool = True
    known: bool = True
    """Whether the number of rows is."""
    before: Mapping[int, Callable[[], object]] = field(default_factory=dict)
    """Calls to make before a row is read, which is the first one of a chunk."""
    next: int = 0
    taken: int = 0
    """The number of chunks."""
    specs = key = None

    def __post_init__(self) -> None:
        self._starts = sorted(self.before)

    def take(self, rows: int) -> Chunk | None:
        start = self.next
        self.before.get(start, lambda: None)()
        if start == self.rows:
            return None
        ends = [start + (self.chunk_rows or rows), *([] if self.rows is None else [self.rows])]
        self.next = min([*ends, *self._starts[bisect(self._starts, start) :][:1]])
        self.taken += 1
        return IndexChunk(start, self.next - start, (range(start, self.next),))

    def rows_left(self) -> int | None:
        return None if self.rows is None or not self.known else self.rows - self.next

    def close(self) -> None:
        pass
