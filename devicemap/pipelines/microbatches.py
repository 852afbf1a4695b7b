"""The calls of a pipeline's stages in one graph: the control dependencies that order them, and their times."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import pairwise, product
from typing import Any

import tensorflow as tf

from devicemap._tensorflow.calls import begin_backward_on
from devicemap._tensorflow.functions import (
    NO_AUTO_CONTROL_DEPS,
    add_control_input,
    with_captures,
    without_auto_control_deps,
)
from devicemap._tensorflow.gradient_links import GradientPaths, Lookups, add_gradients, slices_if, sources_of_gradients
from devicemap.compile.graph_builder import ops_of
from devicemap.compile.lookups import lookups_in, mixed_lookups
from devicemap.compile.trace import Traced
from devicemap.data.rows import HOST, spec_of
from devicemap.inspect.pipelines import StageCall
from devicemap.pipelines.schedule import Step
from devicemap.pipelines.stage_replicas import StageReplica

_AHEAD = 2
"""The first device receives rows this many microbatches ahead. With 1, it waits for copies (benchmarks/test_pipeline_gpus)."""


class ScheduledCalls:
    """The calls of all stages on all microbatches, and their order on each device."""

    def __init__(self, orders: Iterable[Sequence[Step]], clock: Clock | None):
        """`orders`: the calls of each device, forward and backward. `clock`: records their times."""
        self._clock = clock
        self._pairs: defaultdict[Step, list[tuple[Step, Step]]] = defaultdict(list)
        for steps in orders:
            # Forward and backward calls also wait for those of the same kind, because calls of the other kind may not exist.
            kinds = [[step for step in steps if step.backward is backward] for backward in (False, True)]
            for pair in {pair for order in (steps, *kinds) for pair in pairwise(order)}:
                for step in pair:
                    self._pairs[step].append(pair)
        # Inlining removes control edges of calls. So edges go to an op before the inputs, and from an op after the results.
        self._gates: dict[Step, Any] = {}
        self._ends: dict[Step, Any] = {}
        self._arrivals: dict[int, Any] = {}
        """An op for each microbatch that runs when the first stage has its rows and has finished earlier microbatches."""
        self._sent: dict[tuple[int, int], list[Any]] = {}
        """The ops of the rows of a microbatch that are copied to a stage."""
        self._gradients: defaultdict[Any, dict[int, list[Any]]] = defaultdict(dict)
        self._functions: dict[Any, Any] = {}
        """What microbatches call, by trace, and the sources of its gradients. No two devices share a trace, so each has one
        backward pass."""

    def call(
        self, step: Step, replica: StageReplica, values: Sequence[Any], rows: Sequence[Any], has_rows: Any
    ) -> list[Any]:
        """Return the results of a stage for a microbatch, from those of the previous stage, and from rows of the batch.

        `has_rows`: whether the microbatch has rows; a tensor if that is unknown.
        """
        m, first = step.microbatch, replica.share.start
        # Without an order, the first microbatch could arrive last. A copy waits for calls that its device has begun, so the
        # first copies start before the first call does.
        earlier = [*self._sent[step.stage, m - 1]] if m > first else []
        if m - first >= _AHEAD:
            earlier.append(self._arrivals[m - _AHEAD])
        self._sent[step.stage, m] = ops_of(rows)
        for op, before in product(ops_of(rows), earlier):
            add_control_input(op, before)
        traced = replica.traces[m - first]
        if traced.audit.custom_gradients_read:
            has_rows = True
        with tf.device(replica.device), tf.control_dependencies(replica.assigned):
            leaves = self._begin(step, replica, [*values, *rows])
            self._arrivals.setdefault(m, ops_of(leaves)[0])
            if traced.concrete not in self._functions:
                call = with_captures(traced.concrete, replica.captures) if replica.captures else traced.concrete
                call = call if has_rows is True else _on_some(traced, call)
                self._functions[traced.concrete] = call, sources_of_gradients(traced.concrete)
            function, sources = self._functions[traced.concrete]
            call, arguments = without_auto_control_deps(function, leaves if has_rows is True else [has_rows, *leaves])
            begin_backward_on(replica.device, call)
            results = list(call(*arguments))
            op = ops_of(results)[0]
            inputs, paths = _inputs_of(op, traced, replica, function), GradientPaths(sources)
            back = step._replace(backward=True)
            op.on_gradient = partial(self._differentiated, back, replica, traced, inputs, paths, has_rows)
            return self._end(step, replica, paths.track_results(results, sources))

    def _begin(self, step: Step, replica: StageReplica, inputs: Sequence[Any]) -> list[Any]:
        """Return the inputs of a call on the current device, after the call before it."""
        self._gates[step] = tf.no_op()
        with tf.control_dependencies([self._gates[step]]):
            there = _identities(inputs)
        if self._clock:
            with tf.control_dependencies(self._clock.stamp(replica.device, step, there)):
                there = _identities(there)
        return there

    def _end(self, step: Step, replica: StageReplica, results: Sequence[Any]) -> list[Any]:
        """Return the results of a call on the current device, and order it and its neighbors that are in the graph."""
        there = _identities(results)
        known = [each for each in there if each is not None]
        stamps = self._clock.stamp(replica.device, step, known) if self._clock else []
        with tf.control_dependencies([*ops_of(known), *stamps]):
            self._ends[step] = tf.no_op()
        for one, other in self._pairs[step]:
            if one in self._ends and other in self._gates:
                add_control_input(self._gates[other], self._ends[one])
        return there

    def _differentiated(
        self,
        step: Step,
        replica: StageReplica,
        traced: Traced,
        inputs: Sequence[Any],
        paths: GradientPaths,
        has_rows: Any,
        differentiate: Callable[..., Any],
        upstream: Sequence[Any],
    ) -> list[Any]:
        """Return the gradients of the `inputs` of a call, given those of its results, on the current device.

        Gradients of variables are summed over the microbatches, and returned with those of the last microbatch.
        """
        if step in self._gates:  # in second gradients, whose calls may depend on later calls of this schedule
            return list(differentiate(*upstream))
        found = differentiate(*self._begin(step, replica, upstream))
        gradients = [gradient if paths.gets_gradient(taken) else None for taken, gradient in zip(inputs, found)]
        self._end(step, replica, gradients)
        resources = {tensor.ref() for tensor in traced.captures if tensor.dtype == tf.resource}
        handles = [i for i, taken in enumerate(inputs) if taken in resources]
        known = self._gradients[step.stage, replica.device]
        known[step.microbatch] = [slices_if(has_rows, gradients[i]) for i in handles]
        last = len(known) == len(replica.share)
        kinds = lookups_in(traced.concrete, traced.seeds) if last else {}
        for number, i in enumerate(handles):
            terms = [(step._replace(microbatch=m), known[m][number]) for m in replica.share if last]
            gradients[i] = self._sum(terms, kinds.get(inputs[i], Lookups.NONE)) if last else None
        if last:
            known.clear()
        return gradients

    def _sum(self, gradients: Iterable[tuple[Step, Any]], lookups: Lookups) -> Any | None:
        """Return the sum of a variable's gradients of backward calls.

        Each call waits for the sum of the earlier gradients. TensorFlow would hold all gradients, and add them in one op.
        """
        total = None
        for step, gradient in gradients:
            if total is not None:
                add_control_input(self._gates[step], ops_of([total])[0])
            terms = [each for each in (total, gradient) if each is not None]
            if lookups is Lookups.MIXED and [*map(type, terms)] == [tf.IndexedSlices] * 2:
                raise mixed_lookups("a variable of a stage")
            total = add_gradients(terms, lookups) if terms else None
        return total


def _inputs_of(op: Any, traced: Traced, replica: StageReplica, function: Any) -> list[Any]:
    """Return the input of the trace for each input of a call op, as in `sources_of_gradients`.

    The function of the op calls the trace with the captures of a replica.
    """
    replaced = {tensor.ref(): key for key, tensor in replica.captures.items()}
    captures = [replaced.get(tensor.ref(), tensor.ref()) for tensor in function.captured_inputs]
    leaves = len(traced.concrete.inputs) - len(traced.concrete.captured_inputs)
    return [*range(leaves + len(captures) - len(op.inputs), leaves), *captures]


def _identities(leaves: Sequence[Any]) -> list[Any]:
    return [None if leaf is None else tf.identity(leaf) for leaf in leaves]


def _on_some(traced: Traced, call: Any) -> Any:
    """Return a stage as a function of a boolean, whether there are rows, and of the rows."""

    @tf.function(autograph=False)
    def on_some(has_rows: Any, *leaves: Any) -> Any:
        return tf.cond(has_rows, lambda: call(*leaves), traced.no_rows)

    return on_some.get_concrete_function(tf.TensorSpec([], tf.bool), *traced.input_specs)


class Clock:
    """The times of the calls in a graph."""

    def __init__(self) -> None:
        self._times: dict[tuple[str, Step], list[Any]] = {}
        self.values: Any = None
        """The value of `times` in the last run of the graph."""

    def stamp(self, device: str, step: Step, tensors: Sequence[Any]) -> list[Any]:
        """Record the time when the inputs or results of a call on a device are computed; return the op that does so."""
        known = tf.nest.flatten([tensor for tensor in tensors if tensor is not None], expand_composites=True)
        elements = [tf.reshape(tensor, [-1])[:1] for tensor in known if tensor.dtype not in (tf.resource, tf.variant)]

        @tf.function(autograph=False, experimental_attributes=NO_AUTO_CONTROL_DEPS)
        def now(*elements: Any) -> Any:
            with tf.control_dependencies(elements):
                return tf.timestamp()

        with tf.device(HOST):
            call, arguments = without_auto_control_deps(now.get_concrete_function(*map(spec_of, elements)), elements)
            time = tf.ensure_shape(call(*arguments), [])  # other ops cannot wait for a call, because it is inlined
        self._times.setdefault((device, step), []).append(time)
        return [time.op]

    @property
    def times(self) -> Any:
        """The start and the end of each call, float64 `[calls, 2]`, in seconds since the epoch."""
        with tf.device(HOST):
            return tf.stack([tf.stack(times) for times in self._times.values()])

    @property
    def calls(self) -> tuple[StageCall, ...]:
        """The calls of the last run, in the order of their starts."""
        seconds = self.values.numpy() - self.values.numpy().min()
        found = (StageCall(device, *step, *map(float, pair)) for (device, step), pair in zip(self._times, seconds))
        return tuple(sorted(found, key=lambda call: call.started_seconds))
