"""The undocumented names of Keras that `parallelize`, `split` and `Pipeline` use."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf

MASK, LOGITS = "_keras_mask", "_keras_logits"
"""Attributes of a tensor that losses read: its mask, and the input of its softmax or sigmoid, which losses use instead."""


@contextlib.contextmanager
def replacing(owner: Any, **attributes: Any) -> Iterator[None]:
    """Replace methods and other attributes of an object in this context."""
    own = vars(owner)
    before = {name: own[name] for name in attributes if name in own}
    own.update(attributes)
    try:
        yield
    finally:
        for name in attributes:
            own.pop(name, None)
        own.update(before)


def layers_of(model: Any) -> list[Any]:
    """Return the layers in a model or layer of Keras 3 at any depth, including itself; an empty list for other objects."""
    known = "keras" in sys.modules and isinstance(model, sys.modules["keras"].Layer)
    return list(model._flatten_layers()) if known else []


def sublayers_of(layer: Any) -> list[Any]:
    """Return the direct sublayers of a layer."""
    return list(layer._flatten_layers(include_self=False, recursive=False))


def states_of(layer: Any) -> list[Any]:
    """Return the variables in a layer that were not made to be trained. Frozen weights are not among them."""
    weights = {id(variable) for each in layers_of(layer) for variable in each._trainable_variables}
    return [variable for variable in layer.variables if id(variable) not in weights]


def batch_norms_of(model: Any) -> list[Any]:
    """Return the batch normalizations among `layers_of(model)`."""
    import keras

    return [layer for layer in layers_of(model) if isinstance(layer, keras.layers.BatchNormalization)]


def moving_averages_of(layer: Any) -> list[Any]:
    """Return the moving averages of a batch normalization of Keras, without variables that a subclass adds."""
    names = "moving_mean", "moving_variance", "moving_stddev", "renorm_mean", "renorm_stddev"
    return [variable for variable in (getattr(layer, name, None) for name in names) if variable is not None]


@contextlib.contextmanager
def replacing_moments(layers: Sequence[Any], combined: Callable[..., Any]) -> Iterator[None]:
    """Replace the mean and variance in batch normalizations by `combined(layer, mean, variance, count)` in this context.

    Mean and variance are of the rows of the call: `[channels]`. The count is proportional to the number of values. Inputs with
    a mask have a count for each channel: `[channels]`. Others have a scalar, and Keras computes their variance in another way.

    Raises:
        AttributeError: Keras has renamed `_moments`; `batch_norm="local"` does not need it.
    """

    def of(layer: Any) -> Callable[[Any, Any], Any]:
        def moments(inputs: Any, mask: Any) -> Any:
            mean, variance = type(layer)._moments(layer, inputs, mask)
            if mask is None:
                return combined(layer, mean, variance, tf.cast(tf.size(inputs, tf.int64), inputs.dtype))
            counted = tf.broadcast_to(tf.cast(tf.expand_dims(mask, -1), tf.bool), tf.shape(inputs))
            axes = [axis for axis in range(inputs.shape.rank) if axis != layer.axis % inputs.shape.rank]
            count = tf.reduce_sum(tf.cast(counted, inputs.dtype), axes)
            # Keras returns scalars for one channel.
            return combined(layer, tf.reshape(mean, [-1]), tf.reshape(variance, [-1]), count)

        return moments

    with contextlib.ExitStack() as replaced:
        for layer in layers:
            replaced.enter_context(replacing(layer, _moments=of(layer)))
        yield


def mask_of(output: Any) -> Any | None:
    """Return the mask of an output. Keras's losses read it from the tensor."""
    return getattr(output, MASK, None)


def attached_tensors(output: Any) -> dict[str, Any]:
    """Return the tensors that Keras has attached to an output, by attribute."""
    found = {name: getattr(output, name, None) for name in (MASK, LOGITS)}
    return {name: note for name, note in found.items() if note is not None}


def arguments_of_lambda(layer: Any) -> dict[str, Any]:
    """Return the arguments of a `keras.layers.Lambda` that its config holds as code or text."""
    found = {"function": layer.function, "mask": layer.mask, "dtype": layer.dtype_policy}
    return found | {"output_shape": getattr(layer, "_output_shape", None)}


def traces_with_batches(model: Any) -> bool:
    """Whether Keras traces a step with a batch of known size. Before Keras 3.16, it is traced with the specs of the dataset."""
    import keras

    release = tuple(int(part) for part in keras.__version__.split(".")[:2])
    return release >= (3, 16) and model.steps_per_execution == 1


def build_compiled(model: Any, batch: Any) -> None:
    """Build the losses and metrics of a model's `compile` for a batch, without a step.

    Keras does so for its other backends. Errors are left to the step, which raises them, too.
    """
    with replacing(model, optimizer=None), contextlib.suppress(Exception):
        model._symbolic_build(data_batch=batch)


def losses_of(model: Any) -> list[Any]:
    """Return the `keras.losses.Loss` objects of a model's `compile`, once it has seen a batch."""
    return [each.loss for each in getattr(_compiled(model, "loss"), "_flat_losses", None) or ()]


def metrics_of(model: Any) -> list[Any]:
    """Return the metrics of a model's `compile`, once it has seen a batch."""
    return getattr(_compiled(model, "metrics"), "metrics", [])


def measure(model: Any, y: Any, y_pred: Any) -> None:
    """Call the losses and metrics of a model's `compile`, as its steps do, without weights of samples."""
    loss, metrics = _compiled(model, "loss"), _compiled(model, "metrics")
    with contextlib.ExitStack() as replaced:
        for mean in getattr(loss, "metrics", []):  # of several losses
            replaced.enter_context(replacing(mean, update_state=lambda *_, **__: None))
        if loss is not None:
            loss(y, y_pred)
        if metrics is not None:
            metrics.update_state(y, y_pred)


def _compiled(model: Any, kind: str) -> Any:
    found = getattr(model, f"_compile_{kind}", None)
    return found if getattr(found, "built", False) else None


def function_of_rows(loss_or_metric: Any) -> tuple[Any, dict[str, Any]] | None:
    """Return the function that a loss or mean metric of Keras reduces, and its options; `None` for any other."""
    import keras

    wrapper, mean = keras.losses.MeanSquaredError.__base__, keras.metrics.MeanMetricWrapper
    of, own = type(loss_or_metric), vars(loss_or_metric)
    if isinstance(loss_or_metric, wrapper) and not overrides_call(loss_or_metric):
        known = of.call is wrapper.call and "call" not in own
        return (loss_or_metric.fn, loss_or_metric._fn_kwargs) if known else None
    if isinstance(loss_or_metric, mean) and of.update_state is mean.update_state and "update_state" not in own:
        return loss_or_metric._fn, loss_or_metric._fn_kwargs
    return None


def loss_of_function(function: Callable[..., Any]) -> Any:
    """Return a `keras.losses.Loss` of a function `(y, outputs)`. Keras's own refuses nests of different structures."""
    import keras

    class OfFunction(keras.losses.MeanSquaredError.__base__):
        def call(self, y_true: Any, y_pred: Any) -> Any:
            nested = keras.tree.is_nested(y_true) or keras.tree.is_nested(y_pred)
            return self.fn(y_true, y_pred) if nested else super().call(y_true, y_pred)

    return OfFunction(function)


def overrides_call(loss: Any) -> bool:
    """Whether a `keras.losses.Loss` overrides `__call__`, which weights and reduces the results of `call`."""
    import keras

    return type(loss).__call__ is not keras.losses.Loss.__call__


def optimizers_of(model: Any) -> list[Any]:
    """Return the optimizers of a model, from `compile` and other attributes, each once."""
    import keras

    found = [value for value in vars(model).values() if isinstance(value, keras.optimizers.Optimizer)]
    return list({id(each): each for each in found}.values())


def replacing_gradient_sum(optimizer: Any, collected: Callable[[Any], Any]) -> contextlib.AbstractContextManager[None]:
    """Let `collected` replace an optimizer's sum of gradients over the replicas of a strategy in this context.

    The op for that sum takes the gradients of all variables on one device, and TensorFlow's registry of custom gradients keeps
    its graph forever (test_models_in_a_loop_retain_no_more_memory_than_without_devicemap).
    """
    return replacing(optimizer, _all_reduce_sum_gradients=collected)


def overrides(model: Any, name: str) -> bool:
    """Whether a model overrides a method of `keras.Model`, or adds one of this name."""
    import keras

    return getattr(type(model), name, None) is not getattr(keras.Model, name, None)


def clear_step_functions(model: Any) -> None:
    """Let a model's `fit`, `evaluate` and `predict` retrace their steps."""
    model.train_function = model.test_function = model.predict_function = None


def tf_variable(variable: Any) -> Any:
    """Return the `tf.Variable` of a variable. In a layer with a mixed dtype policy, `value` is a tensor of another dtype."""
    return variable if isinstance(variable, tf.Variable) else variable._value


def is_seed(variable: Any) -> bool:
    """Whether a variable is the state of a `keras.random.SeedGenerator`."""
    return variable.path.rpartition("/")[2] == "seed_generator_state"
