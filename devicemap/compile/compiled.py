"""A traced function on several slots, with a graph for each `CallSpec`."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import cached_property, lru_cache, partial
from typing import Any

import tensorflow as tf

from devicemap._tensorflow.calls import Cancellation, attributes_of_calls, prepare_gradient, unrecorded
from devicemap._tensorflow.functions import in_vectorized_map, in_xla_context
from devicemap._tensorflow.gradients import order_of_gradients
from devicemap.compile.audit import is_steady
from devicemap.compile.call_spec import CallSpec, Engine
from devicemap.compile.graph_builder import CallGraphBuilder, ops_are_deterministic
from devicemap.compile.invoke import Invoker, settle_hosts
from devicemap.compile.random import Stream, streams_of_function
from devicemap.compile.replicas import Replicas, captures_fit, home_of
from devicemap.compile.returned import check_row_counts
from devicemap.compile.trace import Traced, in_fn
from devicemap.data.rows import HOST
from devicemap.data.shards import shard_rows
from devicemap.data.structure import as_objects
from devicemap.devices import kind_of, python_calls_at_once
from devicemap.errors import function_error
from devicemap.events import Shard
from devicemap.hosts import host_of, is_remote

_KEPT_SHARDS = 256

ChunkFunction = Callable[[Sequence[Any], int], list[Any]]
"""A function of the leaves and the number of rows of a chunk. It returns the result leaves, on the output device."""


class CompiledMap:
    """A traced function on slots, and the graphs of its calls.

    A slot is a device that takes one shard of a call. A device may have several slots. Graphs are built under one
    lock and never change, so calls need no lock.
    """

    def __init__(self, slots: Sequence[str], output_device: str, trace: Callable[[Stream | None], Traced], name: str):
        """
        Args:
            slots: full names of devices; those that the function cannot use are left out of `slots`.
            output_device: full name of the device for results.
            trace: traces the function. If it gets a stream, random ops draw from it.
            name: of the function, for errors and name scopes.
        """
        self._reported_traces = 0
        self.traces = 0
        """How often `fn` was traced so far."""
        self._trace = trace
        self.traced = self._new_trace(None)
        audit = self.traced.audit
        # A further core of a CPU gains nothing if shards wait for each other, or if ops over all rows use the cores
        # themselves. Half of the rows need as many ops (`benchmarks/test_real_functions.py`).
        alone = self.traced.vectorized or audit.ordered
        self.slots = tuple(dict.fromkeys(slots)) if alone else tuple(slots)
        if audit.python_ops:
            self.slots = self.slots[: python_calls_at_once()]
        self._streams = streams_of_function()
        # Seeds of raw ops, and of functions that were traced before, are the same on each stream.
        self.keeps_seeds = (
            len(audit.fixed_seeds) > 0
            and len(self.slots) > 1
            and not audit.fixed_seeds.isdisjoint(self._new_trace(next(self._streams)).audit.fixed_seeds)
        )
        """Whether the function draws the same numbers in every trace. Then one device computes all rows."""
        if self.keeps_seeds:
            self.slots = self.slots[:1]
        self._output_device = output_device
        self._name = name
        self._lock = threading.RLock()
        self._graphs: dict[CallSpec, Any] = {}
        self._replicas: dict[tuple[bool, Engine], Replicas] = {}
        self._taped: set[tuple[Any, int]] = set()
        self._taping = threading.Lock()
        self.shards = lru_cache(_KEPT_SHARDS)(partial(_shards_of, self.slots))
        """Returns the shards of a call on a number of rows, on all or the first slots, and the `sizes` that its graph takes."""
        self._invoker = Invoker(is_steady(self.traced.user_function))

    def graph(self, spec: CallSpec) -> Any:
        """Return the `ConcreteFunction` of a call. `CallGraphBuilder.build` describes its arguments and results.

        TensorFlow copies the ops for each order of gradients, and each copy of a seeded op begins the same number stream. So a
        function with seeded ops has a graph per order of gradients, and one per call inside a function.
        """
        seeded = bool(self.traced.audit.fixed_seeds)
        if seeded and spec.is_inside:
            with self._lock:
                return self._build(spec)
        key = spec if seeded else replace(spec, gradient_order=min(spec.gradient_order, 1))
        graph = self._graphs.get(key)
        if graph is None:
            with self._lock:
                graph = self._graphs.get(key)
                if graph is None:
                    graph = self._graphs[key] = self._build(key)
        return graph

    def engine_inside(self) -> Engine:
        """Return the engine of a call in the function that is being traced."""
        rewritten = in_fn.get() or in_xla_context() or in_vectorized_map()
        return Engine.REWRITTEN if rewritten else Engine.INLINE

    @cached_property
    def may_use_chunks(self) -> bool:
        """Whether a call on rows in memory gives the same results in chunks of any size.

        Chunks are not used if `fn` depends on order, draws from fixed seeds or advances seeds, if XLA would compile for each
        chunk size, or after `tf.config.experimental.enable_op_determinism()`. A GPU for results may not have memory to hold
        them twice.
        """
        audit = self.traced.audit
        return (
            kind_of(self._output_device) == "CPU"
            and not (audit.ordered or audit.fixed_seeds or audit.advances_seed or self.traced.xla_variant)
            and not ops_are_deterministic()
        )

    def order_of_gradients(self, leaves: Sequence[Any]) -> int:
        """Return the highest order of gradients that tapes may request of an eager call, as in `CallSpec.gradient_order`."""
        return order_of_gradients(self.traced.concrete, [*self.flat(leaves), *self.traced.captures])

    @property
    def belongs_to_a_graph(self) -> bool:
        """Whether the function closes over tensors of a graph that is being built, and can run only there."""
        captured = [*self.traced.captures, *(self.traced.reduction.captured if self.traced.reduction else ())]
        return not all(hasattr(tensor, "numpy") for tensor in captured)

    def run(self, graph: Any, arguments: Sequence[Any], rows: int) -> Any:
        """Call a graph on `rows` rows. Ctrl-C takes effect at once."""
        settle_hosts(self._remote_devices)
        return self._invoker.call(graph, self.flat(arguments), rows)

    def run_taped(self, graph: Any, arguments: Sequence[Any], gradient_order: int) -> Any:
        """Call a graph and let the tapes of this thread record the call. Ctrl-C takes effect when the call ends.

        TensorFlow builds the forward and backward functions of a tape in the first such call, which is not thread-safe.
        """
        settle_hosts(self._remote_devices)
        if (graph, gradient_order) in self._taped:
            return graph(*arguments)
        with self._taping:
            try:
                prepare_gradient(graph, self.flat(arguments), HOST)
            except Exception as error:
                advice = ""
                if "internal_capture_to_output" in str(error):
                    advice = (
                        ". If it calls a tf.recompute_grad or tf.custom_gradient that reads a tf.Variable, pass it the value, "
                        "as in block(row, tf.identity(variable)), or map batches with batched=True"
                    )
                raise function_error(
                    f"the gradient of fn could not be built{advice}: {type(error).__name__}: {error}", error
                ) from error
            outputs = graph(*arguments)
            self._taped.add((graph, gradient_order))
            return outputs

    def take_traces(self) -> int:
        """Return how often `fn` was traced since the previous call of this method."""
        with self._lock:
            unreported, self._reported_traces = self.traces - self._reported_traces, self.traces
            return unreported

    def flat(self, leaves: Sequence[Any]) -> list[Any]:
        """Return the tensors that leaves consist of."""
        return list(tf.nest.flatten([*leaves], expand_composites=True))

    def pack(self, leaves: Sequence[Any]) -> Any:
        """Pack leaves into the nest that the user's function returns, or into the result of the reduction."""
        structure = self.traced.structure
        if self.traced.reduction is not None:
            return self.traced.reduction.pack_result(leaves)
        return leaves[0] if structure is None else as_objects(tf.nest.pack_sequence_as(structure, leaves))

    def pack_no_rows(self) -> Any:
        """Return the nest of results without rows, or the result of the reduction of no rows."""
        if self.traced.reduction is not None:
            return self.pack_states(())
        with tf.device(self._output_device):
            return self.pack(self.traced.no_rows())

    def pack_states(self, states: Iterable[list[Any]]) -> Any:
        """Merge the states of neighbouring chunks, in order, in eager code, and return the result of the reduction."""
        assert self.traced.reduction is not None
        merged = self.traced.reduction.merge_stream(states, self._output_device)
        with tf.device(self._output_device):
            return self.pack(self.traced.reduction.finish_state(merged or self.traced.no_rows()))

    @property
    def devices(self) -> tuple[str, ...]:
        """The devices of the slots, each once."""
        return tuple(dict.fromkeys(self.slots))

    @cached_property
    def _remote_devices(self) -> tuple[str, ...]:
        """The remote devices on which the function runs, or of which it captures tensors and variables."""
        homes = map(home_of, self.traced.captures)
        return tuple(device for device in (*self.devices, *homes) if is_remote(device))

    def chunk_functions(self, cancellation: Cancellation) -> dict[str, Callable[[], ChunkFunction]]:
        """Copy captured variables to the devices, and return a factory of the function of each device, for one call in chunks.

        The factory builds the graph, so that one device may work before the function of another device exists.
        """
        specs = {device: CallSpec((self.slots.index(device),), Engine.CHUNKS) for device in self.devices}
        replicas = self._replicas_for(specs[self.devices[0]])
        if self.traced.audit.fixed_seeds:  # each graph retraces fn, which must not happen in a worker
            for spec in specs.values():
                self.graph(spec)
        lost = settle_hosts(self._remote_devices)
        reached = [device for device in self.devices if host_of(device) not in lost]
        with captures_fit(self.traced, self._name, *reached):
            values = replicas.values(map(self.slots.index, reached))
            replaced = {device: replicas.create(self.slots.index(device), values)[0] for device in reached}
            settle_hosts(self._remote_devices)
        attributes = attributes_of_calls()

        def function_on(device: str) -> ChunkFunction:
            captures = replaced.get(device, {})  # calls on the others fail
            handles = [captures.get(key, v.handle) for key, v in replicas.replicated(self.slots.index(device)).items()]
            graph = unrecorded(self.graph(specs[device]), attributes)

            def compute(leaves: Sequence[Any], rows: int) -> list[Any]:
                results = cancellation.run(graph, *handles, *self.flat(leaves))
                if self.traced.counts_rows:
                    check_row_counts(results, rows, self.traced.reduction is not None)
                return results

            return compute

        return {device: partial(function_on, device) for device in self.devices}

    def _build(self, spec: CallSpec) -> Any:
        builder = CallGraphBuilder(
            spec=spec,
            traces=self._traces_for(spec),
            slots=self.slots,
            replicas=self._replicas_for(spec),
            output_device=self._output_device,
            scope=re.sub(r"\W+", "_", self._name, flags=re.ASCII).strip("_") or "fn",  # valid in a name scope
        )
        return builder.build()

    def _replicas_for(self, spec: CallSpec) -> Replicas:
        """Return the captures of slots in graphs with these gradients and this engine."""
        with self._lock:
            key = spec.differentiable, spec.engine
            if key not in self._replicas:
                traced = self.traced.for_gradients(spec.differentiable)
                with captures_fit(self.traced, self._name, *self.devices):
                    self._replicas[key] = Replicas(traced, self.slots, spec)
            return self._replicas[key]

    def _traces_for(self, spec: CallSpec) -> list[Traced]:
        """Return the trace of each slot."""
        if self.traced.audit.keeps_state(spec.differentiable):
            return [self._variant(self._new_trace(next(self._streams)), spec) for _ in spec.slots]
        return [self._variant(self.traced, spec)] * len(spec.slots)

    def _variant(self, traced: Traced, spec: CallSpec) -> Traced:
        """Return the variant with the right gradients, compiled if XLA can do so.

        XLA supports neither variables of other devices nor the variants that loops and branches keep for their gradients.
        """
        variant = traced.for_gradients(spec.differentiable)
        needs_variants = spec.differentiable and variant.audit.gradient_needs_variants
        if variant.xla_variant and not needs_variants and self._replicas_for(spec).are_local:
            return variant.xla_variant
        return variant

    def _new_trace(self, stream: Stream | None) -> Traced:
        self.traces += 1
        return self._trace(stream)


def _shards_of(slots: Sequence[str], rows: int, most: int | None = None) -> tuple[tuple[Shard, ...], Any]:
    shards = shard_rows(rows, slots[:most])
    with tf.init_scope(), tf.device(HOST):
        return shards, tf.constant([len(shard) for shard in shards], tf.int32)
