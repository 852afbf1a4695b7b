"""Give each device at least one row, by copies of the first row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from devicemap.data.join import join
from devicemap.data.rows import count_rows, take_rows


def filled(rows: Sequence[Any], devices: int) -> list[Any]:
    """Return the rows of a batch, with copies of the first if there are fewer rows than devices.

    A batch without rows stays empty.
    """

    def with_copies() -> list[Any]:
        return [take_rows(join([leaf, *[take_rows(leaf, 0, 1)] * (devices - 1)]), 0, devices) for leaf in rows]

    return list(tf.cond(count_rows(rows[0], tf.int32) < devices, with_copies, lambda: list(rows)))


def are_real(shards: Any, count: Any, devices: int) -> Any:
    """Return whether shards have rows of a batch of `count` rows, and not only copies: bool `[shards]`.

    With fewer rows than devices, each shard has one row.
    """
    return (tf.range(shards, dtype=tf.int64) < count) | (count >= devices)
