"""Convert the INPUT of a command to data. Files that are larger than memory are read while they are mapped."""

from __future__ import annotations

import glob
import gzip
import os
import pkgutil
import re
import sys
import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from devicemap.errors import DataError, DeviceMapError, OptionError, warn_user

_SLICE_BYTES = 2**22
"""About how many bytes of a `.npy` file are read at once."""

_ROWS_PER_BATCH = 64
"""Files and records per batch if the user gives no batch size."""

_RECORDS = re.compile(r".*\.tfrecords?(-\d+-of-\d+)?(\.gz)?", re.IGNORECASE)


@dataclass(frozen=True)
class Input:
    """Data for a map, and the files that its rows come from."""

    data: Any
    """A dataset of rows, or of batches with `batched`; or a nest of arrays."""

    rows: Any
    """A dataset of single rows, or a nest of arrays."""

    files: tuple[tuple[str, int], ...] = ()
    """Names of the files and their numbers of rows, in order; empty if unknown."""

    def locate(self, row: int) -> str:
        """Return the name of the file with a row, and the index of the row in it."""
        for name, count in self.files:
            if row < count:
                return name if count == 1 else f"{name}, row {row}"
            row -= count
        return f"row {row}"

    def take(self, start: int, stop: int) -> Any:
        """Return the rows from `start` to `stop - 1`."""
        if isinstance(self.rows, tf.data.Dataset):
            return self.rows.skip(start).take(stop - start)
        return tf.nest.map_structure(lambda leaf: leaf[start:stop], self.rows)


def load_object(name: str) -> Any:
    """Return the object `MODULE:NAME`. Modules in the current directory are found first, as by `python -m`."""
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        return pkgutil.resolve_name(name)
    except DeviceMapError:
        raise
    except Exception as error:
        raise OptionError(f"{name}: {type(error).__name__}: {error}") from error


def read_input(path: str, batched: bool, batch_size: int | None) -> Input:
    """Read an INPUT; the help of the command line describes its kinds. Batches have `batch_size` rows, or some.

    Raises:
        DataError: there is nothing, or it cannot be read as rows.

    Warns:
        RuntimeWarning: a TFRecord file is truncated within the header of a record, which TensorFlow does not detect.
    """
    if re.fullmatch(r"[\w.]+:[\w.]+", path) and not os.path.exists(path):
        data = load_object(path)
        data = data() if callable(data) else data
        return Input(data, data.unbatch() if batched and isinstance(data, tf.data.Dataset) else data)
    if any(os.path.exists(os.path.join(path, mark)) for mark in ("dataset_spec.pb", "snapshot.metadata")):
        data = tf.data.Dataset.load(path)
        return Input(data, data.unbatch() if batched else data)
    pattern = os.path.join(glob.escape(path), "*") if os.path.isdir(path) else path
    names = [path] if os.path.isfile(path) else sorted(filter(os.path.isfile, glob.glob(pattern, recursive=True)))
    if not names:
        raise DataError(f"{path}: no such file or folder with files; '{path}/**/*.jpg' finds files in subfolders")
    kinds = {_kind(name): name for name in names}
    if len(kinds) > 1:
        raise DataError(
            f"{path} has files of several kinds: {', '.join(kinds.values())}; use a pattern such as '*.npy'"
        )
    kind = _kind(names[0])
    if kind == ".npz":
        return _read_npz(names)
    if kind == ".npy":
        return _read_npy(names, batched, batch_size)
    if kind == "bytes":
        files: list[tuple[str, int]] = [(name, 1) for name in names]
        rows = tf.data.Dataset.from_tensor_slices(names).map(tf.io.read_file, num_parallel_calls=tf.data.AUTOTUNE)
    else:
        files = [(name, _count_records(name)) for name in names]
        rows = tf.data.TFRecordDataset(names, kind.partition(" ")[2])
        rows = rows.apply(tf.data.experimental.assert_cardinality(sum(count for _, count in files)))
    return Input(rows.batch(batch_size or _ROWS_PER_BATCH) if batched else rows, rows, tuple(files))


def _kind(name: str) -> str:
    if _RECORDS.fullmatch(name):
        return "records GZIP" if name.lower().endswith(".gz") else "records"
    suffix = Path(name).suffix.lower()
    return suffix if suffix in (".npy", ".npz") else "bytes"


def _read_npz(names: list[str]) -> Input:
    if len(names) > 1:
        raise DataError(f"{names[0]} and {names[1]}: expected one .npz file; only other files can be several")
    try:
        with np.load(names[0]) as archive:
            arrays = dict(archive)
    except (ValueError, EOFError, zipfile.BadZipFile) as error:
        raise DataError(f"{names[0]} is not a .npz file of plain arrays: {error}") from error
    return Input(arrays, arrays, ((names[0], sys.maxsize),))


def _read_npy(names: list[str], batched: bool, batch_size: int | None) -> Input:
    arrays = [_open_npy(name) for name in names]
    shape, dtype = arrays[0].shape[1:], arrays[0].dtype
    for name, array in zip(names, arrays):
        if (array.shape[1:], array.dtype) != (shape, dtype):
            raise DataError(
                f"{names[0]} has rows of {dtype} {list(shape)}, and {name} of {array.dtype} {list(array.shape[1:])}; "
                "files of one input need rows of one dtype and shape"
            )
    step = batch_size if batched and batch_size else max(1, _SLICE_BYTES // max(1, arrays[0][:1].nbytes))

    def slices() -> Iterator[Any]:
        for array in arrays:
            yield from (np.array(array[start : start + step]) for start in range(0, len(array), step))

    data = tf.data.Dataset.from_generator(slices, output_signature=tf.TensorSpec([None, *shape], tf.as_dtype(dtype)))
    counts = [len(array) for array in arrays]
    rows = data.unbatch().apply(tf.data.experimental.assert_cardinality(sum(counts)))
    return Input(data if batched else rows, rows, tuple(zip(names, counts)))


def _open_npy(name: str) -> Any:
    try:
        array = np.load(name, mmap_mode="r")
        tf.as_dtype(array.dtype)
    except (ValueError, EOFError, TypeError) as error:
        raise DataError(f"{name} is not a .npy file of an array with a dtype of TensorFlow: {error}") from error
    if not array.ndim or (len(array) and not array.size):
        raise DataError(f"{name} has an array of shape {list(array.shape)}; expected rows along its first axis")
    return array


def _count_records(name: str) -> int:
    """Return the number of records in a TFRecord file, from their headers."""
    count = 0
    try:
        with gzip.open(name) if name.lower().endswith(".gz") else open(name, "rb") as file:
            while header := file.read(12):
                if len(header) < 12:
                    warn_user(f"{name} is truncated within the header of a record, which is lost", RuntimeWarning)
                    break
                file.seek(int.from_bytes(header[:8], "little") + 4, os.SEEK_CUR)
                count += 1
    except (EOFError, OverflowError, OSError, zlib.error) as error:
        raise DataError(f"{name}, row {count}: {error}") from error
    return count
