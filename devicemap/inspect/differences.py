"""The differences between the results of two runs of a function, and whether rounding explains them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from devicemap.data.rows import HOST
from devicemap.devices import kind_of

_EXAMINED_ROWS, _ROUNDINGS = 3, 24
"""Rows that are tested for rounding, and how many roundings of each."""

_EPSILON = {tf.bfloat16: 2.0**-7, tf.float16: 2.0**-10, tf.float32: 2.0**-23, tf.float64: 2.0**-52}
"""The distance from 1 to the next number. NumPy does not know it for bfloat16."""

_EPSILON_OF_TENSOR_FLOAT = 2.0**-10
"""The same for float32 on GPUs, which multiply in TensorFloat-32 by default."""


def rounding_explains(
    run: Callable[[list[Any]], list[Any]],
    output: int,
    leaves: Sequence[Any],
    got: Any,
    wanted: Any,
    tolerance: float,
    devices: tuple[str, ...],
) -> bool:
    """Whether rounding alone makes rows of an output differ, as where it decides a branch, an argmax or a number of steps.

    Then other last digits change the result of a row alone as much, and with other rows in the batch, each row that differs
    most has one of its known results.

    Args:
        run: computes the outputs of rows, which run at once, from leaves `[rows, ...]`.
        output: index of the output.
        leaves: the rows that gave `wanted` at once, and `got` in another mode.
        tolerance: as for `find_difference`.
        devices: full names of the devices that computed it.
    """
    dense = all(isinstance(leaf, tf.Tensor) for leaf in (got, wanted, *leaves))
    if not dense or wanted.dtype == tf.string or got.shape != wanted.shape:
        return False
    x, y = got.numpy(), wanted.numpy()
    changes = [_distance(*pair) for pair in zip(x, y)]
    least = tolerance * _distance(np.where(np.isfinite(y), y, 0), 0)

    def results_of(arrays: Iterable[Any]) -> Any:
        with tf.device(HOST):
            tensors = [tf.convert_to_tensor(array) for array in arrays]
        return run(tensors)[output].numpy()

    least_step = epsilon(wanted.dtype, devices)  # fn may compute with fewer digits than the rows have
    decided = False
    for row in sorted(range(len(y)), key=changes.__getitem__, reverse=True)[:_EXAMINED_ROWS]:
        if changes[row] <= least:
            break
        rounded = [
            _rounded(leaf[row].numpy(), leaf.dtype, max(epsilon(leaf.dtype, devices), least_step)) for leaf in leaves
        ]
        alone = [results_of(leaf[:1] for leaf in rounded)[0]]
        while len(alone) <= _ROUNDINGS and _distance(alone[0], alone[-1]) < changes[row] / 2:
            alone.append(results_of(leaf[len(alone) :][:1] for leaf in rounded)[0])
        decided = decided or _distance(alone[0], alone[-1]) >= changes[row] / 2
        others = [row if i == row else row - 1 for i in range(len(y))]
        with_others = results_of(leaf.numpy()[others] for leaf in leaves)[row]
        if min(_distance(with_others, result) for result in (y[row], *alone)) >= changes[row] / 2:
            return False
    return decided


def _rounded(row: Any, dtype: tf.DType, step: float) -> Any:
    """Return an array of a row and behind it `_ROUNDINGS` copies of it with other last digits."""
    copies = np.repeat(np.asarray(row)[None], _ROUNDINGS + 1, axis=0)
    if not dtype.is_floating:
        return copies
    # A sum of many numbers loses more than one rounding: from 4 to 64 units in the last place.
    largest = 4.0 ** np.linspace(1, 3, _ROUNDINGS + 1)
    steps = np.random.default_rng(0).uniform(-1, 1, copies.shape) * largest.reshape(-1, *[1] * (copies.ndim - 1))
    steps[0] = 0
    return (copies * (1.0 + steps * step)).astype(copies.dtype)


def _distance(x: Any, y: Any) -> float:
    """Return the largest difference of two arrays of numbers: infinity where only one is NaN."""
    x, y = np.asarray(x, np.complex128), np.asarray(y, np.complex128)
    with np.errstate(invalid="ignore"):  # infinity minus infinity
        apart = np.where((x == y) | (np.isnan(x) & np.isnan(y)), 0.0, np.abs(x - y))
    return float(np.nan_to_num(apart, nan=np.inf, posinf=np.inf).max(initial=0.0))


def epsilon(dtype: tf.DType, devices: tuple[str, ...]) -> float:
    """The relative error of one rounding.

    Numbers may differ by its square root, half of the digits of a dtype: far more than sums lose by rounding, and far less
    than another batch changes.
    """
    if dtype.real_dtype == tf.float32 and tf.config.experimental.tensor_float_32_execution_enabled():
        return _EPSILON_OF_TENSOR_FLOAT if any(kind_of(device) == "GPU" for device in devices) else _EPSILON[tf.float32]
    return _EPSILON.get(dtype.real_dtype, 0.0)


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
    """Return the arrays that a tensor consists of, with names. Values come last, after the layout."""
    if isinstance(leaf, tf.RaggedTensor):
        lengths = [(f"row lengths of axis {i}", part) for i, part in enumerate(leaf.nested_row_lengths(), start=1)]
        parts = [*lengths, ("flat values", leaf.flat_values)]
    elif isinstance(leaf, tf.SparseTensor):
        leaf = tf.sparse.reorder(leaf)
        parts = [("dense shape", leaf.dense_shape), ("indices", leaf.indices), ("values", leaf.values)]
    else:
        return [(path, np.asarray(leaf.numpy()))]
    return [(f"{path}, {name},", part.numpy()) for name, part in parts]
