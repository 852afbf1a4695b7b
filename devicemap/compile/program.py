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
from pathlib import Path
from types import MethodType
from typing import Any, Protocol

import tensorflow as tf

from devicemap._tensorflow.functions import in_xla_context, keep_alive
from devicemap.compile.compiled import CompiledMap
from devicemap.compile.python_values import plain_values
from devicemap.compile.random import row_seeds
from devicemap.compile.reduction import Reduction
from devicemap.compile.trace import trace
from devicemap.data.rows import HOST, Rows, structure_key
from devicemap.data.shards import UNEVEN_ROWS
from devicemap.data.structure import freeze
from devicemap.devices import choose_devices, choose_output_device, gpu_indices, is_out_of_memory, slots_on, task_device
from devicemap.errors import (
    OTHER_ROW_COUNT,
    DeviceError,
    DeviceMapError,
    OptionError,
    brief,
    function_error,
    is_unknown_to_xla,
)
from devicemap.events import Shard, short_name
from devicemap.hosts import is_remote
from devicemap.options import Options, check_options, check_progress, variables_of

_IF_COMPILED = (
    ". A function that XLA compiles (jit_compile=True) cannot use a variable of another device which it writes, or which the "
    "option in_place names: map on the device of the variable, or leave jit_compile out"
)
"""Advice for a `fn` that calls such a function."""

_IF_LOST = ". If the host is lost, leave out its devices, or restart its server and this program"
"""Advice for an unavailable device of another host."""

_FORKED = (
    "this process was forked after TensorFlow was initialised, and has none of its threads, so that ops would wait forever. "
    "Start processes by multiprocessing.get_context('spawn'), or before the first op, tensor or device listing"
)

_KEPT_REDUCTIONS = 16
"""A program keeps the compiled maps of this many reductions."""

_MAX_PROGRAMS = 64
"""The largest number of kept programs. The least recently used program is dropped first."""

_MOST_VARIANTS = 4
"""The largest number of programs of one function, which differ in the numbers that the function uses."""


class Structured(Protocol):
    """Data with specs: rows, a source of rows, or only specs."""

    @property
    def specs(self) -> Any:
        """Nest of `tf.TypeSpec`s, of shapes `[None, ...]`. Data with equal specs shares a trace."""


class Program:
    """Checked options, chosen devices, and a `CompiledMap` per structure of data. Thread-safe.

    A `CompiledMap` refers neither to its program nor to `fn`.
    """

    def __init__(self, fn: Callable[..., Any], options: dict[str, Any]):
        self.fn = fn
        self.options: Options = check_options(fn, options)
        self._process_id = os.getpid()
        self.devices = choose_devices(self.options.devices)  # initialises TensorFlow
        if _has_lost_threads():
            raise DeviceError(_FORKED)
        self.output_device = choose_output_device(self.options.output_device)
        self.gpus = gpu_indices(self.devices)
        self.name = self.options.name or str(getattr(fn, "__name__", type(fn).__name__))
        self._lock = threading.RLock()
        self.reduction: Reduction | None = None
        self._compiled: dict[Any, CompiledMap] = {}

    def of(self, fn: Callable[..., Any], progress: Any) -> Program:
        """Return the program with another object for its function. Both programs share their compiled maps."""
        program = copy.copy(self)
        program.fn = fn
        if progress is not self.options.progress:
            program.options = replace(self.options, progress=check_progress(progress))
        return program

    def may_repeat(self, compiled: CompiledMap) -> bool:
        """Whether any row may run again by itself. `fn` must take one row and have no side effects."""
        return not (self.options.batched or compiled.traced.audit.has_side_effects)

    def reducing(self, reduction: Reduction) -> Program:
        """Return the program with its results reduced. Both programs share their compiled maps."""
        program = copy.copy(self)
        program.reduction = reduction
        return program

    def compiled_for(self, data: Structured) -> CompiledMap:
        """Return the compiled map for data of this structure, dtypes and inner shapes, which is traced once."""
        if self._process_id != os.getpid():
            raise DeviceError(_FORKED)
        of_data = data.key if isinstance(data, Rows) else structure_key(data.specs)
        # XLA cannot compile loops and branches that TensorFlow changed for a gradient. So functions that it compiles have a
        # trace of their own (test_what_xla_compiles_after_gradients).
        within_xla = not tf.executing_eagerly() and in_xla_context()
        key = (None if self.reduction is None else self.reduction.key), (of_data, within_xla)
        return self._compiled.get(key) or self._trace(data.specs, key)

    def _trace(self, specs: Any, key: Any) -> CompiledMap:
        with self._lock:
            compiled = self._compiled.get(key)
            if compiled is None:
                options = replace(self.options, devices=self.devices, progress=False)
                fn, reduction = _weakly(self.fn), self.reduction
                compiled = CompiledMap(
                    slots_on(self.devices),
                    self.output_device,
                    lambda stream: trace(fn(), specs, options, stream, reduction),  # must not refer to `self`
                    self.name,
                )
                if options.skips and compiled.traced.audit.ordered:
                    raise OptionError(
                        "on_error='skip' and a fn that writes variables in row order: a row that fails may have written "
                        "already; use assign_add, or return the new value"
                    )
            if compiled.belongs_to_a_graph:  # fn closes over tensors of the graph that is being built
                keep_alive(compiled)
                return compiled
            self._compiled[key] = compiled
            reductions = [*dict.fromkeys(reduction for reduction, _ in self._compiled if reduction is not None)]
            for dropped in [key for key in self._compiled if key[0] in reductions[:-_KEPT_REDUCTIONS]]:
                del self._compiled[dropped]
            return compiled

    def with_row_seeds(self, leaves: tuple[Any, ...], first_row: int, rows: Any) -> tuple[Any, ...]:
        """Return the leaves, followed by a leaf of row seeds if the option `seed` is set."""
        if self.options.seed is None:
            return leaves
        with tf.device(HOST):
            return (*leaves, row_seeds(self.options.seed, first_row, rows))

    def located_error(self, error: BaseException, shards: Sequence[Shard]) -> BaseException:
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
        if OTHER_ROW_COUNT in what:
            hint += ". Set batched=False for a fn of one row"
        if "Trying to access resource" in what:
            hint += _IF_COMPILED
        if is_unknown_to_xla(error):
            hint += ". XLA lacks this op, or a dtype of its tensors: leave jit_compile out"
        if isinstance(error, tf.errors.UnavailableError) and any(is_remote(shard.device) for shard in shards):
            hint += _IF_LOST
        if is_out_of_memory(error):
            hint += (
                ". Let devices compute fewer rows at a time: by batch_size, or by fewer rows in each call"
                if len(shards[0]) > 1
                else ". This row does not fit by itself: compute it in parts, or on a device with more memory"
            )
        located = function_error(f"{self.name} failed on {where}: {type(error).__name__}: {what}{hint}", error, shards)
        # The frames of a traceback hold copies of variables on devices (test_a_kept_error_keeps_no_copies_of_variables).
        located.__cause__ = error.with_traceback(None) if isinstance(error, tf.errors.OpError) else error
        return located


def _has_lost_threads() -> bool:
    """Return whether an initialised TensorFlow has no threads in this process (on Linux).

    A forked process has the memory of its parent, but not its threads. Functions then wait forever (test_forks).
    """
    try:
        names = [(thread / "comm").read_text() for thread in Path("/proc/self/task").iterdir()]
    except OSError:  # another system, or a thread ended while it was read, so there are threads
        return False
    # Other versions of TensorFlow may name threads differently, but still have more threads than Python.
    return len(names) <= threading.active_count() and not any(name.startswith("tf_") for name in names)


def _weakly(fn: Callable[..., Any]) -> Callable[[], Any]:
    """Return a weak reference to `fn`. Calls keep `fn` alive."""
    try:
        if not inspect.ismethod(fn):
            return weakref.ref(fn)
        # Not a `WeakMethod`, whose callbacks fail in the garbage collector (test_a_class_that_is_gone).
        function, owner = weakref.ref(fn.__func__), weakref.ref(fn.__self__)
        return lambda: MethodType(function(), owner())  # type: ignore[arg-type]
    except TypeError:  # an object of a class with __slots__
        return lambda: fn


class ProgramCache:
    """The programs of functions that were passed to `parallel_map`, by function and options. Thread-safe.

    Each program is kept as long as its function exists. A program refers to its function, so a table with weak references to
    functions would keep both. The cache keeps programs without their functions, and each call passes its function. TensorFlow's
    registries keep the functions of `tf.py_function` and `tf.custom_gradient` forever, so the number of programs is limited.
    """

    def __init__(self, maxsize: int = _MAX_PROGRAMS) -> None:
        self._most = maxsize
        self._kept: OrderedDict[Any, _CacheEntry] = OrderedDict()
        self._lock = threading.Lock()

    def program_of(self, fn: Callable[..., Any], options: dict[str, Any]) -> Program:
        """Return the program of an earlier call with the same function and options except `progress`, or a new one.

        Bound methods are equal if they are the same method of the same object.
        """
        # Each access creates a new bound method, so the key consists of its object and its function.
        parts = (fn.__self__, fn.__func__) if inspect.ismethod(fn) else (fn,)
        relevant = {name: value for name, value in options.items() if name != "progress"}
        relevant["task"] = task_device.get()
        try:
            in_place = variables_of(options.get("in_place", ()))
            relevant["in_place"] = [id(variable) for variable in in_place]
            # By identity, because __hash__ and __eq__ would call the user's code; and with types, because True == 1.
            of_fn = (*map(id, parts), *((name, type(value), freeze(value)) for name, value in relevant.items()))
            key = of_fn, plain_values(fn)
            hash(key)
        except (TypeError, OptionError):  # an option that is not hashable, or not valid
            return Program(fn, options)
        with self._lock:
            program = self._kept[key].program if key in self._kept else None
            if program is None:
                program = Program(fn, options)
                for dropped in [other for other, kept in self._kept.items() if kept.program is None]:
                    del self._kept[dropped]
                for older in [other for other in self._kept if other[0] == of_fn][: 1 - _MOST_VARIANTS]:
                    self._kept.pop(older).drop()
                self._kept[key] = _CacheEntry(program.of(_provided_by_calls, False), (*parts, *in_place))
            else:
                program = program.of(fn, options.get("progress", False))
            self._kept.move_to_end(key)
            while len(self._kept) > self._most:
                self._kept.popitem(last=False)[1].drop()
            return program


class _CacheEntry:
    """A program, which is dropped with any of the objects that its function consists of."""

    def __init__(self, program: Program, parts: tuple[Any, ...]):
        self.program: Program | None = program
        self._parts = [self._reference(part) for part in parts]

    def drop(self, _: Any = None) -> None:
        # The garbage collector may call this at any moment, also in a thread that holds the lock. So it changes no table.
        self.program = None

    def _reference(self, part: Any) -> Any:
        try:
            return weakref.ref(part, self.drop)
        except TypeError:  # an object of a class with __slots__ is kept as long as the program
            return part


def _provided_by_calls(*args: Any, **kwargs: Any) -> Any:
    """Replace the function of a kept program."""
    raise AssertionError("a program of the cache was called without its function")
