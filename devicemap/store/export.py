"""Results on disk as files of other formats, written chunk by chunk in bounded memory.

A file gets its name, and replaces a file of that name, when it is complete and on disk.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np
import tensorflow as tf

from devicemap.data.rows import HOST
from devicemap.errors import OptionError
from devicemap.store.encoding import Array, bytes_of

RESULT = "result"
"""The name of results that are not a dict."""

_GROUP_BYTES = 2**26
"""Parquet files get row groups of at least this size: small ones are slow to read."""

_CONTENTS = {
    ".npy": "one dense array of numbers",
    ".npz": "a dict of dense arrays of numbers",
    ".parquet": "a dict of dense or ragged arrays of numbers of at most 64 bits, or of strings",
}
"""The contents of files, by suffix. A single array is treated as a dict with the key "result"."""


def check_format(suffix: str, structure: Any) -> None:
    """Raise `OptionError` if a file of a format cannot hold results of these specs, or `ImportError` without its package."""
    if suffix == ".parquet":
        _import_pyarrow()
    columns = {RESULT: structure} if suffix == ".npy" else _columns(structure)
    for name, spec in columns.items():
        if not isinstance(name, str) or not _holds(suffix, spec) or (suffix == ".npz" and name == "file"):
            raise OptionError(
                f"the function returns {name!r}: {spec}, which a {suffix} file cannot hold; it holds {_CONTENTS[suffix]}. Use "
                "another format, or convert the result in fn"
            )


def _columns(nest: Any) -> Mapping[Any, Any]:
    return nest if isinstance(nest, Mapping) else {RESULT: nest}


def _holds(suffix: str, spec: Any) -> bool:
    if type(spec) not in (tf.TensorSpec, tf.RaggedTensorSpec):
        return False
    dtype, ragged = np.dtype(spec.dtype.as_numpy_dtype), isinstance(spec, tf.RaggedTensorSpec)
    if suffix in (".npy", ".npz"):
        return dtype.kind in "biufc" and not ragged
    return dtype.kind in "biufO" and spec.shape.rank is not None


def export(results: Any, path: Path, suffix: str) -> None:
    """Write all `Results` to a file of the format with this suffix, which `path` need not have."""
    check_format(suffix, results.structure)
    if not path.name or path.is_dir():
        raise OptionError(f"{str(path)!r} is a directory; expected the name of a file")
    path = Path(os.path.realpath(path))  # so that a symbolic link stays one
    temporary = path.with_name(f"{path.name}.{uuid4().hex}.tmp")
    try:
        with open(temporary, "xb") as file:
            _WRITERS[suffix](file, results, results if len(results) else [results.load()])
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def _write_npy(file: Any, results: Any, chunks: Iterable[Array]) -> None:
    shape = None
    for chunk in chunks:
        if shape is None:
            shape = chunk.shape[1:]
            header = {"descr": chunk.dtype.str, "fortran_order": False, "shape": (len(results), *shape)}
            np.lib.format.write_array_header_2_0(file, header)
        if chunk.shape[1:] != shape:
            raise OptionError(
                f"a .npy file cannot hold rows of the shapes {list(shape)} and {list(chunk.shape[1:])}; a .parquet file can"
            )
        file.write(bytes_of(chunk))


def _write_npz(file: Any, results: Any, chunks: Iterable[Any]) -> None:
    np.savez(file, **_columns(results.load()))


def _write_parquet(file: Any, results: Any, chunks: Iterable[Any]) -> None:
    pyarrow, parquet = _import_pyarrow()
    specs = _columns(results.structure)
    with ExitStack() as stack:
        writer, group, size = None, [], 0
        for chunk in chunks:
            with tf.device(HOST):
                columns = {name: _as_column(column, specs[name]) for name, column in _columns(chunk).items()}
                group.append(pyarrow.table({name: as_arrow(pyarrow, column) for name, column in columns.items()}))
            writer = writer or stack.enter_context(parquet.ParquetWriter(file, group[0].schema))
            size += group[-1].nbytes
            if size >= _GROUP_BYTES:
                writer.write_table(pyarrow.concat_tables(group))
                group, size = [], 0
        if writer is not None and group:
            writer.write_table(pyarrow.concat_tables(group))


_WRITERS: dict[str, Callable[[Any, Any, Iterable[Any]], None]] = {
    ".npy": _write_npy,
    ".npz": _write_npz,
    ".parquet": _write_parquet,
}
"""Functions of a binary file, the results, and at least one chunk, by suffix."""


def as_arrow(pa: Any, column: Any) -> Any:
    """Return a dense or ragged tensor of shape `[rows, ...]` as an Arrow array; `pa` is the module `pyarrow`."""
    if isinstance(column, tf.RaggedTensor):
        return pa.ListArray.from_arrays(pa.array(column.row_splits, pa.int32()), as_arrow(pa, column.values))
    if column.shape.rank > 1:
        values = tf.reshape(column, [-1, *column.shape[2:]])
        return pa.FixedSizeListArray.from_arrays(as_arrow(pa, values), column.shape[1])
    return pa.array(np.asarray(column), pa.binary() if column.dtype == tf.string else None)


def _as_column(leaf: Any, spec: Any) -> Any:
    """Return a tensor for `as_arrow`. Dense rows of unknown shape become ragged rows, so that all chunks have one type."""
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
