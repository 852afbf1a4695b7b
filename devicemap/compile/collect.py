"""One row after another: a loop that collects what each gives, and copies nothing to or from a GPU in a step.

`tf.map_fn` does it in each step: it tells its loop how many steps there are, which GPUs ask for by way of the host, and they
have no kernels for lists of most integers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

_AS_LARGE = {tf.int16: tf.float16, tf.uint16: tf.float16, tf.uint32: tf.float32, tf.uint64: tf.float64}
"""Integers that GPUs have no kernels of lists for, and dtypes that hold their bits."""

_LARGER = {tf.int8: tf.float16, tf.uint8: tf.float16}
"""The same for those of which another dtype can only hold the numbers."""

_AT_ONCE = 10
"""Rows that may be under way at the same time, as in `tf.map_fn`."""


@dataclass(frozen=True)
class Kept:
    """How one of the results of a row is kept until all rows are done."""

    dtype: Any
    """Its own."""

    shape: Any
    """As far as it is the same for each row."""

    carrier: Any
    """The dtype of the list."""

    device: str | None = None
    """Where the list is; `None`: where the loop runs."""

    def on_device(self) -> AbstractContextManager[Any]:
        """The scope of the ops of the list."""
        return nullcontext() if self.device is None else tf.device(self.device)


def carrier_of(dtype: Any, on_accelerators: bool) -> Any:
    """The dtype of lists that hold numbers of a dtype, also on accelerators."""
    known = _AS_LARGE | _LARGER if on_accelerators else _AS_LARGE
    return known.get(dtype, dtype)


def is_listless(dtype: Any) -> bool:
    """Whether GPUs have no kernels for lists of these integers."""
    return dtype in _AS_LARGE or dtype in _LARGER


def collected(
    run: Callable[[Any], Sequence[Any]],
    rows: Any,
    kept: Sequence[Kept],
    at_once: int | None = None,
    bounded: bool = False,
) -> list[Any]:
    """What `run` gives for the numbers of so many rows, each result as one tensor of all rows.

    Args:
        run: takes an int32 scalar, and returns dense tensors.
        rows: int32 scalar.
        kept: how each of the results is kept.
        at_once: how many rows may be under way at the same time; `None` for as many as TensorFlow likes.
        bounded: whether the loop is told that it has no more steps, which XLA asks for in gradients, and GPUs pay for.
    """
    arrays = []
    for each in kept:
        with each.on_device():
            arrays.append(tf.TensorArray(each.carrier, rows, element_shape=each.shape))

    def step(row: Any, arrays: Sequence[Any]) -> tuple[Any, list[Any]]:
        written = []
        for each, array, result in zip(kept, arrays, run(row)):
            with each.on_device():
                written.append(array.write(row, _as(each.carrier, result)))
        return row + 1, written

    _, arrays = tf.while_loop(
        lambda row, _: row < rows,
        step,
        (0, arrays),
        parallel_iterations=at_once or _AT_ONCE,
        maximum_iterations=rows if bounded else None,
    )
    results = []
    for each, array in zip(kept, arrays):
        with each.on_device():
            results.append(_as(each.dtype, array.stack()))
    return results


def _as(dtype: Any, leaf: Any) -> Any:
    """A leaf in a dtype that holds its numbers, or its bits if it is as large; and back."""
    if leaf.dtype == dtype:
        return leaf
    return tf.bitcast(leaf, dtype) if leaf.dtype.size == dtype.size else tf.cast(leaf, dtype)
