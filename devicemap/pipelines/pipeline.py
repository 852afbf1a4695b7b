"""Models over devices: stages that work on different microbatches at the same time, in one graph.

    rows ── microbatches ──> stage 0 ──> stage 1 ──> ... ── joined ──> rows
                             GPU:0       GPU:1

What a stage gives goes straight to the device of the next one. On a device, calls run in the order of a schedule, which control
edges within the device hold; no device waits for another one but for its inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import tensorflow as tf

from devicemap._tensorflow.keras import batch_norms_of, is_training, layers_of
from devicemap.compile.gather import gather, with_row_counts_checked, with_static_rows
from devicemap.compile.graph_builder import copied, sizes_in_graph
from devicemap.data.rows import HOST, as_rows, count_rows, cut_rows, spec_of
from devicemap.data.structure import as_objects, freeze
from devicemap.devices import choose_output_device
from devicemap.errors import DataError, OptionError, brief, function_error, warn_user
from devicemap.hosts import settle
from devicemap.inspect.pipeline_plan import PipelinePlan, StagePlan
from devicemap.inspect.planner import data_spec
from devicemap.options import Options, check_count
from devicemap.pipelines.microbatches import Calls
from devicemap.pipelines.schedule import schedule_of
from devicemap.pipelines.stages import Stage, devices_of_stages, run_in_turn


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
    ):
        if not isinstance(stages, Sequence) or not stages or not all(callable(stage) for stage in stages):
            hint = "; devicemap.split(model, n) makes one of a Keras model" if layers_of(stages) else ""
            raise OptionError(f"stages={stages!r}; expected a list of functions of a batch, one at least{hint}")
        self._stages = [Stage(stage, f"stage {k} of {len(stages)}") for k, stage in enumerate(stages)]
        check_count("microbatches", microbatches)
        if schedule not in ("1f1b", "gpipe"):
            raise OptionError(f"schedule={schedule!r}; expected '1f1b' or 'gpipe'")
        self._output_device = choose_output_device(output_device)
        self.devices = tuple(devices_of_stages(len(self._stages), devices))
        self._microbatches, self._schedule = int(microbatches), schedule
        self._graphs: dict[Any, Any] = {}
        for stage in stages:
            if names := ", ".join(layer.name for layer in batch_norms_of(stage)):
                warn_user(
                    f"{names} in a stage: batch normalization sees a microbatch at a time in training", RuntimeWarning
                )

    @tf.autograph.experimental.do_not_convert
    def __call__(self, data: Any) -> Any:
        """The stages on a batch.

        Args:
            data: as for `parallel_map` with `batched=True`.

        Raises:
            DataError: for data that is not valid, such as a dataset, which is for `stream`.
            FunctionError: a stage failed, or gives another number of rows than it is given.
        """
        if isinstance(data, tf.data.Dataset):
            raise DataError("data is a tf.data.Dataset, and a call takes one batch; use stream(dataset)")
        rows = as_rows(data)
        if not tf.executing_eagerly():
            return self._composed(rows.structure, rows.count)
        count = rows.count or 0
        try:
            settle(self.devices)
            return self._graph_of(rows.key, rows.specs, min(count, self._microbatches))(*rows.leaves)
        except tf.errors.OpError as error:
            raise function_error(f"a stage failed: {type(error).__name__}: {brief(error)}", error) from error

    def _graph_of(self, key: Any, specs: Any, microbatches: int) -> Any:
        """The stages as a function of leaves of these specs, with rows that are enough for so many microbatches."""
        shape = tf.nest.map_structure(lambda _: None, specs)
        key = key, freeze(shape), microbatches, is_training()
        if key not in self._graphs:

            def composed(*leaves: Any) -> Any:
                return self._composed(tf.nest.pack_sequence_as(shape, leaves), None, microbatches)

            self._graphs[key] = tf.function(composed, autograph=False, input_signature=tf.nest.flatten(specs))
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
        return self._composed(rows.structure, rows.count)

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
        given, rows = spec.specs, spec.rows
        microbatches = self._microbatches if rows is None else min(self._microbatches, rows)
        plans = []
        for stage, device in enumerate(self.devices):
            traced = self._stages[stage].traced(given)
            held = sum(v.shape.num_elements() * v.dtype.size for v in traced.concrete.graph.variables)
            given = traced.nest_of_specs
            sizes = [(spec.shape[1:].num_elements() or 0) * spec.dtype.size for spec in traced.specs]
            steps = schedule_of(self._schedule, len(self.devices), microbatches, stage)
            order = tuple("FB"[step.backward] + str(step.microbatch) for step in steps)
            plans.append(StagePlan(device, held, sum(sizes), order))
        return PipelinePlan(rows, microbatches, self._schedule, tuple(plans))

    def _composed(self, nest: Any, rows: int | None, microbatches: int | None = None) -> Any:
        """The stages on a nest of so many rows, in the graph that is being built.

        `microbatches`: their number, if the number of rows is unknown and at least as large; otherwise some may be empty.
        """
        leaves = tf.nest.flatten(nest)
        filled = rows is not None or microbatches is not None
        parts = max(1, self._microbatches if not filled else microbatches or min(rows or 0, self._microbatches))
        specs, traces = tf.nest.map_structure(spec_of, nest), []
        for stage in self._stages:
            traces.append(stage.of_microbatches(specs, parts))
            specs = traces[-1][0].nest_of_specs
        with tf.device(HOST):
            sizes = sizes_in_graph(count_rows(leaves[0]), parts)
            cut = zip(*(cut_rows(leaf, sizes, parts) for leaf in leaves))
            values = [tf.nest.pack_sequence_as(nest, part) for part in cut]
        calls = Calls("gpipe" if run_in_turn([first for first, *_ in traces]) else self._schedule, len(traces), parts)
        for k, (of_stage, device) in enumerate(zip(traces, self.devices)):
            for m, (traced, value) in enumerate(zip(of_stage, values)):
                with tf.device(device), tf.name_scope(f"stage_{k}_microbatch_{m}"):
                    values[m] = calls.call(k, m, traced, value, filled or sizes[m] > 0)
        with tf.device(self._output_device):
            results = [copied(tf.nest.flatten(value)) for value in values]
            joined, returned = zip(*(gather(part, differentiable=True) for part in zip(*results)))
            leaves = [with_static_rows(leaf, rows) for leaf in with_row_counts_checked(joined, returned, sizes)]
        return as_objects(tf.nest.pack_sequence_as(traces[-1][0].structure, leaves))
