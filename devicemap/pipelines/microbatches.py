"""The calls of a pipeline's stages in one graph, and the control dependencies that order them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import tensorflow as tf

from devicemap._tensorflow.calls import begin_backward_on
from devicemap._tensorflow.functions import unchained, with_captures
from devicemap._tensorflow.gradients import added, wait_for
from devicemap.compile.graph_builder import copied, ops_of
from devicemap.compile.trace import Traced
from devicemap.pipelines.schedule import Step, schedule_of


class Calls:
    """The calls of all stages on the microbatches of one replica, and the order of calls on each device."""

    def __init__(
        self,
        schedule: str,
        stages: int,
        devices: int,
        microbatches: int,
        stamp: Callable[[Step, Sequence[Any]], list[Any]] = lambda *_: [],
    ):
        """The arguments of `schedule_of`; `stamp` returns ops that record the time when inputs or results are computed."""
        self._stamp = stamp
        self._after: defaultdict[Step, list[Step]] = defaultdict(list)
        self._before: defaultdict[Step, list[Step]] = defaultdict(list)
        for device in range(devices):
            steps = schedule_of(schedule, stages, devices, microbatches, device)
            # Forward and backward calls also wait for those of the same kind, because calls of the other kind may not exist.
            kinds = [[step for step in steps if step.backward is backward] for backward in (False, True)]
            for one, other in {pair for order in (steps, *kinds) for pair in pairwise(order)}:
                self._after[one].append(other)
                self._before[other].append(one)
        # Inlining removes control edges of calls. So edges go to an op before the inputs, and from an op after the results.
        self._gates: dict[Step, Any] = {}
        self._ends: dict[Step, Any] = {}
        self._arrivals: list[Any] = []
        self._microbatches = microbatches
        self._gradients: defaultdict[int, dict[int, list[Any]]] = defaultdict(dict)

    def call(
        self, stage: int, microbatch: int, traced: Traced, captures: dict[Any, Any], rows: Sequence[Any], some: Any
    ) -> list[Any]:
        """Return the results of a stage for a microbatch, on the current device.

        Args:
            stage: index of the stage.
            microbatch: index of the microbatch.
            traced: the stage.
            captures: replacements of its captures, by `Tensor.ref()` of the latter.
            rows: the leaves of the microbatch.
            some: whether the microbatch has rows; a tensor if that is unknown.
        """
        step = Step(stage, microbatch, False)
        leaves = self._begin(step, rows)
        if not stage:
            self._arrivals.append(ops_of(leaves)[0])
        call = with_captures(traced.concrete, captures) if captures else traced.concrete
        call = call if some is True else _on_some(traced, call)
        call, arguments = unchained(call, leaves if some is True else [some, *leaves])
        begin_backward_on(tf.nest.flatten(leaves, expand_composites=True)[0].device, call)
        results = list(call(*arguments))
        op = ops_of(results)[0]
        op.on_gradient = partial(self._differentiated, Step(stage, microbatch, True), op)
        results = self._end(step, results)
        self._order(step)
        return results

    def begun(self, microbatch: int) -> Any:
        """Return an op that runs when the first stage has the rows of a microbatch and has finished earlier microbatches."""
        return self._arrivals[microbatch]

    def _begin(self, step: Step, inputs: Sequence[Any]) -> list[Any]:
        self._gates[step] = tf.no_op()
        with tf.control_dependencies([self._gates[step]]):
            there = _copied(inputs)
        noted = self._stamp(step, there)
        with tf.control_dependencies(noted):
            return _copied(there) if noted else there

    def _end(self, step: Step, results: Sequence[Any]) -> list[Any]:
        there = copied(list(results))
        with tf.control_dependencies([*ops_of(there), *self._stamp(step, there)]):
            self._ends[step] = tf.no_op()
        return there

    def _order(self, step: Step) -> None:
        """Order a call after the previous call on its device, and before the next one, if these are in the graph."""
        for before in self._before[step]:
            if before in self._ends:
                wait_for(self._gates[step], self._ends[before])
        for after in self._after[step]:
            if after in self._gates:
                wait_for(self._gates[after], self._ends[step])

    def _differentiated(
        self, step: Step, op: Any, differentiate: Callable[..., Any], upstream: Sequence[Any]
    ) -> list[Any]:
        """Return the gradients of the inputs of a call, given those of its results, on the current device.

        Gradients of variables are summed over all microbatches, and returned with those of the last microbatch.
        """
        if step in self._gates:  # in second gradients, whose calls may depend on later calls of this schedule
            return list(differentiate(*upstream))
        gradients = list(differentiate(*self._begin(step, upstream)))
        self._end(step, [gradient for gradient in gradients if gradient is not None])
        self._order(step)
        self._sum_of_variables(step, op, gradients)
        return gradients

    def _sum_of_variables(self, step: Step, op: Any, gradients: list[Any]) -> None:
        """Replace the gradients of variables by `None`, or in the last microbatch by their sum over all microbatches."""
        handles = [i for i, taken in enumerate(op.inputs) if taken.dtype == tf.resource]
        known = self._gradients[step.stage]
        known[step.microbatch] = [gradients[i] for i in handles]
        last = len(known) == self._microbatches
        for number, i in enumerate(handles):
            gradients[i] = self._sum(step.stage, [known[m][number] for m in sorted(known)]) if last else None
        if last:
            known.clear()

    def _sum(self, stage: int, of_microbatches: Sequence[Any]) -> Any | None:
        """Return the sum of a variable's gradients.

        Each backward call waits for the sum of the earlier gradients. TensorFlow would hold all gradients, and add them in one
        op.
        """
        total = None
        for m, gradient in enumerate(of_microbatches):
            terms = [each for each in (total, gradient) if each is not None]
            total = added(terms) if terms else None
            following = self._gates.get(Step(stage, m + 1, True))
            if following is not None and total is not None:
                wait_for(following, ops_of([total])[0])
        return total


def _copied(leaves: Sequence[Any]) -> list[Any]:
    return [None if leaf is None else copied([leaf])[0] for leaf in leaves]


def _on_some(traced: Traced, call: Any) -> Any:
    """Return a stage as a function of a boolean, whether there are rows, and of the rows."""

    @tf.function(autograph=False)
    def on_some(some: Any, *leaves: Any) -> Any:
        return tf.cond(some, lambda: call(*leaves), traced.no_rows)

    return on_some.get_concrete_function(tf.TensorSpec([], tf.bool), *traced.input_specs)
