"""Models over devices: stages that work on different microbatches at the same time, in one graph.

    rows ── microbatches ──> stage 0 ──> stage 1 ──> ... ── joined ──> rows
                             GPU:0       GPU:1

The results of a stage go directly to the next device. Control dependencies within each device give its calls the order of a
schedule. A device waits for other devices only to receive inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from copy import copy
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import tensorflow as tf

from devicemap._tensorflow.gradients import tape_is_recording
from devicemap._tensorflow.keras import batch_norms_of, layers_of, tf_variable
from devicemap._tensorflow.keras_calls import begin_call, in_training
from devicemap.devices import choose_devices, choose_output_device
from devicemap.errors import DataError, OptionError, warn_user
from devicemap.inspect.pipelines import PipelinePlan, PipelineReport
from devicemap.inspect.planner import specs_and_count
from devicemap.options import Options, check_choice, check_count
from devicemap.pipelines.losses import Losses, differentiate
from devicemap.pipelines.microbatches import Clock
from devicemap.pipelines.pipeline_graph import Batch, EagerGraphs, PipelineGraph, plan_of
from devicemap.pipelines.schedule import PipelineOptions, devices_of_replicas
from devicemap.pipelines.stages import Stage, pack


class Pipeline:
    """Functions of batches, one after the other, each on a device of its own: `stages[-1](... stages[0](x))`.

    Rows come back in order, and gradients are those of the whole batch.

    Args:
        stages: functions of a batch, Keras layers or models. A tuple is passed to the next stage as several arguments.
            Variables stay on their devices: use `split` or `tf.device` to create them on the device of their stage. Otherwise
            their values are sent once per call.
        devices: as for `parallel_map`. The first devices are used, one for each stage of each replica. "interleaved" uses all
            devices, and assigns stages to those of a replica in turn.
        microbatches: number of parts into which the rows of a batch are cut for each replica; fewer if there are fewer rows.
        schedule: the order of calls in `value_and_gradients`. "1f1b": stage `k` of `K` holds the activations of at most
            `K - k` microbatches. "gpipe": it holds those of all microbatches. "interleaved": as "1f1b", with several stages on
            each device, which divides the idle time by their number. In a call under a tape, all forward calls come first.
        output_device: the device on which results are gathered.
        batch_norm: "synchronized": if stages write variables in a call, as batch normalization does in training, the batch is
            one microbatch, and the stages work one after another. "local": such stages see one microbatch at a time.
        added_losses: required if layers add losses that depend on the rows, by `add_loss` or an `activity_regularizer`. "sum"
            or "mean": such losses are the sum or the mean over the rows. Those of an `activity_regularizer` are means since
            Keras 3.14, and sums before.
        loss: the loss of `value_and_gradients`, as for `compile` of Keras: a `keras.losses.Loss`, its name, a list or dict with
            a loss for each output, or a function `(y, outputs)` of all outputs that returns a loss for each row, `[rows, ...]`.
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
        check_choice("batch_norm", batch_norm, "synchronized", "local")
        check_choice("added_losses", added_losses, "sum", "mean", None)
        check_choice("schedule", schedule, "1f1b", "gpipe", "interleaved")
        check_count("microbatches", microbatches)
        check_count("replicas", replicas)
        lanes = devices_of_replicas(len(stages), choose_devices(devices), replicas, schedule, microbatches)
        self._options = PipelineOptions(
            len(stages), lanes, schedule, int(microbatches), batch_norm == "local", added_losses
        )
        self._stages = [Stage(k, stage, self._options) for k, stage in enumerate(stages)]
        self._output_device = choose_output_device(output_device)
        self.devices = tuple(device for lane in lanes for device in lane)
        self._output_names = getattr(stages[-1], "output_names", None) or ()
        self._prepare(None if loss is None else Losses.of(loss, names=self._output_names))
        norms = [layer.name for stage in stages for layer in batch_norms_of(stage) if layer.trainable]
        if norms and microbatches * replicas > 1 and not self._options.local:
            others = f" and {len(norms) - 1} more" if len(norms) > 1 else ""
            warn_user(
                f"{norms[0]}{others}: batch normalization in training needs the whole batch, so that the stages work one after "
                "another; batch_norm='local' lets it see one microbatch at a time",
            )

    def _prepare(self, losses: Any, clock: Clock | None = None) -> None:
        self._losses = losses
        self._stages = [*self._stages[:-1], self._stages[-1].with_losses(losses)]
        self._options = replace(self._options, clock=clock)
        self._graphs = EagerGraphs(self._options, self._stages)

    def _copy_with(self, losses: Losses | None, clock: Clock | None = None) -> Pipeline:
        """Return a pipeline of the same stages with other losses; `clock` times its calls."""
        other = copy(self)
        other._prepare(losses, clock)
        return other

    @property
    def loss(self) -> Any:
        """The `keras.losses.Loss` of `value_and_gradients`, a nest of them, or `None`."""
        return self._losses and self._losses.each

    @property
    def trainable_variables(self) -> list[Any]:
        """The trainable variables of the stages and the loss, each once. Those of functions are known after the first call."""
        known = {id(tf_variable(v)) for model in self._models for v in model.variables}
        captured = [
            v for stage in self._stages for v in stage.captured if v.trainable and id(tf_variable(v)) not in known
        ]
        found = [*(v for model in self._models for v in model.trainable_variables), *captured]
        return list({id(tf_variable(variable)): variable for variable in found}.values())

    @property
    def _models(self) -> list[Any]:
        """The outermost layers of the stages, each once. Layers that functions call are known after the first call."""
        found = [model for stage in self._stages for model in stage.models]
        return list({id(model): model for model in found}.values())

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
        batch = Batch.of(data)
        late = self._options.schedule != "gpipe" and self._options.microbatches > 1 and tape_is_recording()
        if late:
            warn_user(
                "a Pipeline called under a tape holds the activations of all microbatches, as with schedule='gpipe': no "
                "backward pass can begin before the loss is known. Use value_and_gradients(x, y) of Pipeline(loss=...)",
            )
        (nest, layers), (leaves, losses) = self._graphs.run(self._forward, batch)
        if untrained := begin_call(self._models):
            warn_user(
                f"the Keras model that calls this pipeline does not train its variables, such as {untrained[0]}; give the "
                "model an attribute with the stages, too",
            )
        for layer, loss in zip(layers, losses):
            layer.add_loss(loss)
        return pack(nest, leaves)

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
        if self._losses is None:
            raise OptionError("value_and_gradients needs Pipeline(loss=...), such as loss='mse'")
        return self._run_differentiated(x, y, sample_weight)[:2]

    def as_model(self) -> Any:
        """Return a `keras.Model` that calls the pipeline.

        `fit` computes the loss of `compile`, or that of the pipeline, as `value_and_gradients` does. Optimizer slots and
        updates stay on the device of their variable. XLA is off. The model knows the layers that functions call after the
        first step, or from the beginning if the pipeline was called or explained before.

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

        return PipelineModel(self)

    def _run_differentiated(
        self, x: Any, y: Any, weight: Any, scale: Any = 1.0, outputs: bool = False
    ) -> tuple[Any, list[Any], Any]:
        """Return the loss, its gradients times `scale`, and the outputs if they are wanted."""
        batch = Batch.of(x, [y] if weight is None else [y, weight], scale)
        run = partial(self._graphs.run, partial(self._forward_backward, outputs), batch, outputs)
        nest, (value, gradients, leaves) = in_training(run)
        return value, gradients, pack(nest, leaves) if outputs else None

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
        timed = self._copy_with(self._losses, clock := Clock())
        without_loss = y is None and sample_weight is None
        for _ in range(2):
            timed(x) if without_loss else timed.value_and_gradients(x, y, sample_weight)
        return PipelineReport(self.devices, clock.calls)

    def _forward(self, batch: Batch) -> tuple[Any, Any]:
        """Return the specs of the results and the layers that add losses, and the results and losses."""
        graph = PipelineGraph(self._stages, batch, self._options)
        leaves = graph.join_outputs(self._output_device)
        return (graph.nest, [layer for layer, _ in graph.losses]), (leaves, [loss for _, loss in graph.losses])

    def _forward_backward(self, outputs: bool, batch: Batch) -> tuple[Any, Any]:
        """Return the specs of the outputs; the value of the losses, its gradients, and the outputs if they are wanted."""
        compose = partial(PipelineGraph, self._stages, batch, self._options)
        graph, value, gradients = differentiate(self._losses, compose, lambda: self.trainable_variables, batch.scale)
        leaves = graph.join_outputs(self._output_device) if outputs else []
        return graph.nest, (value, gradients, leaves)

    def stream(self, dataset: tf.data.Dataset) -> Iterator[Any]:
        """Run the stages on the batches of a dataset, in order. Stages work on two batches at the same time.

        Raises:
            DataError: for anything but a dataset.

        Examples:
            >>> pipe = Pipeline([lambda x: x * 2, lambda x: x + 1], devices=["CPU:0", "CPU:1"])
            >>> [batch.numpy().tolist() for batch in pipe.stream(tf.data.Dataset.range(3).batch(2))]
            [[1, 3], [5]]
        """
        if not isinstance(dataset, tf.data.Dataset):
            raise DataError(f"data is a {type(dataset).__name__}; expected a tf.data.Dataset of batches")
        # One batch leaves the pipeline while the next one enters.
        return iter(dataset.map(self._in_dataset, num_parallel_calls=2, deterministic=True).prefetch(1))

    @tf.autograph.experimental.do_not_convert
    def _in_dataset(self, *elements: Any) -> Any:
        (nest, _), (leaves, _) = self._forward(Batch.of(elements[0] if len(elements) == 1 else elements))
        return pack(nest, leaves)

    def explain(self, data_or_spec: Any) -> PipelinePlan:
        """Return the plan of a call, or of a training step if there is a loss, without running it.

        It has the schedule, its bubble, and the bytes sent between stages.

        Args:
            data_or_spec: a batch, or a nest of `tf.TensorSpec`s in its place.

        Examples:
            >>> pipe = Pipeline([tf.sin, tf.cos], devices=["CPU:0", "CPU:1"], microbatches=4)
            >>> plan = pipe.explain(tf.TensorSpec([None, 256]))
            >>> [stage.schedule[:4] for stage in plan.stages], plan.bubble
            ([('F0', 'F1', 'B0', 'F2'), ('F0', 'B0', 'F1', 'B1')], 0.2)
        """
        data, rows = specs_and_count(data_or_spec, Options())
        return plan_of(self._stages, data.specs, rows, self._options, self._losses is not None)
