"""Results on disk as files of other formats, written chunk by chunk in bounded memory.

A file gets its name when it is complete and on disk; a file of that name is replaced then.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from devicemap.data.rows import HOST, empty_rows
from devicemap.errors import OptionError
from devicemap.store.encoding import Array

RESULT = "result"
"""The name of results that are no dict."""

_GROUP_BYTES = 2**26
"""Parquet files get row groups of at least this size: small ones are slow to read."""

_CONTENTS = {
    ".npy": "one dense array of numbers",
    ".npz": "a dict of dense arrays of numbers",
    ".parquet": "a dict of dense or ragged arrays of numbers of at most 64 bits, or of strings",
    ".tfrecord": "a dict of dense arrays or ragged lists; of strings, bool, integers of at most 63 bits, or floating-point "
    "numbers of at most 32 bits",
}
"""What files hold, by suffix. A single array is like a dict with the key "result"."""


def check_format(suffix: str, structure: Any) -> None:
    """Raise an error if a file of a format cannot hold results of these specs.

    Raises:
        OptionError: names the result that it cannot hold.
        ImportError: the format needs a package that is not installed.
    """
    if suffix == ".parquet":
        _import_pyarrow()
    columns = structure if isinstance(structure, Mapping) and suffix != ".npy" else {RESULT: structure}
    for name, spec in columns.items():
        if not isinstance(name, str) or not _holds(suffix, spec) or (suffix == ".npz" and name == "file"):
            raise OptionError(
                f"the function returns {name!r}: {spec}, which a {suffix} file cannot hold; it holds {_CONTENTS[suffix]}. Use "
                "another format, or convert the result in fn"
            )


def _holds(suffix: str, spec: Any) -> bool:
    if type(spec) not in (tf.TensorSpec, tf.RaggedTensorSpec):
        return False
    dtype, ragged = np.dtype(spec.dtype.as_numpy_dtype), isinstance(spec, tf.RaggedTensorSpec)
    if suffix == ".tfrecord":
        exact = spec.dtype in (tf.string, tf.bool, tf.bfloat16) or (
            dtype.itemsize <= 4 if dtype.kind == "f" else np.can_cast(dtype, np.int64)
        )
        if not exact or spec.shape.rank is None:
            return False
        return spec.shape.rank == 2 if ragged else spec.shape[2:].is_fully_defined()
    if suffix == ".parquet":
        return dtype.kind in "biufO" and spec.shape.rank is not None
    return dtype.kind in "biufc" and not ragged


def write_npy(path: Path, spec: Any, count: int, chunks: Iterable[Array]) -> None:
    """Write `count` rows to a `.npy` file. Rows of different shapes are an `OptionError`."""
    dtype, shape = np.dtype(spec.dtype.as_numpy_dtype), None
    with replacing(path) as temporary, open(temporary, "wb") as file:

        def begin(row_shape: tuple[int, ...]) -> tuple[int, ...]:
            header = {"descr": dtype.str, "fortran_order": False, "shape": (count, *row_shape)}
            np.lib.format.write_array_header_2_0(file, header)
            return row_shape

        for chunk in chunks:
            shape = begin(chunk.shape[1:]) if shape is None else shape
            if chunk.shape[1:] != shape:
                raise OptionError(
                    f"{path} cannot hold rows of the shapes {list(shape)} and {list(chunk.shape[1:])}; use to_parquet"
                )
            file.write(np.ascontiguousarray(chunk).reshape(-1).view(np.uint8).data)
        if shape is None:
            begin(tuple(empty_rows(spec).shape[1:]))


def write_parquet(path: Path, structure: Any, chunks: Iterable[Any]) -> None:
    """Write rows to a Parquet file, with a column for each key of a dict, in row groups of about 64 MB."""
    pyarrow, parquet = _import_pyarrow()

    def table(chunk: Any) -> Any:
        columns = chunk if isinstance(chunk, Mapping) else {RESULT: chunk}
        specs = structure if isinstance(structure, Mapping) else {RESULT: structure}
        with tf.device(HOST):
            return pyarrow.table(
                {name: as_arrow(pyarrow, _as_column(column, specs[name])) for name, column in columns.items()}
            )

    with replacing(path) as temporary:
        writer, group, size = None, [], 0
        try:
            for chunk in chunks:
                group.append(table(chunk))
                size += group[-1].nbytes
                writer = writer or parquet.ParquetWriter(temporary, group[0].schema)
                if size >= _GROUP_BYTES:
                    writer.write_table(pyarrow.concat_tables(group))
                    group, size = [], 0
            if writer is None:
                group = [table(tf.nest.map_structure(empty_rows, structure))]
                writer = parquet.ParquetWriter(temporary, group[0].schema)
            if group:
                writer.write_table(pyarrow.concat_tables(group))
        finally:
            if writer is not None:
                writer.close()


def write_tfrecords(path: Path, chunks: Iterable[Any]) -> None:
    """Write a `tf.train.Example` for each row, with a feature for each key of a dict."""
    with replacing(path) as temporary, tf.io.TFRecordWriter(str(temporary)) as writer:
        for chunk in chunks:
            columns = chunk if isinstance(chunk, Mapping) else {RESULT: chunk}
            names = sorted(columns)
            for row in zip(*(_features_of(columns[name]) for name in names)):
                features = tf.train.Features(feature=dict(zip(names, row)))
                writer.write(tf.train.Example(features=features).SerializeToString())


def _features_of(column: Any) -> Iterator[Any]:
    """Yield the feature of each row of an array or a ragged tensor."""
    ragged = isinstance(column, tf.RaggedTensor)
    values = np.asarray(column.values) if ragged else column
    splits = column.row_splits.numpy() if ragged else np.arange(len(column) + 1)
    for start, stop in pairwise(splits):
        yield _feature(values[start:stop].reshape(-1))


def _feature(values: Array) -> Any:
    if values.dtype.kind == "O":
        return tf.train.Feature(bytes_list=tf.train.BytesList(value=values))
    if values.dtype.kind in "biu":
        return tf.train.Feature(int64_list=tf.train.Int64List(value=values.astype(np.int64)))
    return tf.train.Feature(float_list=tf.train.FloatList(value=values.astype(np.float32)))


def as_arrow(pa: Any, column: Any) -> Any:
    """Return a dense or ragged tensor of shape `[rows, ...]` as an Arrow array; `pa` is the module `pyarrow`."""
    if isinstance(column, tf.RaggedTensor):
        return pa.ListArray.from_arrays(pa.array(column.row_splits, pa.int32()), as_arrow(pa, column.values))
    if column.shape.rank > 1:
        values = tf.reshape(column, [-1, *column.shape[2:]])
        return pa.FixedSizeListArray.from_arrays(as_arrow(pa, values), column.shape[1])
    return pa.array(np.asarray(column), pa.binary() if column.dtype == tf.string else None)


def _as_column(leaf: Any, spec: Any) -> Any:
    """Return a tensor for `as_arrow`: dense rows of unknown shape as ragged ones, so that all chunks have one type."""
    if isinstance(leaf, tf.RaggedTensor):
        return leaf
    if spec.shape[1:].is_fully_defined() and 0 not in spec.shape[1:]:  # Arrow has no lists of the fixed size 0
        return tf.constant(leaf, spec.dtype)
    return tf.RaggedTensor.from_tensor(leaf, ragged_rank=spec.shape.rank - 1)


def _import_pyarrow() -> tuple[Any, Any]:
    try:
        return importlib.import_module("pyarrow"), importlib.import_module("pyarrow.parquet")
    except ImportError as error:
        raise ImportError(f"a .parquet file needs pyarrow ({error}): pip install 'devicemap[parquet]'") from error


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield the name of a temporary file that replaces `path` at the end, and is deleted after an error."""
    temporary = path.with_name(f"{path.name}.tmp")
    try:
        temporary.touch()
        yield temporary
        with open(temporary, "rb+") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        with suppress(FileNotFoundError):
            temporary.unlink()
