"""The undocumented names of Keras about the calls of layers that are running: what they use, and their training mode."""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from devicemap._tensorflow.keras import replacing


class KerasUse:
    """The Keras objects that a thread uses in a context."""

    def __init__(self) -> None:
        self.layers = list[Any]()
        """The layers that are called."""
        self.variables = list[Any]()
        """The `keras.Variable`s that are read."""
        self.losses = list[tuple[Any, Any]]()
        """The losses that layers add, each with its layer."""
        self.builds = False
        """Whether layers are built."""


_observing = threading.RLock()
"""Held while methods of Keras's classes are replaced."""


@contextlib.contextmanager
def observing() -> Iterator[KerasUse]:
    """Return a context that records the Keras objects that this thread uses. Losses are not added to their layers.

    The training mode is the same before and after the context, although Keras keeps the mode of the layer called last.
    """
    import keras

    used, thread, scope = KerasUse(), threading.get_ident(), _global("stateless_scope")
    context, training = _global("current_call_ctx"), is_training()
    layer_class: Any = keras.Layer
    variable_class: Any = next(each for each in keras.Variable.__mro__ if "value" in vars(each))
    with _observing:
        call, add_loss, value = layer_class.__call__, layer_class.add_loss, variable_class.value

        @functools.wraps(call)  # AutoGraph does not convert functions of Keras's modules
        def observed_call(layer: Any, *args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() != thread:
                return call(layer, *args, **kwargs)
            used.layers.append(layer)
            used.builds |= not layer.built
            of_class = functools.partial(type(layer).add_loss, layer)
            with replacing(layer, **({"add_loss": of_class} if "add_loss" in vars(layer) else {})):  # by `parallelize`
                return call(layer, *args, **kwargs)

        @functools.wraps(add_loss)
        def observed_loss(layer: Any, loss: Any) -> None:
            if threading.get_ident() != thread or _global("stateless_scope") is not scope:  # in a call that builds
                add_loss(layer, loss)
            else:
                used.losses.extend((layer, each) for each in tf.nest.flatten(loss))

        def observed_value(variable: Any) -> Any:
            if threading.get_ident() == thread:
                used.variables.append(variable)
            return value.fget(variable)

        layer_class.__call__, layer_class.add_loss = observed_call, observed_loss
        variable_class.value = property(observed_value)
        try:
            yield used
        finally:
            layer_class.__call__, layer_class.add_loss, variable_class.value = call, add_loss, value
            if context is not None:
                context.training = training


def is_training() -> Any:
    """Return the `training` of the Keras layer that is being called, which may be a tensor; `None` without one."""
    return getattr(_global("current_call_ctx"), "training", None)


def may_train() -> bool:
    """Whether the Keras layer that is being called is in training mode, or a tensor decides that."""
    training = is_training()
    return tf.is_tensor(training) or bool(training)


def in_inference() -> contextlib.AbstractContextManager[None]:
    """Return a context in which the layers that the current layer calls are in inference mode by default."""
    context = _global("current_call_ctx")
    return contextlib.nullcontext() if context is None else replacing(context, training=False)


@functools.cache
def _step() -> Any:
    import keras

    class Step(keras.layers.Layer):
        def call(self, unused: Any, run: Callable[[], None], training: Any = None) -> None:
            run()

    return Step(autocast=False, dtype="float32")


def in_training(function: Callable[[], Any]) -> Any:
    """Return the result of a function in which layers are in training mode."""
    results, failed = list[Any](), list[Exception]()

    def run() -> None:
        try:
            results.append(function())
        except Exception as error:  # Keras would add the arguments of `Step` to the message
            failed.append(error)

    _step()(tf.zeros([]), run=run, training=True)
    if failed:
        raise failed[0]
    return results[0]


def dtype_policy() -> Any:
    """Return the dtype policy that this thread has set; `None` for the default. Keras's own function would set the default."""
    return _global("dtype_policy")


def is_stateless() -> bool:
    """Whether a `keras.StatelessScope` of this thread gives variables other values."""
    return _global("stateless_scope") is not None


def _global(name: str) -> Any:
    state = sys.modules.get("keras.src.backend.common.global_state")
    return state.get_global_attribute(name) if state else None
