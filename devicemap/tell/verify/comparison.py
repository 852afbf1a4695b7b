"""Are two results the same, to rounding? If not, where do they differ, and by how much?"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from devicemap.base.devices import kind_of
from devicemap.base.structure import as_nodes, check_same_structure, map_nest

Array = np.ndarray[Any, Any]
_Allowance = Callable[[Any, Array], Any]
"""`(dtype, wanted) -> gap`: by how much numbers with a fraction may differ, as one number or one for each."""


_EPSILON = {tf.bfloat16: 2.0**-7, tf.float16: 2.0**-10, tf.float32: 2.0**-23, tf.float64: 2.0**-52}
"""The distance from 1 to the next number, which NumPy does not tell of bfloat16."""

_TENSOR_FLOAT_EPSILON = 2.0**-10
"""float32 keeps ten bits of a factor where GPUs multiply in TensorFloat-32, which TensorFlow lets them by default."""


@dataclass(frozen=True)
class Difference:
    """By how much one output differs between two results."""

    output: str
    """Which one: its path in the nest of results, as `the result['x'][0]`."""

    absolute: float | None
    """The largest difference of two numbers; `None` where there is none: for text, NaN, other shapes or dtypes."""

    relative: float | None
    """`absolute` over the largest number of this output."""

    row: int | None
    """The row of the largest difference; `None` where the rows themselves cannot be compared."""

    fault: str | None
    """In words, the first place that differs by more than is allowed; `None` where all of it is rounding."""

    @property
    def weight(self) -> tuple[bool, float]:
        """How bad it is, to compare with others."""
        return self.fault is not None, math.inf if self.relative is None else self.relative

    def __str__(self) -> str:
        row = "" if self.row is None else f" in row {self.row}"
        if self.absolute is None or self.relative is None:
            return self.fault or f"{self.output} differs{row}"
        return (
            f"{self.output} differs by at most {self.absolute:.3g}, {self.relative:.2g} times its largest number,{row}"
        )


def find_difference(got: Any, wanted: Any, tolerance: float) -> str | None:
    """The first difference between two eager results, in words; `None` where there is none.

    Numbers with a fraction may differ by `tolerance * (1 + |wanted|)`. See `compare_results`.

    Examples:
        >>> find_difference(tf.constant([1.0, 2.0]), tf.constant([1.0, 3.0]), 1e-3)
        'the result has 2.0 and 3.0 at index [1], a difference of 1; 1 of 2 numbers differ, by at most 1'
    """
    differences = compare_results(got, wanted, lambda _, numbers: tolerance * (1 + np.abs(numbers)))
    return next((difference.fault for difference in differences if difference.fault), None)


def allowance(tolerance: float | None, devices: tuple[str, ...]) -> _Allowance:
    """By how much the numbers of an output may differ, measured by the largest number of that output.

    Sums of numbers of both signs are small beside what rounding leaves of them, so that a number is not a measure for
    itself. Half of the digits are far more than sums lose in practice, and far less than what another batch changes.

    Args:
        tolerance: relative; `None`: half of the digits of a dtype have to agree.
        devices: full names of the devices that computed the outputs.

    Examples:
        >>> round(allowance(None, ("/device:CPU:0",))(tf.float32, np.array([1.0, -2.0])), 6)
        0.000691
    """
    tensor_float = tf.config.experimental.tensor_float_32_execution_enabled() and any(
        kind_of(device) == "GPU" for device in devices
    )

    def allowed(dtype: tf.DType, wanted: Array) -> float:
        if tolerance is not None:
            return tolerance * _largest_number(wanted)
        kind = dtype.real_dtype
        epsilon = _TENSOR_FLOAT_EPSILON if tensor_float and kind == tf.float32 else _EPSILON[kind]
        return math.sqrt(epsilon) * _largest_number(wanted)

    return allowed


def compare_results(got: Any, wanted: Any, allowed: _Allowance) -> tuple[Difference, ...]:
    """The outputs that differ at all between two eager results, in the order of the nest.

    Args:
        got, wanted: nests of dense, ragged or sparse tensors, of shape `[rows, ...]`.
        allowed: by how much numbers with a fraction may differ; everything else has to be equal (structure, types of
            leaves, dtypes, shapes), and NaN equals NaN.

    Examples:
        >>> [d] = compare_results({"x": tf.constant([4.0, 2.0])}, {"x": tf.constant([4.0, 3.0])}, lambda *_: 2)
        >>> d.output, d.absolute, d.relative, d.row, d.fault
        ("the result['x']", 1.0, 0.25, 1, None)
    """
    got, wanted = as_nodes(got), as_nodes(wanted)
    try:
        check_same_structure(got, wanted)
    except (TypeError, ValueError):
        dtypes = [tf.nest.map_structure(lambda leaf: leaf.dtype.name, nest) for nest in (got, wanted)]
        fault = f"the results have different structures, {dtypes[0]} and {dtypes[1]}"
        return (Difference("the result", None, None, None, fault),)
    leaves = zip(output_paths(wanted), tf.nest.flatten(got), tf.nest.flatten(wanted))
    found = (_compare_leaves(path, a, b, allowed) for path, a, b in leaves)
    return tuple(difference for difference in found if difference is not None)


def output_paths(results: Any) -> list[str]:
    """What the leaves of a nest of results are called.

    >>> output_paths({"x": (1, 2)})
    ["the result['x'][0]", "the result['x'][1]"]
    """
    return list(tf.nest.flatten(map_nest(lambda _, path: path, results, "the result")))


def _compare_leaves(path: str, a: Any, b: Any, allowed: _Allowance) -> Difference | None:
    if type(a).__name__ != type(b).__name__:
        return Difference(path, None, None, None, f"{path} is a {type(a).__name__} and a {type(b).__name__}")
    if a.dtype != b.dtype:
        return Difference(path, None, None, None, f"{path} is {a.dtype.name} and {b.dtype.name}")
    rounded, fault = a.dtype.is_floating or a.dtype.is_complex, None
    parts = list(zip(_parts(path, a), _parts(path, b)))
    for i, ((name, x), (_, y)) in enumerate(parts):
        values = i == len(parts) - 1  # what comes before them is layout
        if x.shape != y.shape:
            fault = f"{name} has the shapes {list(x.shape)} and {list(y.shape)}"
            return Difference(path, None, None, None, fault)
        if not (values and rounded) and np.any(x != y):
            where = tuple(np.argwhere(x != y)[0].tolist())
            fault = f"{name} has {x.item(where)!r} and {y.item(where)!r} at index {list(where)}"
            if not (values and a.dtype.is_integer):
                return Difference(path, None, None, _row_at(b, i, where), fault)
    if not (rounded or fault):
        return None
    wide = np.complex128 if a.dtype.is_complex else np.float64 if rounded else np.longdouble  # bfloat16 too
    x, y = x.astype(wide), y.astype(wide)
    gaps = _gaps(x, y)
    if rounded:
        if not gaps.any():
            return None
        fault = _fault_of(name, x, y, gaps, allowed(a.dtype, y))
    where = tuple(int(index) for index in np.unravel_index(np.argmax(gaps), gaps.shape))
    absolute = relative = None
    if np.isfinite(gaps[where]):
        absolute = float(gaps[where])
        relative = absolute / max(_largest_number(x), _largest_number(y))
    return Difference(path, absolute, relative, _row_at(b, i, where), fault)


def _gaps(a: Array, b: Array) -> Array:
    """How far numbers are apart: NaN infinitely from everything but NaN, and infinities from all but themselves."""
    same = (a == b) | (np.isnan(a) & np.isnan(b))
    finite = np.isfinite(a) & np.isfinite(b)
    gaps = np.where(same, 0.0, np.inf)
    np.abs(np.subtract(a, b, where=finite, out=np.zeros_like(a)), where=finite, out=gaps)
    return gaps


def _largest_number(numbers: Array) -> float:
    """The largest finite absolute value, 0 where there is none."""
    return float(np.abs(numbers).max(initial=0.0, where=np.isfinite(numbers)))


def _fault_of(name: str, a: Array, b: Array, gaps: Array, allowed: Any) -> str | None:
    wrong = (gaps > allowed) | np.isinf(gaps)
    if not wrong.any():
        return None
    where = tuple(np.argwhere(wrong)[0].tolist())
    return (
        f"{name} has {a[where]:.7} and {b[where]:.7} at index {list(where)}, a difference of {gaps[where]:.3g}; "
        f"{wrong.sum()} of {wrong.size} numbers differ, by at most {gaps.max():.3g}"
    )


def _row_at(leaf: Any, part: int, where: tuple[int, ...]) -> int | None:
    """The row that an index into one of a leaf's parts lies in."""
    if isinstance(leaf, tf.RaggedTensor):
        index = where[0]
        for row_ids in reversed(leaf.nested_value_rowids()[:part]):
            index = int(row_ids[index])
        return index
    if isinstance(leaf, tf.SparseTensor):
        return int(tf.sparse.reorder(leaf).indices[where[0], 0]) if part else None
    return where[0] if where else None


def _parts(path: str, leaf: Any) -> list[tuple[str, Array]]:
    """The arrays that tell a leaf apart from others, by name: its layout, and at the end its values."""
    if isinstance(leaf, tf.RaggedTensor):
        lengths = enumerate(leaf.nested_row_lengths(), start=1)
        parts = {f"row lengths of axis {axis}": part for axis, part in lengths} | {"flat values": leaf.flat_values}
    elif isinstance(leaf, tf.SparseTensor):
        leaf = tf.sparse.reorder(leaf)
        parts = {"dense shape": leaf.dense_shape, "indices": leaf.indices, "values": leaf.values}
    else:
        return [(path, np.asarray(leaf.numpy()))]
    return [(f"{path}, {name},", part.numpy()) for name, part in parts.items()]
