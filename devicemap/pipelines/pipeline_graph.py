"""The stages of a pipeline on all microbatches of a batch, in one graph."""

from __future__ import annotations

from collections import Counter, namedtuple
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

import tensorflow as tf

from devicemap._tensorflow.functions import in_xla_context, run_after
from devicemap._tensorflow.gradients import tape_may_record
from devicemap._tensorflow.keras_calls import in_training
from devicemap._tensorflow.runtime import colocate_with_inputs
from devicemap.compile.graph_builder import copy_leaves, sizes_in_graph
from devicemap.compile.invoke import Invoker, settle_hosts
from devicemap.compile.returned import row_count_checks, row_counts, with_static_rows
from devicemap.compile.trace import Traced
from devicemap.data.rows import HOST, as_rows, count_rows, cut_rows, spec_of
from devicemap.data.shards import join, shard_sizes
from devicemap.devices import is_out_of_memory
from devicemap.errors import OptionError, error_text, function_error
from devicemap.events import short_name
from devicemap.inspect.pipelines import PipelinePlan, StagePlan
from devicemap.pipelines.microbatches import ScheduledCalls
from devicemap.pipelines.schedule import PipelineOptions, Step
from devicemap.pipelines.stage_replicas import replicas_of
from devicemap.pipelines.stages import Stage, TracedStage, attachments_to_nodes, trace_stages, trace_state, written_by

_NAMED: Any = {n: namedtuple("_NAMED", ("x", "y", "sample_weight")[: 1 + n]) for n in (1, 2)}
"""Tuples of rows with targets, whose names appear in error messages, by the number of the latter."""


@dataclass(frozen=True)
class Batch:
    """The tensors of a batch."""

    nest: Any
    """The specs of the rows."""

    targets: tuple[Any, ...]
    """The specs of targets, which the last stage takes as a second argument."""

    tensors: tuple[Sequence[Any], Sequence[Any]]
    """The leaves of the rows, and those of the targets."""

    min_rows: int | None
    """The least number of rows, if it is known."""

    scale: Any
    """A scalar that gradients are multiplied by. It is an input of the graph, because an optimizer may change it."""

    key: Any
    """A hashable value of the specs."""

    @classmethod
    def of(cls, data: Any, targets: Sequence[Any] = (), scale: Any = 1.0) -> Batch:
        """Return the batch of the user's data. Raise `DataError` for data that is not valid."""
        data = attachments_to_nodes(data)
        rows = as_rows(_NAMED[len(targets)](data, *targets) if targets else data)
        nest, *others = rows.specs if targets else (rows.specs,)
        count = len(tf.nest.flatten(nest))
        return cls(nest, tuple(others), (rows.leaves[:count], rows.leaves[count:]), rows.count, scale, rows.key)


class PipelineGraph:
    """The results of the stages for a batch, in the graph that is being built.

    Attributes:
        nest: the specs of the results.
        values: the leaves of the results for each microbatch, on the devices of the last stage.
        losses: the losses that layers add, each with its layer, for the whole batch.
        totals: the sums over the rows of the vectors of the loss of the pipeline.
        sizes: the number of rows of each microbatch.
        rows: the number of rows.
    """

    def __init__(self, stages: Sequence[Stage], batch: Batch, options: PipelineOptions):
        self._batch = batch
        colocate_with_inputs(device for devices in options.devices for device in devices)
        traced = trace_stages(stages, batch.nest, batch.targets)
        self.nest = traced[-1].nest
        parts = options.microbatches * len(options.devices)
        if _needs_whole_batch(traced, options):
            parts = 1
        elif batch.min_rows is not None:  # no microbatch is empty
            parts = max(1, min(parts, batch.min_rows))
        with tf.device(HOST):
            self.sizes = sizes_in_graph(count_rows(batch.tensors[0][0]), parts)
            rows, targets = map(self._cut, batch.tensors)
        known = batch.min_rows is not None and batch.min_rows >= parts
        has_rows = [known or self.sizes[m] > 0 for m in range(parts)]
        # The gradient of an idle replica is dense zeros, which make the sum of `tf.IndexedSlices` dense.
        bounds = accumulate(shard_sizes(parts, len(options.devices)), initial=0)
        shares = [range(*pair) for pair in pairwise(bounds)]
        calls = ScheduledCalls(options.orders(self._forward_first(traced), shares), options.clock)
        self.values: list[list[Any]] = [[] for _ in range(parts)]
        vectors: list[list[Any]] = [[] for _ in range(parts)]
        written = {id(handle) for stage in traced for handle in written_by(stage.traced)}
        for k, stage in enumerate(stages):
            for replica in replicas_of(stage, traced[k], shares, written):
                for m in replica.share:
                    taken = [*([] if k else rows[m]), *(targets[m] if traced[k].takes_targets else [])]
                    with tf.name_scope(f"stage_{k}_microbatch_{m}"):
                        results = calls.call(Step(k, m, False), replica, self.values[m], taken, has_rows[m])
                    self.values[m] = results[: len(results) - len(traced[k].losses)]
                    with tf.device(replica.device):
                        vectors[m] += [tf.reduce_sum(vector) for vector in results[len(self.values[m]) :]]
        found = [loss for stage in traced for loss in stage.losses]
        with tf.device(stages[-1].devices[0]):
            self.rows = tf.reduce_sum(self.sizes)
            sums = [tf.add_n(list(of_microbatches)) for of_microbatches in zip(*vectors)]
            self.totals = [total for (layer, _), total in zip(found, sums) if layer is None]
            self.losses = [
                (layer, total if is_sum else tf.math.divide_no_nan(total, tf.cast(self.rows, total.dtype)))
                for (layer, is_sum), total in zip(found, sums)
                if layer is not None
            ]

    def _forward_first(self, traced: Sequence[TracedStage]) -> bool:
        """Whether all forward calls come first: without a loss, if its scale needs all rows, or by `_runs_sequentially`."""
        found = [layer for stage in traced for layer, _ in stage.losses]
        scaled = found.count(None) > 1 and any(layer is not None for layer in found)
        return not self._batch.targets or scaled or _runs_sequentially([stage.traced for stage in traced])

    def _cut(self, tensors: Sequence[Any]) -> list[list[Any]]:
        """Return these tensors for each microbatch."""
        parts = self.sizes.shape[0]
        cut = [cut_rows(tensor, self.sizes, parts) for tensor in tensors]
        return [run_after([], [tensor[m] for tensor in cut]) for m in range(parts)]

    def join_outputs(self, device: str) -> list[Any]:
        """Return the leaves of the results for the whole batch, on a device."""
        with tf.device(device):
            there = [copy_leaves(value) for value in self.values]
            leaves = [*zip(*there)]
            counts = [*map(row_counts, leaves)]
            checked = run_after(row_count_checks(counts, self.sizes, "the pipeline"), [*map(join, leaves)])
            return [with_static_rows(leaf, self._batch.tensors[0][0].shape[0]) for leaf in checked]


class EagerGraphs:
    """Runs functions of a `Batch`, each of which returns facts about its graph, and tensors."""

    def __init__(self, options: PipelineOptions, stages: Sequence[Stage]):
        self._options, self._stages = options, stages
        self._devices = [device for devices in options.devices for device in devices]
        self._graphs: dict[Any, Any] = {}
        self._invoker = Invoker(steady=False)

    def run(self, build: Callable[[Batch], tuple[Any, Any]], batch: Batch, key: Any = None) -> tuple[Any, Any]:
        """Return `build(batch)`. In eager code, it runs in a graph that is kept by `key` and the specs of the batch."""
        if tf.config.functions_run_eagerly():
            raise OptionError("a Pipeline needs graphs; call tf.config.run_functions_eagerly(False) before")
        if not tf.executing_eagerly():
            if in_xla_context():
                raise OptionError(
                    "a Pipeline inside a function that XLA compiles, which is for one device; set jit_compile=False, also in "
                    "compile() of a Keras model that calls it"
                )
            return build(batch)
        try:
            settle_hosts(self._devices)
            parts = self._options.microbatches * len(self._options.devices)
            batch = replace(batch, min_rows=min(batch.min_rows or 0, parts))
            known = self._graphs.get(self._key(batch, key))
            function, facts = known or self._new_graph(build, batch)
            if tape_may_record():  # tapes do not follow a call in another thread
                tensors, times = function(batch.tensors, batch.scale)
            else:
                given = batch.tensors, tf.convert_to_tensor(batch.scale)
                graph = function.get_concrete_function(*given)
                tensors, times = self._invoker.call(graph, tf.nest.flatten(given, expand_composites=True), 1)
            if known is None:
                self._graphs[self._key(batch, key)] = function, facts  # with layers that the traces have found
        except tf.errors.OpError as error:
            raise function_error(f"{self._failed_stage(batch, error)} failed: {error_text(error)}", error) from error
        if self._options.clock:
            self._options.clock.values = times
        return facts[-1], tensors

    def _failed_stage(self, batch: Batch, error: Exception) -> str:
        """Return which stage has this class of error if they run in turn on the whole batch. TensorFlow does not report it."""
        values, targets = batch.tensors
        traced = trace_stages(self._stages, batch.nest, batch.targets)
        # They do not run again if they have side effects, or if memory was short, which whole batches need more of.
        repeatable = not is_out_of_memory(error) and not any(each.traced.audit.has_side_effects for each in traced)
        for stage, each in zip(self._stages, traced) if repeatable else ():
            device = stage.devices[0]
            try:
                with tf.device(device):
                    results = each.traced.concrete(*values, *(targets if each.takes_targets else []))
            except Exception as found:
                return f"{each.name} on {short_name(device)}" if type(found) is type(error) else "a stage"
            values = results[: len(results) - len(each.losses)]
        return "a stage"

    def _key(self, batch: Batch, key: Any) -> tuple[Any, ...]:
        return key, batch.key, batch.min_rows, trace_state(*self._stages)

    def _new_graph(self, build: Callable[[Batch], tuple[Any, Any]], batch: Batch) -> tuple[Any, list[Any]]:
        """Return a graph for batches with a row for as many microbatches, and a list of the facts of its traces."""
        facts, clock, like = list[Any](), self._options.clock, replace(batch, tensors=((), ()), scale=None)

        def run(tensors: Any, scale: Any) -> Any:
            found, made = build(replace(like, tensors=tensors, scale=scale))
            facts.append(found)
            return made, clock.times if clock else None

        signature = (tf.nest.map_structure(spec_of, batch.tensors), tf.TensorSpec([], tf.float32))
        return tf.function(run, autograph=False, input_signature=signature), facts


def plan_of(
    stages: Sequence[Stage], specs: Any, rows: int | None, options: PipelineOptions, has_loss: bool
) -> PipelinePlan:
    """Return the plan of a call for rows of these specs, in training mode if there is a loss."""
    trace = partial(trace_stages, stages, specs)
    traced_stages = in_training(trace) if has_loss else trace()
    traces = [stage.traced for stage in traced_stages]
    microbatches = options.microbatches
    if _needs_whole_batch(traced_stages, options):
        microbatches = 1
    elif rows is not None:
        microbatches = max(1, min(microbatches, -(-rows // len(options.devices))))
    forward_first = _runs_sequentially(traces)
    orders = options.orders(forward_first, [range(microbatches)])
    plans = []
    for k, (stage, traced) in enumerate(zip(stages, traces)):
        variables = traced.concrete.graph.variables
        written = {*map(id, written_by(traced))}
        fetched = [v for v in variables if v.device != stage.devices[0] and id(v.handle) not in written]
        sizes = [(spec.shape[1:].num_elements() or 0) * spec.dtype.size for spec in traced.specs]
        steps = [step for step in orders[k % len(orders)] if step.stage == k]
        own = tuple("FB"[step.backward] + str(step.microbatch) for step in steps)
        plans.append(
            StagePlan(stage.devices[0], _bytes_of(variables), sum(sizes), own, stage.devices[1:], _bytes_of(fetched))
        )
    return PipelinePlan(rows, microbatches, options.schedule, tuple(plans), has_loss, forward_first)


def _bytes_of(variables: Sequence[Any]) -> int:
    return sum(v.shape.num_elements() * v.dtype.size for v in variables)


def _needs_whole_batch(stages: Sequence[TracedStage], options: PipelineOptions) -> bool:
    """Whether a stage may compute a value of all rows, as batch normalization does in training."""
    return not options.local and any(stage.mixes_rows for stage in stages)


def _runs_sequentially(stages: Sequence[Traced]) -> bool:
    """Whether TensorFlow runs all microbatches of a stage before those of another stage, against the schedule.

    It does so for gradients of Python functions, and if one stage writes a variable that another stage uses.
    """
    users = Counter(id(handle) for stage in stages for handle in stage.captures)
    written = (handle for stage in stages for handle in written_by(stage))
    return any(stage.audit.python_ops for stage in stages) or any(users[id(handle)] > 1 for handle in written)
