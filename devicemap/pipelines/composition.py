"""The stages of a pipeline on all microbatches, in the graph that is being built."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import tensorflow as tf

from devicemap._tensorflow.functions import waiting_for
from devicemap._tensorflow.gradients import order_of_gradients, wait_for
from devicemap.compile.call_spec import CallSpec, Engine
from devicemap.compile.gather import gather, with_row_counts_checked, with_static_rows
from devicemap.compile.graph_builder import copied, ops_of, sizes_in_graph
from devicemap.compile.replicas import Replicas
from devicemap.data.rows import HOST, count_rows, cut_rows, spec_of
from devicemap.pipelines.clock import Clock
from devicemap.pipelines.microbatches import Calls
from devicemap.pipelines.schedule import Step
from devicemap.pipelines.stages import Passed, Stage, TracedStage, run_in_turn

_AHEAD = 2
"""The first device receives rows this many microbatches ahead. With 1, it is idle in copies (benchmarks/pipeline_gpus)."""


@dataclass(frozen=True)
class Setting:
    """The devices and the schedule of stages."""

    devices: tuple[tuple[str, ...], ...]
    """The devices of each replica of the pipeline."""

    schedule: str
    """One of `schedule.KINDS`."""

    microbatches: int
    """Number of microbatches of each replica."""

    local: bool
    """Whether layers that write variables, such as batch normalization in training, see one microbatch at a time."""

    def device_of(self, stage: int, replica: int = 0) -> str:
        """Return the device of a stage. Stages are assigned to the devices in turn."""
        return self.devices[replica][stage % len(self.devices[replica])]


@dataclass(frozen=True)
class Batch:
    """The leaves and attached tensors of a batch."""

    passed: Passed
    """Their specs."""

    tensors: Sequence[Any]
    """Leaves, then attached tensors."""

    rows: int | None = None
    """The number of rows, if it is known."""

    least: int = 0
    """The least number of rows."""

    targets: tuple[Any, ...] = ()
    """Nests of leaves, which the last stage takes as a second argument."""

    scale: Any = 1.0
    """A scalar that gradients are multiplied by. It is an input of the graph, because an optimizer may change it."""


class Composition:
    """The results of the stages for a batch.

    Attributes:
        passed: the specs of the results.
        values: the results for each microbatch, leaves and attached tensors, on the devices of the last stage.
        losses: the losses that layers add, each with its layer, for the whole batch.
        sizes: the number of rows of each microbatch.
    """

    def __init__(
        self, stages: Sequence[Stage], batch: Batch, setting: Setting, alive: list[Any], clock: Clock | None = None
    ):
        """
        Args:
            stages: the stages.
            batch: the inputs of the first stage.
            setting: the devices and the schedule.
            alive: a list that lives as long as the graph, for variables that the graph uses.
            clock: records the times of calls.
        """
        self._setting, self._batch, self._alive = setting, batch, alive
        self._given, traced = self._trace(stages)
        parts = self._count(traced)
        with tf.device(HOST):
            self.sizes = sizes_in_graph(count_rows(batch.tensors[0]), parts)
            self.values = self._cut(batch.tensors, parts)
            self._targets = self._cut(tf.nest.flatten(batch.targets), parts)
        known = batch.rows is not None or batch.least >= parts
        self._filled = [known or self.sizes[m] > 0 for m in range(parts)]
        # The gradient of an idle replica is dense zeros, which make the sum of `tf.IndexedSlices` dense.
        replicas = min(len(setting.devices), parts)
        bounds = [-(-replica * parts // replicas) for replica in range(replicas + 1)]
        self._shares = [range(*pair) for pair in pairwise(bounds)]
        kind = "gpipe" if self._forward_first(traced) else setting.schedule
        self._calls = []
        for r, share in enumerate(self._shares):
            stamp = [partial(_stamp, clock, setting, r, share.start)] if clock else []
            self._calls.append(Calls(kind, len(stages), len(setting.devices[0]), len(share), *stamp))
        sums: list[list[Any]] = [[] for _ in range(parts)]
        for k, (stage, first) in enumerate(zip(stages, traced)):
            microbatches = stage.of_microbatches(self._given[k], self._shares)
            for m, losses in self._run(k, first, [each.traced for each in microbatches]):
                sums[m] += losses
        with tf.device(setting.device_of(len(stages) - 1)):
            totals = [tf.add_n(list(of_microbatches)) for of_microbatches in zip(*sums)]
            self.losses = [
                (layer, total if is_sum else tf.math.divide_no_nan(total, self.rows(total.dtype)))
                for (layer, is_sum), total in zip((loss for stage in traced for loss in stage.losses), totals)
            ]

    def _trace(self, stages: Sequence[Stage]) -> tuple[list[Passed], list[TracedStage]]:
        """Trace each stage for its inputs, and set the specs of the results. Return specs of inputs, and traced stages."""
        self.passed, given, traced = self._batch.passed, [], []
        for stage in stages:
            if self._batch.targets and stage is stages[-1]:
                self.passed = self.passed.with_targets(tf.nest.map_structure(spec_of, self._batch.targets))
            given.append(self.passed)
            traced.append(stage.traced(self.passed))
            self.passed = traced[-1].passed
        return given, traced

    def _count(self, traced: Sequence[TracedStage]) -> int:
        """Return the number of microbatches of the batch. None is empty if the number of rows is known."""
        if any(stage.mixes_rows for stage in traced) and not self._setting.local:
            return 1
        parts = self._setting.microbatches * len(self._setting.devices)
        least = self._batch.rows if self._batch.rows is not None else self._batch.least or parts
        return max(1, min(parts, least))

    def _forward_first(self, traced: Sequence[TracedStage]) -> bool:
        """Whether all forward calls come first: without a loss, if its scale needs all rows, or by `run_in_turn`."""
        scaled = self._batch.targets and len(self.passed.nest) > 2 and any(stage.losses for stage in traced)
        return not self._batch.targets or scaled or run_in_turn([stage.traced for stage in traced])

    def _cut(self, tensors: Sequence[Any], parts: int) -> list[list[Any]]:
        """Return these tensors for each microbatch."""
        cut = [cut_rows(tensor, self.sizes, parts) for tensor in tensors]
        return [waiting_for([], [tensor[m] for tensor in cut]) for m in range(parts)]

    def _run(self, k: int, stage: TracedStage, microbatches: Sequence[Any]) -> Any:
        """Call stage `k` on all microbatches. For each of them, yield the sums over rows of the losses of the stage."""
        shares, slots = self._shares, [self._setting.device_of(k, r) for r in range(len(self._shares))]
        captures, assigned = self._captures(stage, slots)
        for r, m in ((r, m) for r, share in enumerate(shares) for m in share):
            leaves = self.values[m]
            if not k and m > shares[r].start:
                # TensorFlow starts copies to a device in any order, so the first microbatch could arrive last.
                before = self._calls[r].begun(max(m - shares[r].start - _AHEAD, 0))
                for op in ops_of([*leaves, *self._targets[m]]):
                    wait_for(op, before)
            if self._batch.targets and k == len(self._given) - 1:
                leaves = self._given[k].inserted(leaves, self._targets[m])
            with tf.device(slots[r]), tf.name_scope(f"stage_{k}_microbatch_{m}"):
                with tf.control_dependencies(assigned[r]):
                    results = self._calls[r].call(
                        k, m - shares[r].start, microbatches[m], captures[r], leaves, self._filled[m]
                    )
                self.values[m] = results[: len(results) - len(stage.losses)]
                yield m, [tf.reduce_sum(vector) for vector in results[len(self.values[m]) :]]

    def _captures(self, stage: TracedStage, slots: Sequence[str]) -> tuple[list[Any], list[Any]]:
        """Return the captures of a stage on the device of each replica, and the ops for which calls wait.

        The first replica has the variables. The other replicas get their values once in each call.
        """
        if len(slots) == 1:
            return [{}], [[]]
        order_of_gradients(stage.traced.concrete, [])  # makes tapes watch the variables
        spec = CallSpec.of_shards(len(slots), Engine.INLINE, gradients=1)
        replicas = Replicas(stage.traced, slots, spec)
        self._alive.append(replicas)
        values, found = replicas.values(range(len(slots))), []
        for r, slot in enumerate(slots):
            with tf.device(slot):
                found.append(replicas.assign(r, values))
        return [captures for captures, _ in found], [assigned for _, assigned in found]

    def rows(self, dtype: Any) -> Any:
        """Return the number of rows."""
        return tf.cast(tf.reduce_sum(self.sizes), dtype)

    def total(self, leaf: int) -> Any:
        """Return the sum over the rows of one of the results `[rows]`; each microbatch is summed on its device."""
        sums = []
        for value in self.values:
            with tf.device(value[leaf].device):
                sums.append(tf.reduce_sum(value[leaf]))
        with tf.device(self._setting.device_of(len(self._given) - 1)):
            return tf.add_n(sums)

    def joined(self, device: str, leaves: Sequence[int]) -> list[Any]:
        """Return some of the results for the whole batch, on a device."""
        with tf.device(device):
            there = [copied([value[i] for i in leaves]) for value in self.values]
            joined, counts = zip(*(gather(part, differentiable=True) for part in zip(*there)))
            checked = with_row_counts_checked(joined, counts, self.sizes)
            return [with_static_rows(leaf, self._batch.rows) for leaf in checked]


def _stamp(clock: Clock, setting: Setting, replica: int, first: int, step: Step, tensors: Sequence[Any]) -> list[Any]:
    return clock.stamp(setting.device_of(step.stage, replica), first, step, tensors)
