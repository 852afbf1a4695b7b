"""A function of one row -> one of a shard's rows, row by row: `tf.map_fn`, with gradients for ragged and sparse rows too.

Where rows or results are ragged or sparse, `tf.map_fn` encodes each. What is encoded has no gradient in a function that
another one calls, and sparse tensors have none at all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from devicemap.errors import failure
from devicemap.internals.gradients import differentiate_values_alone
from devicemap.nests import as_nodes, check_same_structure
from devicemap.options import Options
from devicemap.rows import carried, carried_dtype, count_rows, restored


def mapped(row_fn: Any, specs: list[Any], options: Options, structure: Any, at_once: int | None = None) -> Any:
    """The `ConcreteFunction` of a shard's leaves that calls that of one row for each, one after another.

    `at_once`: how many rows may be under way at the same time; `None` for as many as TensorFlow likes.

    Raises:
        FunctionError: `fn_output_signature` is not what the function of one row returns.
    """
    differentiate_values_alone(row_fn.graph)
    signature = _signature(row_fn, specs, options, structure)
    sparse = {i for i, spec in enumerate(signature) if isinstance(spec, tf.SparseTensorSpec)}
    narrow = {i: leaf.dtype for i, leaf in enumerate(row_fn.structured_outputs) if _is_narrow(leaf, signature[i])}
    taken_apart = [_parts_spec(spec) if i in sparse else spec for i, spec in enumerate(signature)]
    for i in narrow:
        taken_apart[i] = tf.TensorSpec(getattr(signature[i], "shape", None), tf.float16)

    @tf.function(autograph=False)
    def over_rows(*leaves: Any) -> list[Any]:
        takers = {i: _row_taker(leaf) for i, leaf in enumerate(leaves) if not isinstance(leaf, tf.Tensor)}
        rows = list(map(carried, leaves))
        for i in takers:
            rows[i] = tf.range(tf.cast(count_rows(leaves[i]), tf.int32))

        def run(row: Sequence[Any]) -> list[Any]:
            taken = (takers[i](leaf) if i in takers else restored(leaf, specs[i].dtype) for i, leaf in enumerate(row))
            results = row_fn(*taken)
            results = [carried(leaf) if i in narrow else leaf for i, leaf in enumerate(results)]
            return [_parts(leaf) if i in sparse else leaf for i, leaf in enumerate(results)]

        results = tf.map_fn(run, tuple(rows), fn_output_signature=taken_apart, parallel_iterations=at_once)
        results = [restored(leaf, narrow[i]) if i in narrow else leaf for i, leaf in enumerate(results)]
        return [_joined(leaf, signature[i].shape) if i in sparse else leaf for i, leaf in enumerate(results)]

    return over_rows.get_concrete_function(*specs)


def _is_narrow(leaf: Any, spec: Any) -> bool:
    """Whether `tf.map_fn` is to collect dense results that lists cannot hold as they are."""
    return (
        isinstance(leaf, tf.Tensor)
        and not isinstance(spec, tf.RaggedTensorSpec)
        and carried_dtype(leaf.dtype) != leaf.dtype
    )


def _row_taker(leaf: Any) -> Callable[[Any], Any]:
    """What gives row `i` of a ragged or sparse tensor."""
    if isinstance(leaf, tf.SparseTensor):
        leaf = tf.sparse.reorder(leaf)
        row = leaf.indices[:, 0]
        sizes = tf.math.unsorted_segment_sum(tf.ones_like(row), row, leaf.dense_shape[0])
        inner, values = (tf.RaggedTensor.from_row_lengths(x, sizes) for x in (leaf.indices[:, 1:], leaf.values))
        place, value, known, shape = _row_taker(inner), _row_taker(values), leaf.shape[1:], leaf.dense_shape[1:]
        return lambda i: tf.SparseTensor(place(i), value(i), known if known.is_fully_defined() else shape)
    values = leaf.values
    if isinstance(values, tf.RaggedTensor):
        sizes = _row_taker(leaf.with_values(values.row_lengths()))
        splits = tf.gather(values.row_splits, leaf.row_splits)
        flat = _row_taker(tf.RaggedTensor.from_row_splits(values.values, splits, validate=False))
        return lambda i: tf.RaggedTensor.from_row_lengths(flat(i), sizes(i), validate=False)
    shape = [None, *values.shape[1:]]
    array = tf.TensorArray(values.dtype, 0, dynamic_size=True, infer_shape=False, element_shape=shape)
    take: Callable[[Any], Any] = array.split(values, leaf.row_lengths()).read
    return take


def _parts_spec(spec: Any) -> tuple[Any, Any, Any]:
    rank = spec.shape.rank
    return (
        tf.RaggedTensorSpec([None, rank], tf.int64, ragged_rank=0),
        tf.RaggedTensorSpec([None], spec.dtype, ragged_rank=0),
        tf.TensorSpec([rank], tf.int64),
    )


def _parts(leaf: Any) -> tuple[Any, Any, Any]:
    """A sparse tensor as dense ones."""
    return leaf.indices, leaf.values, leaf.dense_shape


def _joined(parts: tuple[Any, Any, Any], known: Any) -> Any:
    """Rows as one sparse tensor, as large as the largest, of their ragged places and values and their shapes."""
    places, values, shapes = parts
    row = tf.cast(places.value_rowids(), tf.int64)
    indices = tf.concat([row[:, None], places.values], 1)
    shape = tf.concat([tf.shape(shapes, tf.int64)[:1], tf.reduce_max(shapes, 0)], 0)
    joined = tf.SparseTensor(indices, values.values, shape)
    joined.set_shape(tf.TensorShape([None]).concatenate(known))
    return joined


def _signature(row_fn: Any, specs: list[Any], options: Options, structure: Any) -> list[Any]:
    """What `tf.map_fn` is to expect: as `fn` returned it when it was traced, or as the user says.

    Where the data is ragged, rows of unknown length make ragged results, as in `tf.map_fn`.
    """
    outputs = row_fn.structured_outputs
    returned = [tf.type_spec_from_value(leaf) for leaf in outputs]
    if ragged := [spec for spec in specs if isinstance(spec, tf.RaggedTensorSpec)]:
        returned = [_as_ragged(spec, ragged[0].row_splits_dtype) for spec in returned]
    if options.fn_output_signature is None:
        return returned
    given = as_nodes(options.fn_output_signature)
    try:
        check_same_structure(given, structure)
    except (TypeError, ValueError) as error:
        raise failure(
            f"fn_output_signature is {options.fn_output_signature}, but fn returns "
            f"{tf.nest.pack_sequence_as(structure, returned)}: the nests must be the same"
        ) from error
    flat = list(tf.nest.flatten(given))
    for spec, leaf in zip(flat, outputs):
        dtype = tf.as_dtype(getattr(spec, "dtype", spec))
        if dtype != leaf.dtype:
            raise failure(
                f"fn_output_signature has {dtype.name} where fn returns {leaf.dtype.name}; they must be the same"
            )
    return flat


def _as_ragged(spec: Any, row_splits_dtype: Any) -> Any:
    if isinstance(spec, tf.TensorSpec) and spec.shape.rank and spec.shape[0] is None:
        return tf.RaggedTensorSpec(spec.shape, spec.dtype, 0, row_splits_dtype)
    return spec
