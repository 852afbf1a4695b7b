"""Check what functions return: the leaves of a row or a batch, and their numbers of rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from devicemap._tensorflow.functions import run_after
from devicemap.data.rows import HOST, count_rows
from devicemap.data.structure import nodes_of, refused_by
from devicemap.errors import OTHER_ROW_COUNT, failure

_FLOAT8 = (tf.dtypes.experimental.float8_e4m3fn, tf.dtypes.experimental.float8_e5m2)
"""Dtypes without kernels for TensorLists."""

_OF_BATCHES = "fn with batched=True"


def as_result(value: Any, path: str, batched: bool) -> Any:
    """Return one leaf of the result of `fn` as a tensor. Lists are stacked, as in tf.data."""
    if value is None:
        raise failure(
            f"{path} of fn is None; expected a tensor for each row. If fn is called for its side effects, let it "
            "return a value of the row, for instance the row itself"
        )
    if isinstance(value, tf.Tensor) and value.dtype == tf.variant:
        raise failure(
            f"{path} of fn is a TensorArray or another object, not a tensor; return its .stack() or .concat()"
        )
    if not isinstance(value, tf.Tensor | tf.RaggedTensor | tf.SparseTensor):
        several = isinstance(value, list) and any(tf.is_tensor(entry) for entry in value)
        hint = "; a list is one tensor, as in tf.data: return a tuple for several results" if several else ""
        if several and batched:
            raise failure(f"{path} of fn is a list of {len(value)}{hint}")
        try:
            value = tf.convert_to_tensor(value)
        except (TypeError, ValueError) as error:
            raise failure(f"{path} of fn is a {type(value).__name__}, not a tensor: {error}{hint}") from error
    if value.dtype in _FLOAT8:
        raise failure(f"{path} of fn is of {value.dtype.name}, which TensorFlow cannot gather; cast it to tf.float16")
    if batched and value.shape.rank == 0:
        raise failure(
            f"{path} of fn is a scalar; with batched=True fn must return as many rows as it is given, of shape "
            "[rows, ...], for instance a loss for each row. Set batched=False for a fn of one row"
        )
    if batched and value.shape.rank and value.shape[0] is not None:
        raise failure(
            f"{path} of fn has {value.shape[0]} row(s), shape {value.shape}, whatever number it is given; with batched=True fn "
            "must return one row per input row, in order. Set batched=False for a fn of one row"
        )
    return value


def check_validity(structure: Any, specs: list[Any]) -> None:
    """Raise an error if an extension type refuses to hold rows, before the rows are computed."""
    refused: list[Any] = []
    if any(node.kind is not None for node in nodes_of(structure)):

        @tf.function(autograph=False)
        def validated(*leaves: Any) -> None:
            refused.append(refused_by(tf.nest.pack_sequence_as(structure, leaves)))

        validated.get_concrete_function(*specs)
    for node, error in filter(None, refused):
        shapes = ", ".join(f"{name}: {part.shape}" for name, part in zip(node.names, node.parts) if tf.is_tensor(part))
        raise failure(
            f"fn returns a {node.kind.__name__}, which cannot hold a result for each row: its __validate__ raises "
            f"{type(error).__name__}: {error} (with shapes {shapes}). Return its tensors in a tuple or a dict"
        ) from error


def row_counts(parts: Sequence[Any]) -> Any:
    """Return the number of rows of each of these leaves: int32 `[len(parts)]`. A scalar has no rows."""
    if all(isinstance(part, tf.Tensor) for part in parts):  # in few ops, for calls on few rows
        shapes = tf.shape_n(parts)
        if any(part.shape.rank is None for part in parts):
            shapes = [tf.concat([shape, [0]], 0) for shape in shapes]
        return tf.stack(shapes)[:, 0]
    return tf.stack([count_rows(part, tf.int32) for part in parts])


def check_row_counts(results: Sequence[Any], rows: int, reduced: bool) -> None:
    """Raise an error like that of `row_count_checks` unless the results of a chunk have its number of rows.

    `reduced`: whether the results are states, of which the last counts the rows.
    """
    # Assertions in the graph of each device would double the time of a first call.
    counts = [leaf.shape[0] if leaf.shape.rank else 0 for leaf in results]
    for count in results[-1].numpy() if reduced else counts:
        if count != rows:
            message = f"assertion failed: [{_other_rows(_OF_BATCHES)}] [{count}] [{rows}]"
            raise tf.errors.InvalidArgumentError(None, None, message)


def _other_rows(name: str) -> str:
    return f"{name} {OTHER_ROW_COUNT}; expected one row for each row. Rows returned and rows given, per device:"


def row_count_checks(returned: Sequence[Any], sizes: Any, name: str = _OF_BATCHES) -> list[Any]:
    """Return assertions that each leaf has as many rows as each shard. `returned` has the row counts of each leaf."""
    given, checks = tf.cast(sizes, tf.int32), []
    with tf.device(HOST):  # GPUs have no strings
        message = tf.constant(_other_rows(name))
    for counts in returned:
        counts = tf.cast(counts, tf.int32)
        # tf.debugging would use the condition twice, and `run_after` would send the results through the first GPU.
        checks.append(tf.raw_ops.Assert(condition=tf.reduce_all(counts == given), data=[message, counts, given]))
    return checks


def with_equal_rows(rows: Sequence[Any], name: str, advice: str) -> list[Any]:
    """Add an assertion to a graph that the inputs and targets of a model have the same number of rows."""
    counts = tf.stack([count_rows(leaf) for leaf in rows])
    with tf.device(HOST):  # GPUs have no strings
        message = tf.constant(
            f"{name} got inputs or targets with different numbers of rows; expected the same. {advice}. Rows:"
        )
    return run_after([tf.raw_ops.Assert(condition=tf.reduce_all(counts == counts[0]), data=[message, counts])], rows)


def with_static_rows(leaf: Any, rows: int | None) -> Any:
    """Set the number of rows in the static shape of a leaf that has none."""
    if isinstance(leaf, tf.RaggedTensor):
        leaf.row_splits.set_shape([None if rows is None else rows + 1])
    elif leaf.shape.rank is not None and leaf.shape[0] is None:
        leaf.set_shape(tf.TensorShape([rows]).concatenate(leaf.shape[1:]))
    return leaf
