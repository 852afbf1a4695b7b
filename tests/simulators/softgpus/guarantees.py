"""One smoke test per guarantee on two emulated GPUs; `make test-gpus` runs all of `tests/laws` on four."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from graphs import between_devices, partitions
from oracle import assert_close, gradients_of
from simulators.softgpus.pair import GPUS, copies_of, gpus, on_gpus, rows, scanning, sent, shard, wave, weight, weights
from trainings import CASES

import devicemap
from devicemap.types import ChunkFinished, Event


def on_host(fn: Callable[[Any], Any], *args: Any) -> Any:
    with tf.device("CPU:0"):
        return fn(*args)


with tf.device("GPU:0"):
    decay = tf.Variable(0.9)


def leaving(row: Any) -> Any:
    """Rows leave the loop at different times."""
    goes_on = lambda state: tf.norm(state) > 1.0 + tf.nn.relu(row[0, 0])
    return tf.while_loop(goes_on, lambda state: (decay * tf.sin(state) * weights,), (row,))[0]


def masking(row: Any) -> Any:
    """Rows have different numbers of positive elements."""
    waves = tf.sin(wave(row))
    return row * tf.reduce_sum(tf.boolean_mask(waves, waves > 0.0))


@pytest.mark.parametrize("options", [{}, {"vectorize": False}, {"batch_size": 3}], ids=str)
@pytest.mark.parametrize("fn", [wave, scanning])
def test_results_equal_those_of_map_fn(fn: Any, options: dict[str, Any]) -> None:
    mapper = on_gpus(fn, **options)
    for count in (0, 1, 5, 8):
        expected = on_host(tf.function(lambda x: tf.map_fn(fn, x)), rows[:count])
        np.testing.assert_allclose(mapper(rows[:count]), expected, rtol=1e-4, atol=1e-5)


def test_no_edge_joins_two_devices() -> None:
    def drawing(row: Any) -> Any:
        tf.debugging.assert_less(row, 1e9)
        return tf.sin(row) * weights + tf.random.normal([])

    mapper = on_gpus(drawing)
    joined = [edge for edge in between_devices(partitions(mapper, rows)) if edge.sender != edge.receiver]
    assert joined == []
    copies = copies_of(lambda: mapper(rows))
    assert not [copy for copy in copies if copy.kind == "between"]


def test_each_row_result_and_variable_is_copied_once() -> None:
    assert sent(on_gpus(wave)) == ([shard + weight] * 2, [shard] * 2)


def test_random_streams_do_not_repeat_and_seeds_do_not_depend_on_devices() -> None:
    drawn = [on_gpus(lambda row: tf.random.normal([4]))(rows).numpy() for _ in range(2)]
    assert len(np.unique(drawn)) == 2 * 8 * 4
    seeded_noise = lambda row, seed: tf.random.stateless_normal([4], seed)
    seeded = [on_gpus(seeded_noise, seed=7, devices=devices)(rows) for devices in (GPUS, "GPU:1")]
    np.testing.assert_array_equal(*seeded)


@pytest.mark.parametrize("fn", [wave, scanning, leaving, masking])
def test_gradients_equal_those_of_map_fn_and_are_computed_where_the_forward_pass_was(fn: Any) -> None:
    mapper = on_gpus(fn)
    gradients_of(mapper, rows, weights)
    gpus.clear()
    found = gradients_of(mapper, rows, weights)
    ran = {run.device: run.count for run in gpus.runs() if run.op == "Cos"}
    assert set(ran) == {*GPUS}
    expected = on_host(gradients_of, lambda x: tf.map_fn(fn, x), rows, weights)
    assert_close(found, expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(("options", "named"), [({}, " row 6 on GPU:1"), ({"batch_size": 2}, " row 6 on GPU:")])
def test_errors_name_the_device_and_the_rows(options: dict[str, Any], named: str) -> None:
    data = tf.tensor_scatter_nd_update(rows, [[6, 0, 0]], [float("nan")])
    mapper = on_gpus(lambda row: tf.debugging.check_numerics(row, "bad"), **options)
    gpus.clear()
    with pytest.raises(tf.errors.InvalidArgumentError, match=named):
        mapper(data)
    assert not gpus.copies("between")  # the search for the rows that failed copies them from the host


def test_a_slow_device_gets_fewer_chunks() -> None:
    gpus.configure(1, kernel_seconds=0.1)
    events: list[Event] = []
    mapper = on_gpus(tf.sin, batched=True, progress=events.append)
    batches = tf.data.Dataset.range(40).map(lambda n: tf.fill([2], tf.cast(n, tf.float32)))
    results = np.concatenate([*mapper.stream(batches)])
    np.testing.assert_allclose(results, np.sin(np.repeat(np.arange(40.0), 2)), rtol=1e-5)
    chunks = Counter(event.shard.device[-5:] for event in events if isinstance(event, ChunkFinished))
    assert chunks["GPU:0"] > 2 * chunks["GPU:1"]
    assert chunks.total() == 40


@pytest.mark.parametrize(("output_device", "engine"), [("CPU:0", "chunks"), ("GPU:0", "one graph")])
def test_results_that_stay_on_a_gpu_come_from_one_graph(output_device: str, engine: str) -> None:
    many = on_host(tf.repeat, rows, 10, 0)
    mapper = on_gpus(tf.sin, output_device=output_device)
    np.testing.assert_allclose(mapper(many), np.sin(many), rtol=1e-4, atol=1e-5)
    assert mapper.report.engine == engine


def test_training_equals_one_device() -> None:
    case = CASES["batch normalization"]
    found = case.fitted(devicemap.parallelize(case.made(), GPUS))
    assert_close(found, case.fitted(case.made()), rtol=1e-3)
