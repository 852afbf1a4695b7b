"""Convert the INPUT of a command to data. Files that are larger than memory are read while they are mapped."""

from __future__ import annotations

import contextlib
import glob
import gzip
import os
import pkgutil
import re
import sys
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
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

    files: Sequence[str] = ()
    """Names of the files that the rows come from, in order."""

    count: Callable[[str], int] | None = None
    """Returns the number of rows in a file; `None` for one row."""

    def locate(self, row: int) -> str:
        """Return the name of the file with a row, and the index of the row in it."""
        for name in self.files:
            count = self.count(name) if self.count else 1
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
    """
    if re.fullmatch(r"[\w.]+:[\w.]+", path) and not os.path.exists(path):
        data = load_object(path)
        data = data() if callable(data) else data
        return Input(data, data.unbatch() if batched and isinstance(data, tf.data.Dataset) else data)
    if os.path.exists(os.path.join(path, "dataset_spec.pb")):
        data = tf.data.Dataset.load(path)
        return Input(data, data.unbatch() if batched else data)
    pattern = os.path.join(glob.escape(path), "*") if os.path.isdir(path) else path
    names = [path] if os.path.isfile(path) else sorted(filter(os.path.isfile, glob.glob(pattern, recursive=True)))
    if not names:
        raise DataError(f"{path}: no such file or folder with files; '{path}/**/*.jpg' finds files in subfolders")
    kinds = {_kind(name): name for name in names}
    if len(kinds) > 1 or (".npz" in kinds and len(names) > 1):
        several = ", ".join({names[0]: 0, names[-1]: 0, **dict.fromkeys(kinds.values())})
        raise DataError(
            f"{path} has {several}; expected files of one kind, or one .npz file. Use a pattern such as '*.npy'"
        )
    kind = _kind(names[0])
    if kind == ".npz":
        arrays = _load(names[0])
        return Input(arrays, arrays, names, lambda name: sys.maxsize)
    if kind == ".npy":
        return _read_npy(names, batched, batch_size)
    if kind == "bytes":
        rows = tf.data.Dataset.from_tensor_slices(names).map(tf.io.read_file, num_parallel_calls=tf.data.AUTOTUNE)
    else:
        for name in names:
            _warn_of_cut(name)
        rows = tf.data.TFRecordDataset(names, kind)
    count = None if kind == "bytes" else cache(partial(_count_records, kind))
    return Input(rows.batch(batch_size or _ROWS_PER_BATCH) if batched else rows, rows, names, count)


def _kind(name: str) -> str:
    """Return `.npy`, `.npz`, `bytes`, or the compression of a TFRecord file."""
    suffix = Path(name).suffix.lower()
    if _RECORDS.fullmatch(name):
        return "GZIP" if suffix == ".gz" else ""
    return suffix if suffix in (".npy", ".npz") else "bytes"


def _warn_of_cut(name: str) -> None:
    """Warn of a file that was cut inside the header of a record. TensorFlow takes that for the end, and fails at other cuts."""
    opened: Any = gzip.open if name.lower().endswith(".gz") else open
    with contextlib.suppress(OSError, EOFError, OverflowError, ValueError, zlib.error), opened(name, "rb") as file:
        while header := file.read(12):
            if len(header) < 12:
                warn_user(f"{name} was cut inside the header of its last record, which is lost", RuntimeWarning)
            file.seek(int.from_bytes(header[:8], "little") + 4, os.SEEK_CUR)


def _count_records(compression: str, name: str) -> int:
    """Return the number of records in a file; a large number for a damaged file, since no file after it was read."""
    try:
        return sum(1 for _ in tf.data.TFRecordDataset(name, compression))
    except tf.errors.OpError:
        return sys.maxsize


def _load(name: str) -> Any:
    """Return the array or the dict of arrays in a file; a `.npy` file is mapped into memory."""
    try:
        loaded = np.load(name, mmap_mode="r")
        loaded = dict(loaded) if isinstance(loaded, Mapping) else loaded
        for array in tf.nest.flatten(loaded):
            tf.as_dtype(array.dtype)
    except (ValueError, EOFError, TypeError, zipfile.BadZipFile) as error:
        raise DataError(f"{name} is not a file of plain arrays with dtypes of TensorFlow: {error}") from error
    return loaded


def _read_npy(names: list[str], batched: bool, batch_size: int | None) -> Input:
    arrays = {name: _load(name) for name in names}
    shape, dtype = arrays[names[0]].shape[1:], arrays[names[0]].dtype
    for name, array in arrays.items():
        if not array.ndim or 0 in array.shape[1:] or (array.shape[1:], array.dtype) != (shape, dtype):
            raise DataError(
                f"{name} has an array of {array.dtype} {list(array.shape)}; expected rows along the first axis, which are "
                f"not empty, and as in {names[0]} of {dtype} {list(shape)}"
            )
    step = batch_size if batched and batch_size else max(1, _SLICE_BYTES // max(1, arrays[names[0]][:1].nbytes))

    def slices() -> Iterator[Any]:
        for array in arrays.values():
            yield from (np.array(array[start : start + step]) for start in range(0, len(array), step))

    data = tf.data.Dataset.from_generator(slices, output_signature=tf.TensorSpec([None, *shape], tf.as_dtype(dtype)))
    rows = data.unbatch().apply(tf.data.experimental.assert_cardinality(sum(map(len, arrays.values()))))
    return Input(data if batched else rows, rows, names, lambda name: len(arrays[name]))
