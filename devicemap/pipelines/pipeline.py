"""Models over devices: stages that work on different microbatches at the same time, in one graph.

    rows ── microbatches ──> stage 0 ──> stage 1 ──> ... ── joined ──> rows
                             GPU:0       GPU:1

The results of a stage go directly to the device of the next stage. Control dependencies within each device make calls run in
the order of a schedule. A device waits for other devices only to receive inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import tensorflow as tf

from devicemap._tensorflow.functions import compiled_as_a_part
from devicemap._tensorflow.gradients import tape_is_recording
from devicemap._tensorflow.keras import batch_norms_of, in_training, is_training, layers_of, stored_in
from devicemap._tensorflow.keras_graphs import begin_call
from devicemap._tensorflow.placement import run_beside_inputs
from devicemap.data.rows import as_rows, spec_of
from devicemap.devices import choose_devices, choose_output_device
from devicemap.errors import DataError, OptionError, brief, function_error, warn_user
from devicemap.events import short_name
from devicemap.hosts import settle
from devicemap.inspect.pipeline_plan import PipelinePlan, StagePlan
from devicemap.inspect.pipeline_report import PipelineReport
from devicemap.inspect.planner import data_spec
from devicemap.options import Options, check_count
from devicemap.pipelines.clock import Clock
from devicemap.pipelines.composition import Batch, Composition, Setting
from devicemap.pipelines.losses import TotalLoss, WithLoss, as_loss
from devicemap.pipelines.schedule import KINDS, schedule_of
from devicemap.pipelines.stages import Passed, Stage, notes_by_leaf


class Pipeline:
    """Functions of batches, one after the other, each on a device of its own: `stages[-1](... stages[0](x))`.

    Rows come back in order, and gradients are those of the whole batch.

    Args:
        stages: functions of a batch, Keras layers or models. A tuple is passed to the next stage as several arguments.
            Variables stay on their devices: use `split` or `tf.device` to create them on the device of their stage.
        devices: as for `parallel_map`. The first devices are used, one for each stage of each replica. "interleaved" uses all
            devices, and assigns stages to those of a replica in turn.
        microbatches: number of parts into which the rows of a batch are cut for each replica; fewer if there are fewer rows.
        schedule: the order of calls in `value_and_gradients`. "1f1b": stage `k` of `K` holds the activations of at most
            `K - k` microbatches. "gpipe": it holds those of all microbatches. "interleaved": as "1f1b", with several stages on
            each device, which divides the idle time by their number. In a call under a tape, all forward calls come first.
        output_device: the device on which results are gathered.
        batch_norm: "synchronized": if layers write variables in a call, as batch normalization does in training, the batch is
            one microbatch, and the stages work one after another. "local": such layers see one microbatch at a time.
        added_losses: required if layers add losses that depend on the rows, by `add_loss` or an `activity_regularizer`. "sum"
            or "mean": such losses are the sum or the mean over the rows. Keras's regularizers are means.
        loss: the loss of `value_and_gradients`, as for `compile` of Keras: a `keras.losses.Loss`, its name, or a function
            `(y, outputs)` that returns a loss for each row, `[rows, ...]`.
        replicas: number of copies of the pipeline, each on other devices with a part of the microbatches. The first replica
            has the variables. The others get their values once per call, and gradients are added.

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
        schedule: Literal["1f1b", "gpipe", "interleaved"] = "1f1b",
        output_device: Any = "/CPU:0",
        batch_norm: Literal["synchronized", "local"] = "synchronized",
        added_losses: Literal["sum", "mean"] | None = None,
        loss: Any = None,
        replicas: int = 1,
    ):
        if not isinstance(stages, Sequence) or not stages or not all(callable(stage) for stage in stages):
            hint = "; devicemap.split(model, n) makes one of a Keras model" if layers_of(stages) else ""
            raise OptionError(f"stages={stages!r}; expected a list of at least one function of a batch{hint}")
        if batch_norm not in ("synchronized", "local"):
            raise OptionError(f"batch_norm={batch_norm!r}; expected 'synchronized' or 'local'")
        if added_losses not in (None, "sum", "mean"):
            raise OptionError(f"added_losses={added_losses!r}; expected 'sum', 'mean' or None")
        check_count("microbatches", microbatches)
        check_count("replicas", replicas)
        if schedule not in KINDS:
            raise OptionError(f"schedule={schedule!r}; expected one of {', '.join(map(repr, KINDS))}")
        names = [f"stage {k} of {len(stages)}" for k in range(len(stages))]
        self._functions, self._added_losses = list(stages), added_losses
        self._stages = [Stage(stage, name, added_losses, layers_of(stage)) for stage, name in zip(stages, names)]
        self._output_device = choose_output_device(output_device)
        lanes = _lanes(len(stages), choose_devices(devices), replicas, schedule, microbatches)
        self.devices = tuple(device for lane in lanes for device in lane)
        self._setting = Setting(lanes, schedule, int(microbatches), batch_norm == "local")
        self._loss = None if loss is None else as_loss(loss)
        self._last: tuple[Any, Stage] | None = None
        self._graphs: dict[Any, Any] = {}
        self._alive: list[Any] = []
        self._warned = False
        norms = [layer.name for stage in stages for layer in batch_norms_of(stage) if layer.trainable]
        if norms and microbatches * replicas > 1 and not self._setting.local:
            warn_user(
                f"{', '.join(norms)}: batch normalization in training needs the whole batch, so that the stages work one after "
                "another; batch_norm='local' lets it see one microbatch at a time",
                RuntimeWarning,
            )

    @property
    def loss(self) -> Any:
        """The `keras.losses.Loss` of `value_and_gradients`, or `None`."""
        return self._loss

    @property
    def trainable_variables(self) -> list[Any]:
        """The trainable variables of the stages, each once. Variables of functions are known after the first call."""
        found = [v for stage in self._stages for layer in stage.layers[:1] for v in layer.trainable_variables]
        known = {id(stored_in(v)) for stage in self._stages for layer in stage.layers[:1] for v in layer.variables}
        stages = [*self._stages, *(self._last or ())[1:]]
        captured = (v for stage in stages if not stage.layers for v in stage.variables)
        found += [v for v in captured if v.trainable and id(v) not in known]
        return list({id(variable): variable for variable in found}.values())

    @tf.autograph.experimental.do_not_convert
    def __call__(self, data: Any) -> Any:
        """Run the stages on a batch.

        Args:
            data: as for `parallel_map` with `batched=True`.

        Raises:
            DataError: for data that is not valid, such as a dataset, which is for `stream`.
            OptionError: inside a function that XLA compiles.
            FunctionError: a stage failed, or returned another number of rows than it got.
        """
        if isinstance(data, tf.data.Dataset):
            raise DataError("data is a tf.data.Dataset, and a call takes one batch; use stream(dataset)")
        batch, key = _batch_of(data)
        begin_call([layer for stage in self._stages for layer in stage.layers[:1]])
        if self._setting.schedule != "gpipe" and self._setting.microbatches > 1 and tape_is_recording():
            self._warn_of_memory()
        found, (tensors, _) = self._run(partial(self._called, None), batch, key)
        for (layer, _), loss in zip(found.losses, tensors[found.count :]):
            layer.add_loss(loss)
        return found.passed.unpacked(tensors[: found.count])

    @tf.autograph.experimental.do_not_convert
    def value_and_gradients(self, x: Any, y: Any, sample_weight: Any = None) -> tuple[Any, list[Any]]:
        """Return the loss of a batch and its gradients, in training mode of Keras.

        The last stage computes the loss of each microbatch. So its backward pass begins before the forward pass of later
        microbatches, and each stage holds the activations of few microbatches. The value is the loss of the whole batch, with
        weights, masks and reduction as in Keras, plus regularizers and losses that layers add.

        Args:
            x: the rows of the batch, as in a call.
            y: their targets, a nest of tensors `[rows, ...]`.
            sample_weight: weights, of shape `[rows]` or the shape of the losses.

        Returns:
            A scalar, and a list with a tensor, `tf.IndexedSlices` or `None` for each of `trainable_variables`, on the device of
            the variable.

        Raises:
            OptionError: the pipeline has no loss.
            DataError: for data that is not valid.
            FunctionError: a stage or the loss failed.

        Examples:
            >>> weight = tf.Variable(2.0)
            >>> pipe = Pipeline([lambda x: x * weight, lambda x: x + 1], ["CPU:0", "CPU:1"], loss="mse")
            >>> value, gradients = pipe.value_and_gradients(tf.ones([4, 1]), tf.zeros([4, 1]))
            >>> float(value), float(gradients[0])
            (9.0, 6.0)
        """
        value, gradients, *_ = self._differentiated(self._needed_loss, x, y, sample_weight)
        return value, gradients

    @property
    def _needed_loss(self) -> Any:
        if self._loss is None:
            raise OptionError("value_and_gradients needs Pipeline(loss=...), such as loss='mse'")
        return self._loss

    def as_model(self) -> Any:
        """Return a `keras.Model` that calls the pipeline.

        `fit` computes the loss of `compile`, or that of the pipeline, as `value_and_gradients` does. Optimizer slots and
        updates stay on the device of their variable. XLA is off.

        Examples:
            >>> import keras
            >>> from devicemap import split
            >>> model = keras.Sequential([keras.Input([4]), keras.layers.Dense(8, "relu"), keras.layers.Dense(1)])
            >>> stages = split(model, 2, "bytes", devices=["CPU:0", "CPU:1"])
            >>> piped = Pipeline(stages, ["CPU:0", "CPU:1"]).as_model()
            >>> piped.compile("adam", "mse")
            >>> history = piped.fit(tf.ones([8, 4]), tf.ones([8, 1]), verbose=0)
            >>> stages.copy_weights_to(model)
        """
        from devicemap.pipelines.keras_model import PipelineModel

        layers = [stage.layers[0] for stage in self._stages if stage.layers]
        return PipelineModel(self, layers, self._differentiated)

    def _differentiated(
        self,
        loss: Any,
        x: Any,
        y: Any,
        weight: Any,
        scale: Any = 1.0,
        outputs: bool = False,
        clock: Clock | None = None,
    ) -> tuple[Any, list[Any], Any, Any]:
        """Return a loss, its gradients times `scale`, the outputs if wanted, and the times of calls if there is a clock."""
        batch, key = _batch_of(x)
        if y is None:
            raise DataError("y is None; expected the targets of the rows, a nest of tensors [rows, ...]")
        targets = tuple(as_rows(each) for each in (y, weight) if each is not None)
        counts = [count for count in (batch.rows, *(rows.count for rows in targets)) if count is not None]
        if len({*counts}) > 1:
            raise DataError(f"x, y and sample_weight have {', '.join(map(str, counts))} rows; expected the same number")
        structures = tuple(rows.structure for rows in targets)
        batch = Batch(batch.passed, batch.tensors, batch.rows, targets=structures, scale=scale)
        if self._last is None or self._last[0] is not loss:
            function = WithLoss(self._functions[-1], loss)
            name = f"stage {len(self._stages) - 1} of {len(self._stages)} with the loss"
            self._last = loss, Stage(function, name, self._added_losses, self._stages[-1].layers)
        stages = [*self._stages[:-1], self._last[1]]
        layers = [layer for stage in stages for layer in stage.layers]
        call = partial(self._run, partial(self._differentiate, loss, stages, outputs, clock), batch)
        key = clock, loss, outputs, key, tuple(rows.key for rows in targets)
        found, tensors = in_training(lambda: call(key), batch.tensors[0]) if layers else call(key)
        value, gradients, rest, times = tensors
        return value, gradients, found.passed.unpacked(rest) if outputs else None, times

    def report(self, x: Any, y: Any = None, sample_weight: Any = None) -> PipelineReport:
        """Run a batch twice, and return the schedule that the pipeline executed in the second run.

        Args:
            x: as in a call.
            y: as in `value_and_gradients`, which runs if `y` is given. Otherwise, a call runs.
            sample_weight: as in `value_and_gradients`.

        Raises:
            OptionError: inside a `tf.function`, or the pipeline has no loss.

        Examples:
            >>> pipe = Pipeline([tf.sin, tf.cos], devices=["CPU:0", "CPU:1"], microbatches=2)
            >>> report = pipe.report(tf.ones([4, 3]))
            >>> [(call.stage, call.microbatch) for call in report.calls if call.device.endswith("CPU:1")]
            [(1, 0), (1, 1)]
        """
        if not tf.executing_eagerly():
            raise OptionError("report inside a tf.function; call it in eager code")
        clock = Clock()
        for _ in range(2):
            if y is None and sample_weight is None:
                batch, key = _batch_of(x)
                _, (_, times) = self._run(partial(self._called, clock), batch, (clock, key))
            else:
                *_, times = self._differentiated(self._needed_loss, x, y, sample_weight, clock=clock)
        self._graphs = {known: graph for known, graph in self._graphs.items() if known[0][0] is not clock}
        return PipelineReport(self.devices, clock.calls(times.numpy()))

    def _run(self, build: Callable[[Batch], tuple[Found, Any]], batch: Batch, key: Any) -> tuple[Found, Any]:
        """Run `build(batch)` in the graph that is being built, or in eager code in a graph that is kept by `key`."""
        if not tf.executing_eagerly():
            if compiled_as_a_part():
                raise OptionError(
                    "a Pipeline inside a function that XLA compiles, which is for one device; set jit_compile=False, also in "
                    "compile() of a Keras model that calls it"
                )
            found, tensors = build(batch)
            run_beside_inputs(self.devices)
            return found, tensors
        count = min(batch.rows or 0, self._setting.microbatches * len(self._setting.devices))
        try:
            settle(self.devices)
            function, results = self._graph_of(build, batch, key, count)
            tensors = function(batch.tensors, batch.targets, batch.scale)
        except tf.errors.OpError as error:
            raise function_error(f"a stage failed: {type(error).__name__}: {brief(error)}", error) from error
        return results[-1], tensors

    def _graph_of(self, build: Callable[[Batch], Any], batch: Batch, key: Any, count: int) -> tuple[Any, list[Found]]:
        """Return the graph for batches of at least `count` rows, and a list of the `Found` of its traces."""
        key = key, count, is_training(), *(stage.state() for stage in self._stages)
        if key not in self._graphs:
            results: list[Found] = []

            def run(tensors: Any, targets: Any, scale: Any) -> Any:
                found, made = build(Batch(batch.passed, tensors, None, count, targets, scale))
                results.append(found)
                return made

            signature = tf.nest.map_structure(spec_of, ([*batch.tensors], batch.targets))
            signature += (tf.TensorSpec([], tf.float32),)
            self._graphs[key] = tf.function(run, autograph=False, input_signature=signature), results
        return self._graphs[key]

    def _called(self, clock: Clock | None, batch: Batch) -> tuple[Found, Any]:
        """Return the results of a call followed by losses that layers add, and the times of calls if there is a clock."""
        made = Composition(self._stages, batch, self._setting, self._alive, clock)
        results = made.joined(self._output_device, range(len(made.values[0])))
        tensors = [*results, *(loss for _, loss in made.losses)]
        return Found(made.passed, len(results), made.losses), (tensors, clock.times if clock else None)

    def _differentiate(
        self, loss: Any, stages: Sequence[Stage], outputs: bool, clock: Clock | None, batch: Batch
    ) -> tuple[Found, Any]:
        """Return the value of a loss, its gradients, the outputs if they are wanted, and the times of calls."""
        run_beside_inputs(self.devices)
        with tf.GradientTape() as tape:
            made = Composition(stages, batch, self._setting, self._alive, clock)
            total = TotalLoss(loss, made, tape, batch.scale)
        gradients = total.gradients(self.trainable_variables)
        results = made.joined(self._output_device, total.outputs) if outputs else []
        return Found(total.passed, len(results), []), (total.value, gradients, results, clock.times if clock else None)

    def _warn_of_memory(self) -> None:
        """Warn once that the schedule has no effect on a call under a tape."""
        if not self._warned:
            self._warned = True
            warn_user(
                "a Pipeline called under a tape holds the activations of all microbatches, as with schedule='gpipe': no "
                "backward pass can begin before the loss is known. Use value_and_gradients(x, y) of Pipeline(loss=...)",
                RuntimeWarning,
            )

    def stream(self, dataset: tf.data.Dataset) -> Iterator[Any]:
        """Run the stages on the batches of a dataset, in order. Stages work on two batches at the same time.

        Examples:
            >>> pipe = Pipeline([lambda x: x * 2, lambda x: x + 1], devices=["CPU:0", "CPU:1"])
            >>> [batch.numpy().tolist() for batch in pipe.stream(tf.data.Dataset.range(3).batch(2))]
            [[1, 3], [5]]
        """
        ahead = 2  # one batch leaves the pipeline while the next one enters
        return iter(dataset.map(self._in_dataset, num_parallel_calls=ahead, deterministic=True).prefetch(1))

    @tf.autograph.experimental.do_not_convert
    def _in_dataset(self, *elements: Any) -> Any:
        batch, _ = _batch_of(elements[0] if len(elements) == 1 else elements, noted=False)
        found, (tensors, _) = self._called(None, batch)
        return found.passed.unpacked(tensors[: found.count])

    def explain(self, data_or_spec: Any) -> PipelinePlan:
        """Return the plan of a call without running it: the schedule, its bubble, and the bytes sent between stages.

        Args:
            data_or_spec: a batch, or a nest of `tf.TensorSpec`s in its place.

        Examples:
            >>> pipe = Pipeline([tf.sin, tf.cos], devices=["CPU:0", "CPU:1"], microbatches=4)
            >>> plan = pipe.explain(tf.TensorSpec([None, 256]))
            >>> [stage.schedule[:4] for stage in plan.stages], plan.bubble
            ([('F0', 'F1', 'B0', 'F2'), ('F0', 'B0', 'F1', 'B1')], 0.2)
        """
        spec = data_spec(data_or_spec, Options())
        given, rows, setting = Passed(spec.specs, {}), spec.rows, self._setting
        count, devices = len(self._stages), len(setting.devices[0])
        microbatches = setting.microbatches
        if rows is not None:
            microbatches = max(1, min(microbatches, -(-rows // len(setting.devices))))
        plans = []
        for k, stage in enumerate(self._stages):
            traced_stage = stage.traced(given)
            traced, given = traced_stage.traced, traced_stage.passed
            variables = sum(v.shape.num_elements() * v.dtype.size for v in traced.concrete.graph.variables)
            sizes = [(spec.shape[1:].num_elements() or 0) * spec.dtype.size for spec in traced.specs]
            steps = schedule_of(setting.schedule, count, devices, microbatches, k % devices)
            own = tuple("FB"[step.backward] + str(step.microbatch) for step in steps if step.stage == k)
            places = tuple(setting.device_of(k, r) for r in range(len(setting.devices)))
            plans.append(StagePlan(places[0], variables, sum(sizes), own, places[1:]))
        return PipelinePlan(rows, microbatches, setting.schedule, tuple(plans), self._loss is not None)


@dataclass(frozen=True)
class Found:
    """The facts that the trace of a graph shows."""

    passed: Passed
    """Specs of results."""

    count: int
    """Number of results."""

    losses: Sequence[tuple[Any, Any]]
    """The losses of `Composition`."""


def _batch_of(data: Any, noted: bool = True) -> tuple[Batch, Any]:
    """Return a batch and a key of its specs."""
    rows = as_rows(data)
    notes = notes_by_leaf(rows.leaves) if noted else {}
    passed = Passed(rows.specs, {key: spec_of(note) for key, note in notes.items()})
    return Batch(passed, [*rows.leaves, *notes.values()], rows.count), (rows.key, tuple(notes))


def _lanes(
    stages: int, known: Sequence[str], replicas: int, schedule: str, microbatches: int
) -> tuple[tuple[str, ...], ...]:
    """Return the devices of each replica.

    Raises:
        OptionError: they do not fit the stages.
    """
    names = ", ".join(map(short_name, known))
    each = min(stages, len(known) // replicas)
    there = f"{stages} stages, {replicas} replica(s) and {len(known)} device(s), {names}"
    if schedule == "interleaved" and (not each or stages % each or microbatches % each):
        raise OptionError(
            f"schedule='interleaved' with {there}: the number of stages ({stages}) and of microbatches ({microbatches}) must "
            f"be multiples of the number of devices of a replica ({each})"
        )
    if schedule != "interleaved" and each < stages:
        raise OptionError(
            f"{there}: each stage of a replica needs a device. Make fewer stages, or use schedule='interleaved'"
        )
    return tuple(tuple(known[r * each : (r + 1) * each]) for r in range(replicas))
