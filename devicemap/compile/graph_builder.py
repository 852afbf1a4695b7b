"""The graph of a call: a `tf.device` block for each slot, or the function of one device."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import tensorflow as tf

from devicemap._tensorflow.calls import begin_backward_on
from devicemap._tensorflow.functions import (
    NO_AUTO_CONTROL_DEPS,
    NO_AUTO_CONTROL_DEPS_NOINLINE,
    add_control_outputs,
    exports_control_outputs,
    run_after,
    with_captures,
)
from devicemap._tensorflow.gradients import differentiate_in_place
from devicemap.compile.call_spec import CallSpec, Engine
from devicemap.compile.replicas import Replicas
from devicemap.compile.returned import row_count_checks, row_counts
from devicemap.compile.trace import Traced
from devicemap.data.rows import HOST, cut_rows
from devicemap.data.shards import join
from devicemap.devices import kind_of


def ops_are_deterministic() -> bool:
    """Return whether `tf.config.experimental.enable_op_determinism()` was called. Then graphs may not read the time."""
    try:
        with tf.init_scope(), tf.device(HOST):
            tf.timestamp()
    except tf.errors.FailedPreconditionError:
        return True
    return False


@dataclass(frozen=True)
class CallGraphBuilder:
    """Builds the graph that a `CallSpec` identifies."""

    spec: CallSpec
    traces: Sequence[Traced]
    """The trace of each slot of `spec`. They differ only in the state that ops keep for each trace."""

    slots: tuple[str, ...]
    """The device of each slot. A device may have several slots."""

    replicas: Replicas
    output_device: str
    scope: str
    """Prefix of the name scopes of the slots."""

    @property
    def traced(self) -> Traced:
        """Any of the traces."""
        return self.traces[0]

    @property
    def uses_resources(self) -> bool:
        """Whether `fn` reads variables, which the user's function may assign after the call."""
        return any(capture.dtype == tf.resource for capture in self.traced.captures)

    @property
    def is_noinline(self) -> bool:
        """Whether the graph must not be inlined into the user's function."""
        audit = self.traced.audit
        # A graph with a loop returns the handles that the gradient of the loop takes. If it stays whole, the placer cannot
        # have some of them on GPUs and others on a CPU (test_gradients_are_those_of_the_serial_map on GPUs).
        captured = [capture.device for capture in self.traced.captures if capture.dtype == tf.resource]
        if self.spec.differentiable and audit.loops and len({*map(kind_of, [*captured, *self.slots])}) > 1:
            return False
        reads_too_late = self.uses_resources and not exports_control_outputs()
        # Inlining side effects would add control edges between all devices.
        return audit.has_side_effects or reads_too_late

    @property
    def returns_early(self) -> bool:
        """Whether the call returns results on the output device before the devices have computed them."""
        return kind_of(self.output_device) != "CPU"

    @property
    def records_end_times(self) -> bool:
        """Whether the graph returns the end time of each shard. Inside a function, other ops would wait for the clock."""
        useful = not self.spec.is_inside and (len(self.spec.slots) > 1 or self.returns_early)
        return useful and not ops_are_deterministic()

    def build(self) -> Any:
        """Build the graph.

        Returns:
            A `ConcreteFunction`: `(handles of replicas, *leaves) -> result leaves` for `Engine.CHUNKS`, and otherwise
            `(sizes, *leaves) -> (result leaves, end times)`. `sizes` is int32 `[shards]`. End times are empty, or one
            float64 tensor `[shards]` of seconds since the epoch.
        """
        attributes = NO_AUTO_CONTROL_DEPS_NOINLINE if self.is_noinline else NO_AUTO_CONTROL_DEPS
        function = partial(tf.function, autograph=False, experimental_attributes=attributes)
        with tf.device(None):
            if self.spec.engine is Engine.CHUNKS:
                handles = [tf.TensorSpec([], tf.resource) for _ in self.replicas.replicated(self.spec.slots[0])]
                return function(self._run_chunk).get_concrete_function(handles, *self.traced.input_specs)
            sizes = tf.TensorSpec([len(self.traces)], tf.int32)
            graph = function(self._run).get_concrete_function(sizes, *self.traced.input_specs)
        begin_backward_on(HOST, graph)
        return graph

    def _run(self, sizes: Any, *leaves: Any) -> tuple[list[Any], list[Any]]:
        """Run each shard on its slot, and gather the results."""
        shards = len(self.traces)
        values = self.replicas.values(self.spec.slots)
        with tf.device(HOST):
            cut = list(zip(*(cut_rows(leaf, sizes, shards) for leaf in leaves)))
            size_of = tf.unstack(sizes, shards)
        results: list[list[Any]] = []
        for i, slot in enumerate(self.spec.slots):
            control_inputs = ops_of(results[-1]) if self.traced.audit.ordered and results else []
            with tf.device(self.slots[slot]), tf.name_scope(f"{self.scope}_{slot}"):
                # Outside of the branch of tf.cond, because the gradient of a loop could not read captures inside.
                captures, assigned = self.replicas.create(slot, values)
            run = partial(self._run_shard, slot, self.traces[i], cut[i], captures)
            if self.spec.empty_shards:
                with tf.device(self.slots[slot]), tf.control_dependencies(control_inputs):
                    results.append(tf.cond(size_of[i] > 0, partial(run, assigned), self.traced.no_rows))
            else:
                results.append(run([*control_inputs, *assigned]))
        acting = [op for part in results for op in ops_of(part)] if self.traced.audit.has_side_effects else []
        ends = []
        if self.records_end_times and self.returns_early:
            ends = [completion_ops(self.slots[slot], part) for slot, part in zip(self.spec.slots, results)]
        with tf.device(self.output_device):
            if self.spec.empty_shards:
                results = [_like_first(part, results[0]) for part in results]
            # The gradient of the join reads the shape of each part on this device. A single part is not joined.
            results = [copy_leaves(part) for part in results]
            ends = ends or [ops_of(part) for part in results]
            joined = self._joined(results, sizes)
            if self.traced.audit.has_side_effects or self.uses_resources:  # the results depend on all reads
                joined = add_control_outputs(acting, joined)
        with tf.device(HOST if self.returns_early else self.output_device):
            end_times = [completion_times(ends)] if self.records_end_times else []
        if self.spec.differentiable:
            differentiate_in_place(tf.compat.v1.get_default_graph().get_operations())
        return joined, end_times

    def _joined(self, results: list[list[Any]], sizes: Any) -> list[Any]:
        """Gather the results of all shards, on the current device, or merge and finish the states of a reduction.

        If `fn` takes batches, assert that it returned as many rows for each shard as the shard has.
        """
        reduction = self.traced.reduction
        joined = [join(parts) for parts in zip(*results)]
        if reduction is not None:
            joined = reduction.finish_state(joined)
        if not self.traced.counts_rows:
            return joined
        if reduction is None:
            counts = [row_counts(parts) for parts in zip(*results)]
        else:  # the last leaf of states counts their rows; without rows, there is no state
            counts, sizes = [join([state[-1] for state in results])], tf.boolean_mask(sizes, sizes > 0)
        with tf.device(HOST):  # on a GPU, the assertion would wait for a copy of its condition
            checks = row_count_checks(counts, sizes)
        return run_after(checks, joined)

    def _run_chunk(self, handles: list[Any], *leaves: Any) -> list[Any]:
        """Run a chunk on the slot, and copy the results to the output device."""
        (slot,) = self.spec.slots
        with tf.device(self.slots[slot]), tf.name_scope(f"{self.scope}_{slot}"):
            results = self._call(self.traced, leaves, self.replicas.with_handles(slot, handles))
            ended = completion_ops(self.slots[slot], results) if self.returns_early else []
        with tf.device(self.output_device):
            copies = copy_leaves(results)
            control_ops = [*ended, *(ops_of(results) if self.traced.audit.has_side_effects else ())]
            return add_control_outputs(control_ops, copies) if control_ops else copies

    def _run_shard(
        self, slot: int, traced: Traced, shard: Sequence[Any], captures: dict[Any, Any], control_inputs: Sequence[Any]
    ) -> list[Any]:
        """Run a shard on a slot. The call waits for the ops `control_inputs`."""
        with tf.device(self.slots[slot]), tf.name_scope(f"{self.scope}_{slot}"):
            results = self._call(traced, shard, captures, control_inputs)
            if self.spec.differentiable:
                differentiate_in_place(ops_of(results))
            return results

    def _call(
        self, traced: Traced, shard: Sequence[Any], captures: dict[Any, Any], control_inputs: Sequence[Any] = ()
    ) -> list[Any]:
        """Call a trace on the current device. `captures` maps the `Tensor.ref()` of captures to replacements."""
        # Without a copy, ops that are colocated with their input (those of tf.debugging) would run on the device that cut the
        # shard, and constants would wait for that device (test_work_is_where_it_belongs).
        shard = copy_leaves(list(shard))
        function = with_captures(traced.concrete, captures)
        # Only around the call, because Grappler drops control edges that the inputs of the call already have.
        with tf.control_dependencies(control_inputs), contextlib.ExitStack() as scopes:
            first = ops_of(shard)[0]
            if self.spec.differentiable and all(tensor.device == first.device for tensor in function.captured_inputs):
                # Otherwise, the placer puts the TensorLists that a loop keeps for its gradient on the first device
                # (test_what_a_loop_leaves_for_its_gradient_stays_on_its_device).
                scopes.enter_context(first.graph.colocate_with(first))
            return list(function(*shard))


def completion_ops(device: str, results: Sequence[Any]) -> list[Any]:
    """Return an op on the host that runs when a device has computed these results. It takes an element of each result."""
    with tf.device(device):
        firsts = [tf.reshape(tensor, [-1])[:1] for tensor in tf.nest.flatten(list(results), expand_composites=True)]
    with tf.device(HOST):  # Grappler drops the inputs of a stateless op without users
        return [tf.raw_ops.Assert(condition=tf.constant(True), data=firsts)]


def sizes_in_graph(rows: Any, shards: int) -> Any:
    """Return `shard_sizes` of a number of rows that is known only when the graph runs. The last sizes may be 0."""
    rows = tf.cast(rows, tf.int32)
    return rows // shards + tf.cast(tf.range(shards) < rows % shards, tf.int32)


def copy_leaves(leaves: list[Any]) -> list[Any]:
    """Return the leaves on the current device."""
    return [tf.identity(leaf) for leaf in leaves]


def ops_of(results: Sequence[Any]) -> list[Any]:
    """Return the ops of all tensors of these results, dense, ragged or sparse."""
    return [t.op for t in tf.nest.flatten(list(results), expand_composites=True)]


def completion_times(ends: Sequence[Sequence[Any]]) -> Any:
    """Return the times at which these groups of ops ended: float64 `[len(ends)]`, in seconds since the epoch."""
    times = []
    for ops in ends:
        with tf.control_dependencies(ops):
            times.append(tf.timestamp())
    return tf.stack(times)


def _like_first(part: list[Any], first: list[Any]) -> list[Any]:
    """Give results without rows the inner shape of the first shard's results, if it is not static."""
    shaped = []
    for leaf, model in zip(part, first):
        if isinstance(leaf, tf.Tensor) and leaf is not model and not leaf.shape[1:].is_fully_defined():
            shape = tf.shape(leaf)
            empty = tf.concat([[0], tf.shape(model)[1:]], 0)
            leaf = tf.reshape(leaf, tf.where(shape[0] > 0, shape, empty))
        shaped.append(leaf)
    return shaped
