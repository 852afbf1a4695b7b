"""A `tf.data.Dataset` -> chunks: batches as they are, cut, or joined, and samples. And back: a stream of chunks as one."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from devicemap.base.options import Options
from devicemap.base.structure import as_nodes, freeze, nodes_of
from devicemap.data.chunks import Chunk
from devicemap.data.join import join
from devicemap.data.rows import HOST, Rows, any_rows, as_rows, take_rows
from devicemap.errors import DataError, DeviceMapError

_SAMPLES_PER_READ = 64
"""Samples that are read at once where chunks have no fixed size: reading them one by one takes longer than small functions."""

_ALL_ROWS = 2**62
"""More than any element has."""

_READ_AHEAD = 2
"""Elements that `tf.data` prepares in the background, where only one worker reads: several take turns, and for each new
dataset that it is told to read ahead from, `tf.data` takes 7 ms to optimise it."""


class Elements:
    """Chunks of a `tf.data.Dataset` of batches.

    Batches are handed on as they are (`whole`), cut to `batch_size`, or, where `merged`, cut and joined to any size.
    """

    reads = True

    def __init__(self, dataset: Any, specs: Any, rows: int | None, batch_size: int | None, whole: bool, merged: bool):
        self.specs, self.key, self.rows = specs, freeze(specs), rows
        self.batch_size = batch_size
        self._whole, self._merged = whole, merged
        self._dataset = dataset
        self._elements: Iterator[Rows] | None = None
        count = int(dataset.cardinality())
        self._elements_left = count if count >= 0 else None
        self._read_elements = self._read_rows = 0
        self._element: Rows | None = None
        self._taken_of_element = 0
        self._next = 0
        self._group = 0
        self._rows_in_group = 0

    def take(self, rows: int, limit: int | None) -> Chunk | None:
        wanted = _ALL_ROWS if self._whole else rows
        if limit is not None:
            wanted = min(wanted, limit)
        if self.batch_size is not None:
            wanted = min(wanted, self.batch_size - self._rows_in_group)
        pieces: list[tuple[Any, ...]] = []
        count = 0
        while count < wanted and (piece := self._piece(wanted - count)) is not None:
            pieces.append(piece[1])
            count += piece[0]
            if not self._merged:
                break
        if not count:
            return None
        with tf.device(HOST):
            leaves = pieces[0] if len(pieces) == 1 else tuple(join(parts) for parts in zip(*pieces))
        return self._chunk(count, leaves)

    def _chunk(self, count: int, leaves: tuple[Any, ...]) -> Chunk:
        self._rows_in_group += count
        fixed = self._whole or self.batch_size is not None
        last = not fixed or self._element is None or self._rows_in_group == self.batch_size
        chunk = Chunk(self._next, count, leaves, self._group, last)
        self._next += count
        if last:
            self._group += 1
            self._rows_in_group = 0
        return chunk

    def rows_left(self) -> int | None:
        if self.rows is not None:
            return self.rows - self._next
        if self._elements_left is None:
            return None
        in_element = 0 if self._element is None else (self._element.count or 0) - self._taken_of_element
        usual = self._read_rows / self._read_elements if self._read_elements else 1
        return in_element + math.ceil(self._elements_left * max(usual, 1))

    def read_ahead(self) -> None:
        if self._elements is None:
            self._dataset = self._dataset.prefetch(_READ_AHEAD)

    def close(self) -> None:
        self._elements = iter(())
        self._element = None

    def rows_of_first_batch(self) -> int | None:
        """Rows of the first chunk, where batches are handed on as they are: it is read now. Else, or without rows, `None`."""
        first = self._next_element() if self._whole else None
        return None if first is None else first.count

    def _next_element(self) -> Rows | None:
        """The element that rows are taken from, read if none is left of the one before; `None` at the end."""
        if self._elements is None:
            self._elements = _read(self._dataset)
        while self._element is None:
            element = next(self._elements, None)
            if element is None:
                self._elements_left = 0
                return None
            if self._elements_left:
                self._elements_left -= 1
            self._read_elements += 1
            self._read_rows += element.count or 0
            self._element, self._taken_of_element = (element if element.count else None), 0
        return self._element

    def _piece(self, wanted: int) -> tuple[int, tuple[Any, ...]] | None:
        """At most `wanted` rows of one element."""
        element, start = self._next_element(), self._taken_of_element
        if element is None:
            return None
        assert element.count is not None
        stop = min(start + wanted, element.count)
        self._taken_of_element = stop
        if stop == element.count:
            self._element = None
        if stop - start == element.count:
            return element.count, element.leaves
        with tf.device(HOST):
            return stop - start, tuple(take_rows(leaf, start, stop) for leaf in element.leaves)


def from_dataset(dataset: Any, options: Options) -> Elements:
    """Chunks of a `tf.data.Dataset`: of samples, or of batches that are handed on (cut to `batch_size` where given).

    Raises:
        DataError: for a batch without a row axis, for elements of unknown rank, and for those that are not tensors.
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
    size = options.batch_size if isinstance(options.batch_size, int) else None
    if options.batched:
        fits = not any(_unknown_dimensions(spec)[1:] for spec in specs)
        whole, merged, rows = options.batch_size is None, options.batch_size == "auto" and fits, None
    else:
        cardinality = int(dataset.cardinality())
        whole, rows = False, cardinality if cardinality >= 0 else None
        dataset, merged = _batches_of_samples(dataset, size)
        size = size if merged else 1
    of_chunk = tf.nest.map_structure(any_rows, as_nodes(dataset.element_spec))
    return Elements(dataset, of_chunk, rows, size, whole, merged)


def as_dataset(stream: Callable[[], Iterator[Any]], spec: Any, count: int | None) -> Any:
    """A `tf.data.Dataset` that goes through `stream()` anew in each iteration.

    TensorFlow keeps the generator of a dataset for good. So that one refers to the stream weakly, and the dataset owns it, by
    its tensor: datasets and iterators that are made of it keep it in Python, as do functions that capture it.
    """
    dataset = tf.data.Dataset.from_generator(_weakly(stream), output_signature=spec)
    if count is not None:
        dataset = dataset.apply(tf.data.experimental.assert_cardinality(count))
    tf.data.experimental.to_variant(dataset)._devicemap_stream = stream
    return dataset


def _weakly(stream: Callable[[], Iterator[Any]]) -> Callable[[], Iterator[Any]]:
    reference = weakref.ref(stream)

    def generate() -> Iterator[Any]:
        known = reference()
        if known is None:
            raise DeviceMapError(
                "the dataset that DeviceMap.as_dataset made is gone, and what was made of it in a tf.function does not keep "
                "it; keep that dataset as long as you read from others that come from it"
            )
        return known()

    return generate


def _batches_of_samples(dataset: Any, size: int | None) -> tuple[Any, bool]:
    """The dataset in batches, and whether several of them can be joined."""
    unknown = [_unknown_dimensions(spec) for spec in tf.nest.flatten(as_nodes(dataset.element_spec))]
    for node in nodes_of(as_nodes(dataset.element_spec)):
        extension = node.kind is not None and issubclass(node.kind, tf.experimental.ExtensionType)
        if extension and not issubclass(node.kind, tf.experimental.BatchableExtensionType):
            raise DataError(
                f"the dataset has samples with a {node.kind.__name__}, which TensorFlow cannot hold several of in one; make it "
                "a tf.experimental.BatchableExtensionType, or set batched=True for a dataset of batches"
            )
    if all(not u for u in unknown):
        return dataset.batch(size or _SAMPLES_PER_READ), True
    if all(u in ([], [0]) for u in unknown):  # samples of different lengths: ragged rows, which fn gets dense again
        return dataset.ragged_batch(size or _SAMPLES_PER_READ), True
    return dataset.batch(1), False  # samples of different shapes cannot be held together


def _unknown_dimensions(spec: Any) -> list[int]:
    if not isinstance(spec, tf.TensorSpec):
        return []
    return [i for i, d in enumerate(spec.shape.as_list()) if d is None]


def _read(dataset: Any) -> Iterator[Rows]:
    for element in dataset:
        yield as_rows(element)
