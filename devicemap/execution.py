"""One traced function on several devices: the per-device `tf.device` blocks, in one graph or one function each."""

from __future__ import annotations

import contextlib
import re
import threading
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import tensorflow as tf

from devicemap.devices import kind_of
from devicemap.gathering import gather
from devicemap.internals import (
    UNCHAINED,
    UNCHAINED_UNIT,
    Cancellation,
    differentiate_in_place,
    must_run,
    order_of_gradients,
    tape_is_recording,
    unrecorded,
)
from devicemap.invoking import Invoker
from devicemap.mirroring import Mirrors, capturing
from devicemap.optimizing import Runnable, as_traced, can_be_optimized_once, optimize
from devicemap.rows import HOST, cut_rows, empty_rows
from devicemap.scheduling import Pace
from devicemap.seeding import Streams
from devicemap.sharding import shard_rows
from devicemap.tracing import Traced
from devicemap.types import Shard

_KEPT_SHARDS = 256


class Towers:
    """A traced function on each of several places.

    A place is a device that takes one shard of a call; a device may be named more than once. Graphs are built on first
    use, under one lock, and never change: calls need no lock.
    """

    def __init__(
        self, places: Sequence[str], output_device: str, trace: Callable[[int | None], Traced], name: str, clocked: bool
    ):
        """`trace(None)` traces the function; `trace(n)` traces it again with random number stream `n`.

        `clocked`: whether graphs tell when each shard was done, where the output device has a clock.
        """
        self._traces = 0
        self._trace = trace
        self.traced = self._trace_again(None)
        # A further core of a CPU gains nothing where shards wait for each other, or where ops over all rows use the cores
        # themselves (`benchmarks/test_real_functions.py`: half the rows cost as many ops); and it needs a stream of its own.
        alone = self.traced.vectorized or self.traced.audit.ordered or self.traced.audit.seeded
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
        self._functions: dict[str, Any] = {}
        self.paces: dict[str, Pace] = {}
        self._mirrors: dict[bool, Mirrors] = {}
        self._streams = Streams(self._trace_again, len(self.places))
        self._shards: dict[int, tuple[tuple[Shard, ...], Any]] = {}
        self._invoker = Invoker(optimize=not self.optimized)
        self._plain = all(isinstance(spec, tf.TensorSpec) for spec in self._input_specs())

    def graph(self, shards: int, gradients: int, any_rows: bool = False, inlined: bool = False) -> Any:
        """The whole call as one `ConcreteFunction`: `(sizes, *leaves) -> (result leaves, rows that fn returned, arrivals)`.

        `sizes` is int32 `[shards]`, and the rows returned are int64 `[shards]` per leaf, for a `fn` of batches. With
        `any_rows`, sizes may be 0, and those devices are not called. The arrivals are one tensor, float64 `[shards]`: when
        the results of each shard were there, in seconds since the epoch; or none, for one shard, without clocks, and
        where the graph is to be `inlined` into another: a clock is a stateful op, which that would wait for.

        `gradients` tells which may be asked for: 0 none, 1 first ones, 2 any (`order_of_gradients`). A function with seeded
        random ops gets a graph for each, as TensorFlow runs other ops for each, and one for each that is inlined, all for
        any rows: each begins number streams of its own.
        """
        differentiable = gradients > 0
        if self.traced.audit.seeded:
            if inlined:
                with self._lock:
                    return self._build_graph(len(self.places), True, True, False, "inlined")
            shards, any_rows = len(self.places), True
        way = gradients if self.traced.audit.seeded else int(differentiable)
        key = (shards, way, any_rows, self._clocked and shards > 1 and not inlined)
        if key not in self._graphs:
            with self._lock:
                if key not in self._graphs:
                    self._graphs[key] = self._build_graph(shards, differentiable, any_rows, key[-1], way)
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
            if self.traced.audit.seeded:
                sizes += [0] * (len(self.places) - len(sizes))
            with tf.init_scope(), tf.device(HOST):
                known = shards, tf.constant(sizes, tf.int32)
            if len(self._shards) > _KEPT_SHARDS:
                self._shards.clear()  # other threads may do so at any moment, too
            self._shards[rows] = known
        return known

    def run(self, graph: Any, arguments: Sequence[Any], rows: int) -> Any:
        """Call one of the graphs, on so many rows, such that Ctrl-C takes effect at once."""
        return self._invoker.call(graph, self.flat(arguments), rows)

    def drawing_alone(self) -> contextlib.AbstractContextManager[None]:
        """While it lasts, no other call of the function draws from the seeds that each of its calls advances."""
        return _all_of(self._drawing.values()) if self._drawing else contextlib.nullcontext()

    def take_traces(self) -> int:
        """How often `fn` was traced since this was asked last."""
        with self._lock:
            traces, self._traces = self._traces, 0
            return traces

    def _trace_again(self, stream: int | None) -> Traced:
        self._traces += 1
        return self._trace(stream)

    def flat(self, leaves: Sequence[Any]) -> Sequence[Any]:
        """The tensors that leaves consist of."""
        return leaves if self._plain else tf.nest.flatten(list(leaves), expand_composites=True)

    def pack(self, leaves: Sequence[Any]) -> Any:
        """The nest that the user's function returns, of these leaves."""
        structure = self.traced.structure
        return leaves[0] if structure is None else tf.nest.pack_sequence_as(structure, leaves)

    def no_rows(self) -> list[Any]:
        """Result leaves without rows."""
        return [empty_rows(spec) for spec in self.traced.specs]

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
            if not self._functions:
                self._functions = {device: self._build_function(device) for device in self.devices}
        callable_of = cancellation.cancellable if cancellation else unrecorded
        mirrors = self._mirrors_for(False)
        values = mirrors.values()
        functions: dict[str, Callable[..., list[Any]]] = {}
        for device, function in self._functions.items():
            lock = self._drawing.get(device)
            with tf.device(device), lock or contextlib.nullcontext():
                mirrors.assign(self.places.index(device), values)
                of_call = partial(callable_of(function, not self.optimized), *mirrors.passed(values))
            functions[device] = of_call if lock is None else partial(_holding, lock, of_call)
        return functions

    def _build_graph(self, shards: int, differentiable: bool, any_rows: bool, clocked: bool, way: Hashable) -> Any:
        mirrors = self._mirrors_for(differentiable)
        ordered = self.traced.audit.ordered
        runnables = [self._runnable(i, way, differentiable) for i in range(shards)]
        acts = self._acts
        # Inlined into the user's function, one call could assign copies that another one is reading.
        unit = acts or (differentiable and mirrors.any_copies)

        @tf.function(autograph=False, experimental_attributes=UNCHAINED_UNIT if unit else UNCHAINED)
        def call(sizes: Any, *leaves: Any) -> tuple[list[Any], list[Any], list[Any]]:
            values = mirrors.values()
            with tf.device(HOST):
                cut = zip(*(cut_rows(leaf, sizes, shards) for leaf in leaves))
                sizes = tf.unstack(sizes, shards)
            results: list[list[Any]] = []
            for i, shard in enumerate(cut):
                after = _ops_of(results[-1]) if ordered and results else []
                tower = partial(self._tower, i, shard, mirrors, values, runnables[i], differentiable)
                if any_rows:
                    with tf.control_dependencies(after):
                        results.append(tf.cond(sizes[i] > 0, tower, self.no_rows))
                else:
                    results.append(tower(after))
            if acts:
                must_run(op for tower in results for op in _ops_of(tower))
            with tf.device(self._output_device):
                if any_rows:
                    results = [_like_first(part, results[0]) for part in results]
                if differentiable or clocked:  # the gradient of joining asks for the shape of each part, from here
                    results = tf.nest.map_structure(tf.identity, results, expand_composites=True)
                arrivals = [_arrivals(results)] if clocked else []
                if shards == 1:
                    gathered = [
                        (tf.nest.map_structure(tf.identity, leaf, expand_composites=True), None) for leaf in results[0]
                    ]
                else:
                    gathered = [gather(parts, differentiable) for parts in zip(*results)]
            if differentiable:
                differentiate_in_place(tf.compat.v1.get_default_graph().get_operations())
            lengths = [lengths for _, lengths in gathered if lengths is not None]
            return [rows for rows, _ in gathered], lengths, arrivals

        specs = self._input_specs()
        if way == "inlined":
            self._streams.forget(way)
        with tf.device(None):
            return call.get_concrete_function(tf.TensorSpec([shards], tf.int32), *specs)

    @property
    def _acts(self) -> bool:
        """Whether `fn` does something besides returning."""
        return bool(self.traced.audit.effects) or self.traced.audit.writes

    def _build_function(self, device: str) -> Any:
        i = self.places.index(device)
        mirrors = self._mirrors_for(False)
        runnable = self._runnable(i, "function", False)
        passed_specs = [tf.TensorSpec(t.shape, t.dtype) for t in runnable.concrete.inputs[: len(runnable.passed)]]
        acts = self._acts

        @tf.function(autograph=False, experimental_attributes=UNCHAINED_UNIT if acts else UNCHAINED)
        def call(*inputs: Any) -> list[Any]:
            passed, shard = inputs[: len(runnable.passed)], inputs[len(runnable.passed) :]
            with tf.device(device), tf.name_scope(f"{self._scope}_{i}"):
                results = _call(runnable, passed, shard, mirrors.captures(i))
            if acts:
                must_run(_ops_of(results))
            with tf.device(self._output_device):  # copied out as a part of the call
                return tf.nest.map_structure(tf.identity, results, expand_composites=True)

        with tf.device(None):
            return call.get_concrete_function(*passed_specs, *self._input_specs())

    def _tower(
        self,
        i: int,
        shard: Sequence[Any],
        mirrors: Mirrors,
        values: dict[int, Any],
        runnable: Runnable,
        differentiable: bool,
        after: Sequence[Any] = (),
    ) -> list[Any]:
        """The traced function on place `i`, `after` other ops, with captured variables of these values."""
        with tf.device(self.places[i]), tf.name_scope(f"{self._scope}_{i}"):
            handles = mirrors.assign(i, values)
            results = _call(runnable, mirrors.passed(values), shard, handles, after)
            if differentiable:
                differentiate_in_place(_ops_of(results))
            return results

    def _mirrors_for(self, differentiable: bool) -> Mirrors:
        """Copies for graphs with gradients, and for others, whose functions take some values as arguments."""
        with self._lock:
            if differentiable not in self._mirrors:
                passed = self._runnable(0, 0, False).passed if self.optimized and not differentiable else ()
                traced = _for(differentiable, self.traced)
                self._mirrors[differentiable] = Mirrors(traced, self.places, differentiable, passed)
            return self._mirrors[differentiable]

    def _runnable(self, i: int, way: Hashable, differentiable: bool) -> Runnable:
        """What runs on place `i`: the traced function, optimised once for all places where that can be.

        If its seeded random ops need a stream per place and way of calling, it is a trace of its own.
        """
        if self.optimized and not differentiable:
            if self._optimized is None:
                self._optimized = optimize(self.traced)
            return self._optimized
        traced = self._streams.traces(way)[i] if self.traced.audit.seeded else self.traced
        return as_traced(_for(differentiable, traced))

    def _input_specs(self) -> list[Any]:
        leaves, _ = self.traced.concrete.structured_input_signature
        return list(leaves)


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


def sizes_in_graph(rows: Any, shards: int) -> Any:
    """`sharding.shard_sizes` for a number of rows that only the running graph knows; the last ones may be 0."""
    rows = tf.cast(rows, tf.int32)
    return rows // shards + tf.cast(tf.range(shards) < rows % shards, tf.int32)


def _call(
    runnable: Runnable, passed: Sequence[Any], shard: Sequence[Any], handles: dict[int, Any], after: Sequence[Any] = ()
) -> list[Any]:
    """Call it on the device of the moment, with other handles for some of its captures."""
    # Ops that are colocated with their input (tf.debugging's, for instance) would follow the shard to the device that cut
    # it.
    shard = tf.nest.map_structure(tf.identity, list(shard), expand_composites=True)
    captured = {position: handles[i] for position, i in enumerate(runnable.captures) if i in handles}
    # Here, not around the whole: TensorFlow takes an edge to the call for redundant if its inputs have it.
    with tf.control_dependencies(after), capturing(runnable.concrete, captured):
        return list(runnable.concrete(*passed, *shard))


def _ops_of(results: Sequence[Any]) -> list[Any]:
    return [t.op for t in tf.nest.flatten(list(results), expand_composites=True)]


def _arrivals(results: Sequence[Sequence[Any]]) -> Any:
    """When each of these was there, on the device of the moment: float64 `[len(results)]`, in seconds since the epoch."""
    times = []
    for part in results:
        with tf.control_dependencies(_ops_of(part)):
            times.append(tf.timestamp())
    return tf.stack(times)


def _like_first(part: list[Any], first: list[Any]) -> list[Any]:
    """Give results without rows the inner shape of the first ones, where it was not known before running."""
    shaped = []
    for leaf, model in zip(part, first):
        if isinstance(leaf, tf.Tensor) and leaf is not model and not leaf.shape[1:].is_fully_defined():
            shape = tf.shape(leaf)
            empty = tf.concat([[0], tf.shape(model)[1:]], 0)
            leaf = tf.reshape(leaf, tf.where(shape[0] > 0, shape, empty))
        shaped.append(leaf)
    return shaped
