"""Map a function of one row over the rows of a shard, one after another, like `tf.map_fn`.

For dense results, the loop of this module replaces that of `tf.map_fn`, which copies to or from a GPU in each step
(test_rows_one_by_one_send_nothing_in_a_step). The `tf.while_loop` of `tf.map_fn` has a maximum number of iterations, and GPUs
have no kernels for TensorLists of most integers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from devicemap._tensorflow.gradients import differentiate_values_alone
from devicemap.data.rows import count_rows
from devicemap.data.structure import as_nodes, check_same_structure
from devicemap.devices import kind_of
from devicemap.errors import failure, function_error
from devicemap.options import Options

LIST_DTYPES = {
    **dict.fromkeys((tf.int8, tf.uint8, tf.int16, tf.uint16), tf.float16),
    tf.uint32: tf.float32,
    tf.uint64: tf.float64,
}
"""Integers without TensorList kernels on GPUs, and dtypes that hold their bits (or numbers, for 8 bits)."""

PARALLEL_ITERATIONS = 10
"""The number of rows that run at the same time: the default of `tf.map_fn`."""


def map_rows(row_fn: Any, specs: list[Any], options: Options, signature: Sequence[Any], parallel: int) -> Any:
    """Return the `ConcreteFunction` of a shard's leaves that calls the function of one row for each row.

    Args:
        row_fn: the `ConcreteFunction` of one row.
        specs: `tf.TypeSpec`s of the leaves.
        options: `jit_compile` and `devices` are used.
        signature: from `signature_of`.
        parallel: how many rows may run at the same time.
    """
    differentiate_values_alone(row_fn.graph)
    dense = all(isinstance(spec, tf.TensorSpec) for spec in signature)

    @tf.function(autograph=False)
    def over_rows(*leaves: Any) -> list[Any]:
        readers = [_row_reader(leaf) for leaf in leaves]

        def run(row: Any) -> list[Any]:
            return list(row_fn(*(read(row) for read in readers)))

        rows = count_rows(leaves[0], tf.int32)
        if not dense or options.jit_compile:  # XLA needs the maximum number of iterations
            return _map_ragged_rows(run, rows, signature, parallel)
        kept = [tf.TensorSpec(spec.shape, leaf.dtype) for leaf, spec in zip(row_fn.outputs, signature)]
        on_cpus = all(kind_of(device) == "CPU" for device in options.devices)
        return _stack_rows(run, rows, kept, parallel, bounded=on_cpus)

    return over_rows.get_concrete_function(*specs)


def row_by_row(
    run: Callable[[Sequence[Any]], list[Any]], leaves: Sequence[Any], rows: Any, like: Sequence[Any]
) -> list[Any]:
    """Call `run` with each row of the leaves, and stack its results, which have the dtypes and shapes of `like`."""
    readers = [_row_reader(leaf) for leaf in leaves]
    return _stack_rows(lambda row: run([read(row) for read in readers]), rows, like)


def signature_of(row_fn: Any, specs: list[Any], options: Options, structure: Any) -> list[Any]:
    """Return the `fn_output_signature` for `tf.map_fn`, from the user or from the traced function.

    If the data is ragged, results of unknown length are ragged, as in `tf.map_fn`.

    Raises:
        FunctionError: the user's signature does not fit the results of the function.
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
    flat = [spec if isinstance(spec, tf.TypeSpec) else tf.as_dtype(spec) for spec in tf.nest.flatten(given)]
    for spec, leaf in zip(flat, outputs):
        wanted = tf.TensorSpec(None, spec) if isinstance(spec, tf.DType) else spec
        if isinstance(leaf, tf.Tensor) and isinstance(wanted, tf.TensorSpec) and wanted.dtype != leaf.dtype:
            raise failure(
                f"fn_output_signature has {wanted.dtype.name} where fn returns {leaf.dtype.name}; they must be the same"
            )
        if not wanted.is_compatible_with(tf.type_spec_from_value(leaf)):
            wrong = f"fn_output_signature has {spec} where fn returns {tf.type_spec_from_value(leaf)}"
            raise function_error(f"{wrong}; they must be compatible", ValueError(wrong))
    return flat


def _as_ragged(spec: Any, row_splits_dtype: Any) -> Any:
    if isinstance(spec, tf.TensorSpec) and spec.shape.rank and spec.shape[0] is None:
        return tf.RaggedTensorSpec(spec.shape, spec.dtype, 0, row_splits_dtype)
    return spec


def _stack_rows(
    run: Callable[[Any], Sequence[Any]],
    rows: Any,
    like: Sequence[Any],
    parallel: int = PARALLEL_ITERATIONS,
    bounded: bool = False,
) -> list[Any]:
    """Call `run` with the index of each row, and stack its dense results, which have the dtypes and shapes of `like`.

    `bounded` gives the loop a maximum number of iterations, which XLA needs for gradients
    (test_gradients_of_rows_one_by_one_in_a_compiled_function).
    """
    dtypes = [LIST_DTYPES.get(each.dtype, each.dtype) for each in like]
    arrays = [tf.TensorArray(dtype, rows, element_shape=each.shape) for dtype, each in zip(dtypes, like)]

    def step(row: Any, arrays: Sequence[Any]) -> tuple[Any, list[Any]]:
        written = [a.write(row, _recast(dtype, result)) for a, dtype, result in zip(arrays, dtypes, run(row))]
        return row + 1, written

    _, arrays = tf.while_loop(
        lambda row, _: row < rows,
        step,
        (0, arrays),
        parallel_iterations=parallel,
        maximum_iterations=rows if bounded else None,
    )
    return [_recast(each.dtype, array.stack()) for each, array in zip(like, arrays)]


def _recast(dtype: Any, leaf: Any) -> Any:
    """Return a leaf in a dtype that holds its bits, or its numbers if the sizes differ; and back."""
    if leaf.dtype == dtype:
        return leaf
    return tf.bitcast(leaf, dtype) if leaf.dtype.size == dtype.size else tf.cast(leaf, dtype)


def _map_ragged_rows(run: Callable[[Any], list[Any]], rows: Any, signature: Sequence[Any], parallel: int) -> list[Any]:
    """Call `run` with the index of each row by `tf.map_fn`, which encodes ragged results.

    Sparse results are passed as dense and ragged tensors, because the encoding of a sparse one has no gradient.
    """
    sparse = {i for i, spec in enumerate(signature) if isinstance(spec, tf.SparseTensorSpec)}
    parts = [_parts_spec(spec) if i in sparse else spec for i, spec in enumerate(signature)]

    def parts_of(row: Any) -> list[Any]:
        leaves = enumerate(run(row))
        return [(leaf.indices, leaf.values, leaf.dense_shape) if i in sparse else leaf for i, leaf in leaves]

    results = tf.map_fn(parts_of, tf.range(rows), fn_output_signature=parts, parallel_iterations=parallel)
    return [_join_parts(leaf, signature[i].shape) if i in sparse else leaf for i, leaf in enumerate(results)]


def _parts_spec(spec: Any) -> tuple[Any, Any, Any]:
    rank = spec.shape.rank
    return (
        tf.RaggedTensorSpec([None, rank], tf.int64, ragged_rank=0),
        tf.RaggedTensorSpec([None], spec.dtype, ragged_rank=0),
        tf.TensorSpec([rank], tf.int64),
    )


def _join_parts(parts: tuple[Any, Any, Any], row_shape: Any) -> Any:
    """Return one sparse tensor, as large as the largest row, from the ragged indices and values of rows and their shapes."""
    inner, values, shapes = parts
    row = tf.cast(inner.value_rowids(), tf.int64)
    indices = tf.concat([row[:, None], inner.values], 1)
    shape = tf.concat([tf.shape(shapes, tf.int64)[:1], tf.reduce_max(shapes, 0)], 0)
    joined = tf.SparseTensor(indices, values.values, shape)
    joined.set_shape(tf.TensorShape([None]).concatenate(row_shape))
    return joined


def _row_reader(leaf: Any) -> Callable[[Any], Any]:
    """Return a function of `i` that returns row `i` of a leaf.

    Float rows are read from a TensorArray, because the gradient of each slice would be a tensor as large as the leaf.
    """
    if isinstance(leaf, tf.SparseTensor):
        leaf = tf.sparse.reorder(leaf)
        row = leaf.indices[:, 0]
        sizes = tf.math.unsorted_segment_sum(tf.ones_like(row), row, leaf.dense_shape[0])
        inner, values = (tf.RaggedTensor.from_row_lengths(x, sizes) for x in (leaf.indices[:, 1:], leaf.values))
        place, value = map(_row_reader, (inner, values))
        known, shape = leaf.shape[1:], leaf.dense_shape[1:]
        return lambda i: tf.SparseTensor(place(i), value(i), known if known.is_fully_defined() else shape)
    if isinstance(leaf, tf.RaggedTensor):
        return _ragged_row_reader(leaf)
    if leaf.dtype.is_integer or leaf.dtype in (tf.bool, tf.string):
        return lambda i: leaf[i]
    array = tf.TensorArray(leaf.dtype, tf.shape(leaf)[0], element_shape=leaf.shape[1:]).unstack(leaf)
    read: Callable[[Any], Any] = array.read
    return read


def _ragged_row_reader(leaf: Any) -> Callable[[Any], Any]:
    values = leaf.values
    if isinstance(values, tf.RaggedTensor):
        sizes = _row_reader(leaf.with_values(values.row_lengths()))
        splits = tf.gather(values.row_splits, leaf.row_splits)
        flat = _row_reader(tf.RaggedTensor.from_row_splits(values.values, splits, validate=False))
        return lambda i: tf.RaggedTensor.from_row_lengths(flat(i), sizes(i), validate=False)
    shape = [None, *values.shape[1:]]
    array = tf.TensorArray(values.dtype, 0, dynamic_size=True, infer_shape=False, element_shape=shape)
    read: Callable[[Any], Any] = array.split(values, leaf.row_lengths()).read
    return read
