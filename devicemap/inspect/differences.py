"""The first difference between two results of a function."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from devicemap.devices import kind_of

_EPSILON = {tf.bfloat16: 2.0**-7, tf.float16: 2.0**-10, tf.float32: 2.0**-23, tf.float64: 2.0**-52}
"""The distance from 1 to the next number. NumPy has no value for bfloat16."""


def usual_tolerance(dtype: tf.DType, devices: tuple[str, ...]) -> float:
    """Return the allowed difference of numbers, relative to the largest: the square root of the distance from 1 to the next.

    That is half of the digits. Sums lose far fewer digits by rounding, and another batch changes far more.
    """
    real = dtype.real_dtype
    if real == tf.float32 and tf.config.experimental.tensor_float_32_execution_enabled():
        real = tf.float16 if any(kind_of(device) == "GPU" for device in devices) else real  # TF32 has as many
    return float(np.sqrt(_EPSILON.get(real, 0.0)))


def find_difference(path: str, got: Any, wanted: Any, tolerance: float) -> str | None:
    """Describe the first difference between two dense, ragged or sparse tensors of one dtype.

    Fractions may differ by `tolerance`, relative to the largest number. A single number is no measure: a sum of numbers of
    both signs is small compared with its rounding error. NaN equals NaN.
    """
    for (name, x), (_, y) in zip(_arrays(path, got), _arrays(path, wanted)):
        if x.shape != y.shape:
            return f"{name} has the shapes {list(x.shape)} and {list(y.shape)}"
        different = x != y
        if x.dtype == wanted.dtype.as_numpy_dtype and (wanted.dtype.is_floating or wanted.dtype.is_complex):
            wide = np.complex128 if wanted.dtype.is_complex else np.float64
            x, y = x.astype(wide), y.astype(wide)
            largest = np.abs(y).max(initial=0.0, where=np.isfinite(y))
            with np.errstate(invalid="ignore"):  # infinity minus infinity
                near = np.abs(x - y) <= tolerance * largest
            different = ~((x == y) | near | (np.isnan(x) & np.isnan(y)))
        if different.any():
            index = tuple(np.argwhere(different)[0].tolist())
            values = f"{x.item(index)!r} and {y.item(index)!r} at index {list(index)}"
            return f"{name} has {values}; {different.sum()} of {different.size} values differ"
    return None


def _arrays(path: str, leaf: Any) -> list[tuple[str, Any]]:
    """Return the arrays of a tensor, with names. Values come last, after the layout."""
    if isinstance(leaf, tf.RaggedTensor):
        lengths = [(f"row lengths of axis {i}", part) for i, part in enumerate(leaf.nested_row_lengths(), start=1)]
        parts = [*lengths, ("flat values", leaf.flat_values)]
    elif isinstance(leaf, tf.SparseTensor):
        leaf = tf.sparse.reorder(leaf)
        parts = [("dense shape", leaf.dense_shape), ("indices", leaf.indices), ("values", leaf.values)]
    else:
        return [(path, np.asarray(leaf.numpy()))]
    return [(f"{path}, {name},", part.numpy()) for name, part in parts]
