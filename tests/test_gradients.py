"""Law 6: gradients of an in-memory map are those of the serial map, wherever the tape is."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import devicemap

X = tf.reshape(tf.range(21, dtype=tf.float32), [7, 3]) / 10


@pytest.mark.parametrize("batched", [False, True])
@pytest.mark.parametrize("place", ["eager", "tape inside tf.function", "tape outside tf.function"])
def test_gradients_are_those_of_the_serial_map(devices: list[str], batched: bool, place: str) -> None:
    weights = tf.Variable(tf.reshape(tf.range(9, dtype=tf.float32), [3, 3]) / 9)

    def fn(x: Any) -> Any:
        return tf.tanh(x @ weights if batched else tf.linalg.matvec(weights, x)) * x

    mapper = devicemap.DeviceMap(fn, devices=devices, batched=batched)

    def gradients(mapped: Any, x: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = tf.reduce_sum(mapped(x) ** 2)
        return tape.gradient(loss, [x, weights])

    def serial(x: Any) -> Any:
        return fn(x) if batched else tf.map_fn(fn, x)

    wanted = gradients(serial, X)
    mapped = tf.function(lambda x: mapper(x)) if place.startswith("tape outside") else mapper
    run = (
        tf.function(lambda x: gradients(mapped, x))
        if place.startswith("tape inside")
        else lambda x: gradients(mapped, x)
    )
    for got, want in zip(run(X), wanted):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


def test_several_maps_in_one_tape_and_second_order() -> None:
    scale = tf.Variable(2.0)
    mapper = devicemap.DeviceMap(lambda row: tf.sin(row) * scale, devices=["CPU:1", "CPU:2"])
    with tf.GradientTape() as outer:
        outer.watch(X)
        with tf.GradientTape() as inner:
            inner.watch(X)
            y = tf.reduce_sum(mapper(mapper(X)))
        first = inner.gradient(y, X)
        total = tf.reduce_sum(first)
    np.testing.assert_allclose(first, 4 * np.cos(2 * np.sin(X)) * np.cos(X), rtol=1e-4)
    of_x, of_scale = outer.gradient(total, [X, scale])
    wanted = -4 * (np.sin(2 * np.sin(X)) * 2 * np.cos(X) ** 2 + np.cos(2 * np.sin(X)) * np.sin(X))
    np.testing.assert_allclose(of_x, wanted, rtol=1e-3, atol=1e-3)
    assert of_scale is not None


def test_gradients_through_chunks_are_refused_not_lost() -> None:
    with tf.GradientTape() as tape:
        with pytest.raises(devicemap.errors.OptionError, match="gradients do not go through chunks"):
            devicemap.parallel_map(tf.sin, X, batch_size=2)
        with tape.stop_recording():
            devicemap.parallel_map(tf.sin, X, batch_size=2)
