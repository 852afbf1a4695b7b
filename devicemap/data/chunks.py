"""In-memory rows -> chunks, cut when a device asks for one, each with the index of its first row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import tensorflow as tf

from devicemap.data.rows import HOST, Rows, take_rows
from devicemap.events import Shard


@dataclass(frozen=True)
class Chunk:
    """Neighbouring rows, read and ready to run."""

    start: int
    """Global index of the first row."""

    count: int
    """How many rows, at least one."""

    leaves: tuple[Any, ...]
    """Leaves of shape `[count, ...]`."""

    group: int
    """Chunks of one group are delivered as one: a batch of the user's, or `batch_size` rows."""

    last: bool
    """Whether it is the last one of its group."""

    def on(self, device: str) -> Shard:
        """The rows of this chunk, on a device."""
        return Shard(device, self.start, self.start + self.count)

    def split(self, sizes: Sequence[int]) -> list[Chunk]:
        """The same rows in smaller chunks."""
        pieces, start = [], 0
        for size in sizes:
            with tf.device(HOST):
                leaves = tuple(take_rows(leaf, start, start + size) for leaf in self.leaves)
            start += size
            pieces.append(Chunk(self.start + start - size, size, leaves, self.group, self.last and start == self.count))
        return pieces


class Source(Protocol):
    """Rows that are read chunk by chunk, in order, by one thread at a time."""

    specs: Any
    """Nest of `tf.TypeSpec`s of a chunk, of shapes `[None, ...]`."""

    key: Any
    """As `Rows.key`: one trace serves one key."""

    rows: int | None
    """How many rows there are, `None` where nobody knows."""

    batch_size: int | None
    """The most rows of a chunk; `None`: any."""

    reads: bool
    """Whether rows are read while the call runs, so that devices may wait for them."""

    def take(self, rows: int, limit: int | None) -> Chunk | None:
        """The next chunk, of about `rows` rows and never more than `limit`; `None` at the end."""

    def rows_left(self) -> int | None:
        """How many rows have not been taken, as far as can be told."""

    def read_ahead(self) -> None:
        """Read in the background from the first chunk on, as nobody does who takes turns with others."""

    def close(self) -> None:
        """Stop what reads ahead."""


class InMemory:
    """Chunks of rows that are all there."""

    reads = False

    def __init__(self, rows: Rows, batch_size: int | None):
        assert rows.count is not None  # eager code knows
        self.specs, self.key, self.batch_size = rows.specs, rows.key, batch_size
        self.rows: int | None = rows.count
        self._count = rows.count
        self._leaves = rows.leaves
        self._next = 0

    def take(self, rows: int, limit: int | None) -> Chunk | None:
        start = self._next
        if start == self._count:
            return None
        group = start if self.batch_size is None else start // self.batch_size
        end = self._count if self.batch_size is None else min((group + 1) * self.batch_size, self._count)
        stop = min(start + rows, start + (limit or rows), end)
        self._next = stop
        with tf.device(HOST):
            leaves = tuple(take_rows(leaf, start, stop) for leaf in self._leaves)
        return Chunk(start, stop - start, leaves, group, self.batch_size is None or stop == end)

    def rows_left(self) -> int | None:
        return self._count - self._next

    def read_ahead(self) -> None:
        pass  # nothing is read

    def close(self) -> None:
        self._leaves = ()
