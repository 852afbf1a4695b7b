"""The rows of a batch: copies of them, if there may be fewer than devices, and where they come from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from devicemap._tensorflow.gradient_links import gradients_through, slices_if
from devicemap._tensorflow.gradients import are_watched
from devicemap.data.rows import count_rows, take_rows
from devicemap.data.shards import join
from devicemap.devices import kind_of


def pad_shards(rows: Sequence[Any], devices: int) -> list[Any]:
    """Return the rows of a batch, with copies of the first for devices without rows. A batch without rows stays empty."""
    count = count_rows(rows[0], tf.int32)

    def with_copies() -> list[Any]:
        stop = tf.maximum(count, devices)
        return [take_rows(join([leaf, *[take_rows(leaf, 0, 1)] * (devices - 1)]), 0, stop) for leaf in rows]

    # The second gradient of a branch cannot be vectorised (test_second_derivatives_with_an_unknown_number_of_rows).
    if are_watched(tf.nest.flatten(rows, expand_composites=True)):
        return with_copies()
    return list(tf.cond(count < devices, with_copies, lambda: list(rows)))


def have_rows(shards: Any, count: Any, devices: int) -> Any:
    """Return whether shards have rows of a batch of `count` rows, and not only copies: bool `[shards]`."""
    # With fewer rows than devices, each shard has one row.
    return (tf.range(shards, dtype=tf.int64) < count) | (count >= devices)


def drop_slices(value: Any, has_rows: Any) -> Any:
    """Return the value of a variable for a shard. Its gradient has no slices if the shard has only copies of rows."""
    return gradients_through([value], lambda upstream: [slices_if(has_rows, upstream)])[0]


def computed_in_step(rows: Sequence[Any]) -> bool:
    """Whether rows come from ops of a step, which the placer puts on GPUs. The rows of the batch are on the host."""
    tensors = tf.nest.flatten(rows, expand_composites=True)
    return any(
        kind_of(tensor.device) != "CPU" if hasattr(tensor, "numpy") else tensor.op.type != "Placeholder"
        for tensor in tensors
    )
