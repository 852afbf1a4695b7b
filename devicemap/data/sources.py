"""Sources: the user's data, read chunk by chunk in the order of rows, and its first rows in memory."""

from __future__ import annotations

import math
import sys
import threading
from collections.abc import Generator
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol

import tensorflow as tf

from devicemap.data.rows import HOST, Rows, as_rows, first_rows, spec_of, take_rows
from devicemap.data.shards import join
from devicemap.data.structure import as_nodes, nodes_of
from devicemap.errors import DataError, FunctionError
from devicemap.events import Shard
from devicemap.options import Options

_SAMPLES_PER_READ = 64
"""Samples per read if chunks have no fixed size. Reading single samples takes longer than small functions."""

_RELEASE_SECONDS = 0.02
"""How long the end of a dataset is waited for."""


@dataclass(frozen=True)
class Chunk:
    """Neighbouring rows that were read."""

    start: int
    """Global index of the first row."""

    count: int
    """Number of rows, at least one."""

    leaves: tuple[Any, ...]
    """Leaves of shape `[count, ...]`."""

    def on(self, device: str) -> Shard:
        """Return the rows of this chunk on a device."""
        return Shard(device, self.start, self.start + self.count)

    def cut(self, start: int, stop: int) -> Chunk:
        """Return rows `start` to `stop - 1`, by their global indices."""
        if (start, stop) == (self.start, self.start + self.count):
            return self
        with tf.device(HOST):
            leaves = tuple(take_rows(leaf, start - self.start, stop - self.start) for leaf in self.leaves)
        return Chunk(start, stop - start, leaves)


class Source(Protocol):
    """Rows that one thread reads chunk by chunk, in order."""

    specs: Any
    """Nest of `tf.TypeSpec`s of a chunk, of shapes `[None, ...]`."""

    rows: int | None
    """Number of rows, `None` if unknown."""

    reads: bool
    """Whether reading takes time, so that devices may wait for rows."""

    @property
    def chunk_rows(self) -> int | None:
        """Expected rows of the next chunk if the source determines them; `None` if `take` does."""

    def take(self, rows: int) -> Chunk | None:
        """Read the next chunk, of at most `rows` rows unless `chunk_rows` is set. Return `None` at the end."""

    def rows_left(self) -> int | None:
        """Return the number of rows that are still to be read, estimated for batches of a dataset; `None` if unknown."""

    def close(self) -> None:
        """Release the data."""


class MemorySource:
    """Chunks of rows in memory."""

    reads = False

    def __init__(self, rows: Rows, chunk_rows: int | None):
        assert rows.count is not None  # eager code knows it
        self.specs = rows.specs
        self.rows: int | None = rows.count
        self.chunk_rows = chunk_rows
        self._all = Chunk(0, rows.count, rows.leaves)
        self._next = 0

    def take(self, rows: int) -> Chunk | None:
        start, self._next = self._next, min(self._next + (self.chunk_rows or rows), self._all.count)
        return self._all.cut(start, self._next) if start < self._next else None

    def rows_left(self) -> int | None:
        return self._all.count - self._next

    def close(self) -> None:
        self._all = Chunk(0, self._next, ())


class BatchUse(Enum):
    """How the batches of a dataset become chunks."""

    WHOLE = "each batch is a chunk"
    CUT = "each batch is cut into chunks"
    JOINED = "a chunk may have rows of several batches"


class DatasetSource:
    """Chunks of a `tf.data.Dataset` of batches."""

    reads = True

    def __init__(self, dataset: Any, specs: Any, rows: int | None, batch_size: int | None, use: BatchUse):
        """`dataset`: of batches of rows; `specs`, `rows`: as in `Source`; `batch_size`: the most rows of a chunk."""
        self.specs, self.rows, self.batch_size = specs, rows, batch_size
        self._use = use
        self._batches = _read(dataset)
        count = int(dataset.cardinality())
        self._batches_left = count if count >= 0 else None
        self._batches_read = self._rows_read = 0
        self._batch: Chunk | None = None
        self._next = 0

    @property
    def chunk_rows(self) -> int | None:
        if self.batch_size is not None:
            return self.batch_size
        return math.ceil(self._usual_rows) if self._use is BatchUse.WHOLE else None

    def take(self, rows: int) -> Chunk | None:
        start = self._next
        cuts: list[tuple[Any, ...]] = []
        while (left := (self.chunk_rows or rows) - (self._next - start)) > 0:
            try:
                batch = self._unread()
            except Exception as error:
                if not cuts:
                    raise
                self._batches = _failing(error)  # raised by the next call, after the rows that were read
                break
            if batch is None:
                break
            stop = batch.start + batch.count
            taken = batch.cut(self._next, stop if self._use is BatchUse.WHOLE else min(self._next + left, stop))
            cuts.append(taken.leaves)
            self._next += taken.count
            if self._use is not BatchUse.JOINED:
                break
        if not cuts:
            return None
        with tf.device(HOST):
            leaves = cuts[0] if len(cuts) == 1 else tuple(join(parts) for parts in zip(*cuts))
        return Chunk(start, self._next - start, leaves)

    def rows_left(self) -> int | None:
        if self.rows is not None:
            return self.rows - self._next
        if self._batches_left is None:
            return None
        return self._rows_read - self._next + math.ceil(self._batches_left * self._usual_rows)

    def close(self) -> None:
        with suppress(ValueError):  # if a thread still reads, the iterator ends with the thread
            self._batches.close()
        self._batch = None

    def rows_of_first_batch(self) -> int | None:
        """Read the first batch if batches are not cut, and return its number of rows; otherwise return `None`."""
        first = self._unread() if self._use is BatchUse.WHOLE else None
        return None if first is None else first.count

    @property
    def _usual_rows(self) -> float:
        return max(1, self._rows_read / self._batches_read) if self._batches_read else 1

    def _unread(self) -> Chunk | None:
        """Return the batch with the next row, read if necessary; `None` at the end."""
        while self._batch is None or self._next == self._batch.start + self._batch.count:
            self._batch = None
            batch = next(self._batches, None)
            if batch is None:
                self._batches_left = 0
                return None
            assert batch.count is not None
            if self._batches_left:
                self._batches_left -= 1
            self._batches_read += 1
            self._batch = Chunk(self._rows_read, batch.count, batch.leaves)
            self._rows_read += batch.count
        return self._batch


def _read(dataset: Any) -> Generator[Rows]:
    iterators = [iter(dataset)]  # created when the first chunk is read
    try:
        for element in iterators[0]:
            yield as_rows(element)
    finally:
        _release(iterators)


def _release(iterators: list[Any]) -> None:
    """Clear a list of iterators over datasets, in a thread if that takes long.

    `tf.data`'s autotuning ends at its next step, up to a minute later (`test_leaving_a_dataset_does_not_wait_for_its_end`).
    """
    if sys.is_finalizing():  # no thread would start
        iterators.clear()
        return
    released = threading.Event()

    def clear() -> None:
        iterators.clear()
        released.set()

    threading.Thread(target=clear, name="devicemap dataset").start()  # the interpreter waits for it: it runs TensorFlow
    released.wait(_RELEASE_SECONDS)


def _failing(error: Exception) -> Generator[Rows]:
    raise error
    yield


def from_dataset(dataset: Any, options: Options) -> DatasetSource:
    """Return chunks of a `tf.data.Dataset` of samples, or of batches with `batched=True`.

    Raises:
        DataError: for a batch without a row axis, and for elements that have an unknown rank or are not tensors.
    """
    specs = tf.nest.flatten(as_nodes(dataset.element_spec))
    for spec in specs:
        if not isinstance(spec, tf.TensorSpec | tf.RaggedTensorSpec | tf.SparseTensorSpec):
            raise DataError(f"the dataset has elements with {spec}; expected dense, ragged or sparse tensors only")
        if spec.shape.rank is None:
            raise DataError(
                f"the dataset has elements of unknown rank ({spec}); give from_generator an output_signature, or map "
                "tf.ensure_shape over it"
            )
        if options.batched and spec.shape.rank == 0:
            raise DataError(
                f"the dataset has elements with a scalar ({spec}), but batched=True takes batches of rows. Call "
                ".batch(n) on it, or set batched=False for a fn of one sample"
            )
    size, rows = options.chunk_rows, None
    if options.batched:
        joins = options.batch_size == "auto" and not any(_unknown_dimensions(spec)[1:] for spec in specs)
        use = BatchUse.WHOLE if options.batch_size is None else BatchUse.JOINED if joins else BatchUse.CUT
    else:
        cardinality = int(dataset.cardinality())
        rows = cardinality if cardinality >= 0 else None
        dataset, joins = _batches_of_samples(dataset, size)
        use, size = (BatchUse.JOINED, size) if joins else (BatchUse.CUT, 1)
    of_chunk = tf.nest.map_structure(spec_of, as_nodes(dataset.element_spec))
    return DatasetSource(dataset, of_chunk, rows, size, use)


def _batches_of_samples(dataset: Any, size: int | None) -> tuple[Any, bool]:
    """Return the dataset in batches, and whether several of them can be joined."""
    unknown = [_unknown_dimensions(spec) for spec in tf.nest.flatten(as_nodes(dataset.element_spec))]
    for node in nodes_of(as_nodes(dataset.element_spec)):
        extension = node.kind is not None and issubclass(node.kind, tf.experimental.ExtensionType)
        if extension and not issubclass(node.kind, tf.experimental.BatchableExtensionType):
            raise DataError(
                f"the dataset has samples with a {node.kind.__name__}, which TensorFlow cannot batch; make it a "
                "tf.experimental.BatchableExtensionType, or set batched=True for a dataset of batches"
            )
    if all(not u for u in unknown):
        return dataset.batch(size or _SAMPLES_PER_READ), True
    if all(u in ([], [0]) for u in unknown):  # samples of different lengths become ragged rows, dense in fn
        return dataset.ragged_batch(size or _SAMPLES_PER_READ), True
    return dataset.batch(1), False  # one tensor cannot hold samples of different shapes


def _unknown_dimensions(spec: Any) -> list[int]:
    if not isinstance(spec, tf.TensorSpec):
        return []
    return [i for i, d in enumerate(spec.shape.as_list()) if d is None]


def rows_in_memory(data: Any, options: Options, most: int | None) -> Rows:
    """Return the first rows of `data`, at most `most`. `None` takes all rows; a dataset needs a number.

    Raises:
        DataError: for data that has no rows or cannot be rows, and for a dataset whose samples do not fit together.
    """
    if isinstance(data, tf.data.Dataset):
        assert most is not None  # it may have no end
        rows = _read_rows(data, options, most)
    else:
        rows = as_rows(data)
    if not rows.count:
        raise DataError("data has no rows; expected at least one, better many more than there are devices")
    return rows if most is None else first_rows(rows, most)


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
