"""The gradients of a function: their devices, and the orders that a call must support."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Sequence
from enum import Enum
from functools import cache, partial
from typing import Any

import tensorflow as tf

from devicemap._tensorflow import Private, nothing, usable, with_fallback
from devicemap._tensorflow.functions import own_graphs

_record = Private("tensorflow.python.eager.record", "could_possibly_record", "record_operation", "stop_recording")
_forwardprop = Private("tensorflow.python.eager.forwardprop_util", "pack_tangents")
_operations = Private("tensorflow", "Operation._clear_attr", "Operation._update_input")
_registry = Private("tensorflow.python.framework.ops", "get_gradient_function")
_gradients = Private("tensorflow.python.ops.gradients_util", "PossibleTapeGradientTypes")
_handle_data = Private("tensorflow.python.ops.handle_data_util", "copy_handle_data")
_resources = Private("tensorflow.python.ops.resource_variable_ops", "variable_accessed")


class Lookups(Enum):
    """The lookups of a function in a table, by which `tf.IndexedSlices` of several calls are added."""

    NONE = "none"
    OF_ROWS = "each row has indices of its own"
    SHARED = "each call has the same indices"
    DISTINCT = "each call has each index once"
    MIXED = "several of these"


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


def fanned_out(value: Any, count: int, lookups: Lookups = Lookups.NONE) -> list[Any]:
    """Return a value, or the handle of a variable, for `count` consumers, whose gradients are added on the current device.

    `lookups`: those of the consumers.

    TensorFlow would add them on the device of the gradient function
    (test_gradients_of_several_users_are_added_on_the_current_device).
    """
    if count == 1 or tf.executing_eagerly():
        return [value] * count

    def add(*upstream: Any) -> list[Any]:
        known = [gradient for gradient in upstream if gradient is not None]
        return [added(known, lookups) if known else None, *[None] * (count - 1)]

    return gradients_through([value] * count, add)


@with_fallback(lambda values, _: list(values), _registry, _operations, _handle_data)
def gradients_through(values: Sequence[Any], change: Callable[..., Sequence[Any]]) -> list[Any]:
    """Return values whose gradients are those that `change` returns for theirs, on the current device."""
    with _unrecorded():
        copies = tf.raw_ops.IdentityN(input=values)
    op = copies[0].op
    for value, copy in zip(op.inputs, copies):
        if value.dtype == tf.resource:
            _handle_data.copy_handle_data(value, copy)

    def changed(op: Any, *upstream: Any) -> Sequence[Any]:
        with tf.device(op.device):
            return change(*upstream)

    _set_gradient(op, values, changed)
    return list(copies)


def _set_gradient(op: Any, inputs: Sequence[Any], gradient: Callable[..., Any]) -> None:
    """Set the gradient function of an op of `_unrecorded`, for tapes inside and outside the function being traced."""
    op._gradient_function = gradient
    if usable(_record):
        _record.record_operation(op.type, list(op.outputs), list(inputs), partial(gradient, op))


@with_fallback(contextlib.nullcontext, _record)
def _unrecorded() -> Any:
    return _record.stop_recording()


def _linked_for_good(results: Sequence[Any], values: Sequence[Any], gradient: Callable[..., Any]) -> list[Any]:
    link = tf.custom_gradient(lambda *_: (list(results), lambda *upstream: gradient(*upstream)))
    return list(link(*values))


@with_fallback(_linked_for_good, _registry, _operations)
def linked(results: Sequence[Any], values: Sequence[Any], gradient: Callable[..., Any]) -> list[Any]:
    """Return the results, in the function being traced, with gradients to `values`, which `gradient` computes.

    Tapes inside the function do not use `gradient`. The fallback is `tf.custom_gradient`, for which TensorFlow's gradient
    registry keeps each graph forever, with the weights of the model.
    """
    copies = tf.raw_ops.IdentityN(input=[*results, *values])
    copies[0].op._gradient_function = lambda _, *upstream: [
        *[None] * len(results),
        *gradient(*upstream[: len(results)]),
    ]
    return list(copies[: len(results)])


def added(gradients: Sequence[Any], lookups: Lookups = Lookups.NONE) -> Any:
    """Return the sum of gradients. A sum of `tf.IndexedSlices` has the slices of one call for all rows."""
    if not all(isinstance(gradient, tf.IndexedSlices) for gradient in gradients):
        return tf.add_n([tf.convert_to_tensor(gradient) for gradient in gradients])
    values, indices = (tf.concat([getattr(each, part) for each in gradients], 0) for part in ("values", "indices"))
    if lookups is Lookups.SHARED:  # calls without rows may have no slices
        count = tf.reduce_max([tf.size(each.indices) for each in gradients])
        calls = tf.size(indices) // tf.maximum(count, 1)
        values = tf.reduce_sum(tf.reshape(values, tf.concat([[calls, count], tf.shape(values)[1:]], 0)), 0)
        indices = indices[:count]
    if lookups is Lookups.DISTINCT:
        indices, places = tf.unique(indices)
        values = tf.math.unsorted_segment_sum(values, places, tf.size(indices))
    return tf.IndexedSlices(values, indices, gradients[0].dense_shape)


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
            gradients = _changing(gradient, _bring_inputs)(op, *upstream)
        # Gradients of loops have zeros for variables of these dtypes, which TensorFlow cannot add for several devices.
        known = tf.nest.flatten(gradients)
        return [None if getattr(each, "dtype", None) in (tf.bool, tf.string) else each for each in known]

    return placed


_takes_functions: dict[str, bool] = {}
"""Whether ops of a type call functions. TensorFlow parses the definition of an op at each access."""


def _bring_inputs(op: Any) -> None:
    """Copy arguments of the graph, except variables, to the current device before a loop or a call of a function takes them.

    TensorFlow passes a TensorList to a function on the first device. A loop then fetches the list from there in each step
    (test_backward_work_runs_where_the_forward_work_ran).
    """
    if op.type not in _takes_functions:
        _takes_functions[op.type] = any(attribute.type == "func" for attribute in op.op_def.attr)
    if not _takes_functions[op.type]:
        return
    for i, tensor in enumerate(op.inputs):
        if tensor.dtype != tf.resource and tensor.op.type == "Placeholder":
            op._update_input(i, tf.identity(tensor))


def _ops_of(graph: Any) -> list[Any]:
    """Return the ops of a function's graph and of the functions that were traced for it."""
    return [op for each in own_graphs(graph) for op in each.get_operations()]


@with_fallback(nothing, _registry, _operations)
def differentiate_freely(graph: Any) -> None:
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


_COMPUTES_VECTORS = {"Svd": "compute_uv", "Eig": "compute_v", "SelfAdjointEigV2": "compute_v"}
"""An attribute of each decomposition. If it is false, the results after the first one are undefined."""


@with_fallback(nothing, _registry, _operations)
def differentiate_values_alone(graph: Any) -> None:
    """Exclude the vectors that a decomposition does not compute from its gradient.

    The static shape of the vectors is [0], but at run time they are scalars. So a loop that stores them for its gradient fails
    (test_gradients_of_values_without_their_vectors). The added ops affect only gradients, because the function exists.
    """
    with _mending:
        for op in _ops_of(graph):
            if op.type not in _COMPUTES_VECTORS or op.get_attr(_COMPUTES_VECTORS[op.type]):
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


def holds_gradients() -> bool:
    """Whether `redirecting` can be used. Otherwise, differentiable calls read variables on their devices."""
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


def redirecting() -> Callable[[Any, Any], Any]:
    """Return a function `(handle, value)` that redirects gradients. It traces once for each shape of values.

    In the function being traced, it returns a handle of a variable whose gradients go to `value`, its assigned value. An
    assignment has no gradient. The handle comes from a call and not from `IdentityN`, because the gradient of a while loop
    follows resources only through calls (`resource_input_index`; test_a_tape_around_a_loop_or_branch_that_calls_a_map).
    """
    first = tf.function(lambda handle, value: handle, autograph=False)

    def redirect(handle: Any, value: Any) -> Any:
        with _unrecorded():
            redirected = first.get_concrete_function(handle, value)(handle, value)
        _set_gradient(redirected.op, [handle, value], lambda op, upstream: [None, upstream])
        return redirected

    return redirect


@with_fallback(lambda: False, _record)
def tape_is_recording() -> bool:
    """Whether a `tf.GradientTape` or `tf.autodiff.ForwardAccumulator` of this thread may record the next op.

    In the fallback, chunks under a tape have gradients of `None` (test_gradients_that_do_not_go_through_are_refused). The
    public API needs the tape itself.
    """
    return bool(_record.could_possibly_record())


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
def are_followed(tensors: Iterable[Any]) -> bool:
    """Whether a `tf.GradientTape` of this thread follows one of these tensors. The public API needs the tape itself."""
    return _gradients.PossibleTapeGradientTypes(list(tensors)) != 0


@with_fallback(lambda tensors: False, _forwardprop)
def have_tangents(tensors: Iterable[Any]) -> bool:
    """Whether a `tf.autodiff.ForwardAccumulator` of this thread follows one of these tensors.

    The public API needs the accumulator. In the fallback, TensorFlow raises errors for ops without forward mode.
    """
    return bool(_forwardprop.pack_tangents(list(tensors)).tangents)
