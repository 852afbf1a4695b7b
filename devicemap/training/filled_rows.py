"""Batches whose number of rows is unknown while a step is traced, and may be smaller than that of devices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from devicemap._tensorflow.gradients import are_followed
from devicemap.data.rows import count_rows, take_rows
from devicemap.data.shards import join


def filled(rows: Sequence[Any], devices: int) -> list[Any]:
    """Return the rows of a batch, with copies of the first for devices without rows. A batch without rows stays empty."""
    count = count_rows(rows[0], tf.int32)

    def with_copies() -> list[Any]:
        stop = tf.maximum(count, devices)
        return [take_rows(join([leaf, *[take_rows(leaf, 0, 1)] * (devices - 1)]), 0, stop) for leaf in rows]

    # The second gradient of a branch cannot be vectorised (test_second_derivatives_with_an_unknown_number_of_rows).
    if are_followed(tf.nest.flatten(list(rows), True)):
        return with_copies()
    return list(tf.cond(count < devices, with_copies, lambda: list(rows)))


def are_real(shards: Any, count: Any, devices: int) -> Any:
    """Return whether shards have rows of a batch of `count` rows, and not only copies: bool `[shards]`.

    With fewer rows than devices, each shard has one row.
    """
    return (tf.range(shards, dtype=tf.int64) < count) | (count >= devices)
