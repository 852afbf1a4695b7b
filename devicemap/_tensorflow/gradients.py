"""The gradients of a function: their devices, and the orders that a call must support."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import Any

import tensorflow as tf

from devicemap._tensorflow import Private, nothing, usable, with_fallback
from devicemap._tensorflow.functions import traced_graphs

_record = Private("tensorflow.python.eager.record", "could_possibly_record")
_forwardprop = Private("tensorflow.python.eager.forwardprop_util", "pack_tangents")
_operations = Private("tensorflow", "Operation._clear_attr", "Operation._set_device", "Operation._update_input")
_registry = Private("tensorflow.python.framework.ops", "get_gradient_function")
_gradients = Private("tensorflow.python.ops.gradients_util", "PossibleTapeGradientTypes")
_resources = Private("tensorflow.python.ops.resource_variable_ops", "variable_accessed")


_mending = threading.Lock()
"""Held while graphs change, because maps in several threads share traces of functions that their functions call."""


@with_fallback(nothing, _registry, _operations)
def differentiate_in_place(ops: Iterable[Any]) -> None:
    """Compute the gradients of these ops of the graph being traced on the devices of the ops.

    TensorFlow adds the gradient of a function call without a device, so the placer selects the first device
    (test_backward_work_runs_where_the_forward_work_ran). The option `colocate_gradients_with_ops` does not apply to calls.
    """
    for op in dict.fromkeys(ops):
        try:
            gradient = _registry.get_gradient_function(op)
        except LookupError:  # the op has no gradient
            continue
        if op.device and gradient is not None:
            op._gradient_function = _on_device(gradient, op.device)


def _changing(gradient: Callable[..., Any], change: Callable[[Any], None]) -> Callable[..., Any]:
    """Return a gradient function that changes each op that `gradient` adds to the graph."""

    def changed(op: Any, *upstream: Any) -> Any:
        graph = tf.compat.v1.get_default_graph()
        known = len(graph.get_operations())
        gradients = gradient(op, *upstream)
        for added in graph.get_operations()[known:]:
            change(added)
        return gradients

    return changed


def _on_device(gradient: Callable[..., Any], device: str) -> Callable[..., Any]:
    def placed(op: Any, *upstream: Any) -> Any:
        with tf.device(device):
            # Only gradients of functions and of tf.custom_gradient call functions. To find their ops takes time.
            if op.type != "IdentityN" and not _takes_functions(op):
                return without_zeros(tf.nest.flatten(gradient(op, *upstream)))
            known = len(op.graph.get_operations())
            gradients = _changing(gradient, _bring_inputs)(op, *upstream)
        # TensorFlow adds zeros for outputs without a gradient, and lists that the loop of the forward pass fills
        # (test_steps_of_recurrent_layers_send_nothing).
        zeros = [each.op for each in upstream if isinstance(each, tf.Tensor) and not hasattr(each, "numpy")]
        for added in (*zeros, *op.graph.get_operations()[known:]):
            if not added.device and added.type != "Placeholder":
                added._set_device(device)
        return without_zeros(tf.nest.flatten(gradients))

    return placed


def without_zeros(gradients: Sequence[Any]) -> list[Any]:
    """Return gradients, of which those of bool and string variables are `None`.

    Gradients of loops have zeros for such variables, which TensorFlow cannot add for several calls.
    """
    return [None if getattr(each, "dtype", None) in (tf.bool, tf.string) else each for each in gradients]


_calls: dict[str, bool] = {}
"""Whether ops of a type call functions. TensorFlow parses the definition of an op at each access."""


def _takes_functions(op: Any) -> bool:
    if op.type not in _calls:
        _calls[op.type] = any(attribute.type == "func" for attribute in op.op_def.attr)
    return _calls[op.type]


def _bring_inputs(op: Any) -> None:
    """Copy arguments of the graph, except variables, to the current device before a loop or a call of a function takes them.

    TensorFlow passes a TensorList to a function on the first device. A loop then fetches the list from there in each step
    (test_backward_work_runs_where_the_forward_work_ran).
    """
    if not _takes_functions(op):
        return
    for i, tensor in enumerate(op.inputs):
        if tensor.dtype != tf.resource and tensor.op.type == "Placeholder":
            op._update_input(i, tf.identity(tensor))


def _ops_of(graph: Any) -> list[Any]:
    """Return the ops of a function's graph and of the functions that were traced for it."""
    return [op for each in traced_graphs(graph) for op in each.get_operations()]


@with_fallback(nothing, _registry, _operations)
def unpin_gradients(graph: Any) -> None:
    """Drop the device constraints from the gradients of gathers in a function's graph and the functions that it calls.

    TensorFlow colocates these gradients with the gathered tensor, by name. In a function that several devices call, that name
    moves the gradients of all devices to one device (test_backward_work_runs_where_the_forward_work_ran).
    """
    with _mending:
        for op in _ops_of(graph):
            # A function that fn calls is part of each trace of fn, so an op may have changed already.
            if op.type in ("Gather", "GatherV2") and op._gradient_function is None:
                op._gradient_function = _changing(_registry.get_gradient_function(op), _remove_colocation)


def _remove_colocation(op: Any) -> None:
    if "_class" in op.node_def.attr:
        op._clear_attr("_class")


COMPUTES_VECTORS = {"Svd": "compute_uv", "Eig": "compute_v", "SelfAdjointEigV2": "compute_v"}
"""An attribute of each decomposition. If it is false, the results after the first one are undefined."""


@with_fallback(nothing, _registry, _operations)
def differentiate_values_alone(graph: Any) -> None:
    """Exclude the vectors that a decomposition does not compute from its gradient.

    The static shape of the vectors is [0], but at run time they are scalars. So a loop that stores them for its gradient fails
    (test_functions.py, "values alone"). The added ops affect only gradients, because the function exists.
    """
    with _mending:
        for op in _ops_of(graph):
            if op.type not in COMPUTES_VECTORS or op.get_attr(COMPUTES_VECTORS[op.type]):
                continue
            consumers = op.outputs[0].consumers()
            if any(each.type == "IdentityN" and each._gradient_function for each in consumers):
                continue  # already changed in another trace of fn
            with op.graph.as_default():
                values, _ = tf.identity_n([op.outputs[0], op.inputs[0]])
            values.op._gradient_function = _gradient_of_values
            for consumer in consumers:
                for i in [i for i, used in enumerate(consumer.inputs) if used is op.outputs[0]]:
                    consumer._update_input(i, values)


def _gradient_of_values(identity: Any, of_values: Any, of_matrix: Any) -> list[Any]:
    op = identity.inputs[0].op
    unused = len(op.outputs) - 1  # the gradient function does not read their gradients
    return [None, _registry.get_gradient_function(op)(op, of_values, *[of_values] * unused)]


def can_replace_inputs() -> bool:
    """Whether `replace_input` can be used."""
    return usable(_operations)


def replace_input(op: Any, tensor: Any) -> None:
    """Replace the only input of an op of the graph being traced by a tensor that was created later.

    The public API only creates ops whose inputs exist.
    """
    op._update_input(0, tensor)


def can_redirect_gradients() -> bool:
    """Whether `gradient_redirector` can be used. Otherwise, differentiable calls read variables on their devices."""
    return usable(_registry, _operations) and _takes_gradient_functions()


@cache
def _takes_gradient_functions() -> bool:
    """Whether TensorFlow uses the gradient function of an op. Otherwise, gradients of variables would be lost."""
    with tf.Graph().as_default():
        x = tf.constant(1.0)
        y = tf.sin(x)
        y.op._gradient_function = lambda op, upstream: 7.0 * upstream
        tf.gradients(y, x)
        return all(op.type != "Cos" for op in x.graph.get_operations())


@with_fallback(lambda: False, _record)
def tape_is_recording() -> bool:
    """Whether a `tf.GradientTape` or `tf.autodiff.ForwardAccumulator` of this thread may record the next op.

    In the fallback, chunks under a tape have gradients of `None` (test_gradients_that_do_not_go_through_are_refused). The
    public API needs the tape itself.
    """
    return bool(_record.could_possibly_record())


@with_fallback(lambda: True, _record)
def tape_may_record() -> bool:
    """Whether a tape is recording, or this is unknown."""
    return tape_is_recording()


@with_fallback(lambda *_: 2, _record, _gradients, _resources)
def order_of_gradients(concrete: Any, tensors: Iterable[Any]) -> int:
    """Return the order of gradients that a call of a `ConcreteFunction` in eager code must support: 0 none, 1 first, 2 any.

    TensorFlow runs another function for each order, so that seeded ops repeat their numbers (tests/laws/test_random.py). The
    public API does not show the order, so the fallback is 2.

    Args:
        concrete: the function.
        tensors: its inputs, including captures.
    """
    if not tape_is_recording():
        return 0
    for variable in concrete.graph.variables:  # tapes start to watch variables, as in the call
        _resources.variable_accessed(variable)
    return int(_gradients.PossibleTapeGradientTypes(list(tensors)))


@with_fallback(lambda tensors: True, _gradients)
def are_watched(tensors: Iterable[Any]) -> bool:
    """Whether a `tf.GradientTape` of this thread follows one of these tensors. The public API needs the tape itself."""
    return _gradients.PossibleTapeGradientTypes(list(tensors)) != 0


@with_fallback(lambda tensors: False, _forwardprop)
def have_tangents(tensors: Iterable[Any]) -> bool:
    """Whether a `tf.autodiff.ForwardAccumulator` of this thread follows one of these tensors.

    The public API needs the accumulator. In the fallback, TensorFlow raises errors for ops without forward mode.
    """
    return bool(_forwardprop.pack_tangents(list(tensors)).tangents)
