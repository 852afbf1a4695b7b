"""Convert the INPUT of a command to data. Files that are larger than memory are read while they are mapped."""

from __future__ import annotations

import glob
import gzip
import importlib
import os
import pkgutil
import re
import sys
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from operator import attrgetter
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import tensorflow as tf

from devicemap.errors import DataError, OptionError, brief, warn_user

_SLICE_BYTES = 2**22
"""Approximate bytes of a `.npy` file that are read at once."""

_ROWS_PER_BATCH = 64
"""Files and records per batch if the user gives no batch size."""

_TABLES = ".csv", ".tsv", ".json", ".jsonl", ".parquet", ".feather", ".xlsx", ".h5", ".pkl"
"""Suffixes of files with many rows that are not read."""

_RECORDS = re.compile(r".*\.tfrec(ords?)?(-\d+-of-\d+)?(\.gz)?", re.IGNORECASE)
_SHARD = re.compile(r".*-\d+-of-\d+(\.gz)?", re.IGNORECASE)


@dataclass(frozen=True)
class Input:
    """Data for a map, and the files that its rows come from."""

    data: Any
    """A dataset of rows, a dataset of batches with `batched`, or a nest of arrays."""

    rows: Any
    """A dataset of single rows, or a nest of arrays."""

    counts: Callable[[], Mapping[str, int]]
    """Returns the number of rows in each file or dataset, in the order of rows."""

    def locate(self, row: int) -> str:
        """Return the name of the file with a row, and the index of the row in it."""
        for name, count in self.counts().items():
            if row < count:
                return name if count == 1 else f"{name}, row {row}"
            row -= count
        return f"row {row}"


def load_object(name: str, expected: str = "MODULE:FUNCTION") -> Any:
    """Return the object `MODULE:NAME` or `FILE.py:NAME`. The current directory is searched first, as by `python -m`.

    `FILE` is imported from the folder of its outermost package, or else from its own, as by pytest.
    """
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        path, is_file, attribute = name.partition(".py:")
        if is_file:
            folder, module = Path(path).resolve().parent, Path(path).name
            while (folder / "__init__.py").exists():
                folder, module = folder.parent, f"{folder.name}.{module}"
            sys.path.insert(0, str(folder))
            loaded = importlib.import_module(module)
            if not os.path.samefile(f"{path}.py", str(loaded.__file__)):
                raise ImportError(f"{loaded.__file__} has the same name; rename one of the files")
            found = attrgetter(attribute)(loaded)
        else:
            found = pkgutil.resolve_name(name)
    except (Exception, SystemExit) as error:  # SystemExit: a script that runs when it is imported
        advice = f"expected {expected}, found from the current directory and PYTHONPATH"
        raise OptionError(f"{name}: {type(error).__name__}: {error}; {advice}") from error
    if isinstance(found, ModuleType):
        raise OptionError(f"{name} is a module; expected {expected}")
    return found


def read_input(path: str, batched: bool, batch_size: int | None) -> Input:
    """Read an INPUT, whose kinds the help of the command line describes. Batches have `batch_size` rows, or any number."""
    saved = os.path.exists(os.path.join(path, "dataset_spec.pb"))
    if saved or (re.fullmatch(r"[^*?[]+:[\w.]+", path) and not os.path.exists(path)):
        try:
            data = tf.data.Dataset.load(path) if saved else load_object(path, "a file, a folder or MODULE:DATASET")
        except OptionError:
            raise
        except Exception as error:  # of TensorFlow or of protocol buffers
            raise DataError(f"{path} cannot be read: {brief(error)}") from error
        data = data() if callable(data) else data
        rows = data
        if batched and isinstance(data, tf.data.Dataset):
            with suppress(ValueError):  # for elements without rows, which the map refuses
                rows = data.unbatch()
        return Input(data, rows, lambda: {path: sys.maxsize})
    pattern = os.path.join(glob.escape(path), "*") if os.path.isdir(path) else path
    names = [path] if os.path.isfile(path) else sorted(filter(os.path.isfile, glob.glob(pattern, recursive=True)))
    if not names and os.path.exists(path) and not os.path.isdir(path):
        raise DataError(f"{path} is a pipe or a device, which can be read only once; write its contents to a file")
    if not names:
        subfolders = f"; '{path}/**/*.jpg' finds files in subfolders" if os.path.isdir(path) else ""
        raise DataError(f"{path}: no such file or folder with files{subfolders}")
    if len(names) == 1 and Path(names[0]).suffix.lower() in _TABLES:
        raise DataError(
            f"{names[0]} would be one row, its bytes; for the rows in it, pass MODULE:DATASET, a function that reads the file"
        )
    kinds = {_kind(name): name for name in names}
    if len(kinds) > 1 or (".npz" in kinds and len(names) > 1):
        raise DataError(
            f"{path} has {', '.join(kinds.values())}; expected files of one kind, or one .npz file. Use a pattern such as "
            "'*.npy'"
        )
    (kind,) = kinds
    if kind == ".npz":
        arrays = _load(names[0])
        return Input(arrays, arrays, lambda: {names[0]: sys.maxsize})
    if kind == ".npy":
        return _read_npy({name: _load(name) for name in names}, batched, batch_size)
    if kind == "bytes":
        rows = tf.data.Dataset.from_tensor_slices(names).map(tf.io.read_file, num_parallel_calls=tf.data.AUTOTUNE)
    else:
        rows = tf.data.TFRecordDataset(names, kind)
    counts = cache(lambda: {name: 1 if kind == "bytes" else _count_records(name) for name in names})
    return Input(rows.batch(batch_size or _ROWS_PER_BATCH) if batched else rows, rows, counts)


def _kind(name: str) -> str:
    """Return `.npy`, `.npz`, `bytes`, or the compression of a TFRecord file."""
    suffix = Path(name).suffix.lower()
    if _RECORDS.fullmatch(name):
        return "GZIP" if suffix == ".gz" else ""
    if _SHARD.fullmatch(name):
        raise DataError(
            f"{name} has the name of a shard; rename TFRecord files to NAME.tfrecord, or pass MODULE:DATASET, a function that "
            "reads the file"
        )
    return suffix if suffix in (".npy", ".npz") else "bytes"


def _count_records(name: str) -> int:
    """Return the number of records in a TFRecord file; a large number for a damaged one, as no file after it is read.

    Warn of a file that was cut inside the header of a record, which TensorFlow takes for the end. Other cuts are errors.
    """
    count = 0
    opened: Any = gzip.open if name.lower().endswith(".gz") else open
    try:
        with opened(name, "rb") as file:
            while header := file.read(12):
                if len(header) < 12:
                    warn_user(f"{name} was cut inside the header of its last record, which is lost")
                    break
                count += 1
                file.seek(int.from_bytes(header[:8], "little") + 4, os.SEEK_CUR)
    except (OSError, EOFError, OverflowError, ValueError, zlib.error):
        return sys.maxsize
    return count


def _load(name: str) -> Any:
    """Return the array or the dict of arrays in a file. A `.npy` file is mapped into memory."""
    try:
        loaded = np.load(name, mmap_mode="r")
        loaded = dict(loaded) if isinstance(loaded, Mapping) else loaded
        for array in tf.nest.flatten(loaded):
            tf.as_dtype(array.dtype)
    except (ValueError, EOFError, TypeError, zipfile.BadZipFile) as error:
        raise DataError(f"{name} is not a file of plain arrays with dtypes of TensorFlow: {error}") from error
    return loaded


def _read_npy(arrays: dict[str, Any], batched: bool, batch_size: int | None) -> Input:
    name_of_first, first = next(iter(arrays.items()))
    shape, dtype = first.shape[1:], tf.as_dtype(first.dtype)
    for name, array in arrays.items():
        if not array.ndim or 0 in array.shape[1:] or (array.shape[1:], tf.as_dtype(array.dtype)) != (shape, dtype):
            like = "" if array is first else f", and as in {name_of_first} of {first.dtype} {list(shape)}"
            raise DataError(
                f"{name} has an array of {array.dtype} {list(array.shape)}; expected rows along the first axis, which are "
                f"not empty{like}"
            )
    step = batch_size if batched and batch_size else max(1, _SLICE_BYTES // max(1, first[:1].nbytes))

    def slices() -> Iterator[Any]:
        for array in arrays.values():
            yield from (np.array(array[start : start + step]) for start in range(0, len(array), step))

    counts = {name: len(array) for name, array in arrays.items()}
    data = tf.data.Dataset.from_generator(slices, output_signature=tf.TensorSpec([None, *shape], dtype))
    rows = data.unbatch().apply(tf.data.experimental.assert_cardinality(sum(counts.values())))
    return Input(data if batched else rows, rows, lambda: counts)
