"""Actors of Ray. Each has a `DeviceMap`, or a function that reduces the rows of a block to a state.

Columns of Arrow tables are converted to rows for TensorFlow, and back, with few copies and without Python code for each row:

    numbers, booleans, text    [rows]
    Ray's tensors              [rows, ...]; ragged if rows differ in the length of their first axis
    lists, and lists of these  ragged [rows, None, ...]; dense [rows, size, ...] for fixed-size lists
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from devicemap.api import DeviceMap
from devicemap.compile.program import Program
from devicemap.compile.random import seeds_of_rows
from devicemap.compile.reduction import BoundReduction, Reduction
from devicemap.errors import DataError, failure
from devicemap.inspect.recorder import Observers
from devicemap.run.mapper import Mapper
from devicemap.store.export import RESULT, as_arrow

NUMBER = "devicemap.row"
"""The column of row numbers."""

STATE = "state"
"""The column of states."""


class Actor:
    """Maps or reduces blocks, from a table to columns."""

    def __init__(self, job: Any, seed: int | None, gpus: bool):
        """`job`: pickled `fn`, reducer or `None`, and options. Unpickling variables starts TensorFlow."""
        # Ray does not hide GPUs. With a `runtime_env` that hides them, Ray would read blocks in tasks that need further CPUs.
        if not gpus:
            os.environ["CUDA_VISIBLE_DEVICES"] = ""
        fn, reducer, options = pickle.loads(job)
        self._run: Callable[[Any], Any] = (
            DeviceMap(fn, **options) if reducer is None else _reducing(fn, reducer, options)
        )
        self._seed = seed

    def __call__(self, block: Any) -> dict[str, Any]:
        data: Any = rows_of(block)
        if self._seed is not None:
            data = data, seeds_of_rows(self._seed, data.pop(NUMBER))
        return columns_of(self._run(data))


def pickled(value: Any) -> bytes:
    """Pickle an object, also functions and classes of the program, by value."""
    from ray import cloudpickle

    return bytes(cloudpickle.dumps(value))  # type: ignore[no-untyped-call]


def _reducing(fn: Callable[..., Any], reducer: Any, options: dict[str, Any]) -> Callable[[Any], Any]:
    """Return a function that reduces rows to one pickled state."""
    program = Program(fn, options)
    return Mapper(program.reducing(_Unfinished(reducer)), Observers(program)).run


class _Unfinished(Reduction):
    """A reduction that ends with a state, and with the structure and specs that are needed to finish it."""

    def of(self, structure: Any, specs: Sequence[Any]) -> BoundReduction:
        bound = super().of(structure, specs)

        def packed(leaves: Sequence[Any]) -> Any:
            state = structure, specs, [leaf.numpy() for leaf in leaves]  # may refer to classes of the program
            return {STATE: tf.constant([pickled(state)])}

        bound.finish_state = lambda states: bound.merge_states([states])  # type: ignore[method-assign]
        bound.pack_result = packed  # type: ignore[method-assign]
        return bound


def rows_of(table: Any) -> dict[str, Any]:
    """Return the columns of a `pyarrow.Table` as arrays and `RaggedTensor`s, by name."""
    import pyarrow as pa
    from ray.data.block import BlockAccessor

    def of_array(name: str, array: Any) -> Any:
        kind = array.type
        if pa.types.is_null(kind) and table.num_rows:
            raise DataError(
                f"column {name!r} of a block has only missing values or empty lists, of unknown type; cast it first, by "
                "map_batches"
            )
        if array.null_count and not pa.types.is_floating(kind):
            raise DataError(
                f"column {name!r} has {array.null_count} missing values of type {kind}; fill or drop them first"
            )
        if pa.types.is_list(kind) or pa.types.is_large_list(kind):
            lengths = array.value_lengths().to_numpy().astype(np.int64)  # TensorFlow's default for row splits
            return tf.RaggedTensor.from_row_lengths(of_array(name, array.flatten()), lengths, validate=False)
        if pa.types.is_fixed_size_list(kind):
            values = of_array(name, array.flatten())
            if isinstance(values, tf.RaggedTensor):
                return tf.RaggedTensor.from_uniform_row_length(values, kind.list_size, len(array))
            return tf.reshape(values, [len(array), kind.list_size, *values.shape[1:]])
        if pa.types.is_null(kind):
            array = array.cast(pa.float64())
        column: Any = BlockAccessor.for_block(pa.table({name: array})).to_numpy(name)
        return _checked(name, kind, column)

    columns = zip(table.column_names, table.columns)
    return {name: of_array(name, c.chunk(0) if c.num_chunks == 1 else c.combine_chunks()) for name, c in columns}


def _checked(name: str, kind: Any, column: np.ndarray) -> Any:
    """Return a column of NumPy for TensorFlow. Rows of different shapes, which are an array of arrays, become ragged."""
    if column.dtype.kind in "biuf" or not len(column) or isinstance(column[0], str | bytes):
        return column
    rows = [np.asarray(row) for row in column] if column.dtype == object else []
    shapes = {(row.dtype, row.shape[1:]) for row in rows}
    if len(shapes) != 1 or not rows[0].shape or rows[0].dtype.kind not in "biuf":
        raise DataError(
            f"column {name!r} is of type {kind}; expected numbers, booleans, text, lists of these, or tensors that differ in "
            "the length of their first axis alone. Leave the column out, for instance by select_columns, or convert it first"
        )
    return tf.RaggedTensor.from_row_lengths(np.concatenate(rows), [len(row) for row in rows], validate=False)


def columns_of(result: Any) -> dict[str, Any]:
    """Return the result of `fn`, a dict of columns or one column, as arrays of NumPy and Arrow by name."""
    import pyarrow as pa

    results, columns = result if isinstance(result, Mapping) else {RESULT: result}, {}
    for name, column in results.items():
        if not isinstance(name, str) or not isinstance(column, tf.Tensor | tf.RaggedTensor):
            raise failure(f"fn returns {results!r}; expected a dict of columns, dense or ragged, or one such tensor")
        if isinstance(column, tf.Tensor):
            columns[name] = np.asarray(column)  # without the copy that `.numpy()` makes
            if columns[name].dtype.kind in "biuf":
                continue  # Ray converts arrays with inner axes to its tensors
        try:
            columns[name] = as_arrow(pa, column)
        except pa.ArrowException as error:
            raise failure(
                f"fn returns {name!r} of {column.dtype.name}, which Arrow cannot hold ({error}); cast it, or return its parts"
            ) from error
    return columns
