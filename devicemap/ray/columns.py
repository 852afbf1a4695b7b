"""Convert columns of Arrow tables to rows for TensorFlow, and back, with few copies and without Python code for each row.

numbers, booleans, text    [rows]
Ray's tensors              [rows, ...]; ragged if rows differ in the length of their first axis
lists, and lists of these  ragged [rows, None, ...]; dense [rows, size, ...] for fixed-size lists
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from devicemap.errors import DataError, failure
from devicemap.store.export import RESULT, as_arrow


def rows_of(table: Any) -> dict[str, Any]:
    """Return the columns of a `pyarrow.Table` as arrays and `RaggedTensor`s, by name.

    Raises:
        DataError: a column is of a type that TensorFlow does not have, or has missing values that are not NaN.
    """
    import pyarrow as pa
    from ray.data.block import BlockAccessor

    def of_array(name: str, array: Any) -> Any:
        kind = array.type
        if array.null_count and not pa.types.is_floating(kind):
            raise DataError(
                f"column {name!r} has {array.null_count} missing values of type {kind}; fill or drop them first"
            )
        if pa.types.is_list(kind) or pa.types.is_large_list(kind):
            lengths = array.value_lengths().to_numpy().astype(np.int64)  # TensorFlow's default for row splits
            return tf.RaggedTensor.from_row_lengths(of_array(name, array.flatten()), lengths, validate=False)
        if pa.types.is_fixed_size_list(kind):
            values = of_array(name, array.flatten())
            return tf.reshape(values, [len(array), kind.list_size, *values.shape[1:]])
        if pa.types.is_null(kind):  # the values of lists that are all empty
            array = array.cast(pa.float64())
        column: Any = BlockAccessor.for_block(pa.table({name: array})).to_numpy(name)
        return _checked(name, kind, column)

    chunked = {name: table.column(name) for name in table.column_names}
    return {
        name: of_array(name, column.chunk(0) if column.num_chunks == 1 else column.combine_chunks())
        for name, column in chunked.items()
    }


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
    """Return the result of `fn` as arrays of NumPy and Arrow, by name.

    Raises:
        FunctionError: the result is neither a dict of columns nor one column.
    """
    columns = result if isinstance(result, Mapping) else {RESULT: result}
    for name, column in columns.items():
        if not isinstance(name, str) or not isinstance(column, tf.Tensor | tf.RaggedTensor):
            raise failure(f"fn returns {columns!r}; expected a dict of columns, dense or ragged, or one such tensor")
    return {name: _column_of(name, column) for name, column in columns.items()}


def _column_of(name: str, column: Any) -> Any:
    import pyarrow as pa

    if isinstance(column, tf.Tensor):
        array = np.asarray(column)  # without the copy that `.numpy()` makes
        if array.dtype.kind in "biuf":
            return array  # Ray converts arrays with inner axes to its tensors
    try:
        return as_arrow(pa, column)
    except pa.ArrowException as error:
        raise failure(
            f"fn returns {name!r} of {column.dtype.name}, which Arrow cannot hold ({error}); cast it, or return its parts"
        ) from error
