"""A user's function with its options and devices, and its `CompiledMap` for each structure of data."""

from __future__ import annotations

import copy
import inspect
import os
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

import tensorflow as tf

from devicemap._tensorflow.runtime import lost_threads
from devicemap.compile.compiled import CompiledMap
from devicemap.compile.random import Stream, row_seeds
from devicemap.compile.reduction import JoinedShards, Reduction
from devicemap.compile.trace import Traced, trace
from devicemap.data.join import UNEVEN_ROWS
from devicemap.data.rows import HOST
from devicemap.data.structure import freeze
from devicemap.devices import choose_devices, choose_output_device, gpu_indices, is_out_of_memory, slots_on
from devicemap.errors import DeviceError, DeviceMapError, brief, function_error
from devicemap.events import Shard, short_name
from devicemap.hosts import is_remote
from devicemap.options import Options, check_options, check_progress

_IF_LOST = ". If the host is lost, leave out its devices, or restart its server and this program"
"""Advice for an unavailable device of another host."""

_FORKED = (
    "this process was forked after TensorFlow was initialised, and has none of its threads, so that ops would wait forever. "
    "Start processes by multiprocessing.get_context('spawn'), or before the first op, tensor or device listing"
)

_KEPT_REDUCTIONS = 16
"""A program keeps the compiled maps of this many reductions."""

_COMPILED = "_devicemap_compiled"
"""Attribute of a graph that is being built: the compiled maps of each program that belong to the graph."""


class Structured(Protocol):
    """Data with specs: rows, a source of rows, or only specs."""

    @property
    def specs(self) -> Any:
        """Nest of `tf.TypeSpec`s, of shapes `[None, ...]`."""

    @property
    def key(self) -> Any:
        """A hashable value. Data with equal keys shares a trace."""


class _Identity:
    """Identifies a program and its copies in weak tables."""


class Program:
    """Checked options, chosen devices, and a `CompiledMap` per structure of data. Thread-safe.

    A `CompiledMap` refers neither to its program nor to `fn`.
    """

    def __init__(self, fn: Callable[..., Any], options: dict[str, Any]):
        self.fn = fn
        self.options: Options = check_options(fn, options)
        if lost_threads():
            raise DeviceError(_FORKED)
        self._process_id = os.getpid()
        self.devices = choose_devices(self.options.devices)
        self.output_device = choose_output_device(self.options.output_device)
        self.gpus = gpu_indices(self.devices)
        self.name = self.options.name or str(getattr(fn, "__name__", type(fn).__name__))
        self._lock = threading.RLock()
        self.reduction: Reduction | JoinedShards | None = None
        self._compiled: dict[Any, CompiledMap] = {}
        self._identity = _Identity()
        self._reducing: OrderedDict[Any, tuple[Any, dict[Any, CompiledMap], _Identity]] = OrderedDict()

    def of(self, fn: Callable[..., Any], progress: Any) -> Program:
        """Return the program with another object for its function. Both programs share their compiled maps."""
        program = copy.copy(self)
        program.fn = fn
        if progress is not self.options.progress:
            program.options = replace(self.options, progress=check_progress(progress))
        return program

    @property
    def counts_rows(self) -> bool:
        """Whether `fn` must return as many rows as it gets."""
        return self.options.batched and (self.reduction is None or self.reduction.counts_rows)

    def may_repeat(self, compiled: CompiledMap) -> bool:
        """Whether any row may run again by itself. `fn` must take one row and have no side effects."""
        audit = compiled.traced.audit
        return not (self.options.batched or audit.effects or audit.writes)

    def reducing(self, reduction: Reduction | JoinedShards) -> Program:
        """Return the program with its results reduced."""
        program = copy.copy(self)
        with self._lock:
            known = self._reducing.pop(reduction.key, None) or (reduction, {}, _Identity())
            self._reducing[reduction.key] = known
            while len(self._reducing) > _KEPT_REDUCTIONS:
                self._reducing.popitem(last=False)
        program.reduction, program._compiled, program._identity = known
        return program

    def compiled_for(self, data: Structured) -> CompiledMap:
        """Return the compiled map for data of this structure, dtypes and inner shapes, which is traced once."""
        if self._process_id != os.getpid():
            raise DeviceError(_FORKED)
        compiled = self._compiled.get(data.key)
        if compiled is None and not tf.executing_eagerly():
            compiled = self._compiled_in_graph().get(data.key)
        return compiled or self._trace(data)

    def _trace(self, data: Structured) -> CompiledMap:
        specs = data.specs
        key = freeze(specs)
        with self._lock:
            compiled = self._compiled.get(key)
            if compiled is None:
                options = replace(self.options, devices=self.devices, progress=False)
                by_rows = self.counts_rows or not self.options.batched
                compiled = CompiledMap(
                    slots_on(self.devices) if by_rows else self.devices,
                    self.output_device,
                    partial(_trace_again, _weakly(self.fn), specs, options, self.reduction),
                    self.name,
                    self.counts_rows,
                )
            known = self._compiled
            if compiled.belongs_to_a_graph:  # fn closes over tensors of the user's tf.function
                known = self._compiled_in_graph()
            known[key] = known[data.key] = compiled
            return compiled

    def _compiled_in_graph(self) -> dict[Any, CompiledMap]:
        """Return the compiled maps of functions that close over tensors of the graph that is being built.

        The graph owns them, because a compiled map refers to the graph. A weak table in the program would keep each graph
        alive.
        """
        graph = tf.compat.v1.get_default_graph()
        if not hasattr(graph, _COMPILED):
            setattr(graph, _COMPILED, weakref.WeakKeyDictionary())
        found: dict[Any, CompiledMap] = getattr(graph, _COMPILED).setdefault(self._identity, {})
        return found

    def seeded(self, leaves: tuple[Any, ...], first_row: int, rows: Any) -> tuple[Any, ...]:
        """Return the leaves, followed by a leaf of row seeds if the option `seed` is set."""
        if self.options.seed is None:
            return leaves
        with tf.device(HOST):
            return (*leaves, row_seeds(self.options.seed, first_row, rows))

    def failed(self, error: BaseException, shards: Sequence[Shard]) -> BaseException:
        """Return the error to raise for an error of one of `shards`, or of the same rows on several devices."""
        if isinstance(error, DeviceMapError) or not isinstance(error, Exception):
            return error
        again = len({(shard.start, shard.stop) for shard in shards}) == 1  # the same rows, on one device after another
        where = (
            ", then ".join([str(shards[0]), *(short_name(shard.device) for shard in shards[1:])])
            if again
            else ", or ".join(map(str, shards))
        )
        what = brief(error)
        uneven = not self.options.batched and "Incompatible shapes during merge" in what
        hint = f". A dense tensor cannot hold rows of different shapes. {UNEVEN_ROWS}" if uneven else ""
        if isinstance(error, tf.errors.UnavailableError) and any(is_remote(shard.device) for shard in shards):
            hint += _IF_LOST
        if is_out_of_memory(error):
            hint += (
                ". Let devices compute fewer rows at a time: by batch_size, or by fewer rows in each call"
                if len(shards[0]) > 1
                else ". This row does not fit by itself: compute it in parts, or on a device with more memory"
            )
        located = function_error(f"{self.name} failed on {where}: {type(error).__name__}: {what}{hint}", error, shards)
        located.__cause__ = error
        return located


def _weakly(fn: Callable[..., Any]) -> Callable[[], Any]:
    """Return a weak reference to `fn`. Calls keep `fn` alive."""
    try:
        return weakref.WeakMethod(fn) if inspect.ismethod(fn) else weakref.ref(fn)
    except TypeError:  # an object of a class with __slots__
        return lambda: fn


def _trace_again(
    fn: Callable[[], Any],
    specs: Any,
    options: Options,
    reduction: Reduction | JoinedShards | None,
    stream: Stream | None,
) -> Traced:
    return trace(fn(), specs, options, stream, reduction)
