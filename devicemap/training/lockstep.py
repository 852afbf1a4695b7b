"""Trace one function per device, such that the functions exchange values, for synchronized batch normalization.

A function cannot wait for a function that is traced later. So each function runs in a separate thread, one thread at a time,
from exchange to exchange. Ops that take the values of several devices are created when all functions have arrived.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import tensorflow as tf

from devicemap._tensorflow.gradients import tape_is_recording
from devicemap._tensorflow.keras import moments_by
from devicemap.errors import failure


class Lockstep:
    """Functions without arguments that run in turns, in the graph that is being built."""

    def __init__(self, functions: Sequence[Callable[[], Any]]):
        graph = tf.compat.v1.get_default_graph()
        graph.switch_to_thread_local()  # threads enter and leave device scopes in any order
        scope = graph.get_name_scope()

        def in_graph(function: Callable[[], Any]) -> Any:
            with graph.as_default(), tf.name_scope(f"{scope}/" if scope else ""):
                return function()

        self._turns = [_Turn(partial(in_graph, function)) for function in functions]
        self._current: _Turn | None = None

    def run(self) -> list[Any]:
        """Return the results of the functions.

        Raises:
            FunctionError: some functions have returned while others wait for them.
            Exception: one of the functions raised it.
        """
        try:
            while True:
                for turn in self._turns:
                    self._current = turn
                    turn.proceed()
                waiting = [turn for turn in self._turns if turn.running]
                if not waiting:
                    return [turn.result for turn in self._turns]
                if len(waiting) < len(self._turns):
                    raise failure("the function meets those of other devices more often on one device than on another")
                for turn, received in zip(waiting, waiting[0].combine([turn.sent for turn in waiting])):
                    turn.received = received
        finally:
            for turn in self._turns:
                turn.stop()

    def meet(self, value: Any, combine: Callable[[list[Any]], Sequence[Any]]) -> Any:
        """Exchange values with the functions of all devices: `combine` maps the sent values to the received ones."""
        assert self._current is not None
        return self._current.exchange(value, combine)


class _Stopped(BaseException):
    """Ends a function whose result is no longer needed."""


class _Turn:
    """One of the functions. Its thread runs from `proceed` to the next exchange, while the caller waits."""

    result: Any = None
    sent: Any = None
    received: Any = None
    combine: Any = None

    def __init__(self, function: Callable[[], Any]):
        self.running = True
        self._function = function
        self._error: BaseException | None = None
        self._stopped = False
        self._may_run, self._has_paused = threading.Semaphore(0), threading.Semaphore(0)
        self._thread = threading.Thread(target=self._run, name="devicemap lockstep", daemon=True)

    def _run(self) -> None:
        try:
            self.result = self._function()
        except _Stopped:
            pass
        except BaseException as error:  # raised again by the caller
            self._error = error
        self.running = False
        self._has_paused.release()

    def proceed(self) -> None:
        """Run until the next exchange, or to the end."""
        if self._thread.ident is None:
            self._thread.start()
        else:
            self._may_run.release()
        self._has_paused.acquire()
        if self._error is not None:
            raise self._error

    def exchange(self, value: Any, combine: Callable[[list[Any]], Sequence[Any]]) -> Any:
        """Send a value, pause this thread, and return the received value."""
        self.sent, self.combine = value, combine
        self._has_paused.release()
        self._may_run.acquire()
        if self._stopped:
            raise _Stopped
        return self.received

    def stop(self) -> None:
        """End the thread."""
        if self._thread.ident is not None and self.running:
            self._stopped = True
            self._may_run.release()
            self._thread.join()


def meeting(layers: Sequence[Any], lockstep: Lockstep, real: Any) -> AbstractContextManager[None]:
    """Return a context in which layers of batch normalization use mean and variance of the rows of all devices.

    `real`: bool `[devices]`, whether the rows of a device count.
    """
    graph = tf.compat.v1.get_default_graph()

    def moments(mean: Any, variance: Any, count: Any, masked: bool) -> Any:
        if tf.compat.v1.get_default_graph() is not graph:
            raise failure(
                "a batch normalization is called in a loop, a branch or a tf.function inside the model, where it cannot take "
                "mean and variance of the rows of all devices; set batch_norm='local'"
            )
        if tape_is_recording():
            raise failure(
                "a layer takes gradients through a batch normalization by a tape of its own, which does not see the rows of "
                "other devices; set batch_norm='local', or compute them in a train_step of the model"
            )
        return lockstep.meet((mean, variance, count), lambda parts: [_merged(parts, real, masked)] * len(parts))

    return moments_by(layers, moments)


def _merged(own: Sequence[tuple[Any, Any, Any]], real: Any, masked: bool) -> tuple[Any, Any]:
    """Combine means and variances of parts, with their numbers of values (Chan, Golub and LeVeque, 1983).

    Without a mask, Keras calls `tf.nn.moments`, which stops the gradient of the mean in the variance. This does not change
    first gradients, but second ones, so the result does the same.
    """
    means, variances, counts = (tf.stack(each) for each in zip(*own))
    counts *= tf.cast(real, counts.dtype)
    shares = (counts / tf.reduce_sum(counts))[:, None]
    mean = tf.reduce_sum(means * shares, 0)
    if masked:
        between = tf.square(means - mean)
    else:
        distance = tf.stop_gradient(means - mean)
        between = tf.square(distance) + 2 * distance * (means - tf.stop_gradient(means))
    return mean, tf.reduce_sum((variances + between) * shares, 0)
