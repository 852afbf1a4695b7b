"""The calls of a pipeline's stages in one graph, and what holds their order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import tensorflow as tf

from devicemap._tensorflow.calls import begin_backward_on
from devicemap._tensorflow.functions import unchained
from devicemap._tensorflow.gradients import added, wait_for
from devicemap.compile.graph_builder import copied, ops_of
from devicemap.compile.trace import Traced
from devicemap.pipelines.schedule import Step, schedule_of


class Calls:
    """The calls of all stages in one graph, and the edges between those of a device."""

    def __init__(self, schedule: str, stages: int, microbatches: int):
        self._edges: dict[int, list[tuple[Step, Step]]] = {}
        for stage in range(stages):
            steps = schedule_of(schedule, stages, microbatches, stage)
            backward = [step for step in steps if step.backward]  # also where forward ones between them cannot wait
            self._edges[stage] = [*pairwise(steps), *pairwise(backward)]
        # Calls are inlined, and edges of their own are lost then: an op before what a call takes, and one behind what it gives.
        self._gates: dict[tuple[int, Step], Any] = {}
        self._behind: dict[tuple[int, Step], Any] = {}
        self._microbatches = microbatches
        self._gradients: list[dict[int, list[Any]]] = [{} for _ in range(stages)]

    def call(self, stage: int, microbatch: int, traced: Traced, rows: Sequence[Any], some: Any) -> list[Any]:
        """The leaves that a stage makes of those of a microbatch, on the device of the moment.

        `some`: whether there are rows in it.
        """
        key = stage, Step(microbatch, False)
        leaves = self._gated(key, rows)
        call = traced.concrete if some is True else _on_some(traced)
        call, taken = unchained(call, leaves if some is True else [some, *leaves])
        begin_backward_on(tf.nest.flatten(leaves, expand_composites=True)[0].device, call)
        results = list(call(*taken))
        op = ops_of(results)[0]
        op.on_gradient = partial(self._differentiated, stage, microbatch, op)
        results = self._ended(key, results)
        if microbatch:
            wait_for(self._gates[key], self._behind[stage, Step(microbatch - 1, False)])
        return results

    def _gated(self, key: tuple[int, Step], given: Sequence[Any]) -> list[Any]:
        self._gates[key] = tf.no_op()
        with tf.control_dependencies([self._gates[key]]):
            return [None if leaf is None else copied([leaf])[0] for leaf in given]

    def _ended(self, key: tuple[int, Step], results: Sequence[Any]) -> list[Any]:
        there = copied(list(results))
        with tf.control_dependencies(ops_of(there)):
            self._behind[key] = tf.no_op()
        return there

    def _differentiated(
        self, stage: int, microbatch: int, op: Any, differentiate: Callable[..., Any], upstream: Sequence[Any]
    ) -> list[Any]:
        """The gradients of what a call takes, of those of its results, on the device of the moment.

        Those of variables are summed over all microbatches, here, with the last of them.
        """
        own = Step(microbatch, True)
        gradients = list(differentiate(*self._gated((stage, own), upstream)))
        made = [gradient for gradient in gradients if gradient is not None]
        self._ended((stage, own), made)
        for before, later in self._edges[stage]:
            if own in (later, before) and (stage, later) in self._gates and (stage, before) in self._behind:
                wait_for(self._gates[stage, later], self._behind[stage, before])
        of_call, handles = list(gradients), [i for i, taken in enumerate(op.inputs) if taken.dtype == tf.resource]
        known = self._gradients[stage]
        known[microbatch] = [of_call[i] for i in handles]
        last = len(known) == self._microbatches
        for number, i in enumerate(handles):
            total = None
            for m in sorted(known) if last else ():
                terms = [each for each in (total, known[m][number]) if each is not None]
                total = added(terms) if terms else None
                # One sum at a time is held; TensorFlow would make one op of them all, with all gradients.
                following = self._gates.get((stage, Step(m + 1, True)))
                if following is not None and total is not None:
                    wait_for(following, ops_of([total])[0])
            of_call[i] = total
        if last:
            known.clear()
        return of_call


def _on_some(traced: Traced) -> Any:
    """What is traced as a function of whether there are rows, and of these."""

    @tf.function(autograph=False)
    def on_some(some: Any, *leaves: Any) -> Any:
        return tf.cond(some, lambda: traced.concrete(*leaves), traced.no_rows)

    return on_some.get_concrete_function(tf.TensorSpec([], tf.bool), *traced.input_specs)
