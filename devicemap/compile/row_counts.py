"""Check the numbers of rows that functions of batches return."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from devicemap._tensorflow.functions import waiting_for
from devicemap.data.rows import count_rows
from devicemap.errors import failure
from devicemap.events import Shard


def row_counts(parts: Sequence[Any]) -> Any:
    """Return the number of rows of each of these leaves: int64 `[len(parts)]`."""
    if all(isinstance(part, tf.Tensor) for part in parts):  # in few ops, for calls on few rows
        return tf.stack(tf.shape_n(parts, out_type=tf.int64))[:, 0]
    return tf.stack([count_rows(part) for part in parts])


def check_row_counts(results: Sequence[Any], returned: Sequence[Any], shards: Sequence[Shard]) -> None:
    """Raise unless a `fn` of batches returned as many rows as each shard has, in every leaf of its results.

    `returned` has the row counts of each leaf. It is empty if there is only one shard.
    """
    counted = [counts.numpy() for counts in returned] or [[_eager_count(leaf)] for leaf in results]
    for leaf, counts in enumerate(counted):
        for count, shard in zip(counts, shards):
            if count != len(shard):
                raise failure(
                    f"fn returned {count} row(s) for the {len(shard)} row(s) it was given ({shard}; leaf {leaf} of its "
                    "results); with batched=True it must return one row per input row, in order. Set batched=False for "
                    "a fn of one row",
                    [shard],
                )


def _eager_count(leaf: Any) -> int:
    """Return the number of rows of an eager leaf, without running an op if the leaf is dense."""
    if leaf.shape.rank == 0:
        raise failure(
            "fn returned a scalar; with batched=True it must return one row per input row, of shape [rows, ...]. Set "
            "batched=False for a fn of one row"
        )
    return int(leaf.shape[0] if isinstance(leaf, tf.Tensor) else count_rows(leaf))


def with_row_counts_checked(results: Sequence[Any], returned: Sequence[Any], sizes: Any, name: str = "fn") -> list[Any]:
    """Add the check of `check_row_counts` to a graph, as an assertion."""
    given = tf.cast(sizes, tf.int64)
    message = (
        f"{name} returned another number of rows than it was given; expected one row for each row. Rows returned and "
        "rows given, per device:"
    )
    # tf.debugging would use the condition twice, and `waiting_for` would send the results through the first GPU.
    checks = [
        tf.raw_ops.Assert(condition=tf.reduce_all(counts == given), data=[message, counts, given])
        for counts in returned or [row_counts([leaf]) for leaf in results]
    ]
    return waiting_for(checks, results)


def with_static_rows(leaf: Any, rows: int | None) -> Any:
    """Set the number of rows in the static shape of a leaf that has none."""
    if isinstance(leaf, tf.RaggedTensor):
        leaf.row_splits.set_shape([None if rows is None else rows + 1])
    elif leaf.shape.rank is not None and leaf.shape[0] is None:
        leaf.set_shape(tf.TensorShape([rows]).concatenate(leaf.shape[1:]))
    return leaf
