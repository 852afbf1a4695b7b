"""What sum, mean, minimum and maximum do with one leaf: rows -> a state, states -> a state, a state -> its result."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import tensorflow as tf

from devicemap.data.rows import count_rows
from devicemap.errors import failure

_GROUP = 128
"""Rows that are added in their own dtype: rounding grows with these, and not with all."""

_WIDE = {
    **dict.fromkeys((tf.float16, tf.bfloat16, tf.float32), tf.float64),
    tf.complex64: tf.complex128,
}
"""Dtypes in which states are merged; others are as they are."""


class Sum:
    """What is done with a leaf of some dtype; `narrow` is that of states that travel, `wide` of those that are merged."""

    def __init__(self, dtype: Any):
        if not (dtype.is_floating or dtype.is_complex or dtype.is_integer):
            raise failure(f"fn returns {dtype.name}, of which there is no {type(self).__name__.lower()}")
        self.dtype = self.narrow = dtype

    @property
    def wide(self) -> Any:
        return _WIDE.get(self.narrow, self.narrow)

    def reduced(self, rows: Any) -> Any:
        """The state of `[rows, ...]`."""
        return self.narrowed(_add_rows(rows))

    def merged(self, states: Any, counts: Any) -> Any:
        """The state of `[states, ...]`, which have so many rows each."""
        return tf.reduce_sum(states, 0)

    def narrowed(self, state: Any) -> Any:
        return tf.cast(state, self.narrow)

    def finished(self, state: Any, count: Any) -> Any:
        """The result of a state of so many rows."""
        return tf.cast(state, self.dtype)


class Mean(Sum):
    """Of fractions, the state is their mean, which no number of rows makes too large; of integers, as TensorFlow has it, the
    sum is divided."""

    def __init__(self, dtype: Any):
        super().__init__(dtype)
        self.narrow = tf.int64 if dtype.is_integer else dtype

    def reduced(self, rows: Any) -> Any:
        if self.dtype.is_integer:
            return tf.reduce_sum(tf.cast(rows, tf.int64), 0)
        total = _add_rows(rows)
        return self.narrowed(tf.math.divide_no_nan(total, tf.cast(count_rows(rows), total.dtype)))

    def merged(self, states: Any, counts: Any) -> Any:
        if self.dtype.is_integer:
            return tf.reduce_sum(states, 0)
        shares = tf.math.divide_no_nan(tf.cast(counts, tf.float64), tf.cast(tf.reduce_sum(counts), tf.float64))
        shares = tf.reshape(shares, tf.concat([tf.shape(counts), tf.ones([tf.rank(states) - 1], tf.int32)], 0))
        return tf.reduce_sum(states * tf.cast(shares, states.dtype), 0)

    def finished(self, state: Any, count: Any) -> Any:
        if self.dtype.is_integer:
            return tf.cast(tf.truncatediv(state, tf.maximum(count, 1)), self.dtype)
        return tf.where(count > 0, tf.cast(state, self.dtype), tf.reduce_mean(tf.zeros([0], self.dtype)))


class Min(Sum):
    """The state is the least so far; without rows, what TensorFlow has for none."""

    def __init__(self, dtype: Any):
        super().__init__(dtype)
        if dtype.is_complex:
            raise failure(f"fn returns {dtype.name}, of which there is no {type(self).__name__.lower()}")

    def reduced(self, rows: Any) -> Any:
        return tf.reduce_min(rows, 0)

    def merged(self, states: Any, counts: Any) -> Any:
        return tf.reduce_min(states, 0)


class Max(Min):
    """The same with the greatest."""

    def reduced(self, rows: Any) -> Any:
        return tf.reduce_max(rows, 0)

    def merged(self, states: Any, counts: Any) -> Any:
        return tf.reduce_max(states, 0)


AGGREGATES: Mapping[str, type[Sum]] = {"sum": Sum, "mean": Mean, "min": Min, "max": Max}


def _add_rows(rows: Any) -> Any:
    """The sum of `[rows, ...]`, in a dtype that may be wider: its rounding does not grow with the number of rows.

    `tf.reduce_sum` adds one row after another where a row has more than one number (`tests/laws/test_reduce.py`).
    """
    wide = _WIDE.get(rows.dtype)
    if wide is None:
        return tf.reduce_sum(rows, 0)
    if rows.dtype.size == 2:
        rows = tf.cast(rows, tf.float32)
    shape, rank = tf.shape(rows), rows.shape.rank
    whole = shape[0] // _GROUP * _GROUP
    groups = tf.reshape(rows[:whole], tf.concat([[whole // _GROUP, _GROUP], shape[1:]], 0))
    if rank is not None:
        groups.set_shape([None, _GROUP, *rows.shape[1:]])
    sums = tf.concat([tf.reduce_sum(groups, 1), tf.reduce_sum(rows[whole:], 0, keepdims=True)], 0)
    return tf.reduce_sum(tf.cast(sums, wide), 0)
