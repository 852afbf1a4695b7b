"""A Keras model whose training step is that of a pipeline."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from devicemap._tensorflow.keras_calls import build_optimizer
from devicemap.data.rows import spec_of
from devicemap.errors import OptionError, warn_user
from devicemap.pipelines.losses import Losses
from devicemap.pipelines.pipeline_graph import Batch
from devicemap.pipelines.stages import trace_stages


class PipelineModel(keras.Model):
    """A `keras.Model` that calls a pipeline. Its loss is computed by the last stage for each microbatch.

    The default of `compile` is the loss of the pipeline. A function as the loss takes all outputs. XLA is off, because it
    compiles for one device.
    """

    def __init__(self, pipe: Any):
        layers = pipe._models
        super().__init__(autocast=False, dtype=_scaled_policy(layers))  # for loss scaling by Keras
        self.pipe, self.stage_layers, self._default = pipe, layers, pipe._losses
        if pipe._output_names:
            self.output_names = pipe._output_names  # which Keras puts before the names of metrics
        self.built = all(stage.knows_layers for stage in pipe._stages)
        self.supports_jit = False  # also for predict without compile

    def compile(
        self, optimizer: Any = "rmsprop", loss: Any = None, loss_weights: Any = None, *arguments: Any, **options: Any
    ) -> None:
        """Configure training as in Keras, with the loss of the pipeline by default.

        Raises:
            OptionError: for losses that stages cannot compute for each row, losses of several reductions, or `jit_compile`.
        """
        if options.get("jit_compile") is True:
            raise OptionError("jit_compile=True: XLA compiles for one device; omit it")
        losses = self._default
        if loss is not None:
            losses = Losses.of(loss, loss_weights, self.pipe._output_names)
        elif loss_weights is not None:
            raise OptionError(f"loss_weights={loss_weights!r} without a loss; pass loss=, too")
        self.pipe = self.pipe._copy_with(losses)
        super().compile(optimizer, self.pipe.loss, losses and losses.factors, *arguments, **options)

    def __call__(self, inputs: Any, *arguments: Any, **options: Any) -> Any:
        self._find_layers(inputs)
        return super().__call__(inputs, *arguments, **options)

    def _find_layers(self, inputs: Any) -> None:
        """Find the layers that stages call, unless they are known. Keras decides whether to scale losses before."""
        if self.built:
            return
        inputs = _with_tuples(inputs)
        symbolic = any(isinstance(leaf, keras.KerasTensor) for leaf in tf.nest.flatten(inputs))  # in a functional model
        trace_stages(self.pipe._stages, tf.nest.map_structure(spec_of, inputs) if symbolic else Batch.of(inputs).nest)
        if _scaled_policy(self.pipe._models) not in (None, self.dtype_policy):
            raise OptionError(
                "functions of the pipeline call layers of mixed_float16, for which Keras scales losses; call pipe.explain(x) "
                "before as_model(), so that the model knows the layers"
            )
        self.stage_layers, self.built = self.pipe._models, True

    def call(self, inputs: Any, training: bool | None = None) -> Any:
        """Call the pipeline. Keras passes `training` to the layers of its stages."""
        return self.pipe(_with_tuples(inputs))

    def make_train_function(self, force: bool = False) -> Any:
        """Make the function of a step. Variables that a step creates in its trace would let it be traced again."""
        if self.built:
            build_optimizer(self)
        return super().make_train_function(force)

    def train_step(self, data: Any) -> Any:
        """Update the variables for a batch, as Keras's own step does."""
        x, y, weight = keras.utils.unpack_x_y_sample_weight(data)
        if self.pipe.loss is None or y is None:
            return super().train_step(data)
        self._find_layers(x)
        build_optimizer(self)
        scale = self.optimizer.scale_loss(tf.ones([]))
        given = _with_tuples(x), _with_tuples(y), self._weight(weight)
        value, gradients, outputs = self.pipe._run_differentiated(*given, scale, outputs=True)
        variables, known = self.pipe.trainable_variables, {id(variable) for variable in self.trainable_variables}
        if not known.issuperset(map(id, variables)):
            raise OptionError(
                "a stage that is a function, or the loss, uses a trainable tf.Variable, which a Keras model does not know; put "
                "it into a keras.layers.Layer, or use value_and_gradients in a loop of your own"
            )
        mean_loss = next(metric for metric in self.metrics if metric.name == "loss")  # what `fit` shows
        mean_loss.update_state(value, sample_weight=tf.shape(tf.nest.flatten(x)[0])[0])
        if variables:
            self.optimizer.apply_gradients(zip(gradients, variables))
        else:
            warn_user("no stage has trainable variables, so that fit changes nothing", UserWarning)
        if tf.nest.is_nested(outputs) and not self.pipe._losses.takes_all_outputs:
            super().compute_loss(x, y, outputs, weight)  # updates the metrics of the losses of single outputs
        return self.compute_metrics(x, y, outputs, sample_weight=weight)

    def compute_loss(
        self, x: Any = None, y: Any = None, y_pred: Any = None, sample_weight: Any = None, **options: Any
    ) -> Any:
        """Return the loss, as in `train_step`. Keras would compute a function of all outputs for each output."""
        if self.pipe.loss is None or y is None or not self.pipe._losses.takes_all_outputs:
            return super().compute_loss(x, y, y_pred, sample_weight, **options)
        loss = self.pipe.loss(_with_tuples(y), y_pred, self._weight(sample_weight))
        loss *= 1.0 if self.pipe._losses.factors is None else self.pipe._losses.factors
        return tf.add_n([loss, *(tf.cast(tf.reduce_sum(each), loss.dtype) for each in self.losses)])

    def _weight(self, given: Any) -> Any:
        """Return the weights of the loss. Keras repeats one tensor of weights for each of several targets."""
        if not (tf.nest.is_nested(given) and self.pipe._losses.takes_all_outputs):
            return _with_tuples(given)
        first, *others = tf.nest.flatten(given)
        message = "sample_weight differs between outputs, and the loss is a function of all outputs"
        with tf.control_dependencies([tf.debugging.assert_equal(other, first, message) for other in others]):
            return tf.identity(first)

    def get_config(self) -> Any:
        """Raise an error: stages and devices have no configuration."""
        raise OptionError(
            "a pipeline cannot be saved or cloned as a whole; use save_weights(), ModelCheckpoint(save_weights_only=True), or "
            "copy_weights_to(model) of the stages of split and save that model"
        )


def _scaled_policy(layers: list[Any]) -> Any:
    """Return the first policy of layers for which Keras scales losses, or `None`."""
    return next((layer.dtype_policy for layer in layers if layer.dtype_policy.name == "mixed_float16"), None)


def _with_tuples(nest: Any) -> Any:
    """Return a nest with tuples in place of lists, which `*_on_batch` pass on. A pipeline stacks lists."""
    if isinstance(nest, list | tuple):
        return tuple(map(_with_tuples, nest))
    return {key: _with_tuples(value) for key, value in nest.items()} if isinstance(nest, dict) else nest
