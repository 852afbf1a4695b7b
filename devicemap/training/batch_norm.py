"""Synchronized batch normalization: mean and variance of the rows of all devices, in functions that are traced in turn."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextvars import copy_context
from functools import partial
from typing import Any

import tensorflow as tf

from devicemap._tensorflow.functions import pinning_loops
from devicemap._tensorflow.gradients import can_replace_inputs, replace_input, tape_is_recording
from devicemap._tensorflow.keras import replacing_moments
from devicemap.compile.invoke import interruptible
from devicemap.errors import failure
from devicemap.training.stateless import current_scope


class SharedMoments:
    """Mean and variance of the rows of all devices, for each call of batch normalization in the graph that is being traced.

    The function of a device is traced before those of later devices, whose rows its mean depends on. So it takes an Identity of
    the mean of its own rows, whose input is replaced when all functions are traced.
    """

    def __init__(self, real: Any):
        """`real`: bool `[devices]`, whether the rows of a device count."""
        self._real = real
        self._graph = tf.compat.v1.get_default_graph()
        self._calls: list[list[tuple[tuple[Any, Any, Any], list[Any]]]] = []
        """For each call of a batch normalization, by device: its means, variances and numbers of values; what it takes."""
        self._next = 0
        """The index of the next call in the function that is being traced."""
        self._stopped = threading.Event()

    def trace(self, layers: Sequence[Any], functions: Sequence[Callable[[], Any]]) -> list[Any]:
        """Return the results of the functions of all devices, which call these layers of batch normalization.

        They are traced in another thread, in which no tape of the user records, so that tapes of layers are found.

        Raises:
            FunctionError: the functions do not call batch normalization equally often.
        """
        if not can_replace_inputs():
            raise failure(
                "batch normalization cannot take the rows of all devices with this TensorFlow; set batch_norm='local'"
            )
        results: list[Any] = interruptible(
            partial(copy_context().run, self._trace, layers, functions), self._stopped.set
        )
        return results

    def _trace(self, layers: Sequence[Any], functions: Sequence[Callable[[], Any]]) -> list[Any]:
        results = []
        with self._graph.as_default(), pinning_loops(), replacing_moments(layers, self._moments):
            for function in functions:
                self._next = 0
                results.append(function())
            for call in self._calls:
                if len(call) < len(functions):
                    raise failure("a batch normalization is called more often on one device than on another")
                with tf.device(None):
                    merged = _merged([moments for moments, _ in call], self._real)
                for _, taken in call:
                    for identity, value in zip(taken, merged):
                        replace_input(identity.op, value)
        return results

    def _moments(self, _: Any, mean: Any, variance: Any, count: Any) -> Any:
        if current_scope() is None:  # in a direct call in another thread
            return mean, variance
        if tf.compat.v1.get_default_graph() is not self._graph:
            raise failure(
                "a batch normalization is called in a loop, a branch or a tf.function inside the model, where it cannot take "
                "mean and variance of the rows of all devices; set batch_norm='local'"
            )
        if tape_is_recording():
            raise failure(
                "a layer takes gradients through a batch normalization by a tape of its own, which does not see the rows of "
                "other devices; set batch_norm='local', or compute them in a train_step of the model"
            )
        if self._stopped.is_set():
            raise KeyboardInterrupt
        if self._next == len(self._calls):
            self._calls.append([])
        taken = [tf.identity(mean), tf.identity(variance)]
        self._calls[self._next].append(((mean, variance, count), taken))
        self._next += 1
        return taken


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
