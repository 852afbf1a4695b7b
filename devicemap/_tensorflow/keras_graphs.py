"""The undocumented names of Keras that describe the calls in a functional model. `split` uses them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from devicemap._tensorflow import Private
from devicemap._tensorflow.keras import layers_of
from devicemap._tensorflow.keras_calls import _global, is_stateless, may_train

_variables = Private("keras.src.backend.common.variables", "AutocastScope")


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
