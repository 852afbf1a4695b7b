"""A path on the command line -> data to map over: files that are larger than memory are read while they are mapped.

| path | rows |
| --- | --- |
| `.npy` | the first axis of the array, read slice by slice through a memory map |
| `.npz` | the first axis of its arrays, as a dict by name; read into memory, since a member of a zip cannot be mapped |
| `.tfrecord`, also `.tfrecord.gz` and `.tfrecord-00000-of-00010` | records, as bytes |
| a folder saved by `tf.data.Dataset.save` | its elements |
| any other file | the whole file, as bytes |

A folder stands for the files in it, without those in folders further down and hidden ones; a pattern such as
`photos/**/*.jpg` for the files that it matches. Several files are in the order of their names, and of one kind.
"""

from __future__ import annotations

import contextlib
import glob
import gzip
import os
import re
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from devicemap.errors import DataError, warn_user

_SLICE_BYTES = 2**22
"""About how much of a memory-mapped array is read at once."""

_ROWS_PER_BATCH = 64
"""Files and records that one batch holds, where the user does not say."""

_RECORDS = re.compile(r".*\.tfrecords?(-\d+-of-\d+)?(\.gz)?", re.IGNORECASE)
_MARKS_OF_SAVED_DATASET = ("dataset_spec.pb", "snapshot.metadata")


def read_input(path: str, batched: bool, batch_size: int | None) -> Any:
    """The data at a path, as `DeviceMap` takes it: a dataset of samples, or of batches with `batched`, or a dict of arrays.

    A saved dataset is handed on as it was saved. `batch_size=None` stands for some rows per batch.

    Raises:
        DataError: nothing is there, or it cannot be read as rows.

    Warns:
        RuntimeWarning: a TFRecord file was cut inside the header of a record, and lacks that one.
    """
    folder = Path(path)
    if folder.is_dir() and any((folder / mark).exists() for mark in _MARKS_OF_SAVED_DATASET):
        return tf.data.Dataset.load(path)
    files = _files_at(path)
    kind = _kind_of(files, path)
    if kind == "npz":
        return _read_npz(files, path)
    if kind == "npy":
        return _read_npy(files, batched, batch_size)
    if kind == "records":
        packed = {name.endswith(".gz") for name in files}
        if len(packed) > 1:
            raise DataError(f"{path} holds TFRecord files of which some are compressed; give those apart")
        for name in files:
            _warn_of_cut(name)
        dataset = tf.data.TFRecordDataset(files, compression_type="GZIP" if packed.pop() else "")
    else:
        dataset = tf.data.Dataset.from_tensor_slices(files).map(tf.io.read_file, num_parallel_calls=tf.data.AUTOTUNE)
    return dataset.batch(batch_size or _ROWS_PER_BATCH) if batched else dataset


def _files_at(path: str) -> list[str]:
    place = Path(path)
    if place.is_file():
        return [path]
    if place.is_dir():
        files = sorted(str(file) for file in place.iterdir() if file.is_file() and not file.name.startswith("."))
        if not files:
            raise DataError(
                f"{path} is a folder without files in it; expected files, or what tf.data.Dataset.save saved. A pattern such "
                f"as '{path.rstrip('/')}/**/*.jpg' finds files in folders further down"
            )
        return files
    files = sorted(name for name in glob.glob(path, recursive=True) if Path(name).is_file())
    if not files:
        what = "no file matches this pattern" if glob.has_magic(path) else "there is no such file or folder"
        raise DataError(f"{path}: {what}")
    return files


def _kind_of(files: Sequence[str], path: str) -> str:
    kinds = {_kind_of_file(name): name for name in files}
    if len(kinds) > 1:
        raise DataError(
            f"{path} holds files of several kinds, {' and '.join(sorted(kinds.values()))}; give a pattern that matches one "
            "kind, for instance '*.npy'"
        )
    return next(iter(kinds))


def _kind_of_file(name: str) -> str:
    suffix = Path(name).suffix.lower()
    if suffix in (".npy", ".npz"):
        return suffix[1:]
    return "records" if _RECORDS.fullmatch(name) else "bytes"


def _read_npz(files: Sequence[str], path: str) -> dict[str, Any]:
    if len(files) > 1:
        raise DataError(
            f"{path} holds {len(files)} .npz files; expected one. Large data is better kept as .npy or TFRecord"
        )
    try:
        with np.load(files[0]) as archive:
            arrays = {name: archive[name] for name in archive.files}
    except (ValueError, EOFError, zipfile.BadZipFile) as error:
        raise DataError(f"{files[0]} is not a .npz file of plain arrays: {error}") from error
    if not arrays:
        raise DataError(f"{files[0]} holds no arrays")
    return arrays


def _warn_of_cut(name: str) -> None:
    """Warn of a file that ends inside the header of a record: TensorFlow takes that for its end, and fails at other cuts."""
    opened: Any = gzip.open if name.endswith(".gz") else open
    with contextlib.suppress(OSError, EOFError, OverflowError, zlib.error), opened(name, "rb") as file:
        while header := file.read(12):
            if len(header) < 12:
                warn_user(f"{name} was cut inside the header of its last record, which is lost", RuntimeWarning)
            file.seek(int.from_bytes(header[:8], "little") + 4, os.SEEK_CUR)


def _read_npy(files: Sequence[str], batched: bool, batch_size: int | None) -> Any:
    arrays = [_open_npy(name) for name in files]
    first = arrays[0]
    for name, array in zip(files, arrays):
        if (array.dtype, array.shape[1:]) != (first.dtype, first.shape[1:]):
            raise DataError(
                f"{files[0]} has rows of {first.dtype} {list(first.shape[1:])}, and {name} of {array.dtype} "
                f"{list(array.shape[1:])}; files that are mapped together need rows of one dtype and shape"
            )
    try:
        dtype = tf.as_dtype(first.dtype)
    except TypeError as error:
        raise DataError(f"{files[0]} holds {first.dtype}, which TensorFlow has no dtype for") from error
    row_bytes = max(1, first.itemsize * int(np.prod(first.shape[1:])))
    step = batch_size if batched and batch_size else max(1, _SLICE_BYTES // row_bytes)
    rows = sum(len(array) for array in arrays)

    def slices() -> Iterator[Any]:
        for array in arrays:
            for start in range(0, len(array), step):
                part = array[start : start + step]
                # a copy: of its own memory, in the byte order of this machine
                yield np.array(part, None if dtype == tf.string else dtype.as_numpy_dtype, order="C")

    dataset = tf.data.Dataset.from_generator(slices, output_signature=tf.TensorSpec([None, *first.shape[1:]], dtype))
    if batched:
        return dataset.apply(tf.data.experimental.assert_cardinality(sum(-(-len(array) // step) for array in arrays)))
    return dataset.unbatch().apply(tf.data.experimental.assert_cardinality(rows))


def _open_npy(name: str) -> Any:
    try:
        array = np.load(name, mmap_mode="r")
    except (ValueError, EOFError) as error:
        raise DataError(f"{name} is not a .npy file of a plain array: {error}") from error
    if array.ndim == 0:
        raise DataError(f"{name} holds a single number; expected an array with rows as its first axis")
    if len(array) and not array.size:
        raise DataError(f"{name} holds {len(array)} rows of shape {[*array.shape[1:]]}, with nothing in them")
    return array
