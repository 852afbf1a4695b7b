"""The undocumented names of Keras about calls of layers: those that are running, and those in a functional model."""

from __future__ import annotations

import contextlib
import copy
import functools
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from devicemap._tensorflow import Private
from devicemap._tensorflow.functions import retracing
from devicemap._tensorflow.keras import layers_of, replacing

_variables = Private("keras.src.backend.common.variables", "AutocastScope")


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
def recording_keras_use() -> Iterator[KerasUse]:
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


class RunningCalls:
    """The calls of Keras layers in which this thread is. Within them, a layer may run several times, in any thread.

    Each run begins with the same training mode. Keras itself keeps that of the layer called last, for the layers after it.
    """

    def __init__(self) -> None:
        self._state = sys.modules["keras.src.backend.common.global_state"].GLOBAL_STATE_TRACKER
        self._of_caller = vars(self._state)
        self._call = _global("current_call_ctx")
        self._begin = self._end = copy.copy(self._call)

    @contextlib.contextmanager
    def continued(self) -> Iterator[None]:
        """Return a context for a run, in which Keras has the state of the thread that made this object.

        The `tf.function`s of the layer are traced again, because a trace keeps values and seeds of the run that made it.
        """
        own = vars(self._state)
        changing = ["current_call_ctx", *(name for name, value in self._of_caller.items() if isinstance(value, list))]
        before = {name: own.get(name) for name in changing}
        own |= self._of_caller | {name: copy.copy(self._of_caller.get(name)) for name in changing}
        own["current_call_ctx"] = call = copy.copy(self._begin)
        try:
            with retracing(object()):
                yield
        finally:
            own |= before
            self._end = call

    def end(self) -> None:
        """Let later layers inherit what they would inherit after a single run."""
        if self._call is not None:
            vars(self._call).update(vars(self._end))


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


def graph_of(model: Any) -> Any:
    """Return the functional model in a built Sequential, or a functional model itself; `None` for other models."""
    graph = getattr(model, "_functional", model)
    known = hasattr(graph, "_nodes_by_depth") and type(model).call.__module__.startswith("keras.src.models.")
    return graph if known else None


def nodes_of(graph: Any) -> list[Any]:
    """Return the nodes of a functional model, which are calls of layers and other ops, in the order in which Keras runs them.

    A node has `operation`, `arguments` with the method `fill_in(tensors by id)`, and the list `outputs`. Calls of one depth are
    in the order of the model's layers.
    """
    by_depth, positions = graph._nodes_by_depth, {id(each): i for i, each in enumerate(graph.operations)}
    depths = (
        sorted(by_depth[depth], key=lambda node: positions[id(node.operation)])
        for depth in sorted(by_depth, reverse=True)
    )
    return [node for nodes in depths for node in nodes if not node.is_input]


def begin_call(layers: Sequence[Any]) -> list[str]:
    """Prepare a call of layers as Keras does.

    Outside of a call of another layer, it removes losses of the previous call. Within a training step in a graph, it builds the
    model's optimizer outside of the graph, where Keras creates slots on the devices of their variables.

    Returns:
        The paths of trainable variables of the layers that the compiled model whose call contains this call does not have.
    """
    call = _global("current_call_ctx")
    if call is None:
        for layer in layers:
            layer._clear_losses()
    elif not is_stateless() and not tf.executing_eagerly():
        model = call.entry_layer
        if may_train():
            build_optimizer(model)
        if getattr(model, "optimizer", None) is not None:
            trained = {id(variable) for variable in model.trainable_variables}
            return [v.path for layer in layers for v in layer.trainable_variables if id(v) not in trained]
    return []


def build_optimizer(model: Any) -> None:
    """Build the optimizer of a model whose layers are built, outside of the graph that is being traced."""
    optimizer = getattr(model, "optimizer", None)
    if optimizer is not None and not optimizer.built and all(layer.built for layer in layers_of(model)):
        # Otherwise, slots would have the dtype of the layer that is being called.
        with tf.init_scope(), _variables.AutocastScope(None):
            optimizer.build(model.trainable_variables)


def _global(name: str) -> Any:
    state = sys.modules.get("keras.src.backend.common.global_state")
    return state.get_global_attribute(name) if state else None
