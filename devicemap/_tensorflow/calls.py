"""Calling a `ConcreteFunction` without the cost of its public call, and cancelling it."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import tensorflow as tf

from devicemap._tensorflow import Private, nothing, usable, with_fallback

_cancellation = Private("tensorflow.python.eager.cancellation", "CancellationManager.start_cancel")
_context = Private("tensorflow.python.eager.context", "context", "Context.function_call_options")
_execute = Private("tensorflow.python.eager.execute", "execute", "execute_with_cancellation")
_atomic = Private("tensorflow.python.eager.polymorphic_function.atomic_function", "InterpolateRuntimeError")
_concrete = Private(
    "tensorflow.python.eager.polymorphic_function.concrete_function",
    *("ConcreteFunction.inference_fn", "ConcreteFunction.function_type"),
)
_selecting = Private(
    "tensorflow.python.eager.polymorphic_function.concrete_function",
    "ConcreteFunction._select_forward_and_backward_functions",
)
_taped = Private(
    "tensorflow.python.eager.polymorphic_function.concrete_function",
    *("_ForwardBackwardCall._functions", "_TapeGradientFunctions._wrap_backward_function"),
)
_delayed = Private(
    "tensorflow.python.eager.polymorphic_function.concrete_function",
    "_DelayedRewriteGradientFunctions._rewrite_forward_and_call_backward",
)
_backprop = Private("tensorflow.python.eager.backprop_util", "IsTrainable")
_gradients = Private("tensorflow.python.ops.gradients_util", "PossibleTapeGradientTypes")
_resources = Private("tensorflow.python.ops.resource_variable_ops", "variable_accessed")

_CALLING = (_context, _execute, _atomic, _concrete)
_TAPING = (_selecting, _gradients, _resources)


def _public_call(concrete: Any, attributes: Any = None) -> Callable[..., Any]:
    leaves, _ = concrete.structured_input_signature

    def call(*tensors: Any, manager: Any = None) -> Any:
        return concrete(*tf.nest.pack_sequence_as(list(leaves), tensors, expand_composites=True))

    return call


@with_fallback(nothing, *_CALLING)
def attributes_of_calls() -> tuple[Any, ...] | None:
    """What calls of functions are made with in this thread. TensorFlow makes that for each thread, and keeps it."""
    return tuple(itertools.chain(*dict(_context.context().function_call_options.as_attrs()).items()))


@with_fallback(_public_call, *_CALLING)
def unrecorded(concrete: Any, attributes: tuple[Any, ...] | None = None) -> Callable[..., Any]:
    """What calls a `ConcreteFunction` in eager code when no tape is recording, with tensors only.

    The public call binds its arguments to a Python signature and asks the tapes first, which takes as long as running a
    small graph does.  With a cancellation `manager`, a call can be cancelled:
    TensorFlow's own way keeps the manager in a global of the process, where threads meet those of others.

    `attributes`: those of another thread, where this one is not to get some.
    """
    ctx, function, captured = _context.context(), concrete.inference_fn, list(concrete.captured_inputs)
    fixed = tf.compat.as_str(function.name), len(function.function_type.flat_outputs)
    flat_attributes = attributes_of_calls() if attributes is None else attributes
    pack = function.function_type.pack_output

    def call(*tensors: Any, manager: Any = None) -> Any:
        inputs = [*tensors, *captured]
        with _atomic.InterpolateRuntimeError(function):  # adds to an error where its op was defined
            if manager is None:
                return pack(_execute.execute(*fixed, inputs, flat_attributes, ctx))
            return pack(_execute.execute_with_cancellation(*fixed, inputs, flat_attributes, ctx, manager))

    return call


_differentiating = threading.RLock()
"""TensorFlow adds to a graph what its gradient needs, and calls in several threads share the graph."""


@with_fallback(nothing, *_TAPING)
def prepare_gradient(concrete: Any, tensors: Sequence[Any], host: str) -> None:
    """Build what a call needs that tapes of this thread record, so that its backward pass begins and ends on `host`.

    TensorFlow keeps it with the `ConcreteFunction`, and its public call uses it.
    """
    inputs = [*tensors, *concrete.captured_inputs]
    for variable in concrete.graph.variables:  # tapes may start to watch a variable here, as in the call
        _resources.variable_accessed(variable)
    kind = _gradients.PossibleTapeGradientTypes(inputs)
    with _differentiating:
        call = concrete._select_forward_and_backward_functions(inputs, kind, True)
        call.forward()
    if usable(_taped, _backprop):
        _begin_backward_on(host, call._functions)


def _begin_backward_on(host: str, functions: Any) -> None:
    """Let what TensorFlow makes for the tapes of one call, and calls for its gradient, lie on `host`.

    Else the first device gets the gradients of all rows; and of each list that a loop leaves for its gradient a list of
    zeros, for which the whole list goes there, though only second gradients can read it.
    """
    if hasattr(functions, "wrap_anywhere") or not hasattr(
        functions, "_wrap_backward_function"
    ):  # no tape follows the call
        return
    functions.wrap_anywhere = functions._wrap_backward_function

    def wrap(forward_graph: Any, backward: Any, outputs: list[Any]) -> Any:
        made = {id(inside): output for inside, output in zip(forward_graph.outputs, outputs)}
        placed = SimpleNamespace(
            inputs=backward.inputs,
            outputs=backward.outputs,
            structured_outputs=backward.structured_outputs,
            captured_inputs=[made.get(id(inside), inside) for inside in backward.captured_inputs],
            _call_flat=_on(host, backward._call_flat),
        )
        taken = len(backward.inputs) - len(backward.captured_inputs)
        trainable = [i for i, output in enumerate(outputs) if _backprop.IsTrainable(output)]
        return functions.wrap_anywhere(forward_graph, placed, outputs[: [-1, *trainable][taken] + 1])

    functions._wrap_backward_function = wrap


def begin_backward_on(host: str, concrete: Any) -> None:
    """The same for calls of a `ConcreteFunction` in a graph that is being built; not for second gradients by tapes.

    Who sets an attribute `on_gradient` of such a call's op makes the gradient, where it is in the same graph: it is called with
    what makes the gradients of the call's inputs of those of its outputs, and with these.
    """
    if usable(_delayed):
        functions = getattr(concrete, "_delayed_rewrite_functions", None)
        if functions is None or "_rewrite_forward_and_call_backward" in vars(functions):  # it does already
            return
        on_host = _on(host, functions._rewrite_forward_and_call_backward)

        def one_at_a_time(*arguments: Any) -> Any:
            with _differentiating:
                return on_host(*arguments)

        functions._rewrite_forward_and_call_backward = one_at_a_time


def _on(device: str, call: Callable[..., Any]) -> Callable[..., Any]:
    def placed(*arguments: Any) -> Any:
        op: Any = arguments[0] if arguments else None
        own = getattr(op, "on_gradient", None)
        with tf.device(device):
            if own is None or op.graph is not tf.compat.v1.get_default_graph():
                return call(*arguments)
            return own(partial(call, op), arguments[1:])

    return placed


class Cancellation:
    """Cancels running `ConcreteFunction`s from another thread.

    TensorFlow's runtime can do that; the public API has no name for it since sessions went. Each call gets a manager of
    its own, because a call that fails cancels what else runs under its manager. Publicly, calls that run go on to their end,
    and only later ones are refused.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: set[Any] = set()
        self._cancelled = False

    def cancellable(self, concrete: Any, attributes: tuple[Any, ...] | None = None) -> Callable[..., Any]:
        """As `unrecorded`, but calls end with `tf.errors.CancelledError` at `cancel`, and later ones at once."""
        return partial(self.run, unrecorded(concrete, attributes))

    def run(self, function: Callable[..., Any], *tensors: Any) -> Any:
        """Call what `unrecorded` has given such that it ends at `cancel`, in the same way."""
        if not usable(_cancellation, *_CALLING):
            if self._cancelled:
                raise tf.errors.CancelledError(None, None, "the call was cancelled before it began")
            return function(*tensors)
        manager = _cancellation.CancellationManager()
        with self._lock:
            self._running.add(manager)
            if self._cancelled:
                manager.start_cancel()
        try:
            return function(*tensors, manager=manager)
        finally:
            with self._lock:
                self._running.discard(manager)

    def cancel(self) -> None:
        """End the calls that run: no further op starts; what a device is computing goes on to its end."""
        with self._lock:
            self._cancelled = True
            running = list(self._running)
        for manager in running:
            manager.start_cancel()
