"""Law 9: load is balanced by default, and a call that runs out of memory continues with smaller chunks."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import devicemap
from benchmarks import simulator

DEVICES = ["CPU:0", "CPU:1", "CPU:2"]
UNTAPED = pytest.mark.private("which calls no tape records")


def engines_of(mapper: devicemap.DeviceMap, x: tf.Tensor, calls: int) -> list[str]:
    engines = []
    for _ in range(calls):
        mapper(x)
        engines.append(mapper.report.engine)
    return engines


@UNTAPED
def test_short_calls_use_one_graph_once_they_are_known_to_be_short() -> None:
    mapper = devicemap.DeviceMap(lambda row: tf.sin(row), devices=DEVICES)
    x = tf.random.uniform([200, 4])
    engines = engines_of(mapper, x, 5)
    assert engines == sorted(engines)  # chunks first; how many calls it takes depends on measurements
    assert (engines[0], engines[-1]) == ("chunks", "one graph")
    np.testing.assert_allclose(mapper(x), tf.sin(x), rtol=1e-6)


def _halve(level: tf.Variable, rows: Any) -> Any:
    return rows + level.assign(level * 0.5 + tf.reduce_mean(rows))


KNOWN_SEED = pytest.mark.private("when tf.random.set_seed was called")


@pytest.mark.parametrize(
    ("make_fn", "options"),
    [
        pytest.param(lambda: partial(_halve, tf.Variable(0.0)), {"batched": True}, id="order"),
        pytest.param(lambda: lambda row: row + tf.random.normal([4]), {}, id="fixed seed", marks=KNOWN_SEED),
        pytest.param(lambda: partial(tf.keras.layers.Dropout(0.5, seed=1), training=True), {}, id="Keras seed"),
        pytest.param(lambda: tf.sin, {"jit_compile": True}, id="XLA"),
    ],
)
def test_maps_that_depend_on_the_shards_use_one_graph_and_repeat_their_results(
    make_fn: Any, options: dict[str, Any]
) -> None:
    """In chunks, these results would depend on the sizes of chunks and their devices, and XLA would compile for each size."""
    x, results = tf.ones([500, 4]), []
    for _ in range(2):
        tf.random.set_seed(1)
        mapper = devicemap.DeviceMap(make_fn(), devices=DEVICES, **options)
        results.append(mapper(x))
        assert mapper.report.engine == "one graph"
    np.testing.assert_array_equal(*results)


@UNTAPED
def test_calls_that_take_as_long_for_few_rows_use_one_graph(sim: simulator.Simulator) -> None:
    mapper = devicemap.DeviceMap(lambda rows: sim.work(rows, 0.05), devices=DEVICES, batched=True)
    assert engines_of(mapper, tf.random.uniform([5, 4]), 3) == ["one graph"] * 3
    assert engines_of(mapper, tf.random.uniform([300, 4]), 4) == ["chunks"] + ["one graph"] * 3


@UNTAPED
def test_long_calls_stay_in_chunks_and_a_slow_device_gets_fewer_rows(sim: simulator.Simulator) -> None:
    sim.configure(1, speed=0.1)

    def fn(rows: Any) -> Any:
        return sim.work(rows, 0.008 * tf.cast(tf.shape(rows)[0], tf.float32))

    mapper = devicemap.DeviceMap(fn, devices=DEVICES, batched=True)
    x = tf.random.uniform([192, 4])
    for _ in range(5):
        np.testing.assert_allclose(mapper(x), 2 * x + 1)
        assert mapper.report.engine == "chunks"
        slow = next(device for device in mapper.report.devices if device.device.endswith("CPU:1"))
        assert 0 < slow.rows < 192 * 0.1 / 2.1 * 2


@UNTAPED
def test_a_call_that_runs_out_of_memory_continues_in_chunks(sim: simulator.Simulator) -> None:
    """The first call runs one graph, of 10 rows per device. Later calls know that they do not fit."""
    for device in range(2):
        sim.configure(device, memory_rows=5)

    def fn(rows: Any) -> Any:
        return sim.work(rows, tf.fill([tf.shape(rows)[0]], 1e-4))  # rows in memory are those with a time

    mapper = devicemap.DeviceMap(fn, devices=DEVICES[:2], batched=True)
    graphs = []
    for rows in (20, 20, 300):
        x = tf.random.uniform([rows, 4])
        np.testing.assert_allclose(mapper(x), 2 * x + 1)
        graphs.append(sum(call.rows == 10 for call in sim.calls()))
    assert graphs[0] > 0
    assert graphs == graphs[:1] * 3


def test_a_call_under_a_tape_that_runs_out_of_memory_says_what_to_do(sim: simulator.Simulator) -> None:
    for device in range(3):
        sim.configure(device, memory_rows=40)

    def fn(rows: Any) -> Any:
        return rows * tf.stop_gradient(sim.work(rows, tf.fill([tf.shape(rows)[0]], 1e-4)))

    x = tf.ones([300, 4])
    with tf.GradientTape() as tape:
        tape.watch(x)
        with pytest.raises(tf.errors.ResourceExhaustedError, match="fewer rows in each call"):
            devicemap.parallel_map(fn, x, devices=DEVICES, batched=True)
