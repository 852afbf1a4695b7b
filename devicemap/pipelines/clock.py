"""The start and end times of the calls of a pipeline, for `Pipeline.report`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from devicemap._tensorflow.functions import NO_AUTO_CONTROL_DEPS, unchained
from devicemap.data.rows import HOST, spec_of
from devicemap.inspect.pipeline_report import StageCall
from devicemap.pipelines.schedule import Step


class Clock:
    """The times of the calls in a graph."""

    def __init__(self) -> None:
        self._times: dict[tuple[str, int, Step], list[Any]] = {}

    def stamp(self, device: str, first: int, step: Step, tensors: Sequence[Any]) -> list[Any]:
        """Record the time when tensors are computed on a device, and return the op that does so.

        Args:
            device: the device.
            first: the index in the batch of the first microbatch of the replica.
            step: the call with these tensors as inputs or results.
            tensors: the tensors.
        """
        known = tf.nest.flatten([tensor for tensor in tensors if tensor is not None], expand_composites=True)
        elements = [tf.reshape(tensor, [-1])[:1] for tensor in known if tensor.dtype not in (tf.resource, tf.variant)]

        @tf.function(autograph=False, experimental_attributes=NO_AUTO_CONTROL_DEPS)
        def now(*elements: Any) -> Any:
            with tf.control_dependencies(elements):
                return tf.timestamp()

        with tf.device(HOST):
            call, arguments = unchained(now.get_concrete_function(*map(spec_of, elements)), elements)
            time = tf.ensure_shape(call(*arguments), [])  # other ops cannot wait for a call, because it is inlined
        self._times.setdefault((device, first, step), []).append(time)
        return [time.op]

    @property
    def times(self) -> Any:
        """The start and the end of each call, float64 `[calls, 2]`, in seconds since the epoch."""
        with tf.device(HOST):
            return tf.stack([tf.stack(times) for times in self._times.values()])

    def calls(self, times: Any) -> tuple[StageCall, ...]:
        """Return the calls, given the value of `times`, in the order of their starts."""
        start = times.min()
        found = (
            StageCall(device, step.stage, first + step.microbatch, step.backward, *map(float, pair - start))
            for (device, first, step), pair in zip(self._times, times)
        )
        return tuple(sorted(found, key=lambda call: call.started_seconds))
