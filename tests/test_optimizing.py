"""One optimised function serves all devices: when it may, and that it is the same function."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from graphs import partitions, placements

import devicemap
from devicemap.auditing import variable_of
from devicemap.optimizing import can_be_optimized_once, optimize
from devicemap.options import check_options
from devicemap.rows import as_rows
from devicemap.towers import Towers
from devicemap.tracing import Traced, trace

X = tf.reshape(tf.range(60, dtype=tf.float32), [20, 3]) / 60
TWO = ["/device:CPU:0", "/device:CPU:1"]
scale = tf.Variable(2.0)


def _traced(fn: Any, data: Any = X, **options: Any) -> Traced:
    return trace(fn, as_rows(data).specs, check_options(fn, options))


def _optimized(traced: Traced) -> Any:
    """The optimised function of the leaves alone."""
    runnable = optimize(traced)
    variables = [variable_of(traced.concrete, traced.concrete.captured_inputs[i]) for i in runnable.passed]
    return lambda *leaves: runnable.concrete(*(variable.read_value() for variable in variables), *leaves)


def _loop(row: Any) -> Any:
    while tf.reduce_sum(row) < 10.0:
        row = row * scale + 1.0
    return {"row": row, "on": tf.cond(row[0] > 5.0, lambda: row[0], lambda: -row[0])}


def _constants(row: Any) -> Any:
    return row @ tf.linalg.inv(tf.eye(3) * 2.0 + tf.ones([3, 3]))


def _checked(row: Any) -> Any:
    tf.debugging.assert_less(row, 0.5, message="too large")
    return row


@pytest.mark.parametrize(
    ("fn", "options"),
    [
        (_loop, {}),
        (_loop, {"vectorize": False}),
        (_constants, {"batched": True}),
        (lambda row: tf.scan(lambda a, b: 0.5 * a + b, row), {}),
        (lambda row: tf.strings.as_string(row), {}),
        (lambda row: tf.linalg.svd(tf.reshape(row, [3, 1]), compute_uv=False), {}),
    ],
)
def test_it_is_the_same_function(fn: Any, options: dict[str, Any]) -> None:
    traced = _traced(fn, **options)
    assert can_be_optimized_once(traced, TWO)
    for got, wanted in zip(_optimized(traced)(X), traced.concrete(X)):
        assert got.dtype == wanted.dtype
        if got.dtype == tf.string:
            np.testing.assert_array_equal(got, wanted)
        else:
            np.testing.assert_allclose(got, wanted, rtol=1e-5)


def test_assertions_stay() -> None:
    with pytest.raises(tf.errors.InvalidArgumentError, match="too large"):
        _optimized(_traced(_checked))(X)
    with pytest.raises(tf.errors.InvalidArgumentError, match="too large"):
        devicemap.parallel_map(_checked, X, devices=["CPU:1", "CPU:2"])


@tf.function(experimental_attributes={"_noinline": True})
def _kept(row: Any, pair: Any) -> Any:
    return row * 2.0, pair + 1


def _calls_what_is_kept(row: Any) -> Any:
    return _kept(row, tf.constant([1, 2]))[0] + 1.0


def _aligned(row: Any) -> Any:
    """What TensorFlow 1 called a function: `tf.nn.ctc_loss` has some."""
    logits = tf.stack([row, row, -row])[:, None]
    return tf.nn.ctc_loss([[1, 2]], logits, [2], [3], logits_time_major=True, blank_index=0)[0]


@pytest.mark.parametrize("fn", [_calls_what_is_kept, _aligned])
def test_functions_that_are_not_inlined(devices: list[str], fn: Any) -> None:
    wanted = tf.function(lambda x: tf.map_fn(fn, x, fn_output_signature=tf.TensorSpec(None)))(X)
    for options in ({}, {"vectorize": False}, {"vectorize": False, "batch_size": 2}):
        np.testing.assert_allclose(devicemap.parallel_map(fn, X, devices=devices, **options), wanted, rtol=1e-4)


def _prints(row: Any) -> Any:
    tf.print(row, output_stream="file:///dev/null")
    return row


def _adds(row: Any) -> Any:
    scale.assign_add(0.0)
    return row


@pytest.mark.parametrize(
    ("traced", "places"),
    [
        (lambda: _traced(tf.sin), TWO[:1]),
        (lambda: _traced(tf.sin), ["/device:GPU:0", "/device:GPU:1"]),
        (lambda: _traced(_prints), TWO),
        (lambda: _traced(_adds), TWO),
        (lambda: _traced(tf.sin, jit_compile=True), TWO),
        (lambda: _traced(_calls_what_is_kept, vectorize=False), TWO),
        (lambda: _traced(tf.reduce_sum, tf.ragged.constant([[1.0], []])), TWO),
    ],
)
def test_what_is_left_to_tensorflow(traced: Any, places: list[str]) -> None:
    assert not can_be_optimized_once(traced(), places)


def test_constants_are_folded_once_and_not_per_tower() -> None:
    graphs = partitions(devicemap.DeviceMap(_constants, batched=True, devices=["CPU:1", "CPU:2", "CPU:3"]), X)
    assert placements(graphs, "MatrixInverse") == {}
    assert set(placements(graphs, "MatMul")) == {"CPU:1", "CPU:2", "CPU:3"}


def test_ops_are_fused_as_in_one_function() -> None:
    dense = tf.keras.layers.Dense(4, activation="relu")
    dense.build([None, 3])
    mapper = devicemap.DeviceMap(dense, devices=["CPU:1", "CPU:2"], batched=True)
    graphs = partitions(mapper, X)
    assert placements(graphs, "FusedMatMul") == {"CPU:1": 1, "CPU:2": 1}
    assert not placements(graphs, "BiasAdd")
    np.testing.assert_allclose(mapper(X), dense(X), rtol=1e-6)


def test_a_device_that_fn_asks_for_stays() -> None:
    def fn(batch: Any) -> Any:
        with tf.device("/device:CPU:3"):
            batch = tf.sin(batch)
        return tf.cos(batch)

    mapper = devicemap.DeviceMap(fn, devices=["CPU:1", "CPU:2"], batched=True)
    graphs = partitions(mapper, X)
    assert placements(graphs, "Sin") == {"CPU:3": 2}
    assert placements(graphs, "Cos") == {"CPU:1": 1, "CPU:2": 1}


def test_gradients_go_through_the_original() -> None:
    mapper = devicemap.DeviceMap(lambda row: tf.nn.relu(row * scale), devices=["CPU:1", "CPU:2"])
    mapper(X)
    with tf.GradientTape() as tape:
        y = tf.reduce_sum(mapper(X))
    np.testing.assert_allclose(tape.gradient(y, scale), tf.reduce_sum(X), rtol=1e-5)


@pytest.mark.parametrize("batch_size", [None, 4])
def test_a_handle_without_its_variable_is_read_where_it_is(batch_size: int | None) -> None:
    variable = tf.Variable(2.0)

    def fn(row: Any) -> Any:
        return row * tf.raw_ops.ReadVariableOp(resource=variable.handle, dtype=tf.float32)

    mapper = devicemap.DeviceMap(fn, devices=["CPU:1", "CPU:2"], batch_size=batch_size)
    np.testing.assert_allclose(mapper(X), 2 * X)
    variable.assign(3.0)
    np.testing.assert_allclose(mapper(X), 3 * X)


def test_towers_know() -> None:
    towers = Towers(TWO, TWO[0], _traced(tf.sin), "fn", False)
    assert towers.optimized


def test_threads_may_ask_for_more_shards_than_are_kept() -> None:
    towers = Towers(TWO, TWO[0], _traced(tf.sin), "fn", False)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(6) as pool:
            sizes = [(i * 131) % 601 + 1 for i in range(3000)]
            for size, (shards, _) in zip(sizes, pool.map(towers.shards, sizes)):
                assert sum(map(len, shards)) == size
    finally:
        sys.setswitchinterval(interval)
