"""Models over devices: stages that work on different microbatches at the same time, in one graph.

    rows ── microbatches ──> stage 0 ──> stage 1 ──> ... ── joined ──> rows
                             GPU:0       GPU:1

What a stage gives goes straight to the device of the next one. On a device, calls run in the order of a schedule, which control
edges within the device hold; no device waits for another one but for its inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, Literal, NamedTuple

import tensorflow as tf

from devicemap._tensorflow.calls import begin_backward_on
from devicemap._tensorflow.gradients import added, wait_for
from devicemap.base.devices import choose_devices, choose_output_device
from devicemap.base.options import check_count
from devicemap.base.structure import freeze
from devicemap.compile.gather import gather, with_static_rows
from devicemap.compile.layout import copied, ops_of, sizes_in_graph
from devicemap.data.rows import HOST, Rows, any_rows, as_rows, count_rows, cut_rows, empty_rows, spec_of
from devicemap.errors import OptionError, function_error, warn_user
from devicemap.events import short_name
from devicemap.tell.plan.pipeline import PipelinePlan, StagePlan


class Step(NamedTuple):
    """One of the calls of a stage."""

    microbatch: int
    backward: bool


def schedule_of(kind: str, stages: int, microbatches: int, stage: int) -> list[Step]:
    """The order in which a stage makes its calls, forward and backward.

    "gpipe": all forward, then all backward (Huang et al., 2019). "1f1b": after `stages - stage` microbatches, each forward call
    waits for a backward one, so that no more microbatches' activations are held (Narayanan et al., 2019).

    >>> [f"{'FB'[step.backward]}{step.microbatch}" for step in schedule_of("1f1b", 2, 3, 0)]
    ['F0', 'F1', 'B0', 'F2', 'B1', 'B2']
    >>> [f"{'FB'[step.backward]}{step.microbatch}" for step in schedule_of("gpipe", 2, 3, 0)]
    ['F0', 'F1', 'F2', 'B0', 'B1', 'B2']
    """
    held = microbatches if kind == "gpipe" else min(microbatches, stages - stage)
    steps = [Step(m, False) for m in range(held)]
    for m in range(microbatches):
        steps.append(Step(m, True))
        if m + held < microbatches:
            steps.append(Step(m + held, False))
    return steps


class Pipeline:
    """Functions of batches, one after the other, each on a device of its own: `stages[-1](... stages[0](x))`.

    Rows come back in order, and gradients are those of the whole batch. With "1f1b", backward calls begin before all forward
    calls are done where the gradient of a microbatch's outputs does not depend on those of later ones: where the last stage
    gives a loss for each row, and these are added or averaged. Otherwise, and in eager code under a tape, all forward calls
    come first, as with "gpipe". A batch normalization in a stage sees microbatches, and a warning says so.

    Args:
        stages: functions of a batch, Keras layers or models; what a tuple holds is passed as several arguments. Their variables
            stay where they are; those of Keras stages that were built are moved to the device of their stage.
        devices: as for `parallel_map`; the first ones, one for each stage.
        microbatches: into how many parts the rows of a batch are cut, at most: no part is empty.
        schedule: "1f1b" or "gpipe".
        output_device: where results are gathered.

    Raises:
        OptionError: for what cannot be, for instance fewer devices than stages.

    Examples:
        >>> pipe = Pipeline([lambda x: x * 2, lambda x: x + 1], devices=["CPU:0", "CPU:1"], microbatches=2)
        >>> pipe(tf.range(5)).numpy().tolist()
        [1, 3, 5, 7, 9]
    """

    def __init__(
        self,
        stages: Sequence[Callable[..., Any]],
        devices: Any = None,
        microbatches: int = 8,
        schedule: Literal["1f1b", "gpipe"] = "1f1b",
        output_device: Any = "/CPU:0",
    ):
        self._stages = tuple(stages)
        if not self._stages or not all(callable(stage) for stage in self._stages):
            raise OptionError(f"stages={stages!r}; expected a list of functions of a batch, one at least")
        check_count("microbatches", microbatches)
        if schedule not in ("1f1b", "gpipe"):
            raise OptionError(f"schedule={schedule!r}; expected '1f1b' or 'gpipe'")
        known = choose_devices(devices)
        if len(known) < len(self._stages):
            raise OptionError(
                f"{len(self._stages)} stages, and {len(known)} device(s): {', '.join(map(short_name, known))}. Make "
                "fewer stages"
            )
        self.devices = tuple(known[: len(self._stages)])
        self._microbatches, self._schedule = int(microbatches), schedule
        self._output_device = choose_output_device(output_device)
        self._traced = [_on_some(stage) for stage in self._stages]
        self._calls: dict[Any, Any] = {}
        for stage, device in zip(self._stages, self.devices):
            _move_variables(stage, device)
            _warn_of_batch_norm(stage)

    def __call__(self, data: Any) -> Any:
        """The stages on a batch.

        Args:
            data: as for `parallel_map` with `batched=True`.

        Raises:
            DataError: for data that cannot be.
            FunctionError: a stage failed, or gives another number of rows than it is given.
        """
        rows = as_rows(data)
        if not tf.executing_eagerly():
            return self._composed(rows)
        count = min(rows.count or 0, self._microbatches)
        key = rows.key, freeze(tf.nest.map_structure(lambda _: None, rows.structure)), count
        if key not in self._calls:
            self._calls[key] = tf.function(
                lambda *leaves: self._composed(_of_leaves(rows, leaves, count)), autograph=False
            )
        try:
            return self._calls[key](*rows.leaves)
        except tf.errors.OpError as error:
            raise function_error(f"a stage failed: {type(error).__name__}: {error.message}", error) from error

    def stream(self, dataset: tf.data.Dataset) -> Iterator[Any]:
        """The stages on the batches of a dataset, in order; the first stages are at work on the next one while the last ones
        are on the one before.

        Examples:
            >>> pipe = Pipeline([lambda x: x * 2, lambda x: x + 1], devices=["CPU:0", "CPU:1"])
            >>> [batch.numpy().tolist() for batch in pipe.stream(tf.data.Dataset.range(3).batch(2))]
            [[1, 3], [5]]
        """
        ahead = 2  # of which one drains while the other fills
        mapped = dataset.map(self._in_dataset, num_parallel_calls=ahead, deterministic=True).prefetch(1)
        return iter(mapped)

    @tf.autograph.experimental.do_not_convert
    def _in_dataset(self, *elements: Any) -> Any:
        return self._composed(as_rows(elements[0] if len(elements) == 1 else elements))

    def explain(self, data_or_spec: Any) -> PipelinePlan:
        """What a call would do, without running it: the schedule, its bubble, and what goes from stage to stage.

        Args:
            data_or_spec: a batch, or a nest of `tf.TensorSpec`s in its place.
        """
        leaves = tf.nest.flatten(data_or_spec)
        counts = [leaf.shape[0] for leaf in leaves]
        given = tf.nest.map_structure(
            lambda leaf: any_rows(leaf) if isinstance(leaf, tf.TypeSpec) else spec_of(leaf), data_or_spec
        )
        microbatches = self._microbatches if counts[0] is None else min(self._microbatches, counts[0])
        plans = []
        for stage, device in enumerate(self.devices):
            traced = self._traced[stage].get_concrete_function(True, given)
            held = sum(v.shape.num_elements() * v.dtype.size for v in traced.graph.variables)
            given = tf.nest.map_structure(spec_of, traced.structured_outputs)
            sizes = [(spec.shape[1:].num_elements() or 0) * spec.dtype.size for spec in tf.nest.flatten(given)]
            steps = schedule_of(self._schedule, len(self.devices), microbatches, stage)
            order = tuple("FB"[step.backward] + str(step.microbatch) for step in steps)
            plans.append(StagePlan(device, held, sum(sizes), order))
        return PipelinePlan(counts[0], microbatches, self._schedule, tuple(plans))

    def _composed(self, rows: Rows) -> Any:
        """The stages on rows, in the graph that is being built."""
        count = self._microbatches if rows.count is None else min(rows.count, self._microbatches)
        with tf.device(HOST):
            sizes = sizes_in_graph(count_rows(rows.leaves[0]), max(count, 1))
            parts = list(zip(*(cut_rows(leaf, sizes, max(count, 1)) for leaf in rows.leaves)))
        calls = _Calls(self._schedule, len(self.devices), len(parts))
        values = [tf.nest.pack_sequence_as(rows.structure, part) for part in parts]
        for stage, (traced, device) in enumerate(zip(self._traced, self.devices)):
            for m, value in enumerate(values):
                some = sizes[m] > 0 if rows.count is None else True
                with tf.device(device), tf.name_scope(f"stage_{stage}_microbatch_{m}"):
                    values[m] = calls.call(stage, m, traced, value, some)
        structure = values[0]
        with tf.device(self._output_device):
            results = [copied(tf.nest.flatten(value)) for value in values]
            joined = (
                [gather(leaves, differentiable=True)[0] for leaves in zip(*results)] if len(results) > 1 else results[0]
            )
        return tf.nest.pack_sequence_as(structure, [with_static_rows(leaf, rows.count) for leaf in joined])


class _Calls:
    """The calls of all stages in one graph, and the edges between those of a device."""

    def __init__(self, schedule: str, stages: int, microbatches: int):
        self._before: dict[tuple[int, Step], Step] = {}
        for stage in range(stages):
            steps = schedule_of(schedule, stages, microbatches, stage)
            self._before |= {(stage, step): before for before, step in pairwise(steps)}
        self._ops: dict[tuple[int, Step], Any] = {}
        self._microbatches = microbatches
        self._gradients: list[dict[int, list[Any]]] = [{} for _ in range(stages)]

    def call(self, stage: int, microbatch: int, traced: Any, value: Any, some: Any) -> Any:
        """A stage on a microbatch, on the device of the moment; `some`: whether there are rows in it."""
        earlier = self._ops.get((stage, Step(microbatch - 1, False)))
        value = tf.nest.map_structure(tf.identity, value, expand_composites=True)
        concrete = traced.get_concrete_function(some, tf.nest.map_structure(spec_of, value))
        begin_backward_on(tf.nest.flatten(value, expand_composites=True)[0].device, concrete)
        with tf.control_dependencies([] if earlier is None else [earlier]):
            results = concrete(some, value)
        op = self._ops[stage, Step(microbatch, False)] = ops_of(tf.nest.flatten(results))[0]
        op.on_gradient = partial(self._differentiated, stage, microbatch, op)
        return results

    def _differentiated(
        self, stage: int, microbatch: int, op: Any, ops: Sequence[Any], gradients: Sequence[Any]
    ) -> list[Any]:
        """The gradient of a call was built, of these ops, on the device of the moment.

        Returns:
            The gradients of what the call takes: those of variables summed over all microbatches, here, with the last of them.
        """
        own = Step(microbatch, True)
        self._ops[stage, own] = ops[-1]
        for later, before in [(step, before) for (of, step), before in self._before.items() if of == stage]:
            if own in (later, before) and (stage, later) in self._ops and (stage, before) in self._ops:
                wait_for(self._ops[stage, later], self._ops[stage, before])
        of_call, handles = list(gradients), [i for i, taken in enumerate(op.inputs) if taken.dtype == tf.resource]
        known = self._gradients[stage]
        known[microbatch] = [of_call[i] for i in handles]
        last = len(known) == self._microbatches
        for number, i in enumerate(handles):
            of_call[i] = None
            for m in sorted(known) if last else ():
                total, gradient = of_call[i], known[m][number]
                of_call[i] = (
                    added([each for each in (total, gradient) if each is not None]) if gradient is not None else total
                )
                # One sum at a time is held; TensorFlow would make one op of them all, with all gradients.
                following = self._ops.get((stage, Step(m + 1, True)))
                if following is not None and of_call[i] is not None:
                    wait_for(following, ops_of([of_call[i]])[0])
        if last:
            known.clear()
        return of_call


def _of_leaves(rows: Rows, leaves: Sequence[Any], count: int) -> Rows:
    """Rows like these, of other leaves of which nobody knows how many rows they have, but that there are at least `count`."""
    return Rows(tf.nest.pack_sequence_as(rows.structure, leaves), tuple(leaves), leaves[0].shape[0], rows.key)


def _on_some(stage: Callable[..., Any]) -> Any:
    """A stage as a `tf.function` of whether there are rows, and of rows, in any structure."""
    inner = tf.function(lambda value: stage(*value) if type(value) is tuple else stage(value), reduce_retracing=True)

    def on_some(some: Any, value: Any) -> Any:
        if some is True:
            return inner(value)
        concrete = inner.get_concrete_function(tf.nest.map_structure(spec_of, value))
        nothing = [empty_rows(spec_of(leaf)) for leaf in tf.nest.flatten(concrete.structured_outputs)]
        return tf.cond(
            some, lambda: inner(value), lambda: tf.nest.pack_sequence_as(concrete.structured_outputs, nothing)
        )

    return tf.function(on_some, autograph=False)


def _layers_of(stage: Any) -> list[Any]:
    """The Keras layers in a stage, itself included."""
    return list(stage._flatten_layers()) if hasattr(stage, "_flatten_layers") else []


def _move_variables(stage: Any, device: str) -> None:
    """Move the variables of a Keras stage. Keras has no public name for where the value of a variable is."""
    for variable in getattr(stage, "variables", ()) if _layers_of(stage) else ():
        if variable.value.device != device:
            with tf.device(device):
                variable._value = tf.Variable(variable.value, trainable=variable.trainable, dtype=variable.value.dtype)


def _warn_of_batch_norm(stage: Any) -> None:
    found = [layer.name for layer in _layers_of(stage) if type(layer).__name__ == "BatchNormalization"]
    if found:
        names = ", ".join(found)
        warn_user(f"{names} in a stage: batch normalization sees a microbatch at a time in training", RuntimeWarning)


def _spec_of_any(leaf: Any) -> Any:
    return any_rows(leaf if isinstance(leaf, tf.TypeSpec) else tf.type_spec_from_value(tf.convert_to_tensor(leaf)))
