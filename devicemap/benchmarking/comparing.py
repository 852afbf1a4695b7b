"""Are two results the same, to rounding? If not, where do they differ, and by how much?"""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from devicemap.rows import map_nest


def find_difference(got: Any, wanted: Any, tolerance: float) -> str | None:
    """The first difference between two eager results, in words; `None` where there is none.

    Numbers with a fraction may differ by `tolerance * (1 + |wanted|)`, and NaN equals NaN; everything else has to be equal:
    structure, types of leaves, dtypes, shapes.

    Args:
        got, wanted: nests of dense, ragged or sparse tensors.
        tolerance: relative and absolute.

    Example:
        >>> find_difference(tf.constant([1.0, 2.0]), tf.constant([1.0, 3.0]), 1e-3)
        'the result has 2.0 and 3.0 at index [1], a difference of 1; 1 of 2 numbers differ, by at most 1'
    """
    try:
        tf.nest.assert_same_structure(got, wanted)
    except (TypeError, ValueError):
        return f"the results have different structures, {_shape_of(got)} and {_shape_of(wanted)}"
    paths = tf.nest.flatten(map_nest(lambda _, path: path, wanted, "the result"))
    for path, a, b in zip(paths, tf.nest.flatten(got), tf.nest.flatten(wanted)):
        if type(a) is not type(b) and type(a).__name__ != type(b).__name__:
            return f"{path} is a {type(a).__name__} and a {type(b).__name__}"
        if a.dtype != b.dtype:
            return f"{path} is {a.dtype.name} and {b.dtype.name}"
        for part, x, y in zip(_part_names(path, a), _parts(a), _parts(b)):
            if found := _difference_of_arrays(part, x.numpy(), y.numpy(), a.dtype, tolerance):
                return found
    return None


def _difference_of_arrays(path: str, a: Any, b: Any, dtype: Any, tolerance: float) -> str | None:
    if a.shape != b.shape:
        return f"{path} has the shapes {list(a.shape)} and {list(b.shape)}"
    if not (dtype.is_floating or dtype.is_complex) or a.dtype.kind in "iu":  # row lengths and indices are integers
        wrong = a != b
        if not np.any(wrong):
            return None
        where = tuple(int(i) for i in np.argwhere(wrong)[0])
        return f"{path} has {a.item(where)!r} and {b.item(where)!r} at index {list(where)}"
    wide = np.complex128 if dtype.is_complex else np.float64  # bfloat16 too, which NumPy cannot compare by itself
    a, b = a.astype(wide), b.astype(wide)
    wrong = ~np.isclose(a, b, rtol=tolerance, atol=tolerance, equal_nan=True)
    if not wrong.any():
        return None
    where = tuple(int(i) for i in np.argwhere(wrong)[0])
    gaps = np.abs(np.subtract(a, b, where=wrong, out=np.zeros_like(a)))
    return (
        f"{path} has {a[where]:.7} and {b[where]:.7} at index {list(where)}, a difference of {gaps[where]:.3g}; "
        f"{wrong.sum()} of {wrong.size} numbers differ, by at most {gaps.max():.3g}"
    )


def _parts(leaf: Any) -> list[Any]:
    """The dense tensors that tell a leaf apart from others."""
    if isinstance(leaf, tf.RaggedTensor):
        return [*leaf.nested_row_lengths(), leaf.flat_values]
    if isinstance(leaf, tf.SparseTensor):
        leaf = tf.sparse.reorder(leaf)
        return [leaf.dense_shape, leaf.indices, leaf.values]
    return [leaf]


def _part_names(path: str, leaf: Any) -> list[str]:
    if isinstance(leaf, tf.RaggedTensor):
        return [*(f"{path}, row lengths of axis {i + 1}," for i in range(leaf.ragged_rank)), f"{path}, flat values,"]
    if isinstance(leaf, tf.SparseTensor):
        return [f"{path}, {part}," for part in ("dense shape", "indices", "values")]
    return [path]


def _shape_of(nest: Any) -> Any:
    return tf.nest.map_structure(lambda leaf: leaf.dtype.name, nest)
