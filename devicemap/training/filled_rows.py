"""Cut rows so that each device has at least one. Devices without rows get a copy of the first row, without effect."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from devicemap._tensorflow.gradients import linked
from devicemap.compile.graph_builder import sizes_in_graph
from devicemap.data.join import join
from devicemap.data.rows import HOST, count_rows, cut_rows, take_rows
from devicemap.data.sharding import shard_sizes


@dataclass(frozen=True)
class FilledShards:
    """The rows of each device. A device that would have no rows has a copy of the first row, which does not count."""

    sizes: Any
    """The number of rows of each shard that count: int32 `[shards]`."""

    filled: Any
    """The number of rows of each shard, with copies: int32 `[shards]`."""

    parts: list[list[Any]]
    """The leaves of each shard."""

    @classmethod
    def of(cls, leaves: Sequence[Any], rows: int | None, devices: int, place: str) -> FilledShards:
        """Cut leaves with `rows` rows, `None` if unknown, on the device `place`."""
        with tf.device(place):
            if rows is not None:
                sizes = tf.constant(shard_sizes(rows, devices))
                count = sizes.shape[0]
                return cls(sizes, sizes, [*map(list, zip(*(cut_rows(leaf, sizes, count) for leaf in leaves)))])
            count = count_rows(leaves[0], tf.int32)
            sizes = sizes_in_graph(count, devices)
            filled = tf.maximum(sizes, tf.minimum(count, 1))
            starts = tf.unstack(tf.where(sizes > 0, tf.cumsum(sizes, exclusive=True), 0), devices)
            stops = tf.unstack(tf.stack(starts) + filled, devices)
            cut = [_slices(leaf, starts, stops, tf.unstack(sizes, devices)) for leaf in leaves]
            return cls(sizes, filled, [*map(list, zip(*cut))])

    @property
    def count(self) -> int:
        return int(self.sizes.shape[0])


def _slices(leaf: Any, starts: Sequence[Any], stops: Sequence[Any], sizes: Sequence[Any]) -> list[Any]:
    """Cut a leaf. Its gradient joins the gradients of rows that count. TensorFlow would add padded gradients of slices."""
    parts = [take_rows(leaf, start, stop) for start, stop in zip(starts, stops)]
    if not isinstance(leaf, tf.Tensor) or not leaf.dtype.is_floating:
        return parts
    return linked(parts, [leaf], lambda *upstream: [tf.concat([u[:size] for u, size in zip(upstream, sizes)], 0)])


def filled(devices: int, *rows: Any) -> list[Any]:
    """Return the rows of a batch, with copies of the first row if there are fewer rows than devices."""
    with tf.device(HOST):
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
    """Return the rows that count of leaves that were computed for the rows of `filled`."""

    def of_all(upstream: Any) -> list[Any]:
        none = tf.concat([[devices - tf.cast(count, tf.int32)], tf.shape(upstream)[1:]], 0)
        return [tf.cond(few, lambda: tf.concat([upstream, tf.zeros(none, upstream.dtype)], 0), lambda: upstream)]

    few = count < devices
    kept = tf.cond(few, lambda: [take_rows(leaf, 0, count) for leaf in leaves], lambda: list(leaves))
    return [
        linked([leaf], [given], of_all)[0] if isinstance(given, tf.Tensor) and given.dtype.is_floating else leaf
        for leaf, given in zip(kept, leaves)
    ]
