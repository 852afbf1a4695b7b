"""How fast devices are in steps that a graph repeats, and shards of rows that they take as long for.

Nothing but graphs runs between steps, so speeds are variables, which each step reads first and writes at its end.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from devicemap.data.rows import HOST

_KEPT = 0.9
"""Of the speed that was known, in that after a step: the noise of a step counts for little."""

_STEPS = 10
"""Before speeds are known well enough."""

_UNEVEN = 1.3
"""How much faster than the slowest the fastest device has to be for shards to differ: else equal seeds give equal results."""


class Clock:
    """Rows and seconds of devices, since the last `reset`."""

    def __init__(self, devices: Sequence[str], even: bool = False):
        """`even`: shards are, however fast devices are."""
        self.devices, self._even = tuple(devices), even
        with tf.init_scope(), tf.device(HOST):
            zeros = tf.zeros([len(devices)], tf.float64)
            self._speeds, self._rows, self._busy, self._idle = (tf.Variable(zeros, trainable=False) for _ in range(4))
            self._steps = tf.Variable(0, trainable=False, dtype=tf.int64)

    def known(self) -> list[tuple[str, int, float, float]]:
        """Each device, its rows, its seconds, and how many it was done before the last one."""
        rows, busy, idle = (variable.numpy().tolist() for variable in (self._rows, self._busy, self._idle))
        return list(zip(self.devices, map(int, rows), busy, idle))

    def reset(self) -> None:
        """Forget rows and seconds; speeds stay known."""
        for variable in (self._rows, self._busy, self._idle):
            variable.assign(tf.zeros_like(variable))

    def sizes(self, even: Any) -> tuple[Any, Any]:
        """Sizes of the shards of a step, int32 `[devices]`, instead of `even` ones, and when it begins."""
        began = tf.timestamp()
        if self._even:
            return even, began
        with tf.control_dependencies([began]):
            speeds, steps = self._speeds.read_value(), self._steps.read_value()
            uneven = tf.reduce_max(speeds) > _UNEVEN * tf.reduce_min(speeds)
            each = (steps > _STEPS) & uneven & (tf.reduce_min(even) > 0)
            return tf.where(each, shares_of(tf.reduce_sum(even), speeds), even), began

    def note(self, sizes: Any, began: Any, arrivals: Any) -> None:
        """When the results of each shard of a step were there."""
        rows = tf.cast(sizes, tf.float64)
        seconds = tf.maximum(arrivals[0] - began, 1e-9) * tf.sign(rows)
        now, known = tf.math.divide_no_nan(rows, seconds), self._speeds.read_value()
        self._speeds.assign(tf.where((known > 0) & (now > 0), _KEPT * known + (1 - _KEPT) * now, known + now))
        self._rows.assign_add(rows)
        self._busy.assign_add(seconds)
        self._idle.assign_add(tf.reduce_max(seconds) - seconds)
        self._steps.assign_add(1)


def shares_of(rows: Any, speeds: Any) -> Any:
    """Sizes of shards in proportion to speeds, none of them empty: int32 `[devices]`, of at least as many `rows`."""
    count = speeds.shape[0]
    left = tf.cast(rows - count, tf.float64)
    stops = tf.cast(tf.round(tf.cumsum(speeds) / tf.reduce_sum(speeds) * left), tf.int32)
    return 1 + stops - tf.concat([[0], stops[:-1]], 0)
