"""Comparisons on random rows, which find functions whose results for a row depend on other rows."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import tensorflow as tf

from devicemap.data.rows import spec_of, take_rows
from devicemap.data.shards import join
from devicemap.inspect.verify import find_difference

UNKNOWN_SIZE = 32
"""The number that replaces unknown dimensions, also that of rows."""

_SPARSE_ELEMENTS = 8
"""The largest number of elements in a row of a random sparse tensor."""

_ROUNDING = 1e-5
"""Relative tolerance for results that the same kernels compute."""

_OTHER_KERNELS = 0.03
"""Relative tolerance for results of fewer rows: more than rounding, also of 16-bit floats."""


def dependence_on_rows(
    run: Callable[[list[Any]], Any], given: Sequence[Any], *rows: int, draws: Callable[[], bool] = lambda: False
) -> str | None:
    """Describe a result for one half of some rows that differs if the other half changes or is left out.

    `run` maps a list of tensors `[rows, ...]` like `given`, dense, ragged or sparse, to a nest of such tensors. It may refuse
    random arguments, such as indices out of range. `rows` are numbers of rows, of which the first counts that `run` accepts.
    `draws` returns whether `run` has drawn random numbers. If other rows are left out, only the first rows then get the same
    numbers.

    Returns `None` for no difference, and if `run` accepts none of them.
    """
    for count in rows:
        with suppress(Exception):  # of the user's functions
            return _dependence(run, given, count, draws)
    return None


def _dependence(
    run: Callable[[list[Any]], Any], given: Sequence[Any], rows: int, draws: Callable[[], bool]
) -> str | None:
    whole, others = (
        [take_rows(each, 0, rows) for each in random_tensors(given, seed=seed).values()] for seed in (0, 1)
    )
    first, again = (tf.nest.flatten(run(whole)) for _ in range(2))
    count = whole[0].shape[0]
    # Results with other numbers of rows are refused when they are joined.
    of_rows = [i for i, each in enumerate(first) if each.shape[:1] == [count]]
    halves = [half for half in ((0, count // 2), (count // 2, count)) if half[0] < half[1]]
    pads = not all(isinstance(each, tf.Tensor) for each in whole)

    def is_padded(result: Any) -> bool:
        """Whether its inner lengths may depend on other rows."""
        return isinstance(result, tf.SparseTensor) or (pads and isinstance(result, tf.Tensor))

    def found(tensors: list[Any], half: tuple[int, int], part: tuple[int, int], tolerance: float) -> str | None:
        """Compare a part of the results for some tensors with half of the first results."""
        results = tf.nest.flatten(run(tensors))
        # Sparse results of devices become as large as the largest. Padded results of other lengths cannot be joined.
        same = [i for i in of_rows if not is_padded(results[i]) or results[i].shape[1:] == first[i].shape[1:]]
        got, one, other = (
            [take_rows(leaves[i], *of_part) for i in same]
            for leaves, of_part in ((results, part), (first, half), (again, half))
        )
        return difference("a result", got, one, other, tolerance)

    for half in halves:
        pairs = zip(whole, others)
        changed = [join([take_rows(one if each is half else other, *each) for each in halves]) for one, other in pairs]
        if text := found(changed, half, half, _ROUNDING):
            return f"{text}, if other rows change"
    for half in halves[:1] if draws() else halves:
        left = [take_rows(each, *half) for each in whole]
        if text := found(left, half, (0, half[1] - half[0]), _OTHER_KERNELS):
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

    Integers are 0 or 1, which are valid indices for most layers. Integers and strings differ for seeds 0 and 1. Ragged rows
    have lengths from 1 to 4, and are longer for seed 1. Sparse rows have a few elements. All ragged tensors have the same
    lengths, and sparse ones of one shape the same indices, because ops combine them.
    """

    def dense(i: int, shape: Sequence[int | None], dtype: tf.DType) -> Any:
        shape = [size or unknown_size for size in shape]
        if dtype == tf.string:
            return tf.fill(shape, str(seed or ""))
        if dtype.is_floating:
            return tf.cast(tf.random.stateless_uniform(shape, [seed, i], -largest, largest), dtype)
        return tf.cast((tf.random.stateless_uniform(shape, [0, i], 0, 2, tf.int32) + seed) % 2, dtype)

    def ragged(i: int, shape: Sequence[int | None], dtype: tf.DType, rank: int, splits: tf.DType) -> Any:
        if not rank:
            return dense(i, shape, dtype)
        shortest = 1 + 4 * seed
        lengths = tf.random.stateless_uniform([shape[0] or unknown_size], [seed, rank], shortest, shortest + 4, splits)
        values = ragged(i, [int(tf.reduce_sum(lengths)), *shape[2:]], dtype, rank - 1, splits)
        return tf.RaggedTensor.from_row_lengths(values, lengths)

    def sparse(i: int, shape: Sequence[int | None], dtype: tf.DType) -> Any:
        lengths = [size or unknown_size for size in shape]
        size = math.prod(lengths[1:])
        places = tf.random.stateless_uniform([lengths[0], _SPARSE_ELEMENTS], [seed, 0], 0, size, tf.int64)
        places += size * tf.range(lengths[0], dtype=tf.int64)[:, tf.newaxis]
        places, _ = tf.unique(tf.sort(tf.reshape(places, [-1])))
        indices = tf.transpose(tf.unravel_index(places, tf.constant(lengths, tf.int64)))
        return tf.SparseTensor(indices, dense(i, places.shape, dtype), lengths)

    def like(i: int, tensor: Any) -> Any:
        dtype = tf.as_dtype(tensor.dtype)
        if isinstance(tensor, tf.SparseTensor | tf.SparseTensorSpec):
            return sparse(i, tensor.shape, dtype)
        if not isinstance(tensor, tf.RaggedTensor | tf.RaggedTensorSpec):
            return dense(i, tensor.shape, dtype)
        spec = spec_of(tensor)
        return ragged(i, tensor.shape, dtype, spec.ragged_rank, spec.row_splits_dtype)

    return {id(tensor): like(i, tensor) for i, tensor in enumerate(symbolic)}
