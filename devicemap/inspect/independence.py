"""Comparisons on random rows, which find functions whose results for a row depend on other rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from devicemap.inspect.verify import find_difference

UNKNOWN_SIZE = 32
"""The number that replaces unknown dimensions, also that of rows."""

_ROUNDING = 1e-5
"""Relative tolerance for results that the same kernels compute."""

_OTHER_KERNELS = 0.03
"""Relative tolerance for results of fewer rows: more than rounding, also of 16-bit floats."""


def dependence_on_rows(run: Callable[[list[Any]], Any], given: Sequence[Any], rows: int) -> str | None:
    """Describe a result for the first half of some rows that differs if the other half changes or is left out.

    `run` maps a list of dense tensors `[rows, ...]` like `given` to a nest of such tensors. Returns `None` for no difference,
    and if `run` raises an exception: it may refuse random arguments, such as indices out of range.
    """
    half = rows // 2
    whole, others = ([each[:rows] for each in random_tensors(given, seed=seed).values()] for seed in (0, 1))
    changed = [tf.concat([row[:half], other[half:]], 0) for row, other in zip(whole, others)]

    def first_rows(tensors: list[Any]) -> list[Any]:
        return [tensor[:half] for tensor in tf.nest.flatten(run(tensors))]

    try:
        first, again, beside_others = map(first_rows, (whole, whole, changed))
        if found := difference("a result", beside_others, first, again, _ROUNDING):
            return f"{found}, if other rows change"
        alone = first_rows([tensor[:half] for tensor in whole])
        found = difference("a result", alone, first, again, _OTHER_KERNELS)
    except Exception:
        return None
    return f"{found}, if other rows are left out" if found else None


def difference(
    what: str, found: Sequence[Any], first: Sequence[Any], again: Sequence[Any], tolerance: float
) -> str | None:
    """Describe a difference between found and first results, unless that result changes from the first call to another."""
    if len(found) != len(first):
        return f"{len(found)} outputs and losses, not {len(first)}"
    for one, other, got in zip(first, again, found):
        same = find_difference(what, other, one, tolerance) is None
        if same and (different := find_difference(what, got, one, tolerance)):
            return different
    return None


def random_tensors(symbolic: Sequence[Any], largest: float = 1.0, seed: int = 0) -> dict[int, Any]:
    """Return random rows for symbolic tensors or specs, by `id`. `largest` is the largest magnitude of fractions.

    Integers are 0 or 1, which are valid indices for most layers. Integers and strings differ for seeds 0 and 1.
    """

    def random(i: int, tensor: Any) -> Any:
        dtype = tf.as_dtype(tensor.dtype)
        shape = [size or UNKNOWN_SIZE for size in tensor.shape]
        if dtype == tf.string:
            return tf.fill(shape, str(seed or ""))
        if dtype.is_floating:
            return tf.cast(tf.random.stateless_uniform(shape, [seed, i], -largest, largest), dtype)
        return tf.cast((tf.random.stateless_uniform(shape, [0, i], 0, 2, tf.int32) + seed) % 2, dtype)

    return {id(tensor): random(i, tensor) for i, tensor in enumerate(symbolic)}
