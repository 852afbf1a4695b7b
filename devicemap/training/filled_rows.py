"""Give each device at least one row, by copies of the first row, and drop what was computed for the copies."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from devicemap._tensorflow.gradients import linked
from devicemap.data.join import join
from devicemap.data.rows import count_rows, take_rows


def filled(devices: int, place: str, *rows: Any) -> list[Any]:
    """Return the rows of a batch, on the device `place`, with copies of the first if there are fewer rows than devices.

    A batch without rows stays empty.
    """
    with tf.device(place):
        count = count_rows(rows[0], tf.int32)

        def copied() -> list[Any]:
            return [take_rows(join([leaf, *[take_rows(leaf, 0, 1)] * (devices - 1)]), 0, devices) for leaf in rows]

        enough = tf.cond(count < devices, copied, lambda: list(rows))
        return [
            linked([leaf], [given], lambda upstream: [upstream[:count]])[0]
            if isinstance(given, tf.Tensor) and given.dtype.is_floating
            else leaf
            for leaf, given in zip(enough, rows)
        ]


def counted(devices: int, count: Any, *leaves: Any) -> list[Any]:
    """Return the first rows of leaves that were computed for the rows of `filled`. `count`: their number, int64."""

    def of_all(upstream: Any) -> list[Any]:
        none = tf.concat([[devices - tf.cast(count, tf.int32)], tf.shape(upstream)[1:]], 0)
        return [tf.cond(few, lambda: tf.concat([upstream, tf.zeros(none, upstream.dtype)], 0), lambda: upstream)]

    few = count < devices
    kept = tf.cond(few, lambda: [take_rows(leaf, 0, count) for leaf in leaves], lambda: list(leaves))
    return [
        linked([leaf], [given], of_all)[0] if isinstance(given, tf.Tensor) and given.dtype.is_floating else leaf
        for leaf, given in zip(kept, leaves)
    ]


def are_real(shards: Any, count: Any, devices: int) -> Any:
    """Return whether shards have rows of a batch of `count` rows, and not only copies: bool `[shards]`.

    With fewer rows than devices, each shard has one row.
    """
    return (tf.range(shards, dtype=tf.int64) < count) | (count >= devices)
