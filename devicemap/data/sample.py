"""The first rows of the user's data, in memory."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from devicemap.data.join import join
from devicemap.data.rows import HOST, Rows, as_rows, take_rows
from devicemap.data.sources import from_dataset
from devicemap.errors import DataError, FunctionError
from devicemap.options import Options


def rows_in_memory(data: Any, options: Options, most: int | None, most_of_dataset: int) -> Rows:
    """Return the first rows of `data`: at most `most`, or `most_of_dataset` rows of a dataset if `most` is `None`.

    Raises:
        DataError: for data that has no rows or cannot be rows, and for a dataset whose samples do not fit together.
    """
    if isinstance(data, tf.data.Dataset):
        rows = _read_rows(data, options, most or most_of_dataset)
    else:
        rows = as_rows(data)
    if not rows.count:
        raise DataError("data has no rows; expected at least one, better many more than there are devices")
    return rows if most is None else first_rows(rows, most)


def first_rows(rows: Rows, most: int) -> Rows:
    """Return at most `most` rows from the start."""
    if rows.count is not None and rows.count <= most:
        return rows
    with tf.device(HOST):
        return as_rows(tf.nest.map_structure(lambda leaf: take_rows(leaf, 0, most), rows.structure))


def _read_rows(dataset: Any, options: Options, most: int) -> Rows:
    source = from_dataset(dataset, options)
    chunks, count = [], 0
    while count < most and (chunk := source.take(most - count)) is not None:
        chunks.append(chunk.leaves)
        count += chunk.count
    source.close()
    if not chunks:
        raise DataError("the dataset is empty; expected at least one row, better many more than there are devices")
    try:
        with tf.device(HOST):
            leaves = [join(parts) for parts in zip(*chunks)]
    except FunctionError as error:
        raise DataError(
            f"the first {count} rows of the dataset have different inner shapes, and cannot be held in memory together; "
            "pass some of them as a tf.RaggedTensor, or pad them to one shape"
        ) from error
    return first_rows(as_rows(tf.nest.pack_sequence_as(source.specs, leaves)), most)
