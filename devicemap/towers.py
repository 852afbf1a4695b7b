"""A traced function on each device, compiled once for each way of calling it."""

from __future__ import annotations

import contextlib
import itertools
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import tensorflow as tf

from devicemap.devices import kind_of
from devicemap.execution import Layout
from devicemap.internals.gradients import order_of_gradients, tape_is_recording
from devicemap.internals.running import Cancellation, unrecorded
from devicemap.invoking import Invoker
from devicemap.mirroring import Mirrors
from devicemap.nests import as_objects
from devicemap.optimizing import Runnable, as_traced, can_be_optimized_once, optimize
from devicemap.rows import HOST
from devicemap.scheduling import Pace
from devicemap.seeding import Streams
from devicemap.sharding import shard_rows
from devicemap.tracing import Traced
from devicemap.types import Shard

_KEPT_SHARDS = 256

_GRAPHS, _FUNCTIONS, _INLINED = range(3)
"""Ways of calling begin with these."""


class Towers:
    """A traced function on each of several places.

    A place is a device that takes one shard of a call; a device may be named more than once. Graphs are built on first
    use, under one lock, and never change: calls need no lock.
    """

    def __init__(
        self,
        places: Sequence[str],
        output_device: str,
        traced: Traced,
        name: str,
        clocked: bool,
    ):
        """`clocked`: whether graphs tell when each shard was done, where the output device has a clock."""
        self.traced = traced
        self._traces = 1
        # A further core of a CPU gains nothing where shards wait for each other, or where ops over all rows use the cores
        # themselves (`benchmarks/test_real_functions.py`: half the rows cost as many ops).
        alone = self.traced.vectorized or self.traced.audit.ordered
        self.places = tuple(dict.fromkeys(places)) if alone else tuple(places)
        self.optimized = can_be_optimized_once(self.traced, self.places)
        self._optimized: Runnable | None = None
        self._output_device = output_device
        self._clocked = clocked and kind_of(output_device) == "CPU"
        self._scope = re.sub(r"\W+", "_", name, flags=re.ASCII).strip("_") or "fn"  # what a name scope may hold
        self._lock = threading.RLock()
        # Two calls at once would read a device's copy of an advancing seed before either writes it.
        self._drawing = {device: threading.Lock() for device in self.devices if self.traced.audit.advances_seed}
        self._graphs: dict[tuple[int, int, bool, bool], Any] = {}
        self._taped: set[tuple[Any, int]] = set()
        self._taping = threading.Lock()
        self._functions: dict[str, Any] = {}
        self.paces: dict[str, Pace] = {}
        self._layouts: dict[bool, Layout] = {}
        self._streams = Streams()
        self._inlined = itertools.count()
        self._shards: dict[int, tuple[tuple[Shard, ...], Any]] = {}
        self._invoker = Invoker(optimize=not self.optimized)
        self._plain = all(isinstance(spec, tf.TensorSpec) for spec in self.traced.input_specs)

    def graph(self, shards: int, gradients: int, any_rows: bool = False, inlined: bool = False) -> Any:
        """The whole call as one `ConcreteFunction`: `(sizes, *leaves) -> (result leaves, rows that fn returned, arrivals)`.

        `sizes` is int32 `[shards]`, and the rows returned are int64 `[shards]` per leaf, for a `fn` of batches. With
        `any_rows`, sizes may be 0, and those devices are not called. The arrivals are one tensor, float64 `[shards]`: when
        the results of each shard were there, in seconds since the epoch; or none, for one shard, without clocks, and
        where the graph is to be `inlined` into another: a clock is a stateful op, which that would wait for.

        `gradients` tells which may be asked for: 0 none, 1 first ones, 2 any (`order_of_gradients`). A function with seeded
        random ops gets a graph for each, as TensorFlow runs other ops for each, and one for each that is inlined: each begins
        number streams of its own.
        """
        seeded = self.traced.audit.seeded
        if seeded and inlined:
            with self._lock:
                return self._build(shards, (_INLINED, next(self._inlined)), True, any_rows, False)
        key = (
            shards,
            gradients if seeded else min(gradients, 1),
            any_rows,
            self._clocked and shards > 1 and not inlined,
        )
        if key not in self._graphs:
            with self._lock:
                if key not in self._graphs:
                    way = (_GRAPHS, *map(int, key[:-1]))  # a clock changes no number
                    self._graphs[key] = self._build(shards, way, gradients > 0, any_rows, key[-1])
        return self._graphs[key]

    def order_of_gradients(self, leaves: Sequence[Any]) -> int:
        """Which gradients of a call in eager code may be asked for, as `graph` takes it."""
        return order_of_gradients(self.traced.concrete, self.flat(leaves)) if tape_is_recording() else 0

    @property
    def belongs_to_a_graph(self) -> bool:
        """Whether the function closes over tensors of a graph that is being built, and can run only there."""
        return not all(hasattr(captured, "numpy") for captured in self.traced.concrete.captured_inputs)

    def shards(self, rows: int) -> tuple[tuple[Shard, ...], Any]:
        """The shards of a call on `rows` rows, and the `sizes` that the graph for it takes."""
        known = self._shards.get(rows)
        if known is None:
            shards = shard_rows(rows, self.places)
            sizes = [len(shard) for shard in shards]
            with tf.init_scope(), tf.device(HOST):
                known = shards, tf.constant(sizes, tf.int32)
            if len(self._shards) > _KEPT_SHARDS:
                self._shards.clear()  # other threads may do so at any moment, too
            self._shards[rows] = known
        return known

    def run(self, graph: Any, arguments: Sequence[Any], rows: int) -> Any:
        """Call one of the graphs, on so many rows, such that Ctrl-C takes effect at once."""
        return self._invoker.call(graph, self.flat(arguments), rows)

    def run_taped(self, graph: Any, arguments: Sequence[Any], gradients: int) -> Any:
        """Call one of the graphs in this thread, for a tape to record.

        TensorFlow builds what a tape needs in the first such call, and does not expect several at once: they would fail, or
        draw the same numbers.
        """
        if (graph, gradients) in self._taped:
            return graph(*arguments)
        with self._taping:
            outputs = graph(*arguments)
            self._taped.add((graph, gradients))
            return outputs

    def drawing_alone(self) -> contextlib.AbstractContextManager[None]:
        """While it lasts, no other call of the function draws from the seeds that each of its calls advances."""
        return _all_of(self._drawing.values()) if self._drawing else contextlib.nullcontext()

    def take_traces(self) -> int:
        """How often `fn` was traced since this was asked last: once, at first."""
        with self._lock:
            traces, self._traces = self._traces, 0
            return traces

    def flat(self, leaves: Sequence[Any]) -> Sequence[Any]:
        """The tensors that leaves consist of."""
        return leaves if self._plain else tf.nest.flatten(list(leaves), expand_composites=True)

    def pack(self, leaves: Sequence[Any]) -> Any:
        """The nest that the user's function returns, of these leaves."""
        structure = self.traced.structure
        return leaves[0] if structure is None else as_objects(tf.nest.pack_sequence_as(structure, leaves))

    @property
    def devices(self) -> tuple[str, ...]:
        """The devices of the places, each once."""
        return tuple(dict.fromkeys(self.places))

    def in_flight(self, prefetch: int) -> dict[str, int]:
        """How many chunks may be under way on each device; one in all where `fn` depends on their order."""
        if self.traced.audit.ordered:
            return {self.places[0]: 1}
        if self.traced.audit.advances_seed:  # two at once on a device would draw from one seed
            return dict.fromkeys(self.places, 1)
        return {device: max(prefetch, self.places.count(device)) for device in self.devices}

    def functions(self, cancellation: Cancellation | None = None) -> dict[str, Callable[..., list[Any]]]:
        """One function per device, for one call: `(*tensors of a chunk) -> result leaves`, on the output device.

        They see captured variables as they are now: each is brought to each device once, however many chunks follow.
        """
        with self._lock:
            layout = self._layout(False)
            if not self._functions:
                runnables = self._runnables(len(self.places), (_FUNCTIONS,), False)
                places = {device: self.places.index(device) for device in self.devices}
                self._functions = {device: layout.function(i, runnables[i]) for device, i in places.items()}
        callable_of = cancellation.cancellable if cancellation else unrecorded
        mirrors = layout.mirrors
        values = mirrors.values()
        functions: dict[str, Callable[..., list[Any]]] = {}
        for device, function in self._functions.items():
            lock = self._drawing.get(device)
            with tf.device(device), lock or contextlib.nullcontext():
                mirrors.assign(self.places.index(device), values)
                of_call = partial(callable_of(function, not self.optimized), *mirrors.passed(values))
            functions[device] = of_call if lock is None else partial(_holding, lock, of_call)
        return functions

    def _layout(self, differentiable: bool) -> Layout:
        """With copies of what is captured for graphs with gradients, or for others, which take some values as arguments."""
        with self._lock:
            if differentiable not in self._layouts:
                passed = self._shared(differentiable).passed
                traced = _for(differentiable, self.traced)
                mirrors = Mirrors(traced, self.places, differentiable, passed)
                self._layouts[differentiable] = Layout(
                    traced, self.places, mirrors, self._output_device, differentiable, self._scope
                )
            return self._layouts[differentiable]

    def _build(self, shards: int, way: tuple[int, ...], differentiable: bool, any_rows: bool, clocked: bool) -> Any:
        layout = self._layout(differentiable)
        return layout.graph(self._runnables(shards, way, differentiable), any_rows, clocked)

    def _runnables(self, places: int, way: tuple[int, ...], differentiable: bool) -> list[Runnable]:
        """What runs on the first so many places: copies, where ops keep something for each place and way of calling.

        Those are random ops with seeds, and Python functions that a tape follows.
        """
        shared = self._shared(differentiable)
        if self.traced.audit.seeded or (differentiable and "EagerPyFunc" in self.traced.audit.effects):
            return [replace(shared, concrete=copy) for copy in self._streams.copies(shared.concrete, way, places)]
        return [shared] * places

    def _shared(self, differentiable: bool) -> Runnable:
        """The traced function, optimised once for all places where that can be."""
        if not self.optimized or differentiable:
            return as_traced(_for(differentiable, self.traced))
        if self._optimized is None:
            self._optimized = optimize(self.traced)
        return self._optimized


def _for(differentiable: bool, traced: Traced) -> Traced:
    """The variant that has the right gradients, or the one that is fast."""
    return traced.with_gradients or traced if differentiable else traced


@contextlib.contextmanager
def _all_of(locks: Iterable[threading.Lock]) -> Iterator[None]:
    with contextlib.ExitStack() as held:
        for lock in locks:
            held.enter_context(lock)
        yield


def _holding(lock: threading.Lock, function: Callable[..., Any], *tensors: Any) -> Any:
    with lock:
        return function(*tensors)
