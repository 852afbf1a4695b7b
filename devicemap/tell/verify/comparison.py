"""Are two results the same, to rounding? If not, where do they differ, and by how much?"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from devicemap.base.structure import as_nodes, check_same_structure, map_nest

Array = np.ndarray[Any, Any]
Allowance = Callable[[Any, Array], Any]
"""`(dtype, wanted) -> gap`: by how much numbers with a fraction may differ, as one number or one for each."""


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


def find_difference(got: Any, wanted: Any, tolerance: float) -> str | None:
    """The first difference between two eager results, in words; `None` where there is none.

    Numbers with a fraction may differ by `tolerance * (1 + |wanted|)`, and NaN equals NaN; everything else has to be equal:
    structure, types of leaves, dtypes, shapes.

    Args:
        got, wanted: nests of dense, ragged or sparse tensors.
        tolerance: relative and absolute.

    Examples:
        >>> find_difference(tf.constant([1.0, 2.0]), tf.constant([1.0, 3.0]), 1e-3)
        'the result has 2.0 and 3.0 at index [1], a difference of 1; 1 of 2 numbers differ, by at most 1'
    """
    differences = compare_results(got, wanted, lambda _, numbers: tolerance * (1 + np.abs(numbers)))
    return next((difference.fault for difference in differences if difference.fault), None)


def compare_results(got: Any, wanted: Any, allowed: Allowance) -> tuple[Difference, ...]:
    """The outputs that differ at all between two eager results, in the order of the nest.

    Args:
        got, wanted: nests of dense, ragged or sparse tensors, of shape `[rows, ...]`.
        allowed: by how much numbers with a fraction may differ; everything else has to be equal, and NaN equals NaN.

    Examples:
        >>> [d] = compare_results({"x": tf.constant([4.0, 2.0])}, {"x": tf.constant([4.0, 3.0])}, lambda *_: 2)
        >>> d.output, d.absolute, d.relative, d.row, d.fault
        ("the result['x']", 1.0, 0.25, 1, None)
    """
    got, wanted = as_nodes(got), as_nodes(wanted)
    try:
        check_same_structure(got, wanted)
    except (TypeError, ValueError):
        fault = f"the results have different structures, {_dtypes_of(got)} and {_dtypes_of(wanted)}"
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


def _compare_leaves(path: str, a: Any, b: Any, allowed: Allowance) -> Difference | None:
    if type(a) is not type(b) and type(a).__name__ != type(b).__name__:
        return Difference(path, None, None, None, f"{path} is a {type(a).__name__} and a {type(b).__name__}")
    if a.dtype != b.dtype:
        return Difference(path, None, None, None, f"{path} is {a.dtype.name} and {b.dtype.name}")
    *layout, (name, x, y) = zip(_part_names(path, a), _parts(a), _parts(b))
    for i, (part, c, d) in enumerate(layout):  # row lengths, indices
        if fault := _difference_of_shapes(part, c, d):
            return Difference(path, None, None, None, fault)
        if np.any(c != d):
            where, fault = _first_place(part, c, d)
            return Difference(path, None, None, _row_at(b, i, where), fault)
    if fault := _difference_of_shapes(name, x, y):
        return Difference(path, None, None, None, fault)
    if not (a.dtype.is_floating or a.dtype.is_complex):
        if not np.any(x != y):
            return None
        where, fault = _first_place(name, x, y)
        if not a.dtype.is_integer:
            return Difference(path, None, None, _row_at(b, len(layout), where), fault)
        _, absolute, relative, where = _largest_gap(x.astype(np.longdouble), y.astype(np.longdouble))
        return Difference(path, absolute, relative, _row_at(b, len(layout), where), fault)
    wide = np.complex128 if a.dtype.is_complex else np.float64  # bfloat16 too, which NumPy cannot compare by itself
    x, y = x.astype(wide), y.astype(wide)
    gaps, absolute, relative, where = _largest_gap(x, y)
    if not gaps.any():
        return None
    fault = _describe_gaps(name, x, y, gaps, allowed(a.dtype, y))
    return Difference(path, absolute, relative, _row_at(b, len(layout), where), fault)


def _largest_gap(a: Array, b: Array) -> tuple[Array, float | None, float | None, tuple[int, ...]]:
    """How far numbers are apart, and the largest of these: absolute, relative, and its index.

    NaN is infinitely far from everything but NaN, and so are infinities from everything but themselves.
    """
    same = (a == b) | (np.isnan(a) & np.isnan(b))
    finite = np.isfinite(a) & np.isfinite(b)
    gaps = np.where(same, 0.0, np.inf)
    np.abs(np.subtract(a, b, where=finite, out=np.zeros_like(a)), where=finite, out=gaps)
    where = tuple(int(i) for i in np.unravel_index(np.argmax(gaps), gaps.shape)) if gaps.size else ()
    largest = float(gaps.max(initial=0.0))
    if not np.isfinite(largest):
        return gaps, None, None, where
    return gaps, largest, largest / max(largest_number(a), largest_number(b)) if largest else 0.0, where


def largest_number(numbers: Array) -> float:
    """The largest finite absolute value, 0 where there is none."""
    return float(np.abs(numbers).max(initial=0.0, where=np.isfinite(numbers)))


def _describe_gaps(path: str, a: Array, b: Array, gaps: Array, allowed: Any) -> str | None:
    wrong = (gaps > allowed) | np.isinf(gaps)
    if not wrong.any():
        return None
    where = tuple(int(i) for i in np.argwhere(wrong)[0])
    return (
        f"{path} has {a[where]:.7} and {b[where]:.7} at index {list(where)}, a difference of {gaps[where]:.3g}; "
        f"{wrong.sum()} of {wrong.size} numbers differ, by at most {gaps.max():.3g}"
    )


def _first_place(path: str, a: Array, b: Array) -> tuple[tuple[int, ...], str]:
    where = tuple(int(i) for i in np.argwhere(a != b)[0])
    return where, f"{path} has {a.item(where)!r} and {b.item(where)!r} at index {list(where)}"


def _difference_of_shapes(path: str, a: Array, b: Array) -> str | None:
    return None if a.shape == b.shape else f"{path} has the shapes {list(a.shape)} and {list(b.shape)}"


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


def _parts(leaf: Any) -> list[Array]:
    """The arrays that tell a leaf apart from others: its layout, and at the end its values."""
    if isinstance(leaf, tf.RaggedTensor):
        return [part.numpy() for part in (*leaf.nested_row_lengths(), leaf.flat_values)]
    if isinstance(leaf, tf.SparseTensor):
        leaf = tf.sparse.reorder(leaf)
        return [part.numpy() for part in (leaf.dense_shape, leaf.indices, leaf.values)]
    return [np.asarray(leaf.numpy())]


def _part_names(path: str, leaf: Any) -> list[str]:
    if isinstance(leaf, tf.RaggedTensor):
        return [*(f"{path}, row lengths of axis {i + 1}," for i in range(leaf.ragged_rank)), f"{path}, flat values,"]
    if isinstance(leaf, tf.SparseTensor):
        return [f"{path}, {part}," for part in ("dense shape", "indices", "values")]
    return [path]


def _dtypes_of(nest: Any) -> Any:
    return tf.nest.map_structure(lambda leaf: leaf.dtype.name, nest)
