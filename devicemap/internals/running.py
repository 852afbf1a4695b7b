"""Calling a `ConcreteFunction` without the cost of its public call, and cancelling it."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from typing import Any

import tensorflow as tf
from tensorflow.python.eager import cancellation, context, execute
from tensorflow.python.eager.polymorphic_function import atomic_function


def unrecorded(concrete: Any, optimize: bool = True) -> Callable[..., Any]:
    """What calls a `ConcreteFunction` in eager code when no tape is recording, with tensors only.

    The public call binds its arguments to a Python signature and asks the tapes first, which takes as long as running a
    small graph does. With `optimize=False`, the graph runs as it is. With a cancellation `manager`, a call can be cancelled:
    TensorFlow's own way keeps the manager in a global of the process, where threads meet those of others.
    """
    function, captured = concrete.inference_fn, list(concrete.captured_inputs)
    ctx = context.context()
    attributes = dict(ctx.function_call_options.as_attrs())
    if not optimize:
        config = tf.compat.v1.ConfigProto.FromString(attributes["config_proto"])
        config.graph_options.rewrite_options.disable_meta_optimizer = True
        attributes["config_proto"] = config.SerializeToString()
    fixed = tf.compat.as_str(function.name), len(function.function_type.flat_outputs)
    flat_attributes = tuple(itertools.chain(*attributes.items()))

    def call(*tensors: Any, manager: Any = None) -> Any:
        inputs = [*tensors, *captured]
        with atomic_function.InterpolateRuntimeError(function):  # adds to an error where its op was defined
            if manager is None:
                results = execute.execute(*fixed, inputs, flat_attributes, ctx)
            else:
                results = execute.execute_with_cancellation(*fixed, inputs, flat_attributes, ctx, manager)
        return function.function_type.pack_output(results)

    return call


class Cancellation:
    """Cancels running `ConcreteFunction`s from another thread.

    TensorFlow's runtime can do that; the public API has no name for it since sessions went. Each call gets a manager of
    its own, because a call that fails cancels what else runs under its manager.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: set[Any] = set()
        self._cancelled = False

    def cancellable(self, concrete: Any, optimize: bool = True) -> Callable[..., Any]:
        """As `unrecorded`, but calls end with `tf.errors.CancelledError` at `cancel`, and later ones at once."""
        function = unrecorded(concrete, optimize)

        def call(*tensors: Any) -> Any:
            manager = cancellation.CancellationManager()
            with self._lock:
                self._running.add(manager)
                if self._cancelled:
                    manager.start_cancel()
            try:
                return function(*tensors, manager=manager)
            finally:
                with self._lock:
                    self._running.discard(manager)

        return call

    def cancel(self) -> None:
        """End the calls that run: no further op starts; what a device is computing goes on to its end."""
        with self._lock:
            self._cancelled = True
            running = list(self._running)
        for manager in running:
            manager.start_cancel()
