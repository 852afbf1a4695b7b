"""What is used of Keras that it does not document: here only, and gone without it where something else does the same."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf


@contextlib.contextmanager
def replacing(owner: Any, **methods: Any) -> Iterator[None]:
    """While it lasts, an object has these methods of its own; `None`: that of its class."""
    own = vars(owner)
    before = {name: own.pop(name) for name in methods if name in own}
    own.update({name: method for name, method in methods.items() if method is not None})
    try:
        yield
    finally:
        for name in methods:
            own.pop(name, None)
        own.update(before)


def layers_of(model: Any) -> list[Any]:
    """The layers in a model or layer at any depth, itself included; none of what is not Keras's."""
    return list(model._flatten_layers()) if hasattr(model, "_flatten_layers") else []


def sublayers_of(layer: Any) -> list[Any]:
    """The layers that a layer consists of, without those in them."""
    return list(layer._flatten_layers(include_self=False, recursive=False))


def batch_norms_of(model: Any) -> list[Any]:
    """Those that are batch normalizations."""
    import keras

    return [layer for layer in layers_of(model) if isinstance(layer, keras.layers.BatchNormalization)]


@contextlib.contextmanager
def moments_by(layers: Sequence[Any], combined: Callable[..., Any]) -> Iterator[None]:
    """While it lasts, batch normalizations take `combined(mean, variance, count)` for mean and variance of their inputs.

    Without Keras's name for it, that is an `AttributeError`, and `batch_norm="local"` does without.
    """

    def of(layer: Any) -> Callable[[Any, Any], Any]:
        def moments(inputs: Any, mask: Any) -> Any:
            counted = tf.ones_like(inputs[..., :1]) if mask is None else tf.cast(mask, inputs.dtype)
            return combined(*type(layer)._moments(layer, inputs, mask), tf.reduce_sum(counted))

        return moments

    with contextlib.ExitStack() as replaced:
        for layer in layers:
            replaced.enter_context(replacing(layer, _moments=of(layer)))
        yield


def mask_of(output: Any) -> Any | None:
    """The mask of an output, which Keras's losses look for on the tensor."""
    return getattr(output, "_keras_mask", None)


def set_mask(output: Any, mask: Any) -> None:
    """Give an output of a graph its mask."""
    output._keras_mask = mask


def updates_alone(optimizer: Any, **methods: Any) -> contextlib.AbstractContextManager[None]:
    """While it lasts, an optimizer has these methods, and adds no gradients of replicas, of which Keras knows one: the op for
    that takes them all, and is on one device."""
    return replacing(optimizer, _all_reduce_sum_gradients=list, **methods)


def forget_functions(model: Any) -> None:
    """Let a model's loops trace their steps anew."""
    model.train_function = model.test_function = model.predict_function = None


def is_training() -> bool | None:
    """Whether the layer of Keras that is being called is in training, as those in it are then; `None`: nobody says, or
    nobody uses Keras."""
    state = sys.modules.get("keras.src.backend.common.global_state")
    return getattr(state.get_global_attribute("current_call_ctx"), "training", None) if state else None


def is_seed(variable: Any) -> bool:
    """Whether it is the state of a `keras.random.SeedGenerator`."""
    return variable.path.rpartition("/")[2] == "seed_generator_state"


def is_used_once(layer: Any) -> bool:
    """Whether a layer was called on symbolic inputs once, whose inputs and outputs are then all that it has."""
    return len(layer._inbound_nodes) == 1


def inputs_of(layer: Any) -> list[Any]:
    """Return the tensors that a layer's only symbolic call took; `layer.input` of a model is that of the model itself."""
    return layer._inbound_nodes[0].input_tensors


def outputs_of(layer: Any) -> list[Any]:
    """Return the tensors that a layer's only symbolic call gave."""
    return layer._inbound_nodes[0].outputs


def arguments_of(layer: Any, tensors: dict[int, Any]) -> Any:
    """Return the arguments of a layer's only symbolic call, with other tensors, by the identity of those that it took."""
    return layer._inbound_nodes[0].arguments.fill_in(tensors)
