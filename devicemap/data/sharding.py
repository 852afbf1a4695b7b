"""Divide rows into balanced shards of neighbouring rows."""

from __future__ import annotations

from collections.abc import Sequence

from devicemap.events import Shard

ROWS_PER_CORE = 16
"""The fewest rows per shard with which a further core gets a shard (`benchmarks/test_call_cost.py`)."""


def shard_sizes(rows: int, shards: int) -> tuple[int, ...]:
    """Return the sizes of at most `shards` balanced, non-empty shards of `rows` rows.

    >>> shard_sizes(10, 4)
    (3, 3, 2, 2)
    >>> shard_sizes(2, 4)
    (1, 1)
    """
    shards = min(rows, shards)
    return tuple(rows // shards + (i < rows % shards) for i in range(shards))


def shard_rows(rows: int, slots: Sequence[str]) -> tuple[Shard, ...]:
    """Return balanced shards of rows 0 to `rows - 1` for the first slots.

    Slots are names of devices. A repeated name is a further core of a CPU. It gets a shard only if each shard has at
    least `ROWS_PER_CORE` rows.

    >>> [str(s) for s in shard_rows(3, ["/device:CPU:0", "/device:CPU:1"])]
    ['rows 0 to 1 on CPU:0', 'row 2 on CPU:1']
    >>> [str(s) for s in shard_rows(3, ["/device:CPU:0", "/device:CPU:0"])]
    ['rows 0 to 2 on CPU:0']
    """
    count = max(len(set(slots)), min(len(slots), rows // ROWS_PER_CORE))
    shards, start = [], 0
    for slot, size in zip(slots, shard_sizes(rows, count)):  # fewer sizes than slots on few rows
        shards.append(Shard(slot, start, start + size))
        start += size
    return tuple(shards)
