"""Results on disk, the reading side: rows by chunk, in part, or all of them, checked as they are read."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from devicemap.data.join import join
from devicemap.data.rows import HOST, empty_rows, take_rows
from devicemap.errors import FunctionError, JournalError, MissingRowsError, brief
from devicemap.store.chunks import Array, Layout
from devicemap.store.encoding import decode_leaves, describe_nest, structure_of
from devicemap.store.entries import Entry, missing_rows, overlapping
from devicemap.store.records import Contents, read_journal
from devicemap.store.segments import SegmentReader, untold


def open_results(directory: str | os.PathLike[str]) -> Results:
    """Open what `DeviceMap.write` wrote to `directory`, whether or not it got to the end.

    Reads the journal alone; files of chunks are read, and their checksums compared, when their rows are asked for. What
    is written later is not seen.

    Raises:
        JournalError: there is no journal of devicemap in it, or a damaged one, or one that does not tell of all that is there.
    """
    path = Path(directory)
    contents = read_journal(path)
    if contents.header is None:
        raise JournalError(
            f"{path} holds no results yet: the run that made it ended before its first chunk was finished"
        )
    if contents.header.reducer is not None:
        raise JournalError(f"{path} holds a reduction's partial results, no rows: DeviceMap.reduce goes on with them")
    results = Results(path, contents)
    if results.complete and (more := untold(path, contents.entries)):
        raise JournalError(
            f"{path} holds more than the {len(results)} rows that its journal tells of, in {min(more).name}: they are being "
            "written, or the journal is a false one"
        )
    return results


class Results:
    """Results on disk, in the order of the rows. Made by `open_results`; thread-safe.

    Wherever rows come from it, they come as nests of the structure that the mapped function returns: of NumPy arrays for
    dense results (strings are `bytes`, of dtype object), of `tf.RaggedTensor` and `tf.SparseTensor` for the others. Objects
    of other classes come as named tuples of their fields, without those that are no tensors.

        len(results)                     the number of rows
        results[100:200]                 some of them; reads only the chunks that they are in
        for chunk in results: ...        chunk by chunk, as they were written, one file at a time
        results.load()                   all of them
        results.as_dataset()             a tf.data.Dataset of the chunks, as tensors

    Rows that are not there, or damaged, are an error that names them where they are asked for, a `MissingRowsError`.
    """

    def __init__(self, directory: Path, contents: Contents):
        assert contents.header is not None
        self.directory = directory
        """Where they are."""

        self.structure = structure_of(contents.header.results, directory)
        """Nest of `tf.TypeSpec`s, of shapes `[None, ...]`."""

        self._specs = tf.nest.flatten(self.structure)
        self._layout = Layout(describe_nest(self.structure))
        self._entries = contents.entries
        self._rows = contents.rows

    @property
    def missing(self) -> list[tuple[int, int | None]]:
        """The `(start, stop)` of the rows that no run has computed; `stop` is `None` where nobody knows it.

        Damaged chunks are not among them: they are found when they are read.
        """
        if self._rows is not None:
            return [*missing_rows(self._entries, 0, self._rows)]
        known = self._entries[-1].stop if self._entries else 0
        return [*missing_rows(self._entries, 0, known), (known, None)]

    @property
    def complete(self) -> bool:
        """Whether no rows are missing."""
        return not self.missing

    def __len__(self) -> int:
        """The number of rows, missing ones included.

        Raises:
            MissingRowsError: nobody knows: the data was a dataset, and no run got to its end.
        """
        if self._rows is None:
            raise self._missing_error(self.missing)
        return self._rows

    def __iter__(self) -> Iterator[Any]:
        """The chunks, in order, one file at a time. The end of those before a gap is an error."""
        row = 0
        with self._reader() as segments:
            for entry in self._entries:
                if entry.start > row:
                    raise self._missing_error([(row, entry.start)])
                yield self._pack(self._leaves(segments, entry))
                row = entry.stop
        if row != self._rows:
            raise self._missing_error([(row, self._rows)])

    def __getitem__(self, rows: slice) -> Any:
        """Rows, by a slice without a step."""
        if not isinstance(rows, slice) or rows.step not in (None, 1):
            raise TypeError(
                f"results[{rows!r}]; expected a slice without a step, as in results[i:j] or results[i:i + 1]"
            )
        from_start = all(bound is not None and bound >= 0 for bound in (rows.start or 0, rows.stop))
        length = sys.maxsize if self._rows is None and from_start else len(self)
        start, stop, _ = rows.indices(length)
        return self._read(start, max(start, stop))

    def load(self) -> Any:
        """All rows. Takes the memory of the results and of one chunk; twice that of ragged and sparse results."""
        return self._read(0, len(self))

    def as_dataset(self) -> Any:
        """A `tf.data.Dataset` of the chunks in order, as nests of tensors of `structure`; unbatch it to get rows.

        All chunks are read and checked once before it is returned, because a dataset can raise errors of TensorFlow alone:
        one that holds the message, where a chunk is damaged later. An iteration reads one file at a time.

        Raises:
            MissingRowsError: rows are missing, or damaged.
        """
        if not self.complete:
            raise self._missing_error(self.missing)
        with self._reader() as segments:
            for entry in self._entries:
                segments.read(entry)

        def chunks() -> Iterator[Any]:
            with self._reader() as segments:
                for entry in self._entries:
                    with tf.device(HOST):  # not around the yield: whichever thread comes next goes on from there
                        leaves = map(_as_tensor, self._leaves(segments, entry), self._specs)
                        chunk = self._pack(list(leaves))
                    yield chunk

        dataset = tf.data.Dataset.from_generator(chunks, output_signature=self.structure)
        return dataset.apply(tf.data.experimental.assert_cardinality(len(self._entries)))

    def __repr__(self) -> str:
        rows = "?" if self._rows is None else self._rows
        return f"Results({str(self.directory)!r}, rows={rows}, chunks={len(self._entries)}, complete={self.complete})"

    def _read(self, start: int, stop: int) -> Any:
        missing = missing_rows(self._entries, start, stop)
        if missing:
            raise self._missing_error(missing)
        if start == stop:
            return self._pack([_no_rows(spec) for spec in self._specs])
        arrays: dict[int, Array] = {}
        parts: dict[int, list[Any]] = {}
        with self._reader() as segments:
            for entry in overlapping(self._entries, start, stop):
                first, last = max(start, entry.start), min(stop, entry.stop)
                for i, leaf in enumerate(self._leaves(segments, entry)):
                    with tf.device(HOST):
                        piece = take_rows(leaf, first - entry.start, last - entry.start)
                    if isinstance(piece, np.ndarray):
                        if i not in arrays:
                            arrays[i] = self._empty((stop - start, *piece.shape[1:]), piece.dtype)
                        self._check_inner_shape(arrays[i], piece, entry)
                        arrays[i][first - start : last - start] = piece
                    else:
                        parts.setdefault(i, []).append(piece)
        with tf.device(HOST):
            return self._pack([arrays[i] if i in arrays else self._join(parts[i]) for i in range(len(self._specs))])

    def _reader(self) -> SegmentReader:
        return SegmentReader(self.directory, self._layout)

    def _leaves(self, segments: SegmentReader, entry: Entry) -> list[Any]:
        return decode_leaves(segments.read(entry), self._specs)

    def _pack(self, leaves: list[Any]) -> Any:
        return tf.nest.pack_sequence_as(self.structure, leaves)

    def _join(self, parts: list[Any]) -> Any:
        try:
            return join(parts)
        except (FunctionError, ValueError, tf.errors.OpError) as error:
            raise JournalError(
                f"chunks in {self.directory} do not fit together: {brief(error)}. Iterate over the results to get them by chunk"
            ) from error

    def _empty(self, shape: Sequence[int], dtype: Any) -> Array:
        try:
            return np.empty(shape, dtype)
        except (MemoryError, ValueError) as error:  # of so many rows, a folder may say so
            raise JournalError(f"rows in {self.directory}: {error}. Take fewer, by slices or chunk by chunk") from error

    def _check_inner_shape(self, whole: Array, piece: Array, entry: Entry) -> None:
        if whole.shape[1:] != piece.shape[1:]:
            raise JournalError(
                f"rows {entry.start} to {entry.stop - 1} in {self.directory} are of shape {list(piece.shape[1:])} each, "
                f"and rows before them of {list(whole.shape[1:])}; one array cannot hold both. Iterate over the results "
                "to get them by chunk"
            )

    def _missing_error(self, missing: list[Any]) -> MissingRowsError:
        ranges = [f"{start} to {stop - 1}" if stop is not None else f"from {start} on" for start, stop in missing]
        more = f" and {len(ranges) - 5} more ranges" if len(ranges) > 5 else ""
        return MissingRowsError(
            f"rows {', '.join(ranges[:5])}{more} are missing in {self.directory}: no run has got to the end. Run write "
            "again with the same function and data: it computes what is missing"
        )


def _no_rows(spec: Any) -> Any:
    with tf.device(HOST):
        empty = empty_rows(spec)
    return empty.numpy() if isinstance(spec, tf.TensorSpec) else empty


def _as_tensor(leaf: Any, spec: Any) -> Any:
    return tf.convert_to_tensor(leaf, spec.dtype) if isinstance(leaf, np.ndarray) else leaf
