"""`fn` mapped as one writes it in eager code: what a benchmark holds `DeviceMap` against."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from devicemap.base.interruption import Signals
from devicemap.base.options import Options
from devicemap.base.structure import as_objects, map_nest
from devicemap.compile.gather import check_row_counts
from devicemap.compile.seeds import row_seeds
from devicemap.compile.trace import trace
from devicemap.data.join import join
from devicemap.data.rows import HOST, Rows, row_spec, take_rows
from devicemap.data.sample import first_rows
from devicemap.data.shards import chunk_bounds, shard_rows
from devicemap.errors import FunctionError, brief, function_error
from devicemap.events import Shard


class EagerMap:
    """`fn` over shards, each in a `tf.device` block, one block after another.

    With `batched=True`, `fn` takes a shard at a time; else `tf.map_fn` in eager code hands it one row at a time. A `fn` that
    is a `tf.function` stays one: it is only called from eager code.
    """

    def __init__(self, fn: Callable[..., Any], devices: Sequence[str], batch_size: int | None, options: Options):
        """`options` are those of `DeviceMap`, of which `batched`, `seed`, `output_device` and the signature matter."""
        self._fn = fn
        self._devices = devices
        self._batch_size = batch_size
        self._options = options
        self._signatures: dict[Any, Any] = {}

    def __call__(self, rows: Rows) -> Any:
        """The nest that `fn` returns, for all rows, on the output device.

        Raises:
            FunctionError: `fn` failed; it names the device and rows, and is an instance of the original error's class too.
        """
        with Signals():
            parts = [self._run(shard, rows) for shard in self._shards(rows.count or 0)]
        structure = parts[0]
        with tf.device(self._options.output_device):
            leaves = [join(leaves) for leaves in zip(*map(tf.nest.flatten, parts))]
        return tf.nest.pack_sequence_as(structure, leaves)

    def prepare(self, rows: Rows) -> None:
        """Find out what `fn` returns, which `tf.map_fn` has to be told; apart, so that a first call does not hold it."""
        if not self._options.batched and rows.key not in self._signatures:
            traced = trace(self._fn, rows.specs, dataclasses.replace(self._options, vectorize=False, jit_compile=False))
            specs = [_signature_of_row(spec) for spec in traced.specs]
            self._signatures[rows.key] = tf.nest.pack_sequence_as(traced.structure, specs)

    def few_rows(self, rows: Rows) -> Rows:
        """So few of the rows as tell what all of them cost: those that one call of `fn` takes."""
        return first_rows(rows, len(self._shards(rows.count or 0)[0]) if self._options.batched else 1)

    def _shards(self, count: int) -> Sequence[Shard]:
        if self._batch_size is None:
            return shard_rows(count, self._devices)
        bounds = chunk_bounds(count, self._batch_size)
        return [Shard(self._devices[i % len(self._devices)], *pair) for i, pair in enumerate(bounds)]

    def _run(self, shard: Shard, rows: Rows) -> Any:
        with tf.device(HOST):  # cut where the data is, or all of it would go to every device
            data = tf.nest.map_structure(lambda leaf: take_rows(leaf, shard.start, shard.stop), rows.structure)
            seed = self._options.seed
            seeds = () if seed is None else (row_seeds(seed, shard.start, len(shard)),)
        self.prepare(rows)
        try:
            with tf.device(shard.device):
                if self._options.batched:
                    results = self._apply(data, *seeds)
                    check_row_counts(tf.nest.flatten(results), [], [shard])
                    return results
                # tf.map_fn would convert fn with autograph, in eager code too: slower, and errors lose their class
                row_fn = tf.autograph.experimental.do_not_convert(lambda row: self._apply(*row))
                return tf.map_fn(row_fn, (data, *seeds), fn_output_signature=self._signatures[rows.key])
        except FunctionError:
            raise
        except Exception as error:
            raise function_error(
                f"fn failed in eager code on {shard}: {type(error).__name__}: {brief(error)}. "
                'If it is meant for graphs only, set modes=["graph"]',
                error,
                [shard],
            ) from error

    def _apply(self, data: Any, *seeds: Any) -> Any:
        data = as_objects(data)
        keywords = {"seed": seeds[0]} if seeds else {}
        results = self._fn(*data, **keywords) if type(data) is tuple else self._fn(data, **keywords)
        return map_nest(lambda value, _: _as_tensor(value), results, "the result")


def _as_tensor(value: Any) -> Any:
    """Lists become tensors, as in tf.data and `DeviceMap`."""
    if isinstance(value, tf.Tensor | tf.RaggedTensor | tf.SparseTensor):
        return value
    return tf.convert_to_tensor(value)


def _signature_of_row(spec: Any) -> Any:
    """What `tf.map_fn` is told of one row, so that all rows make what has `spec`."""
    if isinstance(spec, tf.RaggedTensorSpec):
        return tf.RaggedTensorSpec(spec.shape[1:], spec.dtype, spec.ragged_rank - 1, spec.row_splits_dtype)
    return row_spec(spec)
