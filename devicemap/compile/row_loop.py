"""A function of one row -> one of a shard's rows, row by row: `tf.map_fn`, with gradients for ragged and sparse rows too.

Where rows or results are ragged or sparse, `tf.map_fn` encodes each. What is encoded has no gradient in a function that
another one calls, and sparse tensors have none at all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from devicemap._tensorflow.gradients import differentiate_values_alone
from devicemap.base.devices import kind_of
from devicemap.base.options import Options
from devicemap.base.structure import as_nodes, check_same_structure
from devicemap.compile.collect import Kept, carrier_of, collected
from devicemap.compile.kernels import is_made_on_host, is_taken_on_host
from devicemap.data.rows import HOST, count_rows
from devicemap.errors import failure, function_error


def mapped(row_fn: Any, specs: list[Any], options: Options, structure: Any, at_once: int | None = None) -> Any:
    """The `ConcreteFunction` of a shard's leaves that calls that of one row for each, one after another.

    `at_once`: how many rows may be under way at the same time; `None` for as many as TensorFlow likes.

    Raises:
        FunctionError: `fn_output_signature` is not what the function of one row returns.
    """
    differentiate_values_alone(row_fn.graph)
    signature = signature_of(row_fn, specs, options, structure)
    dense = all(isinstance(spec, tf.TensorSpec) for spec in signature)

    @tf.function(autograph=False)
    def over_rows(*leaves: Any) -> list[Any]:
        takers = [
            _row_taker(leaf, isinstance(leaf, tf.Tensor) and is_taken_on_host(row_fn.graph, row_fn.inputs[i]))
            for i, leaf in enumerate(leaves)
        ]

        def run(row: Any) -> list[Any]:
            return list(row_fn(*(take(row) for take in takers)))

        rows = count_rows(leaves[0], tf.int32)
        if dense and not options.jit_compile:  # for which TensorFlow wants to know how many steps there are at most
            on_cpus = all(kind_of(device) == "CPU" for device in options.devices or ())
            return collected(run, rows, _kept_of(row_fn, signature, options), at_once, bounded=on_cpus)
        return _mapped(run, rows, row_fn, signature, at_once)

    return over_rows.get_concrete_function(*specs)


def row_by_row(
    run: Callable[[Sequence[Any]], list[Any]], leaves: Sequence[Any], rows: Any, like: Sequence[Any]
) -> list[Any]:
    """Call `run` with each row of the leaves, and stack its results, which have the dtypes and shapes of `like`."""
    takers = [_row_taker(leaf, on_host=True) for leaf in leaves]
    kept = [Kept(each.dtype, each.shape, carrier_of(each.dtype, True)) for each in like]
    return collected(lambda row: run([take(row) for take in takers]), rows, kept)


def _kept_of(row_fn: Any, signature: Sequence[Any], options: Options) -> list[Kept]:
    """How its results are kept until all rows are done, on the devices of the options."""
    kinds = {kind_of(device) for device in options.devices or ()}
    kept = []
    for leaf, spec in zip(row_fn.outputs, signature):
        on_host = bool(kinds) and "CPU" not in kinds and leaf.dtype == tf.int32 and is_made_on_host(row_fn.graph, leaf)
        kept.append(
            Kept(leaf.dtype, spec.shape, carrier_of(leaf.dtype, bool(kinds - {"CPU"})), HOST if on_host else None)
        )
    return kept


def _mapped(
    run: Callable[[Any], list[Any]], rows: Any, row_fn: Any, signature: Sequence[Any], at_once: int | None
) -> list[Any]:
    """What `run` gives for each of so many rows, by `tf.map_fn`, which also collects what is ragged."""
    sparse = {i for i, spec in enumerate(signature) if isinstance(spec, tf.SparseTensorSpec)}
    taken_apart = [_parts_spec(spec) if i in sparse else spec for i, spec in enumerate(signature)]

    def parts_of(row: Any) -> list[Any]:
        return [_parts(leaf) if i in sparse else leaf for i, leaf in enumerate(run(row))]

    results = tf.map_fn(parts_of, tf.range(rows), fn_output_signature=taken_apart, parallel_iterations=at_once)
    return [_joined(leaf, signature[i].shape) if i in sparse else leaf for i, leaf in enumerate(results)]


def _row_taker(leaf: Any, on_host: bool) -> Callable[[Any], Any]:
    """Return a function of `i` that returns row `i` of a leaf. `on_host`: whether int32 rows are used on the host."""
    if not isinstance(leaf, tf.Tensor):
        return _row_taker_of_parts(leaf)
    has_gradient = not (leaf.dtype.is_integer or leaf.dtype in (tf.bool, tf.string))
    if not has_gradient and (leaf.dtype != tf.int32 or on_host):  # no list is needed
        return lambda i: leaf[i]
    array = tf.TensorArray(leaf.dtype, tf.shape(leaf)[0], element_shape=leaf.shape[1:]).unstack(leaf)
    return array.read


def _row_taker_of_parts(leaf: Any) -> Callable[[Any], Any]:
    """What gives row `i` of a ragged or sparse tensor."""
    if isinstance(leaf, tf.SparseTensor):
        leaf = tf.sparse.reorder(leaf)
        row = leaf.indices[:, 0]
        sizes = tf.math.unsorted_segment_sum(tf.ones_like(row), row, leaf.dense_shape[0])
        inner, values = (tf.RaggedTensor.from_row_lengths(x, sizes) for x in (leaf.indices[:, 1:], leaf.values))
        place, value = map(_row_taker_of_parts, (inner, values))
        known, shape = leaf.shape[1:], leaf.dense_shape[1:]
        return lambda i: tf.SparseTensor(place(i), value(i), known if known.is_fully_defined() else shape)
    values = leaf.values
    if isinstance(values, tf.RaggedTensor):
        sizes = _row_taker_of_parts(leaf.with_values(values.row_lengths()))
        splits = tf.gather(values.row_splits, leaf.row_splits)
        flat = _row_taker_of_parts(tf.RaggedTensor.from_row_splits(values.values, splits, validate=False))
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


def signature_of(row_fn: Any, specs: list[Any], options: Options, structure: Any) -> list[Any]:
    """What `tf.map_fn` is to expect: as `fn` returned it when it was traced, or as the user says.

    Where the data is ragged, rows of unknown length make ragged results, as in `tf.map_fn`.
    """
    outputs = row_fn.structured_outputs
    returned = [tf.type_spec_from_value(leaf) for leaf in outputs]
    if ragged := [spec for spec in specs if isinstance(spec, tf.RaggedTensorSpec)]:
        returned = [_as_ragged(spec, ragged[0].row_splits_dtype) for spec in returned]
    if options.fn_output_signature is None:
        return returned
    given = as_nodes(options.fn_output_signature, lists=lambda path: True)
    try:
        check_same_structure(given, structure)
    except (TypeError, ValueError) as error:
        raise function_error(
            f"fn_output_signature is {options.fn_output_signature}, but fn returns "
            f"{tf.nest.pack_sequence_as(structure, returned)}: the nests must be the same",
            error,
        ) from error
    flat = list(tf.nest.flatten(given))
    for spec, leaf in zip(flat, outputs):
        if isinstance(leaf, tf.Tensor) and not isinstance(spec, tf.RaggedTensorSpec | tf.SparseTensorSpec):
            dtype = tf.as_dtype(getattr(spec, "dtype", spec))
            if dtype != leaf.dtype:
                raise failure(
                    f"fn_output_signature has {dtype.name} where fn returns {leaf.dtype.name}; they must be the same"
                )
        elif not (isinstance(spec, tf.TypeSpec) and spec.is_compatible_with(tf.type_spec_from_value(leaf))):
            wrong = f"fn_output_signature has {spec} where fn returns {tf.type_spec_from_value(leaf)}"
            raise function_error(f"{wrong}; they must be compatible", ValueError(wrong))
    return flat


def _as_ragged(spec: Any, row_splits_dtype: Any) -> Any:
    if isinstance(spec, tf.TensorSpec) and spec.shape.rank and spec.shape[0] is None:
        return tf.RaggedTensorSpec(spec.shape, spec.dtype, 0, row_splits_dtype)
    return spec
