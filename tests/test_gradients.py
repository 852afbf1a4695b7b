"""Law 6: gradients of an in-memory map are those of the serial map, wherever the tape is."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from graphs import between_towers, partitions, placements

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


def _simulate(weights: Any) -> Any:
    def step(row: Any) -> Any:
        for _ in tf.range(3):
            row = tf.tanh(tf.linalg.matvec(weights, row))
        return row

    return step


@pytest.mark.parametrize("place", ["eager", "tf.function"])
@pytest.mark.parametrize(
    ("name", "options"),
    [("batch", {"batched": True}), ("loop", {}), ("loop", {"vectorize": False}), ("embedding", {})],
)
def test_second_order_reaches_inputs_and_variables(name: str, options: dict[str, Any], place: str) -> None:
    weights = tf.Variable(tf.reshape(tf.range(9, dtype=tf.float32), [3, 3]) / 9)
    fn = {
        "batch": lambda b: tf.tanh(b @ weights) @ weights,
        "loop": _simulate(weights),
        "embedding": lambda row: tf.reduce_prod(tf.gather(weights, tf.cast(row[:2], tf.int32)), 0) * row,
    }[name]
    mapper = devicemap.DeviceMap(fn, devices=["CPU:1", "CPU:2", "CPU:0"], **options)

    def serial(x: Any) -> Any:
        return fn(x) if "batched" in options else tf.map_fn(fn, x)

    def gradients(mapped: Any, x: Any) -> Any:
        with tf.GradientTape() as outer:
            outer.watch(x)
            with tf.GradientTape() as inner:
                inner.watch(x)
                loss = tf.reduce_sum(mapped(x) ** 2)
            first = [tf.convert_to_tensor(g) for g in inner.gradient(loss, [x, weights])]
            total = tf.add_n([tf.reduce_sum(g**2) for g in first])
        return [*first, *map(tf.convert_to_tensor, outer.gradient(total, [x, weights]))]

    run = gradients if place == "eager" else tf.function(gradients)
    for got, want in zip(run(mapper, X), tf.function(gradients)(serial, X)):
        np.testing.assert_allclose(got, want, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("options", [{"batched": True}, {}, {"vectorize": False}], ids=str)
def test_backward_work_runs_where_the_forward_work_ran(options: dict[str, Any]) -> None:
    weights = tf.Variable(tf.eye(3))
    fn = (lambda b: tf.tanh(b @ weights) @ weights) if "batched" in options else _simulate(weights)
    mapper = devicemap.DeviceMap(fn, devices=["CPU:1", "CPU:2", "CPU:3"], **options)

    def gradients() -> Any:
        with tf.GradientTape() as tape:
            tape.watch(X)
            loss = tf.reduce_sum(mapper(X) ** 2)
        return tape.gradient(loss, [X, weights])

    graphs = partitions(gradients)
    for op in ("MatMul", "TanhGrad"):
        where = placements(graphs, op)
        assert set(where) == {"CPU:1", "CPU:2", "CPU:3"}
        assert len(set(where.values())) == 1
    assert not [edge for edge in between_towers(graphs) if edge.control]


def test_an_update_between_two_calls_in_one_tape(devices: list[str]) -> None:
    scale = tf.Variable(2.0)
    mapper = devicemap.DeviceMap(lambda row: row * row * scale, devices=devices)

    def gradients(x: Any) -> Any:
        with tf.GradientTape(persistent=True) as tape:
            tape.watch(x)
            first = mapper(x)
            scale.assign_add(1.0)
            second = mapper(x)
        result = tape.gradient(first, x), tape.gradient(second, x)
        scale.assign_sub(1.0)
        return result

    for run in (gradients, tf.function(gradients), tf.function(gradients)):
        for got, factor in zip(run(X), (2.0, 3.0)):
            np.testing.assert_allclose(got, 2 * X * factor, rtol=1e-5)


@pytest.mark.parametrize("batched", [False, True])
def test_jacobians(batched: bool) -> None:
    weights = tf.Variable(tf.eye(3) * 2)
    fn = (lambda b: tf.tanh(b @ weights)) if batched else (lambda x: tf.tanh(tf.linalg.matvec(weights, x)))
    mapper = devicemap.DeviceMap(fn, devices=["CPU:1", "CPU:2"], batched=batched)
    with tf.GradientTape() as tape:
        tape.watch(X)
        y = mapper(X)
    wanted = tf.linalg.diag((1 - tf.tanh(2 * X) ** 2) * 2)
    np.testing.assert_allclose(tape.batch_jacobian(y, X), wanted, rtol=1e-4, atol=1e-5)


def test_forward_mode_is_refused() -> None:
    mapper = devicemap.DeviceMap(tf.sin, devices=["CPU:1", "CPU:2"])
    with (
        tf.autodiff.ForwardAccumulator(X, tf.ones_like(X)),
        pytest.raises(devicemap.errors.DataError, match=r"use a tf\.GradientTape"),
    ):
        mapper(X)


def test_gradients_through_chunks_are_refused_not_lost() -> None:
    with tf.GradientTape() as tape:
        with pytest.raises(devicemap.errors.OptionError, match="gradients do not go through chunks"):
            devicemap.parallel_map(tf.sin, X, batch_size=2)
        with tape.stop_recording():
            devicemap.parallel_map(tf.sin, X, batch_size=2)
