"""A traced function on each device, compiled once for each way of calling it."""

from __future__ import annotations

import contextlib
import itertools
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

import tensorflow as tf

from devicemap._tensorflow.calls import Cancellation, attributes_of_calls, prepare_gradient, unrecorded
from devicemap._tensorflow.functions import compiled_as_a_part, has_own_variables
from devicemap._tensorflow.gradients import holds_gradients, order_of_gradients
from devicemap.base.devices import is_out_of_memory, kind_of, python_calls_at_once
from devicemap.base.hosts import host_of, is_remote, settle
from devicemap.base.structure import as_objects
from devicemap.compile.audit import Treatment, variable_of
from devicemap.compile.invoke import Invoker
from devicemap.compile.layout import Form, Layout
from devicemap.compile.mirrors import Mirrors
from devicemap.compile.reduction import BoundReduction
from devicemap.compile.seeds import Stream, Streams, drawn_alike
from devicemap.compile.trace import Traced, in_fn
from devicemap.data.rows import HOST, home_of
from devicemap.data.shards import shard_rows
from devicemap.errors import brief, function_error
from devicemap.events import Shard, short_name

_KEPT_SHARDS = 256

_GRAPHS, _FUNCTIONS, _INLINED, _PROBE = range(4)
"""Ways of calling begin with these."""


class Compiled:
    """A traced function on each of several places.

    A place is a device that takes one shard of a call; a device may be named more than once. Graphs are built on first
    use, under one lock, and never change: calls need no lock.
    """

    def __init__(
        self,
        places: Sequence[str],
        output_device: str,
        trace: Callable[[Stream | None], Traced],
        name: str,
    ):
        """`trace(None)` traces the function; `trace(stream)` traces it again with that number stream."""
        self._told_traces = 0
        self.traces = 0
        """How often `fn` was traced so far."""
        self._trace = trace
        self.left_uncompiled = False
        """Whether XLA was asked for, and cannot use the variables of `fn` from these devices."""
        self.traced = self._trace_again(None)
        if self.traced.uncompiled and _used_elsewhere(
            self.traced, places, Treatment.ATOMIC, Treatment.ORDERED, Treatment.STAYS
        ):
            self.left_uncompiled = True
            reason = (
                f"{self.traced.reason}; not compiled, because fn uses a variable of another device, which XLA cannot"
            )
            self.traced = replace(self.traced.uncompiled, reason=reason)
        # A further core of a CPU gains nothing where shards wait for each other, or where ops over all rows use the cores
        # themselves (`benchmarks/test_real_functions.py`: half the rows cost as many ops).
        alone = self.traced.vectorized or self.traced.audit.ordered
        self.places = tuple(dict.fromkeys(places)) if alone else tuple(places)
        if self.traced.audit.python:
            self.places = self.places[: python_calls_at_once()]
        self._streams = Streams()
        self.keeps_seeds = (
            self.traced.audit.seeded
            and len(self.places) > 1
            and drawn_alike(
                self.traced.audit, *(traced.audit for traced in self._streams.traces(self._trace_again, (_PROBE,), 1))
            )
        )
        """Whether it draws the same numbers however it is traced: then one device draws them all."""
        if self.keeps_seeds:
            self.places = self.places[:1]
        self._output_device = output_device
        self._clocked = has_clock()
        self._name = name
        self._scope = re.sub(r"\W+", "_", name, flags=re.ASCII).strip("_") or "fn"  # what a name scope may hold
        self._lock = threading.RLock()
        # Two calls at once would read a device's copy of an advancing seed before either writes it.
        self._drawing = {device: threading.Lock() for device in self.devices if self.traced.audit.advances_seed}
        self._graphs: dict[tuple[int, int, Form, bool, bool], Any] = {}
        self._taped: set[tuple[Any, int]] = set()
        self._taping = threading.Lock()
        self._functions: dict[str, Any] = {}
        self._of_functions: list[Traced] = []
        self._layouts: dict[tuple[bool, ...], Layout] = {}
        self._inlined = itertools.count()
        self._shards: dict[int, tuple[tuple[Shard, ...], Any]] = {}
        self._invoker = Invoker(self.traced.steady)
        self._plain = all(isinstance(spec, tf.TensorSpec) for spec in self.traced.input_specs)

    def graph(
        self,
        shards: int,
        gradients: int,
        any_rows: bool = False,
        inlined: bool = False,
        one_row: bool = False,
        checked: bool = False,
    ) -> Any:
        """The whole call as one `ConcreteFunction`: `(sizes, *leaves) -> (result leaves, rows that fn returned, arrivals)`.

        `sizes` is int32 `[shards]`, and the rows returned are int64 `[shards]` per leaf, for a `fn` of batches. With
        `any_rows`, sizes may be 0, and those devices are not called. The arrivals are one tensor, float64 `[shards]`: when
        the results of each shard were there, in seconds since the epoch; or none, for one shard that goes to the host, without
        clocks, and where the graph is to be `inlined` into another: a clock is a stateful op, which that would wait for.

        `gradients` tells which may be asked for: 0 none, 1 first ones, 2 any (`order_of_gradients`). A function with seeded
        random ops gets a graph for each, as TensorFlow runs other ops for each, and one for each that is inlined: each begins
        number streams of its own. `one_row`: whether a shard of one row is known as such where it is to be inlined. `checked`:
        whether the graph itself checks that `fn` returned as many rows as it got.
        """
        audit = self.traced.audit
        clocked = self._clocked and (shards > 1 or kind_of(self._output_device) != "CPU") and not inlined
        # TensorFlow folds constants of that size into wrong gradients of loops that rows leave at different times.
        apart = inlined and one_row and self.traced.vectorized and audit.loops
        form = Form(any_rows, clocked, apart, checked)
        anew = audit.seeded and inlined
        in_place = anew or (inlined and self._reads_in_place)
        of_run = inlined and not gradients and not anew and has_own_variables()
        key = shards, gradients if audit.seeded else min(gradients, 1), form, in_place, of_run
        graph = None if anew else self._graphs.get(key)
        if graph is None:
            with self._lock:
                graph = None if anew else self._graphs.get(key)
                if graph is None:
                    way = (_INLINED, next(self._inlined)) if anew else (_GRAPHS, *key[:2], int(any_rows))
                    graph = self._build(shards, way, anew or gradients > 0, form, in_place, of_run)
                if not anew:
                    self._graphs[key] = graph
        return graph

    @cached_property
    def may_use_chunks(self) -> bool:
        """Whether a call on rows in memory gives the same results in chunks of any size.

        Not if `fn` depends on order or draws from fixed seeds, if XLA would compile for each chunk size, or after
        `tf.config.experimental.enable_op_determinism()`. Nor if results go to a GPU, whose memory they may not fit twice.
        """
        audit = self.traced.audit
        return (
            kind_of(self._output_device) == "CPU"
            and not (audit.ordered or audit.seeded or audit.advances_seed or self.traced.uncompiled)
            and self._clocked
        )

    @property
    def _reads_in_place(self) -> bool:
        """Whether devices in a function of the user's read variables where these are, instead of copies that the call assigns.

        What reads more than once would be sent each time, and XLA takes no variable of elsewhere. But what is compiled with
        all around it takes no copies either; and a loop over calls, as that of a map over `fn`, gets one device for them all.
        """
        traced = self._variant(self.traced, True, False)
        return is_rewritten_with_its_caller() or not (
            traced.audit.loops or traced.audit.reads_again or traced.uncompiled
        )

    def order_of_gradients(self, leaves: Sequence[Any]) -> int:
        """Which gradients of a call in eager code may be asked for, as `graph` takes it."""
        return order_of_gradients(self.traced.concrete, [*self.flat(leaves), *self.traced.captures])

    @property
    def belongs_to_a_graph(self) -> bool:
        """Whether the function closes over tensors of a graph that is being built, and can run only there."""
        captured = [*self.traced.captures, *(self._reduction.captured if self._reduction else ())]
        return not all(hasattr(tensor, "numpy") for tensor in captured)

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
        settle(self._remote_devices)
        return self._invoker.call(graph, self.flat(arguments), rows)

    def run_taped(self, graph: Any, arguments: Sequence[Any], gradients: int) -> Any:
        """Call a graph for the tapes of this thread to record; Ctrl-C takes effect when the call ends.

        TensorFlow builds what a tape needs in the first such call, and does not expect several at once: they would fail, or
        draw the same numbers.
        """
        settle(self._remote_devices)
        if (graph, gradients) in self._taped:
            return graph(*arguments)
        with self._taping:
            try:
                prepare_gradient(graph, self.flat(arguments), HOST)
            except Exception as error:
                raise function_error(
                    f"the gradient of fn could not be built: {type(error).__name__}: {error}", error
                ) from error
            outputs = graph(*arguments)
            self._taped.add((graph, gradients))
            return outputs

    def drawing_alone(self) -> AbstractContextManager[None]:
        """While it lasts, no other call of the function draws from the seeds that each of its calls advances."""
        return _all_of(self._drawing.values()) if self._drawing else contextlib.nullcontext()

    def take_traces(self) -> int:
        """How often `fn` was traced since this was asked last."""
        with self._lock:
            untold, self._told_traces = self.traces - self._told_traces, self.traces
            return untold

    def _trace_again(self, stream: Stream | None) -> Traced:
        self.traces += 1
        traced = self._trace(stream)
        return traced.uncompiled or traced if self.left_uncompiled else traced

    def flat(self, leaves: Sequence[Any]) -> Sequence[Any]:
        """The tensors that leaves consist of."""
        return leaves if self._plain else tf.nest.flatten(list(leaves), expand_composites=True)

    def pack(self, leaves: Sequence[Any]) -> Any:
        """The nest that the user's function returns, of these leaves; or that of its reduction."""
        structure, reduction = self.traced.structure, self.traced.reduction
        if reduction is not None:
            return reduction.packed(leaves)
        return leaves[0] if structure is None else as_objects(tf.nest.pack_sequence_as(structure, leaves))

    def pack_no_rows(self) -> Any:
        """The same of no rows at all."""
        return self.pack(self.traced.no_rows()) if self._reduction is None else self.pack_states(())

    def pack_states(self, states: Iterable[list[Any]]) -> Any:
        """The same of the states of neighbouring rows, in order: in eager code, merged as they come."""
        assert self._reduction is not None
        merged = self._reduction.merged_as_they_come(states, self._output_device)
        with tf.device(self._output_device):
            return self.pack(self._reduction.finished(merged or self.traced.no_rows()))

    @property
    def _reduction(self) -> BoundReduction | None:
        reduction = self.traced.reduction
        return reduction if isinstance(reduction, BoundReduction) else None

    @property
    def devices(self) -> tuple[str, ...]:
        """The devices of the places, each once."""
        return tuple(dict.fromkeys(self.places))

    @cached_property
    def _remote_devices(self) -> tuple[str, ...]:
        """The remote devices that it runs on or whose tensors and variables it captures."""
        homes = map(home_of, self.traced.captures)
        return tuple(device for device in (*self.devices, *homes) if is_remote(device))

    def functions(self, cancellation: Cancellation | None = None) -> dict[str, Callable[[], Callable[..., list[Any]]]]:
        """What gives each device's function, for one call: `(*tensors of a chunk) -> result leaves`, on the output device.

        They see captured variables as they are now: each is brought to each device once, however many chunks follow. A
        function is built where it is first asked for, so that other devices may be at work by then.
        """
        with self._lock:
            mirrors = self._layout(False, of_job=True).mirrors
            if not self._of_functions:  # here, and not by a worker: some are traced anew
                self._of_functions = self._traces_for(len(self.places), (_FUNCTIONS,), False)
        lost = settle(self._remote_devices)
        reached = [device for device in self.devices if host_of(device) not in lost]  # the others fail when called
        values = mirrors.values(map(self.places.index, reached))
        for device in reached:
            with tf.device(device), self._drawing.get(device) or contextlib.nullcontext(), self._captures_fit(device):
                mirrors.assign(self.places.index(device), values)
        settle(self._remote_devices)
        callable_of = cancellation.cancellable if cancellation else unrecorded
        of_call = partial(callable_of, attributes=attributes_of_calls())
        return {device: partial(self._function_of_call, device, of_call) for device in self.devices}

    def _function_of_call(self, device: str, callable_of: Callable[[Any], Any]) -> Callable[..., list[Any]]:
        if device not in self._functions:
            with self._lock:
                if device not in self._functions:
                    place = self.places.index(device)
                    layout = self._layout(False, of_job=True)
                    self._functions[device] = layout.function(place, self._of_functions[place])
        of_call: Callable[..., list[Any]] = callable_of(self._functions[device])
        lock = self._drawing.get(device)
        return of_call if lock is None else partial(_holding, lock, of_call)

    def _layout(
        self, differentiable: bool, in_place: bool = False, of_job: bool = False, of_run: bool = False
    ) -> Layout:
        """With copies of what is captured for graphs with gradients, or for others; or with none of variables.

        For jobs in chunks they are this map's own: calls of others while one runs are not to assign them; or those of a run.
        """
        with self._lock:
            key = differentiable, in_place, of_job, of_run
            if key not in self._layouts:
                traced = self._variant(self.traced, differentiable, in_place)
                with self._captures_fit(*self.devices):
                    mirrors = Mirrors(traced, self.places, differentiable, in_place, not of_job, of_run)
                self._layouts[key] = Layout(
                    traced, self.places, mirrors, self._output_device, differentiable, self._scope
                )
            return self._layouts[key]

    @contextlib.contextmanager
    def _captures_fit(self, *devices: str) -> Iterator[None]:
        """Bring what `fn` captures to one of the devices.

        Raises:
            FunctionError: it has no memory for that. An instance of TensorFlow's class, too.
        """
        try:
            yield
        except tf.errors.OpError as error:
            if not is_out_of_memory(error):
                raise
            concrete, treatments = self.traced.concrete, self.traced.audit.treatments
            copied = [
                (variable_of(concrete, handle), handle)[treatment is None]
                for handle, treatment in zip(self.traced.captures, treatments)
                if treatment in (None, Treatment.READ)
            ]
            sizes = [(value.shape.num_elements() or 0) * value.dtype.size for value in copied if value is not None]
            raise function_error(
                f"{self._name}: no memory for a copy of what fn captures, {sum(sizes)} bytes in all, on "
                f"{' or '.join(map(short_name, devices))}; with in_place=[...] variables stay where they are: {brief(error)}",
                error,
            ) from error

    def _build(
        self, shards: int, way: tuple[int, ...], differentiable: bool, form: Form, in_place: bool, of_run: bool
    ) -> Any:
        in_place = in_place or (differentiable and not holds_gradients())
        layout = self._layout(differentiable, in_place, of_run=of_run and not in_place)
        return layout.graph(self._traces_for(shards, way, differentiable, in_place), form)

    def _traces_for(
        self, places: int, way: tuple[int, ...], differentiable: bool, in_place: bool = False
    ) -> list[Traced]:
        """What runs on the first so many places: traces of their own where ops keep something for each, and way of calling.

        Those are random ops with seeds, and Python functions that a tape follows.
        """
        if self.traced.audit.seeded or (differentiable and "EagerPyFunc" in self.traced.audit.effects):
            traces = self._streams.traces(self._trace_again, way, places)
            return [self._variant(traced, differentiable, in_place) for traced in traces]
        return [self._variant(self.traced, differentiable, in_place)] * places

    def _variant(self, traced: Traced, differentiable: bool, in_place: bool) -> Traced:
        """The one that has the right gradients, or the one that is fast.

        It is not compiled where variables stay in place, nor where a loop would hand its lists to its gradient: XLA cannot.
        """
        plain = traced.uncompiled or traced
        lists = differentiable and (plain.with_gradients or plain).audit.loops
        if lists or (in_place and _used_elsewhere(traced, self.places, Treatment.READ)):
            traced = plain
        return traced.with_gradients or traced if differentiable else traced


def is_rewritten_with_its_caller() -> bool:
    """Whether what is being traced goes on to be compiled or vectorised with all around it."""
    return (
        in_fn.get()
        or compiled_as_a_part()
        or "loop_body" in tf.get_current_name_scope().split("/")  # of tf.vectorized_map, which vectorises no assignment
    )


def has_clock() -> bool:
    """Whether graphs may ask what time it is: not after `tf.config.experimental.enable_op_determinism()`."""
    try:
        with tf.init_scope(), tf.device(HOST):
            tf.timestamp()
    except tf.errors.FailedPreconditionError:
        return False
    return True


def _used_elsewhere(traced: Traced, places: Sequence[str], *treatments: Treatment) -> bool:
    """Whether it uses, in one of these ways, a variable that does not lie where all of its places are."""
    return any(
        treatment in treatments and {handle.device} != {*places}
        for handle, treatment in zip(traced.captures, traced.audit.treatments)
    )


@contextlib.contextmanager
def _all_of(locks: Iterable[threading.Lock]) -> Iterator[None]:
    with contextlib.ExitStack() as held:
        for lock in locks:
            held.enter_context(lock)
        yield


def _holding(lock: threading.Lock, function: Callable[..., Any], *tensors: Any) -> Any:
    with lock:
        return function(*tensors)
