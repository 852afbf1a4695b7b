"""Models over devices: stages that work on different microbatches at the same time, in one graph.

    rows ── microbatches ──> stage 0 ──> stage 1 ──> ... ── joined ──> rows
                             GPU:0       GPU:1

What a stage gives goes straight to the device of the next one. On a device, calls run in the order of a schedule, which control
edges within the device hold; no device waits for another one but for its inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import tensorflow as tf

from devicemap._tensorflow.functions import compiled_as_a_part
from devicemap._tensorflow.keras import batch_norms_of, is_training, layers_of
from devicemap._tensorflow.keras_graphs import begin_call
from devicemap._tensorflow.placement import run_beside_inputs
from devicemap.compile.gather import gather, with_row_counts_checked, with_static_rows
from devicemap.compile.graph_builder import copied, sizes_in_graph
from devicemap.data.rows import HOST, as_rows, count_rows, cut_rows, spec_of
from devicemap.devices import choose_output_device
from devicemap.errors import DataError, OptionError, brief, function_error, warn_user
from devicemap.hosts import settle
from devicemap.inspect.pipeline_plan import PipelinePlan, StagePlan
from devicemap.inspect.planner import data_spec
from devicemap.options import Options, check_count
from devicemap.pipelines.microbatches import Calls
from devicemap.pipelines.schedule import schedule_of
from devicemap.pipelines.stages import Passed, Stage, devices_of_stages, notes_by_leaf, run_in_turn


class Pipeline:
    """Functions of batches, one after the other, each on a device of its own: `stages[-1](... stages[0](x))`.

    Rows come back in order, and gradients are those of the whole batch. With "1f1b", backward calls begin before all forward
    calls are done, if the last stage returns a loss for each row, and these are added or averaged: then the gradient of a
    microbatch's outputs does not depend on later ones. Otherwise, and in eager code under a tape, all forward calls come first,
    as with "gpipe". A batch normalization in a stage sees one microbatch at a time, and a warning says so.

    Args:
        stages: functions of a batch, Keras layers or models; a tuple is passed to the next one as several arguments. Variables
            stay where they are: `split` and `tf.device` create them on the device of their stage.
        devices: as for `parallel_map`; the first of them are taken, one for each stage.
        microbatches: into how many parts the rows of a batch are cut; fewer if there are fewer rows.
        schedule: "1f1b" or "gpipe".
        output_device: where results are gathered.
        batch_norm: "synchronized": if layers write variables in a call, as batch normalization does in training, the batch is
            one microbatch, and the stages work one after another. "local": such layers see one microbatch at a time.
        added_losses: required if layers add losses that depend on the rows, by `add_loss` or an `activity_regularizer` (Keras's
            are means): whether they are the "sum" or the "mean" over the rows.

    Raises:
        OptionError: for arguments that are not valid, for instance fewer devices than stages.

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
        batch_norm: Literal["synchronized", "local"] = "synchronized",
        added_losses: Literal["sum", "mean"] | None = None,
    ):
        if not isinstance(stages, Sequence) or not stages or not all(callable(stage) for stage in stages):
            hint = "; devicemap.split(model, n) makes one of a Keras model" if layers_of(stages) else ""
            raise OptionError(f"stages={stages!r}; expected a list of functions of a batch, one at least{hint}")
        if batch_norm not in ("synchronized", "local"):
            raise OptionError(f"batch_norm={batch_norm!r}; expected 'synchronized' or 'local'")
        if added_losses not in (None, "sum", "mean"):
            raise OptionError(f"added_losses={added_losses!r}; expected 'sum', 'mean' or None")
        self._stages = [Stage(stage, f"stage {k} of {len(stages)}", added_losses) for k, stage in enumerate(stages)]
        check_count("microbatches", microbatches)
        if schedule not in ("1f1b", "gpipe"):
            raise OptionError(f"schedule={schedule!r}; expected '1f1b' or 'gpipe'")
        self._output_device = choose_output_device(output_device)
        self.devices = tuple(devices_of_stages(len(self._stages), devices))
        self._microbatches, self._schedule = int(microbatches), schedule
        self._local = batch_norm == "local"
        self._graphs: dict[Any, Any] = {}
        norms = [layer.name for stage in stages for layer in batch_norms_of(stage) if layer.trainable]
        if norms and microbatches > 1 and not self._local:
            warn_user(
                f"{', '.join(norms)}: batch normalization in training needs the whole batch, so that the stages work one after "
                "another; batch_norm='local' lets it see one microbatch at a time",
                RuntimeWarning,
            )

    @tf.autograph.experimental.do_not_convert
    def __call__(self, data: Any) -> Any:
        """The stages on a batch.

        Args:
            data: as for `parallel_map` with `batched=True`.

        Raises:
            DataError: for data that is not valid, such as a dataset, which is for `stream`.
            OptionError: inside a function that XLA compiles.
            FunctionError: a stage failed, or gives another number of rows than it is given.
        """
        if isinstance(data, tf.data.Dataset):
            raise DataError("data is a tf.data.Dataset, and a call takes one batch; use stream(dataset)")
        rows = as_rows(data)
        notes = notes_by_leaf(rows.leaves)
        given, tensors = (
            Passed(rows.specs, {key: spec_of(note) for key, note in notes.items()}),
            [*rows.leaves, *notes.values()],
        )
        begin_call([layer for stage in self._stages for layer in stage.layers[:1]])
        if not tf.executing_eagerly():
            if compiled_as_a_part():
                raise OptionError(
                    "a Pipeline inside a function that XLA compiles, which is for one device; set jit_compile=False, also in "
                    "compile() of a Keras model that calls it"
                )
            returned, tensors = self._composed(given, tensors, rows.count)
            run_beside_inputs(self.devices)
            return returned.unpacked(tensors)
        count = min(rows.count or 0, self._microbatches)
        try:
            settle(self.devices)
            function, found = self._graph_of(given, (rows.key, tuple(notes)), count)
            tensors = function(*tensors)
        except tf.errors.OpError as error:
            raise function_error(f"a stage failed: {type(error).__name__}: {brief(error)}", error) from error
        return found[-1].unpacked(tensors)

    def _graph_of(self, given: Passed, key: Any, microbatches: int) -> tuple[Any, list[Returned]]:
        """The stages as a function of tensors, with rows that are enough for so many microbatches, and what it returns."""
        key = key, microbatches, is_training(), *(layer.trainable for stage in self._stages for layer in stage.layers)
        if key not in self._graphs:
            found: list[Returned] = []

            def composed(*tensors: Any) -> Any:
                returned, results = self._composed(given, tensors, None, microbatches)
                found.append(returned)
                return results

            signature = tf.nest.flatten((given.nest, [*given.notes.values()]))
            self._graphs[key] = tf.function(composed, autograph=False, input_signature=signature), found
        return self._graphs[key]

    def stream(self, dataset: tf.data.Dataset) -> Iterator[Any]:
        """The stages on the batches of a dataset, in order; the first stages are at work on the next one while the last ones
        are on the one before.

        Examples:
            >>> pipe = Pipeline([lambda x: x * 2, lambda x: x + 1], devices=["CPU:0", "CPU:1"])
            >>> [batch.numpy().tolist() for batch in pipe.stream(tf.data.Dataset.range(3).batch(2))]
            [[1, 3], [5]]
        """
        ahead = 2  # of which one drains while the other fills
        return iter(dataset.map(self._in_dataset, num_parallel_calls=ahead, deterministic=True).prefetch(1))

    @tf.autograph.experimental.do_not_convert
    def _in_dataset(self, *elements: Any) -> Any:
        rows = as_rows(elements[0] if len(elements) == 1 else elements)
        returned, tensors = self._composed(Passed(rows.specs, {}), rows.leaves, rows.count)
        return returned.passed.unpacked(tensors)

    def explain(self, data_or_spec: Any) -> PipelinePlan:
        """Return the plan of a call without running it: the schedule, its bubble, and the bytes sent from stage to stage.

        Args:
            data_or_spec: a batch, or a nest of `tf.TensorSpec`s in its place.

        Examples:
            >>> pipe = Pipeline([tf.sin, tf.cos], devices=["CPU:0", "CPU:1"], microbatches=4)
            >>> plan = pipe.explain(tf.TensorSpec([None, 256]))
            >>> [stage.schedule[:4] for stage in plan.stages], plan.bubble
            ([('F0', 'F1', 'B0', 'F2'), ('F0', 'B0', 'F1', 'B1')], 0.2)
        """
        spec = data_spec(data_or_spec, Options())
        given, rows = Passed(spec.specs, {}), spec.rows
        microbatches = self._microbatches if rows is None else min(self._microbatches, rows)
        plans = []
        for stage, device in enumerate(self.devices):
            traced_stage = self._stages[stage].traced(given)
            traced, given = traced_stage.traced, traced_stage.passed
            held = sum(v.shape.num_elements() * v.dtype.size for v in traced.concrete.graph.variables)
            sizes = [(spec.shape[1:].num_elements() or 0) * spec.dtype.size for spec in traced.specs]
            steps = schedule_of(self._schedule, len(self.devices), microbatches, stage)
            order = tuple("FB"[step.backward] + str(step.microbatch) for step in steps)
            plans.append(StagePlan(device, held, sum(sizes), order))
        return PipelinePlan(rows, microbatches, self._schedule, tuple(plans))

    def _composed(
        self, given: Passed, tensors: Sequence[Any], rows: int | None, microbatches: int | None = None
    ) -> tuple[Returned, list[Any]]:
        """The stages on leaves of so many rows and what is attached to them, in the graph that is being built.

        `microbatches`: their number, if the number of rows is unknown and at least as large; otherwise some may be empty.
        """
        filled = rows is not None or microbatches is not None
        parts = max(1, self._microbatches if not filled else microbatches or min(rows or 0, self._microbatches))
        passed = [given]
        for stage in self._stages:
            first = stage.traced(passed[-1])
            passed.append(first.passed)
            if first.mixes_rows and not self._local:
                parts = 1
        traces = [stage.of_microbatches(taken, parts) for stage, taken in zip(self._stages, passed)]
        with tf.device(HOST):
            sizes = sizes_in_graph(count_rows(tensors[0]), parts)
            values = [list(part) for part in zip(*(cut_rows(tensor, sizes, parts) for tensor in tensors))]
        losses: list[list[Any]] = [[] for _ in range(parts)]
        in_turn = run_in_turn([first.traced for first, *_ in traces])
        calls = Calls("gpipe" if in_turn else self._schedule, len(traces), parts)
        for k, (of_stage, device) in enumerate(zip(traces, self.devices)):
            for m, (traced, value) in enumerate(zip(of_stage, values)):
                with tf.device(device), tf.name_scope(f"stage_{k}_microbatch_{m}"):
                    results = calls.call(k, m, traced.traced, value, filled or sizes[m] > 0)
                count = len(results) - len(traced.losses)
                values[m] = results[:count]
                losses[m] += results[count:]
        returned = Returned(passed[-1], [loss for first, *_ in traces for loss in first.losses])
        with tf.device(self._output_device):
            every = [copied([*value, *own]) for value, own in zip(values, losses)]
            joined, counts = zip(*(gather(part, differentiable=True) for part in zip(*every)))
            leaves = [with_static_rows(leaf, rows) for leaf in with_row_counts_checked(joined, counts, sizes)]
            count = len(values[0])
            return returned, leaves[:count] + returned.reduced(leaves[count:])


@dataclass(frozen=True)
class Returned:
    """What a call of all stages returns: the tensors of `passed`, and then a scalar for each loss."""

    passed: Passed
    losses: Sequence[tuple[Any, bool]]
    """As in `TracedStage`."""

    def reduced(self, vectors: Sequence[Any]) -> list[Any]:
        """Return the losses of the batch, of their vectors `[rows]`."""
        sums = map(tf.reduce_sum, vectors)
        return [
            loss if is_sum else tf.math.divide_no_nan(loss, tf.cast(count_rows(vector), loss.dtype))
            for (_, is_sum), loss, vector in zip(self.losses, sums, vectors)
        ]

    def unpacked(self, tensors: Sequence[Any]) -> Any:
        """Return the nest of results, and add losses to their layers."""
        count = len(tensors) - len(self.losses)
        for (layer, _), loss in zip(self.losses, tensors[count:]):
            layer.add_loss(loss)
        return self.passed.unpacked(tensors[:count])
