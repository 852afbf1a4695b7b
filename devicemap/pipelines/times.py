"""When the calls of a pipeline ended, told by its graphs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from devicemap._tensorflow.functions import unchained
from devicemap.compile.layout import ended_on
from devicemap.data.rows import HOST


class Times:
    """Of the last call, kept in variables: nothing but graphs runs while a model is trained."""

    def __init__(self, stages: int, microbatches: int):
        with tf.init_scope(), tf.device(HOST):
            self._nothing = tf.fill([stages, microbatches], tf.constant(np.nan, tf.float64))
            self._forward, self._backward = (tf.Variable(self._nothing, trainable=False) for _ in range(2))
            self._began = tf.Variable(0.0, trainable=False, dtype=tf.float64)

    def of(self, tensors: Sequence[Any]) -> Any:
        """When these, of one device, are there, in the graph that is being built: in seconds since the epoch."""
        device = tf.nest.flatten(list(tensors), expand_composites=True)[0].device

        @tf.function(autograph=False)
        def when(*there: Any) -> Any:
            with tf.control_dependencies(ended_on(device, there)):
                return tf.timestamp()

        with tf.device(HOST):
            call, taken = unchained(when.get_concrete_function(*tensors), tensors)
            return call(*taken)

    def keep_forward(self, began: Any, ends: Sequence[Sequence[Any]]) -> None:
        """A call began, and its stages ended so with each microbatch; nothing is known of gradients."""
        with tf.device(HOST):
            filled = tf.pad(
                tf.stack(ends), [[0, 0], [0, self._nothing.shape[1] - len(ends[0])]], constant_values=np.nan
            )
            self._began.assign(began)
            self._forward.assign(filled)
            self._backward.assign(self._nothing)

    def keep_backward(self, stage: int, ends: Sequence[Any]) -> None:
        """A stage ended so with the gradient of each microbatch."""
        with tf.device(HOST):
            self._backward[stage, : len(ends)].assign(tf.stack(ends))

    def known(self) -> dict[tuple[int, str], float]:
        """When each call of each stage ended, in seconds since the call of the pipeline began: NaN where it did not."""
        found = {}
        for name, log in (("F", self._forward), ("B", self._backward)):
            for (stage, m), end in np.ndenumerate(log.numpy() - self._began.numpy()):
                found[stage, f"{name}{m}"] = float(end)
        return found
