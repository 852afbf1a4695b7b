"""Datasets and in-memory rows -> chunks, in order, each with the index of its first row."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from devicemap.errors import DataError
from devicemap.options import Options
from devicemap.rows import HOST, Rows, as_rows, freeze, take_rows
from devicemap.scheduling import samples_per_chunk
from devicemap.sharding import chunk_bounds
from devicemap.streaming import Chunk


@dataclass(frozen=True)
class Source:
    """Data that is read chunk by chunk."""

    specs: Any
    """Nest of `tf.TypeSpec`s of a chunk, of shapes `[None, ...]`."""

    chunks: Iterator[Chunk]
    """The chunks; may be read once."""

    @property
    def key(self) -> Any:
        """As `Rows.key`: one trace serves one key."""
        return freeze(self.specs)


def in_memory(rows: Rows, batch_size: int) -> Source:
    """Chunks of at most `batch_size` rows."""
    assert rows.count is not None  # eager code knows
    return Source(rows.specs, _pieces(rows, 0, batch_size))


def from_dataset(dataset: Any, options: Options, devices: int) -> Source:
    """Chunks of a `tf.data.Dataset`: of samples, or of batches that are handed on (cut to `batch_size` where given).

    Raises:
        DataError: for a batch without a row axis, and for elements that are not tensors.
    """
    for spec in tf.nest.flatten(dataset.element_spec):
        if not isinstance(spec, tf.TensorSpec | tf.RaggedTensorSpec | tf.SparseTensorSpec):
            raise DataError(f"the dataset has elements with {spec}; expected dense, ragged or sparse tensors only")
        if options.batched and spec.shape.rank == 0:
            raise DataError(
                f"the dataset has elements with a scalar ({spec}), but batched=True takes batches of rows. Call "
                ".batch(n) on it, or set batched=False for a fn of one sample"
            )
    if dataset.cardinality() == tf.data.INFINITE_CARDINALITY:
        raise DataError("the dataset is infinite, and its whole result would be too; take a part of it with .take(n)")
    if not options.batched:
        dataset = _batches_of_samples(dataset, options, devices)
    return Source(_any_rows(dataset.element_spec), _read(dataset, options.batch_size))


def _batches_of_samples(dataset: Any, options: Options, devices: int) -> Any:
    cardinality = int(dataset.cardinality())
    size = options.batch_size or samples_per_chunk(cardinality if cardinality >= 0 else None, devices)
    unknown = [_unknown_dimensions(spec) for spec in tf.nest.flatten(dataset.element_spec)]
    if all(not u for u in unknown):
        return dataset.batch(size)
    if all(u in ([], [0]) for u in unknown):  # samples of different lengths: ragged rows, which fn gets dense again
        return dataset.ragged_batch(size)
    return dataset.batch(1)  # samples of different shapes cannot be held together


def _unknown_dimensions(spec: Any) -> list[int]:
    if not isinstance(spec, tf.TensorSpec):
        return []
    if spec.shape.rank is None:
        return [-1]
    return [i for i, d in enumerate(spec.shape.as_list()) if d is None]


def _any_rows(specs: Any) -> Any:
    """The specs without the row counts that a dataset knows, so that the last, smaller batch needs no other trace."""

    def relax(spec: Any) -> Any:
        if spec.shape.rank is None:
            raise DataError(
                f"the dataset has elements of unknown rank ({spec}); give from_generator an output_signature, or map "
                "tf.ensure_shape over it"
            )
        shape = tf.TensorShape([None]).concatenate(spec.shape[1:])
        if isinstance(spec, tf.RaggedTensorSpec):
            return tf.RaggedTensorSpec(shape, spec.dtype, spec.ragged_rank, spec.row_splits_dtype)
        return type(spec)(shape, spec.dtype)

    return tf.nest.map_structure(relax, specs)


def _read(dataset: Any, batch_size: int | None) -> Iterator[Chunk]:
    start = 0
    for element in dataset:
        rows = as_rows(element)
        yield from _pieces(rows, start, batch_size)
        start += rows.count or 0


def _pieces(rows: Rows, first_row: int, batch_size: int | None) -> Iterator[Chunk]:
    """Non-empty chunks of `rows`, whose first has the global index `first_row`."""
    count = rows.count or 0
    if batch_size is None or 0 < count <= batch_size:
        if count:
            yield Chunk(first_row, count, rows.leaves)
        return
    for start, stop in chunk_bounds(count, batch_size):
        with tf.device(HOST):  # not around the yield: whichever thread comes next goes on from there
            leaves = tuple(take_rows(leaf, start, stop) for leaf in rows.leaves)
        yield Chunk(first_row + start, stop - start, leaves)
