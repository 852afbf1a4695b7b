"""The serial oracle: what law 1 says a parallel map must equal, and how to compare."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import tensorflow as tf


def serial(fn: Any, data: Any, batched: bool, signature: Any = None) -> Any:
    """`fn` over `data` on one device, as the hand would write it."""
    unpack, of_tensors = type(data) is tuple, signature is None
    if batched:
        return fn(*data) if unpack else fn(data)

    @tf.function
    def row(*elements: Any) -> Any:
        return tensors(fn(*elements)) if of_tensors else fn(*elements)

    if signature is None and not any(isinstance(leaf, tf.RaggedTensor) for leaf in tf.nest.flatten(data)):
        specs = tf.nest.map_structure(lambda leaf: tf.TensorSpec(leaf.shape[1:], leaf.dtype), data)
        results = row.get_concrete_function(*(specs if unpack else (specs,))).structured_outputs
        signature = tf.nest.map_structure(lambda leaf: tf.TensorSpec(leaf.shape, leaf.dtype), results)

    @tf.function
    def mapped(data: Any) -> Any:
        return tf.map_fn(lambda e: row(*e) if unpack else row(e), data, fn_output_signature=signature)

    return mapped(data)


def one_by_one(fn: Any, data: Any) -> Any:
    """`fn` of each row in eager code, which traces nothing: of dense leaves, of which a tuple is several arguments."""
    rows = [tf.nest.map_structure(lambda leaf: leaf[i], data) for i in range(len(tf.nest.flatten(data)[0]))]
    results = [tensors(fn(*row) if type(row) is tuple else fn(row)) for row in rows]
    return tf.nest.map_structure(lambda *leaves: tf.stack(leaves), *results)


def gradients_of(mapped: Any, *sources: Any) -> list[Any]:
    """Gradients of the sum of squares of what `mapped` makes of the first source, by all real leaves of the sources.

    Zeros where there is none.
    """
    leaves = [leaf for leaf in tf.nest.flatten(sources) if leaf.dtype.is_floating]
    with tf.GradientTape() as tape:
        tape.watch(leaves)
        results = [leaf for leaf in tf.nest.flatten(mapped(sources[0])) if leaf.dtype.is_floating]
        totals = [tf.reduce_sum(leaf**2) for leaf in results]
    return [*map(tf.convert_to_tensor, tape.gradient(totals, leaves, unconnected_gradients="zero"))]


def assert_one_by_one(mapped: Any, fn: Any, data: Any, *variables: Any, rtol: float = 1e-4, atol: float = 1e-5) -> None:
    """What `mapped` returns are results of single rows, and so are gradients by rows and variables."""
    alone = partial(one_by_one, fn)
    results = mapped(data)
    assert_same(results, alone(data), rtol=rtol, atol=atol)
    if any(leaf.dtype.is_floating for leaf in tf.nest.flatten(results)):
        got, wanted = (gradients_of(each, data, *variables) for each in (mapped, alone))
        assert_same(got, wanted, rtol=rtol, atol=atol)


def tensors(nest: Any) -> Any:
    """tf.data's convention for what a function returns, which tf.map_fn does not share: lists become tensors."""
    if isinstance(nest, dict):
        return {key: tensors(value) for key, value in nest.items()}
    if isinstance(nest, tuple):
        made = [tensors(value) for value in nest]
        return type(nest)(*made) if hasattr(nest, "_fields") else tuple(made)
    return tf.stack(nest) if isinstance(nest, list) else nest


def assert_same(got: Any, wanted: Any, exact: bool = False, rtol: float = 1e-5, atol: float = 1e-6) -> None:
    """Same structure, dtypes, static shapes and values, to rounding unless `exact`."""
    tf.nest.assert_same_structure(got, wanted)
    for a, b in zip(tf.nest.flatten(got), tf.nest.flatten(wanted)):
        assert type(a) is type(b)
        assert a.dtype == b.dtype
        if isinstance(a, tf.SparseTensor):
            a, b = tf.sparse.to_dense(tf.sparse.reorder(a)), tf.sparse.to_dense(tf.sparse.reorder(b))
        if isinstance(a, tf.RaggedTensor):
            assert a.ragged_rank == b.ragged_rank
            for x, y in zip(a.nested_row_splits, b.nested_row_splits):
                assert x.dtype == y.dtype
                np.testing.assert_array_equal(x, y)
            a, b = a.flat_values, b.flat_values
        assert a.shape == b.shape
        if a.dtype == tf.bfloat16:  # which NumPy does not compare with its own numbers
            a, b = tf.cast(a, tf.float32), tf.cast(b, tf.float32)
        if exact or not (a.dtype.is_floating or a.dtype.is_complex):
            np.testing.assert_array_equal(a.numpy(), b.numpy())
        else:
            np.testing.assert_allclose(a.numpy(), b.numpy(), rtol=rtol, atol=atol)


def assert_close(got: Any, wanted: Any, rtol: float = 1e-4, atol: float = 1e-5) -> None:
    """The same numbers, in nests that may be of lists or tuples."""
    tf.nest.assert_same_structure(got, wanted, check_types=False)
    for a, b in zip(tf.nest.flatten(got), tf.nest.flatten(wanted)):
        np.testing.assert_allclose(a, b, rtol=rtol, atol=atol)


def first_rows(data: Any, rows: int) -> Any:
    """The first `rows` rows of every leaf."""

    def take(leaf: Any) -> Any:
        if isinstance(leaf, tf.SparseTensor):
            return tf.sparse.slice(leaf, [0] * leaf.shape.rank, [rows, *leaf.shape[1:]])
        return leaf[:rows]

    return tf.nest.map_structure(take, data)
