"""Trace one function per device, such that the functions exchange values, for synchronized batch normalization.

A function cannot wait for a function that is traced later. So each function runs in a separate thread, one thread at a time,
from exchange to exchange. Ops that take the values of several devices are created when all functions have arrived.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from contextvars import copy_context
from typing import Any

import tensorflow as tf

from devicemap._tensorflow.gradients import tape_is_recording
from devicemap._tensorflow.keras import replacing_moments
from devicemap.errors import failure
from devicemap.training.stateless import current_scope


class Lockstep:
    """Functions without arguments that run in turns, in the graph that is being built.

    A turn ends at the next exchange of values, or when the function returns. Then it is the turn of the next function.
    """

    def __init__(self, functions: Sequence[Callable[[], Any]]):
        self._graph = tf.compat.v1.get_default_graph()
        self._graph.switch_to_thread_local()  # threads enter and leave device scopes in any order
        self._scope = self._graph.get_name_scope()
        self._functions = functions
        self._context = copy_context()
        self._turns = [threading.Semaphore(slot == 0) for slot in range(len(functions))]
        self._current = 0
        self._sent: list[Any] = []
        """The values of the functions that have arrived at the next exchange."""
        self._received: Sequence[Any] = ()
        """The value for each function from the last exchange."""
        self._results: list[Any] = []
        """The results of the functions that have returned."""
        self._error: BaseException | None = None

    def run(self) -> list[Any]:
        """Return the results of the functions, or raise an error of one of them.

        Raises:
            FunctionError: some functions have returned while others wait for them.
        """
        with ThreadPoolExecutor(len(self._functions), "devicemap lockstep") as pool:
            try:
                list(pool.map(self._run, range(len(self._functions))))
            except BaseException as error:  # Ctrl-C ends the functions at their next exchange
                self._error = error
        if self._error is not None:
            raise self._error
        return self._results

    def _run(self, slot: int) -> None:
        self._turns[slot].acquire()
        try:
            if self._error is None:
                with self._graph.as_default(), tf.name_scope(f"{self._scope}/" if self._scope else ""):
                    self._results.append(self._context.copy().run(self._functions[slot]))
                self._check_alike()
        except BaseException as error:  # raised again by the caller
            self._error = self._error or error
        self._end_turn()

    def exchange(self, value: Any, combine: Callable[[list[Any]], Sequence[Any]]) -> Any:
        """Exchange values with the functions of all devices: `combine` maps the sent values to the received ones."""
        slot = self._current
        self._sent.append(value)
        self._check_alike()
        if len(self._sent) == len(self._functions):
            with tf.device(None):
                self._received = combine(self._sent)
            self._sent = []
        self._end_turn()
        self._turns[slot].acquire()
        if self._error is not None:
            raise _Stopped
        return self._received[slot]

    def _end_turn(self) -> None:
        self._current = (self._current + 1) % len(self._functions)
        self._turns[self._current].release()

    def _check_alike(self) -> None:
        if self._sent and self._results:
            raise failure("the function exchanges values with other devices more often on one device than on another")


class _Stopped(BaseException):
    """Ends a function whose result is no longer needed."""


def synchronizing_moments(layers: Sequence[Any], lockstep: Lockstep, real: Any) -> AbstractContextManager[None]:
    """Return a context in which layers of batch normalization use mean and variance of the rows of all devices.

    `real`: bool `[devices]`, whether the rows of a device count.
    """
    graph = tf.compat.v1.get_default_graph()

    def moments(_: Any, mean: Any, variance: Any, count: Any) -> Any:
        if current_scope() is None:  # in a direct call in another thread
            return mean, variance
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
        return lockstep.exchange((mean, variance, count), lambda parts: [_merged(parts, real)] * len(parts))

    return replacing_moments(layers, moments)


def _merged(own: Sequence[tuple[Any, Any, Any]], real: Any) -> tuple[Any, Any]:
    """Combine means and variances of parts, with their numbers of values (Chan, Golub and LeVeque, 1983).

    Without a mask, Keras calls `tf.nn.moments`, which stops the gradient of the mean in the variance. This does not change
    first gradients, but second ones, so the result does the same. Mean and variance of no values are then NaN, else 0.
    """
    means, variances, counts = (tf.stack(each) for each in zip(*own))
    masked = counts.shape.rank == 2
    counts *= tf.cast(real[:, None] if masked else real, counts.dtype)
    total = tf.reduce_sum(counts, 0)
    shares = tf.math.divide_no_nan(counts, total) if masked else (counts / total)[:, None]
    mean = tf.reduce_sum(tf.math.multiply_no_nan(means, shares), 0)  # without parts that have no values
    if masked:
        between = tf.square(means - mean)
    else:
        distance = tf.stop_gradient(means - mean)
        between = tf.square(distance) + 2 * distance * (means - tf.stop_gradient(means))
    return mean, tf.reduce_sum(tf.math.multiply_no_nan(variances + between, shares), 0)
