"""Read results on disk: by chunk, by slice, or all rows. All data is checked when it is read."""

from __future__ import annotations

import os
import sys
from bisect import bisect_right
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import tensorflow as tf

from devicemap.data.rows import HOST, empty_rows, take_rows
from devicemap.data.shards import join
from devicemap.errors import FunctionError, JournalError, MissingRowsError, OptionError, brief
from devicemap.events import FailedRow
from devicemap.store.database import Header, StoredChunk, open_database, overlapping
from devicemap.store.encoding import structure_of
from devicemap.store.export import export


def open_results(directory: str | os.PathLike[str]) -> Results:
    """Open the results that `DeviceMap.write` has written to `directory`, also if that run is not finished.

    Only the list of chunks is read. Chunks are read, and their checksums compared, when their rows are requested. Later chunks
    are not included.

    Raises:
        JournalError: the directory holds no results of devicemap, or they are damaged.

    Examples:
        >>> import tempfile
        >>> from devicemap import DeviceMap
        >>> directory = tempfile.mkdtemp()
        >>> _ = DeviceMap(lambda n: n * n, batch_size=2).write(tf.range(5), directory)
        >>> open_results(directory)[1:4]
        array([1, 4, 9], dtype=int32)
    """
    if not isinstance(directory, str | os.PathLike):
        raise OptionError(f"directory={directory!r:.80}; expected a path")
    path = Path(directory)
    with open_database(path) as database:
        header, chunks = database.contents()
        if header is None:
            raise JournalError(f"{path} holds no results yet: no chunk has been committed")
        if header.call.get("reducer") is not None:
            raise JournalError(
                f"{path} holds partial results of a reduction, not rows; continue it with DeviceMap.reduce"
            )
        return Results(path, header, chunks)


class Results:
    """Results on disk, in the order of rows, as returned by `open_results`; thread-safe.

    Rows are returned in nests of the structure that the mapped function returns: NumPy arrays for dense results (strings are
    `bytes`, of dtype object), and `tf.RaggedTensor` and `tf.SparseTensor` for others. Objects become named tuples of those
    fields that are tensors.

        len(results)                     the number of rows
        results[100:200]                 some rows; reads only the chunks that hold them
        for chunk in results: ...        chunk by chunk, as they were written
        results.load()                   all rows
        results.as_dataset()             a tf.data.Dataset of the chunks, as tensors
        results.to_parquet("x.parquet")  a file for other programs; also to_npy
        results.to_dict()                counts, missing and failed rows, as JSON values
        results.failed_rows              rows of the data without results; results.row_numbers() has the others

    A request for missing or damaged rows raises a `MissingRowsError` that names them.
    """

    def __init__(self, directory: Path, header: Header, chunks: Sequence[StoredChunk]):
        self.directory = directory.absolute()  # the program may change its working directory
        """The directory that holds the results."""

        self.structure = structure_of(header.call["results"])
        """Nest of `tf.TypeSpec`s, of shapes `[None, ...]`."""

        self._specs = tf.nest.flatten(self.structure)
        self._chunks = chunks
        self._rows = header.rows
        self._failed = [chunk for chunk in chunks if chunk.error is not None]
        self._results_before = [chunk.start - i for i, chunk in enumerate(self._failed)]
        """For each row that failed, the number of results before it."""

    @property
    def failed_rows(self) -> tuple[FailedRow, ...]:
        """The rows of the data that failed and were left out (`on_error="skip"`), in order. They have no results."""
        return tuple(FailedRow(chunk.start, str(chunk.device), str(chunk.error)) for chunk in self._failed)

    def row_numbers(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        """Return the row of the data that each result belongs to: int64 of shape `[len(results)]`.

        Raises:
            MissingRowsError: the number of rows is unknown.

        Examples:
            >>> import tempfile
            >>> from devicemap import DeviceMap
            >>> def positive(x):
            ...     return tf.debugging.check_numerics(tf.math.log(x), "not positive")
            >>> results = DeviceMap(positive, on_error="skip").write(tf.constant([1.0, 0.0, 1.0]), tempfile.mkdtemp())
            >>> results.load(), results.row_numbers(), results.failed_rows[0].row
            (array([0., 0.], dtype=float32), array([0, 2]), 1)
        """
        rows = np.arange(len(self) + len(self._failed), dtype=np.int64)
        return np.delete(rows, [chunk.start for chunk in self._failed])

    @property
    def missing(self) -> list[tuple[int, int | None]]:
        """The `(start, stop)` of rows of the data that no run has tried; `stop` is `None` if the number of rows is unknown.

        Damaged chunks are not included; they are found when they are read.
        """
        ranges = _missing_rows(self._chunks, 0, sys.maxsize if self._rows is None else self._rows)
        return [(start, stop if stop < sys.maxsize else None) for start, stop in ranges]

    @property
    def complete(self) -> bool:
        """Whether no rows are missing."""
        return not self.missing

    def __len__(self) -> int:
        """Return the number of rows, which includes missing rows but not failed ones.

        Raises:
            MissingRowsError: it is unknown, because the data is a dataset that no run has read to its end.
        """
        if self._rows is None:
            raise self._missing_error(self.missing)
        return self._rows - len(self._failed)

    def __iter__(self) -> Iterator[Any]:
        """Yield the chunks in order. Raises `MissingRowsError` for missing rows, after the chunks before them."""
        missing = self.missing
        for _, leaves in self._read_chunks(0, missing[0][0] if missing else sys.maxsize):
            yield self._pack(leaves)
        if missing:
            raise self._missing_error(missing)

    def __getitem__(self, rows: slice) -> Any:
        """Return the rows of a slice without a step."""
        if not isinstance(rows, slice) or rows.step not in (None, 1):
            raise TypeError(
                f"results[{rows!r}]; expected a slice without a step, as in results[i:j] or results[i:i + 1]"
            )
        from_start = all(bound is not None and bound >= 0 for bound in (rows.start or 0, rows.stop))
        length = sys.maxsize if self._rows is None and from_start else len(self)
        start, stop, _ = rows.indices(length)
        return self._read(start, max(start, stop))

    def __array__(self, dtype: Any = None, copy: Any = None) -> NoReturn:
        """Raise an error. NumPy would stack the chunks, and a map cannot know that items are chunks."""
        raise TypeError(
            "Results are on disk, in chunks: results.load() returns all rows, and results.as_dataset() the chunks as batches"
        )

    def load(self) -> Any:
        """Return all rows, in the memory of the results. Strings, ragged, sparse and unknown shapes need twice the memory."""
        return self._read(0, len(self))

    def as_dataset(self) -> Any:
        """Return a `tf.data.Dataset` of the chunks in order, as nests of tensors of `structure`; unbatch it to get rows.

        All chunks are read and checked once before the dataset is returned. A dataset can only raise errors of TensorFlow. If
        a chunk is damaged later, such an error has the message.

        Raises:
            MissingRowsError: rows are missing or damaged.
        """
        deque(self, 0)

        def chunks() -> Iterator[Any]:
            for _, leaves in self._read_chunks(0, sys.maxsize):
                with tf.device(HOST):  # not around the yield, because another thread may continue after it
                    tensors = [
                        tf.constant(leaf, spec.dtype) if isinstance(leaf, np.ndarray) else leaf
                        for leaf, spec in zip(leaves, self._specs)
                    ]
                yield self._pack(tensors)

        dataset = tf.data.Dataset.from_generator(chunks, output_signature=self.structure)
        return dataset.apply(tf.data.experimental.assert_cardinality(len(self._chunks) - len(self._failed)))

    def to_dict(self) -> dict[str, Any]:
        """Return what is known without reading rows, as JSON values: counts, ranges of missing rows, and failed rows."""
        return {
            "directory": str(self.directory),
            "rows": None if self._rows is None else len(self),
            "chunks": len(self._chunks) - len(self._failed),
            "complete": self.complete,
            "missing": [list(rows) for rows in self.missing],
            "failed_rows": [asdict(row) for row in self.failed_rows],
        }

    def to_npy(self, path: str | os.PathLike[str]) -> None:
        """Write all rows to a `.npy` file, for `numpy.load`: one dense array of numbers of shape `[len(results), ...]`.

        Chunks are read one by one. The file appears, or is replaced, when it is complete. Raises `OptionError` for other
        results, and `MissingRowsError` for missing or damaged rows.
        """
        export(self, Path(path), ".npy")

    def to_parquet(self, path: str | os.PathLike[str]) -> None:
        """Write all rows to a Parquet file, with a column for each key of a dict, or else the column `result`.

        Columns hold numbers of at most 64 bits or binary strings, or lists of these for rows with axes. Row groups have about
        64 MB, which is also the memory that the export needs. It needs pyarrow. Errors are those of `to_npy`.
        """
        export(self, Path(path), ".parquet")

    def __repr__(self) -> str:
        rows = "?" if self._rows is None else len(self)
        failed = f", failed={len(self._failed)}" if self._failed else ""
        chunks = len(self._chunks) - len(self._failed)
        return f"Results({str(self.directory)!r}, rows={rows}{failed}, chunks={chunks}, complete={self.complete})"

    def _read(self, first: int, last: int) -> Any:
        """Return results `first` to `last - 1`."""
        start = self._row_of(first)
        stop = self._row_of(last - 1) + 1 if last > first else start
        if missing := _missing_rows(self._chunks, start, stop):
            raise self._missing_error(missing)
        try:
            with tf.device(HOST):
                return self._pack(self._joined(start, stop, last - first))
        except (FunctionError, MemoryError, ValueError, tf.errors.OpError) as error:
            raise JournalError(
                f"rows {start} to {stop - 1} in {self.directory} cannot be returned at once: {brief(error)}. Iterate over the "
                "results to get them by chunk"
            ) from error

    def _row_of(self, result: int) -> int:
        """Return the row of the data that a result belongs to."""
        return result + bisect_right(self._results_before, result)

    def _joined(self, start: int, stop: int, count: int) -> list[Any]:
        """Return the leaves of `count` results of rows of the data. Arrays of known shapes are copied once."""
        joined: list[Any] = []  # an array to fill, or a list of parts
        for spec in self._specs:
            known = isinstance(spec, tf.TensorSpec) and spec.dtype != tf.string and spec.shape[1:].is_fully_defined()
            joined.append(np.empty((count, *spec.shape[1:]), spec.dtype.as_numpy_dtype) if known else [])
        filled = 0
        for chunk, leaves in self._read_chunks(start, stop):
            first, last = max(start, chunk.start), min(stop, chunk.stop)
            for whole, leaf in zip(joined, leaves):
                rows = take_rows(leaf, first - chunk.start, last - chunk.start)
                if isinstance(whole, list):
                    whole.append(rows)
                else:
                    whole[filled : filled + last - first] = rows
            filled += last - first
        return [_join(whole, spec) if isinstance(whole, list) else whole for whole, spec in zip(joined, self._specs)]

    def _read_chunks(self, start: int, stop: int) -> Iterator[tuple[StoredChunk, list[Any]]]:
        with open_database(self.directory) as database:
            for chunk in overlapping(self._chunks, start, stop):
                if chunk.error is None:
                    yield chunk, database.leaves(chunk, self._specs)

    def _pack(self, leaves: list[Any]) -> Any:
        return tf.nest.pack_sequence_as(self.structure, leaves)

    def _missing_error(self, missing: Sequence[Any]) -> MissingRowsError:
        ranges = [f"{start} to {stop - 1}" if stop is not None else f"from {start} on" for start, stop in missing]
        more = f" and {len(ranges) - 5} more ranges" if len(ranges) > 5 else ""
        return MissingRowsError(
            f"rows {', '.join(ranges[:5])}{more} are missing in {self.directory}: no run has finished. Run write again with "
            "the same function and data: it computes what is missing"
        )


def _missing_rows(chunks: Sequence[StoredChunk], start: int, stop: int) -> list[tuple[int, int]]:
    """Return the `(start, stop)` of missing rows: those of rows `start` to `stop - 1` that are in none of these sorted chunks.

    >>> _missing_rows([StoredChunk(2, 4, ""), StoredChunk(4, 6, "")], 0, 8)
    [(0, 2), (6, 8)]
    """
    edges = [start, *(edge for chunk in overlapping(chunks, start, stop) for edge in chunk[:2]), stop]
    return [(low, high) for low, high in zip(edges[::2], edges[1::2]) if low < high]


def _join(parts: Sequence[Any], spec: Any) -> Any:
    if not parts:
        empty = empty_rows(spec)
        return empty.numpy() if isinstance(empty, tf.Tensor) else empty
    return np.concatenate(parts) if isinstance(parts[0], np.ndarray) else join(parts)
