"""Shards of steps by measured speed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from devicemap.run.clock import Clock, shares_of

DEVICES = ["/device:CPU:0", "/device:CPU:1", "/device:CPU:2"]


@pytest.mark.parametrize("speeds", [[1.0, 1.0], [4.0, 1.0], [1.0, 0.001, 7.0, 7.0], [1e-9, 1e9, 1.0]])
def test_shares_follow_speeds(speeds: list[float]) -> None:
    for rows in (len(speeds), len(speeds) + 1, 17, 1000):
        shares = shares_of(tf.constant(rows), tf.constant(speeds, tf.float64)).numpy()
        assert shares.sum() == rows
        assert shares.min() >= 1
        exact = 1 + np.array(speeds) / sum(speeds) * (rows - len(speeds))
        np.testing.assert_array_less(np.abs(shares - exact), 1 + 1e-9)


def steps(clock: Clock, seconds_per_row: list[float], count: int, rows: int) -> list[int]:
    """The sizes of the last of so many steps, of devices that take so long."""

    @tf.function
    def step(seconds: Any) -> Any:
        sizes, began = clock.sizes(tf.constant([rows // len(DEVICES)] * len(DEVICES), tf.int32))
        clock.note(sizes, began, [began + tf.cast(sizes, tf.float64) * seconds])
        return sizes

    return [step(tf.constant(seconds_per_row, tf.float64)).numpy().tolist() for _ in range(count)][-1]


def test_steps_take_as_long_on_all_devices() -> None:
    clock = Clock(DEVICES)
    assert steps(clock, [0.01, 0.01, 0.04], 5, 90) == [30, 30, 30]  # too few to know
    assert steps(clock, [0.01, 0.01, 0.04], 30, 90) == [40, 39, 11]
    assert steps(clock, [0.04, 0.01, 0.01], 100, 90) == [11, 39, 40]  # others are slow now
    assert steps(clock, [0.01, 0.01, 0.011], 100, 90) == [30, 30, 30]  # even ones stay so to the row


def test_rows_and_seconds_are_told() -> None:
    clock = Clock(DEVICES)
    steps(clock, [0.01, 0.02, 0.03], 2, 9)
    assert [(device, rows) for device, rows, *_ in clock.known()] == [(device, 6) for device in DEVICES]
    clock.reset()
    assert [rows for _, rows, *_ in clock.known()] == [0, 0, 0]


def test_few_rows_are_shared_evenly() -> None:
    clock = Clock(DEVICES)
    steps(clock, [0.01, 0.01, 0.04], 30, 90)
    even = tf.constant([1, 1, 0], tf.int32)
    assert clock.sizes(even)[0].numpy().tolist() == [1, 1, 0]


def test_shards_stay_even_where_they_have_to() -> None:
    clock = Clock(DEVICES, even=True)
    assert steps(clock, [0.01, 0.01, 0.04], 30, 90) == [30, 30, 30]
    assert [rows for _, rows, *_ in clock.known()] == [900, 900, 900]
