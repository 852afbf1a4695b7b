"""Cut rows into balanced shards. Join results in the order of rows, or yield them as a `tf.data.Dataset`."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from devicemap.errors import failure
from devicemap.events import Shard

ROWS_PER_CORE = 16
"""The fewest rows per shard with which a further core gets a shard (`benchmarks/test_call_cost.py`)."""

UNEVEN_ROWS = (
    "Pad to a fixed shape or, unless results are reduced, return a tf.RaggedTensor. A fn of one row may also have "
    "fn_output_signature=tf.RaggedTensorSpec(...), and a fn of the batches of a dataset needs batched=True"
)
"""Advice for rows that do not fit into one dense tensor."""


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


def join(parts: Sequence[Any]) -> Any:
    """Join dense, ragged or sparse leaves of neighbouring rows into one leaf, in eager code or in a graph.

    Raises:
        FunctionError: dense parts differ in their inner shapes. In a graph, TensorFlow raises an error when the graph runs.
    """
    first = parts[0]
    if len(parts) == 1:
        return first
    if isinstance(first, tf.SparseTensor):
        return _join_sparse(parts)
    if isinstance(first, tf.RaggedTensor):
        values = join([part.values for part in parts])
        if first.shape[1] is not None and all(part.shape[1] == first.shape[1] for part in parts):
            rows, dtype = tf.add_n([part.nrows() for part in parts]), first.row_splits.dtype
            length = tf.constant(first.shape[1], dtype)
            return tf.RaggedTensor.from_uniform_row_length(values, length, nrows=rows, validate=False)
        lengths = tf.concat([part.row_lengths() for part in parts], 0)
        return tf.RaggedTensor.from_row_lengths(values, lengths, validate=False)
    if tf.executing_eagerly():
        check_inner_shapes(parts)
    return tf.concat(list(parts), 0)


def _join_sparse(parts: Sequence[Any]) -> Any:
    """Join sparse tensors like `tf.sparse.concat`, which has no gradient."""
    if parts[0].shape.rank is None:  # a shard without rows has the rank 1
        parts = [parts[0], *(_with_rank_of(parts[0], part) for part in parts[1:])]
    shapes = tf.stack([part.dense_shape for part in parts])
    starts = tf.unstack(tf.cumsum(shapes[:, 0], exclusive=True), len(parts))
    columns = tf.one_hot(0, tf.shape(shapes)[1], dtype=tf.int64)
    indices = tf.concat([part.indices + start * columns for part, start in zip(parts, starts)], 0)
    values = tf.concat([part.values for part in parts], 0)
    shape = tf.concat([[tf.reduce_sum(shapes[:, 0])], tf.reduce_max(shapes, 0)[1:]], 0)
    joined = tf.SparseTensor(indices, values, shape)
    if not tf.executing_eagerly():
        common = functools.reduce(tf.TensorShape.most_specific_compatible_shape, (part.shape for part in parts))
        joined.set_shape(common if common.rank is None else tf.TensorShape([None]).concatenate(common[1:]))
    return joined


def _with_rank_of(first: Any, part: Any) -> Any:
    rank = tf.size(first.dense_shape)
    shape = tf.concat([part.dense_shape, tf.zeros_like(first.dense_shape)], 0)[:rank]
    return tf.SparseTensor(tf.reshape(part.indices, tf.stack([tf.size(part.values), rank])), part.values, shape)


def check_inner_shapes(parts: Sequence[Any]) -> None:
    """Raise `FunctionError` if dense results of shards differ in their inner shapes."""
    shapes = list(dict.fromkeys(str(part.shape[1:]) for part in parts if isinstance(part, tf.Tensor)))
    if len(shapes) > 1:
        raise failure(
            f"fn returned dense results of different inner shapes for different shards: {', '.join(shapes)}; a dense "
            f"tensor cannot hold both. {UNEVEN_ROWS}"
        )
