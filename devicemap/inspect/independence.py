"""Comparisons on random rows, which find functions whose results for a row depend on other rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import tensorflow as tf

from devicemap.inspect.verify import find_difference

UNKNOWN_SIZE = 32
"""The number that replaces unknown dimensions, also that of rows."""

_ROUNDING = 1e-5
"""Relative tolerance for results that the same kernels compute."""

_OTHER_KERNELS = 0.03
"""Relative tolerance for results of fewer rows: more than rounding, also of 16-bit floats."""


def dependence_on_rows(
    run: Callable[[list[Any]], Any], given: Sequence[Any], *rows: int, draws: Callable[[], bool] = lambda: False
) -> str | None:
    """Describe a result for one half of some rows that differs if the other half changes or is left out.

    `run` maps a list of dense tensors `[rows, ...]` like `given` to a nest of such tensors. It may refuse random arguments,
    such as indices out of range. `rows` are numbers of rows, of which the first counts that `run` accepts. `draws` returns
    whether `run` has drawn random numbers. If other rows are left out, only the first rows then get the same numbers.

    Returns `None` for no difference, and if `run` accepts none of them.
    """
    for count in rows:
        with suppress(Exception):  # of the user's functions
            return _dependence(run, given, count, draws)
    return None


def _dependence(
    run: Callable[[list[Any]], Any], given: Sequence[Any], rows: int, draws: Callable[[], bool]
) -> str | None:
    whole, others = ([each[:rows] for each in random_tensors(given, seed=seed).values()] for seed in (0, 1))
    first, again = (tf.nest.flatten(run(whole)) for _ in range(2))
    count = whole[0].shape[0]
    # Results with other numbers of rows are refused when they are joined.
    of_rows = [i for i, each in enumerate(first) if each.shape[:1] == [count]]
    halves = [half for half in (slice(0, count // 2), slice(count // 2, count)) if half.start < half.stop]

    def found(tensors: list[Any], half: slice, part: slice, tolerance: float) -> str | None:
        """Compare a part of the results for some tensors with half of the first results."""
        results = tf.nest.flatten(run(tensors))
        got, one, other = (
            [leaves[i][of_part] for i in of_rows] for leaves, of_part in ((results, part), (first, half), (again, half))
        )
        return difference("a result", got, one, other, tolerance)

    for half in halves:
        pairs = zip(whole, others)
        changed = [tf.concat([(one if each is half else other)[each] for each in halves], 0) for one, other in pairs]
        if text := found(changed, half, half, _ROUNDING):
            return f"{text}, if other rows change"
    for half in halves[:1] if draws() else halves:
        if text := found([each[half] for each in whole], half, slice(0, half.stop - half.start), _OTHER_KERNELS):
            return f"{text}, if other rows are left out"
    return None


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


def random_tensors(
    symbolic: Sequence[Any], largest: float = 1.0, seed: int = 0, unknown_size: int = UNKNOWN_SIZE
) -> dict[int, Any]:
    """Return random rows for symbolic tensors or specs, by `id`. `largest` is the largest magnitude of fractions.

    Integers are 0 or 1, which are valid indices for most layers. Integers and strings differ for seeds 0 and 1.
    """

    def random(i: int, tensor: Any) -> Any:
        dtype = tf.as_dtype(tensor.dtype)
        shape = [size or unknown_size for size in tensor.shape]
        if dtype == tf.string:
            return tf.fill(shape, str(seed or ""))
        if dtype.is_floating:
            return tf.cast(tf.random.stateless_uniform(shape, [seed, i], -largest, largest), dtype)
        return tf.cast((tf.random.stateless_uniform(shape, [0, i], 0, 2, tf.int32) + seed) % 2, dtype)

    return {id(tensor): random(i, tensor) for i, tensor in enumerate(symbolic)}
