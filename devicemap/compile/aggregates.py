"""Reducers: sum, mean, minimum and maximum of one leaf, and `Reducer`. Rows -> state, states -> state, state -> result."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from devicemap.compile.python_values import plain_values
from devicemap.data.rows import count_rows
from devicemap.data.structure import freeze, map_nest
from devicemap.errors import failure

_GROUP = 128
"""Rows that are added in their own dtype: rounding grows with this number and not with the number of rows."""

_WIDE = {
    **dict.fromkeys((tf.float16, tf.bfloat16, tf.float32), tf.float64),
    tf.complex64: tf.complex128,
}
"""Dtypes in which states are merged. States of other dtypes are merged in their own dtype."""


@dataclass(frozen=True)
class Reducer:
    """A custom reduction: `finish(merge(step(step(initial, row), row), ...))`, in the order of rows.

    Args:
        initial: the state before the first row: a nest of numbers, arrays or tensors of the dtypes of states (0.0 for floats).
            Each device starts with it, so merging it with another state must return that other state.
        step: `(state, result of a row) -> state`, of the same structure, shapes and dtypes. It runs on the device that
            computed the row.
        merge: `(state, state of later rows) -> state`. It must be associative, but need not be commutative.
        finish: `state -> result`.

    Examples:
        >>> from devicemap import parallel_reduce
        >>> larger = lambda a, b: tf.cond(b[0] > a[0], lambda: b, lambda: a)
        >>> largest = Reducer(initial=(-1.0, -1), step=larger, merge=larger, finish=lambda best: best[1])
        >>> int(parallel_reduce(lambda x, i: (tf.sin(x), i), (tf.range(8.0), tf.range(8)), largest))
        2
    """

    initial: Any
    step: Callable[[Any, Any], Any]
    merge: Callable[[Any, Any], Any]
    finish: Callable[[Any], Any] = lambda state: state


def reducer_key(reducer: Reducer) -> Any:
    """Return a hashable value that is equal for equal reducers, whose functions use the same numbers."""
    with tf.init_scope():
        initial = map_nest(lambda leaf, _: tf.io.serialize_tensor(leaf).numpy(), reducer.initial)
    functions: tuple[Any, ...] = reducer.step, reducer.merge, reducer.finish
    return freeze(initial), functions, tuple(map(plain_values, functions))


class Sum:
    """A sum of rows of one dtype. States are sent in the dtype `narrow` and merged in the dtype `wide`."""

    def __init__(self, dtype: Any):
        if not (dtype.is_floating or dtype.is_complex or dtype.is_integer):
            self._refuse(dtype)
        self.dtype = self.narrow = dtype

    def _refuse(self, dtype: Any) -> None:
        raise failure(
            f"fn returns {dtype.name}, of which there is no {type(self).__name__.lower()}; let it return a number"
        )

    @property
    def wide(self) -> Any:
        return _WIDE.get(self.narrow, self.narrow)

    def reduce_rows(self, rows: Any) -> Any:
        """Return the state of rows `[rows, ...]`."""
        return self.to_narrow(_add_rows(rows))

    def merge_states(self, states: Any, counts: Any) -> Any:
        """Return the state of `[states, ...]`, which have these numbers of rows."""
        return tf.reduce_sum(states, 0)

    def to_narrow(self, state: Any) -> Any:
        return tf.cast(state, self.narrow)

    def finish_state(self, state: Any, count: Any) -> Any:
        """Return the result of a state of `count` rows."""
        return tf.cast(state, self.dtype)


class Mean(Sum):
    """A mean. For floating-point numbers, the state is the mean, so it cannot overflow. For integers, it is the sum."""

    def __init__(self, dtype: Any):
        super().__init__(dtype)
        self.narrow = tf.int64 if dtype.is_integer and dtype != tf.uint64 else dtype

    def reduce_rows(self, rows: Any) -> Any:
        if self.dtype.is_integer:
            return tf.reduce_sum(self.to_narrow(rows), 0)
        total = _add_rows(rows)
        return self.to_narrow(tf.math.divide_no_nan(total, tf.cast(count_rows(rows), total.dtype)))

    def merge_states(self, states: Any, counts: Any) -> Any:
        if self.dtype.is_integer:
            return super().merge_states(states, counts)
        shares = tf.math.divide_no_nan(tf.cast(counts, tf.float64), tf.cast(tf.reduce_sum(counts), tf.float64))
        shares = tf.reshape(shares, tf.concat([tf.shape(counts), tf.ones([tf.rank(states) - 1], tf.int32)], 0))
        return tf.reduce_sum(states * tf.cast(shares, states.dtype), 0)

    def finish_state(self, state: Any, count: Any) -> Any:
        if self.dtype.is_integer:  # tf.reduce_mean of integers truncates
            return tf.cast(tf.truncatediv(state, tf.cast(tf.maximum(count, 1), state.dtype)), self.dtype)
        state = tf.cast(state, self.dtype)
        if self.dtype.is_complex:
            return state
        return state / tf.cast(tf.minimum(count, 1), self.dtype)  # NaN without rows, as in TensorFlow


class Min(Sum):
    """A minimum. Without rows, it is the largest number of the dtype, as in TensorFlow."""

    _op = staticmethod(tf.reduce_min)

    def __init__(self, dtype: Any):
        super().__init__(dtype)
        if dtype.is_complex:
            self._refuse(dtype)

    def reduce_rows(self, rows: Any) -> Any:
        return self._op(rows, 0)

    def merge_states(self, states: Any, counts: Any) -> Any:
        return self._op(states, 0)


class Max(Min):
    """A maximum."""

    _op = staticmethod(tf.reduce_max)


AGGREGATES: Mapping[str, type[Sum]] = {"sum": Sum, "mean": Mean, "min": Min, "max": Max}


def _add_rows(rows: Any) -> Any:
    """Return the sum of rows `[rows, ...]`, in a dtype that may be wider. Its rounding does not grow with the rows.

    The kernel of Sum adds row after row if a row has several numbers (test_rounding_does_not_grow_with_the_rows).
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
