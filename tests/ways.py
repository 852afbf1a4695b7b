"""What cases are crossed with: options that decide how rows travel, places of a call, and places of a tape."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import tensorflow as tf

X = tf.reshape(tf.range(12.0), [6, 2])
Options = dict[str, Any]
Call = Callable[[Any], Any]

ONE: Options = {"devices": ["CPU:1"]}
SEVERAL: Options = {"devices": ["CPU:2", "CPU:0", "CPU:5"]}
IN_MEMORY = {"one device": ONE, "several devices": SEVERAL}
CHUNKED = {"one device, chunks": {**ONE, "batch_size": 4}, "several devices, chunks": {**SEVERAL, "batch_size": 4}}
WAYS = {**IN_MEMORY, **CHUNKED}
ways = pytest.mark.parametrize("way", WAYS.values(), ids=list(WAYS))


def of_unknown_rows(data: Any) -> Any:
    """Specs of data whose number of rows is unknown."""

    def relaxed(leaf: Any) -> Any:
        shape = [None, *leaf.shape[1:]]
        if isinstance(leaf, tf.RaggedTensor):
            return tf.RaggedTensorSpec(shape, leaf.dtype, leaf.ragged_rank, leaf.row_splits.dtype)
        return (tf.SparseTensorSpec if isinstance(leaf, tf.SparseTensor) else tf.TensorSpec)(shape, leaf.dtype)

    return tf.nest.map_structure(relaxed, data)


def _with_known_rows(call: Call, data: Any) -> Call:
    return tf.function(lambda data: call(data))


def _with_unknown_rows(call: Call, data: Any) -> Call:
    return tf.function(lambda data: call(data), input_signature=[of_unknown_rows(data)])


CALLS: dict[str, Callable[[Call, Any], Call]] = {
    "eager": lambda call, data: call,
    "known rows": _with_known_rows,
    "unknown rows": _with_unknown_rows,
}
"""In eager code, or inside a user's `tf.function` of rows like `data`."""

PLACES: dict[str, Callable[[Callable[..., Any], Call, Any], Any]] = {
    "eager": lambda take, call, data: take(call, data),
    "tape inside tf.function": lambda take, call, data: _with_known_rows(partial(take, call), data)(data),
    "tape outside tf.function": lambda take, call, data: take(_with_known_rows(call, data), data),
    "unknown rows": lambda take, call, data: _with_unknown_rows(partial(take, call), data)(data),
}
"""Of a tape: `take` takes gradients of a call. The last one is like the `train_step` of a Keras model."""
places = pytest.mark.parametrize("place", PLACES.values(), ids=list(PLACES))


class Counter:
    """A function that counts how often Python runs it, for tracing or otherwise."""

    def __init__(self, fn: Callable[..., Any] = lambda *rows: rows[0]):
        self.fn, self.count = fn, 0

    def __call__(self, *args: Any) -> Any:
        self.count += 1
        return self.fn(*args)


class Items:
    """An object with items."""

    def __getitem__(self, i: int) -> float:
        return [1.0, 2.0][i]

    def __len__(self) -> int:
        return 2
