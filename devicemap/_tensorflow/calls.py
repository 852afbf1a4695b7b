"""Calls of a `ConcreteFunction`: with little overhead, cancellable, and with the backward pass on the host."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import tensorflow as tf

from devicemap._tensorflow import Private, nothing, usable, with_fallback
from devicemap._tensorflow.functions import pinning_loops
from devicemap._tensorflow.gradients import _gradients, are_watched, order_of_gradients, without_zeros

_cancellation = Private("tensorflow.python.eager.cancellation", "CancellationManager.start_cancel")
_context = Private("tensorflow.python.eager.context", "context", "Context.function_call_options")
_execute = Private("tensorflow.python.eager.execute", "execute", "execute_with_cancellation")
_atomic = Private("tensorflow.python.eager.polymorphic_function.atomic_function", "InterpolateRuntimeError")
_concrete = Private(
    "tensorflow.python.eager.polymorphic_function.concrete_function",
    "ConcreteFunction.inference_fn",
    "ConcreteFunction.function_type",
    "ConcreteFunction._select_forward_and_backward_functions",
    "_DelayedRewriteGradientFunctions._rewrite_forward_and_call_backward",
    "_ForwardBackwardCall._functions",
    "_TapeGradientFunctions._wrap_backward_function",
)
_backprop = Private("tensorflow.python.eager.backprop_util", "IsTrainable")

_CALLING = (_context, _execute, _atomic, _concrete)


def _public_call(concrete: Any, attributes: Any = None) -> Callable[..., Any]:
    leaves, _ = concrete.structured_input_signature

    def call(*tensors: Any, manager: Any = None) -> Any:
        return concrete(*tf.nest.pack_sequence_as(list(leaves), tensors, expand_composites=True))

    return call


@with_fallback(nothing, *_CALLING)
def attributes_of_calls() -> tuple[Any, ...] | None:
    """Return the attributes of function calls. TensorFlow creates them once per thread, and never frees them."""
    return tuple(itertools.chain(*dict(_context.context().function_call_options.as_attrs()).items()))


@with_fallback(_public_call, *_CALLING)
def unrecorded(concrete: Any, attributes: tuple[Any, ...] | None = None) -> Callable[..., Any]:
    """Return a callable for a `ConcreteFunction` in eager code, without tapes, with tensors only.

    The public call first binds its arguments to a Python signature and asks the tapes, which takes as long as running a small
    graph. A cancellation `manager` cancels the call. TensorFlow's own context manager is global to all threads.

    Args:
        concrete: the function.
        attributes: `attributes_of_calls` of another thread; by default those of this thread.
    """
    ctx, function, captured = _context.context(), concrete.inference_fn, list(concrete.captured_inputs)
    fixed = tf.compat.as_str(function.name), len(function.function_type.flat_outputs)
    flat_attributes = attributes_of_calls() if attributes is None else attributes
    pack = function.function_type.pack_output

    def call(*tensors: Any, manager: Any = None) -> Any:
        inputs = [*tensors, *captured]
        with _atomic.InterpolateRuntimeError(function):  # adds the definition of its op to an error
            if manager is None:
                return pack(_execute.execute(*fixed, inputs, flat_attributes, ctx))
            return pack(_execute.execute_with_cancellation(*fixed, inputs, flat_attributes, ctx, manager))

    return call


_differentiating = threading.RLock()
"""Held while TensorFlow adds intermediate outputs to a graph, which calls in several threads share."""


@with_fallback(nothing, _concrete, _backprop)
def prepare_gradient(concrete: Any, tensors: Sequence[Any], host: str) -> None:
    """Build the functions of a call that tapes of this thread record, with the backward pass on `host`.

    TensorFlow keeps them with the `ConcreteFunction`, and its public call uses them.
    """
    inputs = [*tensors, *concrete.captured_inputs]
    with _differentiating:
        order = order_of_gradients(concrete, inputs)
        call = concrete._select_forward_and_backward_functions(inputs, order, True)
        call.forward()
    _place_taped_backward(host, call._functions)


def _place_taped_backward(host: str, functions: Any) -> None:
    """Place the backward pass of a taped call on `host`, and do not record outputs that its gradient does not use.

    `_wrap_backward_function` puts the gradients of all rows on the first device. It also sends each TensorList that a loop
    keeps for its gradient to that device, to create zeros for it (tests/simulators/softgpus/traffic.py,
    test_what_a_loop_keeps_for_its_gradient_stays_where_it_is).
    """
    if hasattr(functions, "wrap_anywhere") or not hasattr(functions, "_wrap_backward_function"):
        return  # already done, or no tape records
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


@with_fallback(nothing, _concrete, _gradients)
def begin_backward_on(host: str, concrete: Any) -> None:
    """Place the backward pass of calls of a `ConcreteFunction` in a graph that is being built on `host`.

    The attribute `on_gradient` of a call's op replaces its gradient in the same graph. It is called with the default gradient
    function and the gradients of the outputs.
    """
    functions = getattr(concrete, "_delayed_rewrite_functions", None)
    if functions is None or "_rewrite_forward_and_call_backward" in vars(functions):
        return
    rewrite = functions._rewrite_forward_and_call_backward
    on_host = _on(host, lambda *arguments: without_zeros(rewrite(*arguments)))

    def one_at_a_time(op: Any, *upstream: Any) -> Any:
        # The gradient would be a function of outputs that are added to the op now, and that the tape does not know.
        if op.graph is tf.compat.v1.get_default_graph() and are_watched(op.outputs):
            raise NotImplementedError(
                "tf.gradients or tf.hessians takes gradients of a call of devicemap under a tf.GradientTape, which would not "
                "follow them; use nested tapes"
            )
        with _differentiating, pinning_loops():
            return on_host(op, *upstream)

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

    In the fallback, and in asynchronous execution, running calls finish, and later ones fail.

    Each call gets a separate manager, because a call that fails cancels all calls of its manager
    (test_a_call_that_fails_leaves_another_alone).
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: set[Any] = set()
        self._cancelled = False

    def run(self, function: Callable[..., Any], *tensors: Any) -> Any:
        """Call a result of `unrecorded`. It raises `tf.errors.CancelledError` after `cancel`."""
        # Asynchronous calls return before they start, and a manager cancels its calls when it is freed.
        if not (usable(_cancellation, *_CALLING) and tf.config.experimental.get_synchronous_execution()):
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
        """Cancel running calls. No further op starts, and running ops finish."""
        with self._lock:
            self._cancelled = True
            running = list(self._running)
        for manager in running:
            manager.start_cancel()
