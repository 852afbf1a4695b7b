"""Gradients: where those of a function are computed, and which a call may be asked for."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import Any

import tensorflow as tf

from devicemap._tensorflow import Private, nothing, usable, with_fallback
from devicemap._tensorflow.functions import functions_within, own_functions

_record = Private("tensorflow.python.eager.record", "could_possibly_record")
_forwardprop = Private("tensorflow.python.eager.forwardprop_util", "pack_tangents")
_operations = Private("tensorflow", "Operation._update_input", "Operation._clear_attr")
_control = Private("tensorflow", "Operation._add_control_input")
_registry = Private("tensorflow.python.framework.ops", "get_gradient_function")
_gradients = Private("tensorflow.python.ops.gradients_util", "PossibleTapeGradientTypes")
_handle_data = Private("tensorflow.python.ops.handle_data_util", "copy_handle_data", "get_resource_handle_data")
_resources = Private("tensorflow.python.ops.resource_variable_ops", "variable_accessed")


_mending = threading.Lock()
"""Maps share the traces of functions that their own functions call (`tracing_again`), in whichever thread they are traced."""


def _any_order(_: Any, __: Iterable[Any]) -> int:
    return 2


@with_fallback(nothing, _registry, _operations)
def differentiate_in_place(ops: Iterable[Any]) -> None:
    """Let the gradients of these ops of the graph being traced be computed on the devices that the ops are placed on.

    TensorFlow adds gradients to a function without a device, which means the first one; the option that would change it
    (`colocate_gradients_with_ops` of `tf.gradients`) does not reach the gradients of functions, and each op's own gradient
    function, the one place left, is not public.
    """
    for op in dict.fromkeys(ops):
        try:
            gradient = _registry.get_gradient_function(op)
        except LookupError:  # it has none
            continue
        if op.device and gradient is not None:
            op._gradient_function = _on_device(gradient, op.device)


@with_fallback(lambda value, count: [value] * count, _registry, _operations, _handle_data)
def fanned_out(value: Any, count: int) -> list[Any]:
    """A value, or the handle of a variable, for so many users, whose gradients are added on the device of the moment, straight
    from where they are computed.

    TensorFlow adds the gradients of a tensor with several users wherever the gradient function as a whole is.
    """
    if tf.executing_eagerly():
        return [value] * count
    copies = tf.raw_ops.IdentityN(input=[value] * count)
    op = copies[0].op
    if value.dtype == tf.resource:
        for copy in copies:
            _handle_data.copy_handle_data(op.inputs[0], copy)

    def add(op: Any, *upstream: Any) -> list[Any]:
        known = [gradient for gradient in upstream if gradient is not None]
        with tf.device(op.device):
            return [added(known) if known else None, *[None] * (count - 1)]

    op._gradient_function = add
    return list(copies)


def _linked_for_good(results: Sequence[Any], values: Sequence[Any], gradient: Callable[..., Any]) -> list[Any]:
    @tf.custom_gradient
    def link(*_: Any) -> Any:
        return list(results), lambda *upstream: gradient(*upstream)

    return list(link(*values))


@with_fallback(_linked_for_good, _registry, _operations)
def linked(results: Sequence[Any], values: Sequence[Any], gradient: Callable[..., Any]) -> list[Any]:
    """The results, in the function being traced; of gradients to them, `gradient` makes those to `values`, whatever led there.
    A tape follows them out of the function, not in it.

    `tf.custom_gradient` does the same, in TensorFlow's registry of gradients, which keeps each graph that uses it for good.
    """
    copies = tf.raw_ops.IdentityN(input=[*results, *values])
    copies[0].op._gradient_function = lambda _, *upstream: [
        *[None] * len(results),
        *gradient(*upstream[: len(results)]),
    ]
    return list(copies[: len(results)])


def added(gradients: Sequence[Any]) -> Any:
    """The sum of gradients; of slices, as TensorFlow has it, all of them: optimizers treat those in ways of their own."""
    if all(isinstance(gradient, tf.IndexedSlices) for gradient in gradients):
        values, indices = (tf.concat([getattr(g, part) for g in gradients], 0) for part in ("values", "indices"))
        return tf.IndexedSlices(values, indices, gradients[0].dense_shape)
    return tf.add_n([tf.convert_to_tensor(gradient) for gradient in gradients])


@with_fallback(nothing, _control)
def wait_for(op: Any, before: Any) -> None:
    """Let an op of the graph being traced wait for another one, unless that needs what it gives."""
    needed: set[Any] = set()
    left = [before]
    while left:
        each = left.pop()
        if each not in needed:
            needed.add(each)
            left += [*(tensor.op for tensor in each.inputs), *each.control_inputs]
    if op not in needed:
        op._add_control_input(before)


def _on_device(gradient: Callable[..., Any], device: str) -> Callable[..., Any]:
    def placed(op: Any, *upstream: Any) -> Any:
        graph = tf.compat.v1.get_default_graph()
        known = len(graph.get_operations())
        with tf.device(device):
            gradients = gradient(op, *upstream)
            for added in graph.get_operations()[known:]:
                _bring_inputs(added)
        return gradients

    return placed


def _bring_inputs(op: Any) -> None:
    """Let an op take what comes into its graph by way of the device of the moment; variables stay where they are.

    TensorFlow hands lists (of a loop's intermediate results) to a function on the first device, whatever made them; a loop
    then fetches its list from there, and hands it back, in each step.
    """
    for i, tensor in enumerate(op.inputs):
        if tensor.dtype != tf.resource and tensor.op.type == "Placeholder":
            op._update_input(i, tf.identity(tensor))


@with_fallback(nothing, _registry, _operations)
def differentiate_freely(graph: Any) -> None:
    """Let the gradients of gathers in a function's graph, and in those that it calls, not ask for a device.

    They ask for that of what was gathered from, by name. In the gradients of a function that several devices call it is one
    name, and TensorFlow brings all of it to one device.
    """
    with _mending:
        for each in (graph, *own_functions(graph)[0]):
            for op in each.get_operations():
                if op.type in ("Gather", "GatherV2"):
                    gradient = _registry.get_gradient_function(op)
                    if not hasattr(
                        gradient, "without_colocation"
                    ):  # a function that fn calls is met again in each trace
                        op._gradient_function = _without_colocation(gradient)


@with_fallback(nothing, _registry, _operations)
def differentiate_values_alone(graph: Any) -> None:
    """Let gradients of eigenvalues and singular values pass by the vectors that were not asked for.

    TensorFlow gives their static shape as [0], and they are scalars: a loop that keeps them for the gradient fails. What a
    function's graph says is changed for its gradients only, as the function itself was made before.
    """
    with _mending:
        for each in (graph, *own_functions(graph)[0]):
            for op in [op for op in each.get_operations() if op.type in _WITHOUT_VECTORS]:
                # a function that fn calls is met again in each trace
                if not op.get_attr(_WITHOUT_VECTORS[op.type]) and not hasattr(op, "values_alone"):
                    _link_values(op)


def _link_values(op: Any) -> None:
    op.values_alone = True
    consumers = op.outputs[0].consumers()
    with op.graph.as_default():
        values, _ = tf.identity_n([op.outputs[0], op.inputs[0]])
    values.op._gradient_function = _of_values
    for consumer in consumers:
        for i in [i for i, used in enumerate(consumer.inputs) if used is op.outputs[0]]:
            consumer._update_input(i, values)


_WITHOUT_VECTORS = {"Svd": "compute_uv", "Eig": "compute_v", "SelfAdjointEigV2": "compute_v"}


def _of_values(linked: Any, of_values: Any, of_matrix: Any) -> list[Any]:
    op = linked.inputs[0].op
    unused = len(op.outputs) - 1  # some wait for these gradients, none reads them
    return [None, _registry.get_gradient_function(op)(op, of_values, *[of_values] * unused)]


def _without_colocation(gradient: Callable[..., Any]) -> Callable[..., Any]:
    def free(op: Any, *upstream: Any) -> Any:
        graph = tf.compat.v1.get_default_graph()
        known = len(graph.get_operations())
        gradients = gradient(op, *upstream)
        for added in graph.get_operations()[known:]:
            if "_class" in added.node_def.attr:
                added._clear_attr("_class")
        return gradients

    free.without_colocation = True  # type: ignore[attr-defined]
    return free


@with_fallback(nothing, _handle_data)
def complete_handle_data(graph: Any) -> None:
    """Tell a function's graph, and those that it calls, what variables the handles are of that their ops hand on.

    A branch of `tf.cond` does not tell (vectorised loops have one in each step), and second gradients of what follows
    need the shape: without it they fail.
    """
    graphs = {name: inner for name, (inner, _) in functions_within(graph).items()}
    own, _ = own_functions(graph)
    with _mending:
        while sum(_complete(each, graphs) for each in (graph, *own)):
            pass


def _complete(graph: Any, graphs: dict[str, Any]) -> bool:
    """Tell what is known of handles one op further on; whether anything was told."""
    more = False
    for op in graph.get_operations():
        for i, handle in enumerate(op.outputs):
            if handle.dtype == tf.resource and not _has_handle_data(handle):
                source = _handed_on(op, i, graphs)
                if source is not None and _has_handle_data(source):
                    _handle_data.copy_handle_data(source, handle)
                    more = True
    return more


def _handed_on(op: Any, i: int, graphs: dict[str, Any]) -> Any:
    """The tensor that is output `i` of an op that only hands it on."""
    if op.type in ("Identity", "IdentityN", "While", "StatelessWhile"):
        return op.inputs[i]
    attribute = {"If": "then_branch", "StatelessIf": "then_branch"}.get(op.type, "f")
    calls = op.type in ("If", "StatelessIf", "PartitionedCall", "StatefulPartitionedCall")
    called = graphs.get(op.get_attr(attribute).name) if calls else None
    return None if called is None else called.outputs[i]


def _has_handle_data(handle: Any) -> bool:
    of_what = _handle_data.get_resource_handle_data(handle).shape_and_type
    return len(of_what) > 0 and not any(each.shape.unknown_rank for each in of_what)


def holds_gradients() -> bool:
    """Whether `redirect_gradient` can be used. It has no public way: variables stay where they are."""
    return usable(_registry, _operations) and _takes_gradient_functions()


@cache
def _takes_gradient_functions() -> bool:
    """Whether TensorFlow uses the gradient function that is set on an op; else gradients of variables would be lost."""
    with tf.Graph().as_default():
        x = tf.constant(1.0)
        y = tf.sin(x)
        y.op._gradient_function = lambda op, upstream: 7.0 * upstream
        tf.gradients(y, x)
        return all(op.type != "Cos" for op in x.graph.get_operations())


def redirect_gradient(handle: Any, value: Any) -> Any:
    """Return the handle of a variable, in the function being traced, whose gradients go to `value`, which was assigned to it.

    An assignment has no gradient. It is a call, and not an `IdentityN`, because the gradient of a while loop around it follows
    resources through calls only (`resource_input_index`; test_a_tape_around_a_loop_or_branch_that_calls_a_map).
    """
    first = tf.function(lambda handle, value: handle, autograph=False)
    redirected = first.get_concrete_function(handle, value)(handle, value)
    redirected.op._gradient_function = lambda op, upstream: [None, upstream]
    return redirected


@with_fallback(lambda: False, _record)
def tape_is_recording() -> bool:
    """Whether a `tf.GradientTape` or `tf.autodiff.ForwardAccumulator` of this thread may record the next op.

    Public API tells only whether a given tape watches a given tensor, and needs that tape: it is taken to be none, where
    gradients do not go through anyway.
    """
    return bool(_record.could_possibly_record())


@with_fallback(_any_order, _record, _gradients, _resources)
def order_of_gradients(concrete: Any, tensors: Iterable[Any]) -> int:
    """Which gradients a call of a `ConcreteFunction` in eager code has to keep: 0 none, 1 first ones, 2 any.

    `tensors` are its inputs, with those that it captures.

    TensorFlow runs another function for each; public API does not tell which, so it may be any.
    """
    if not tape_is_recording():
        return 0
    for variable in concrete.graph.variables:  # as the call would: tapes may start to watch it here
        _resources.variable_accessed(variable)
    return int(_gradients.PossibleTapeGradientTypes(list(tensors)))


@with_fallback(lambda tensors: False, _forwardprop)
def have_tangents(tensors: Iterable[Any]) -> bool:
    """Whether a `tf.autodiff.ForwardAccumulator` of this thread follows one of these tensors.

    Public API asks one accumulator, and needs it; TensorFlow then says itself what has no forward mode.
    """
    return bool(_forwardprop.pack_tangents(list(tensors)).tangents)
