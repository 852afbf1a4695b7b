"""What the benchmarks count as sent between devices, held against graphs whose traffic can be computed on paper."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import tensorflow as tf

from benchmarks import traffic
from benchmarks.simulator import Unavailable
from benchmarks.traffic import Traffic

ROWS = tf.ones([10, 4])  # 160 bytes, on CPU:0


@pytest.fixture(scope="module")
def meter() -> traffic.Meter:
    try:
        return traffic.load()
    except Unavailable as reason:
        pytest.skip(str(reason))


def second(meter: traffic.Meter, function: Callable[..., Any], *args: Any) -> Traffic:
    function(*args)
    return meter.measure(lambda: function(*args))


@pytest.mark.parametrize("steps", [0, 1, 5])
def test_a_loop_sends_in_each_turn(meter: traffic.Meter, steps: int) -> None:
    with tf.device("CPU:0"):
        table = tf.Variable(tf.ones([7, 3]))

    @tf.function
    def looping(rows: Any, steps: Any) -> Any:
        with tf.device("CPU:1"):
            state = tf.sin(rows)  # 160 bytes to CPU:1
            steps = tf.identity(steps)  # 4
            for _ in tf.range(steps):
                with tf.device("CPU:2"):
                    column = tf.cos(state)[:, :1]  # 160 to CPU:2 in each turn
                with tf.device("CPU:1"):
                    state += column + tf.reduce_sum(table)  # 40, and 84 of the variable, to CPU:1
            state = tf.identity(state)
        with tf.device("CPU:0"):
            return tf.identity(state)  # 160 to CPU:0

    sent = second(meter, looping, ROWS, tf.constant(steps))
    to_go_on = 2 * (steps + 1)  # CPU:0 and CPU:2 receive a byte per step, and one at the end of the loop
    assert sent.bytes == 160 + 4 + steps * (160 + 40 + 84) + to_go_on + 160
