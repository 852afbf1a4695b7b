"""Law 3: fn is traced once, for all device counts, sizes and calls."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial, wraps
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from graphs import traced
from ways import Counter

import devicemap

X = tf.reshape(tf.range(60, dtype=tf.float32), [20, 3])
TWO = ["CPU:1", "CPU:2"]


@pytest.mark.in_ci(2)
@pytest.mark.parametrize("options", [{}, {"batched": True}, {"vectorize": False}, {"jit_compile": True}])
def test_one_trace_whatever_comes(options: dict[str, Any], devices: list[str]) -> None:
    if "jit_compile" in options and devices[0].startswith("GPU"):
        pytest.skip("not applicable: XLA does not compile for emulated GPUs")
    fn = Counter(lambda row: row * 2)
    mapper = devicemap.DeviceMap(fn, devices=devices, **options)
    with ThreadPoolExecutor(8) as pool:
        sizes = [1, 20, 3, 7, 0, 12, 2, 5] * 4
        for size, y in zip(sizes, pool.map(lambda n: mapper(X[:n]), sizes)):
            np.testing.assert_allclose(y, 2 * X[:size])
    mapper(X.numpy()[:7])
    samples = tf.data.Dataset.from_tensor_slices(X)
    mapper(samples.batch(3) if options.get("batched") else samples)
    tf.function(lambda x: mapper(x))(X)
    with tf.GradientTape() as tape:
        tape.watch(X)
        mapper(X)
    assert fn.count == 1


@pytest.mark.parametrize(("name", "scope"), [("my map", "my_map_1_"), ("→", "fn_1_")])
def test_a_graph_is_inlined_and_its_ops_have_the_name_of_the_map(name: str, scope: str) -> None:
    variable = tf.Variable(2.0)
    mapper = devicemap.DeviceMap(lambda row: variable * row, devices=TWO, name=name)
    graph = tf.function(lambda x: mapper(x)).get_concrete_function(X).graph.as_graph_def()
    inner = [node.name for function in graph.library.function for node in function.node_def]
    assert any(node.startswith(scope) for node in inner)
    assert not any(function.attr["_noinline"].b for function in graph.library.function)


def test_a_new_dtype_rank_or_inner_shape_is_one_more() -> None:
    fn = Counter(lambda row: row * 2)
    mapper = devicemap.DeviceMap(fn, devices=TWO)
    for data in (X, tf.cast(X, tf.int32), X[:, :2], X[:, :, None], X, X[:, :2]):
        mapper(data)
    assert fn.count == 4


def test_parallel_map_and_parallel_reduce_remember_their_function() -> None:
    for call in (devicemap.parallel_map, partial(devicemap.parallel_reduce, reducer="sum")):
        fn = Counter(lambda row: row * 2)
        for devices, traces in ((TWO, 1), (["CPU:1"], 2)):
            for rows in (20, 1, 20):
                call(fn, X[:rows], devices=devices)
            assert fn.count == traces
    devicemap.parallel_map(tf.sin, X, batch_size=1)
    with pytest.raises(devicemap.errors.OptionError, match="batch_size=True"):  # which equals 1
        devicemap.parallel_map(tf.sin, X, batch_size=True)


FACTOR = 2.0
TRACES = Counter()


def _global(row: Any) -> Any:
    other = TRACES(row)
    return tf.map_fn(lambda each: _times_factor(each) + 0 * other[0], row)


def _times_factor(row: Any) -> Any:
    return row * FACTOR


class _Method:
    def of(self, row: Any) -> Any:
        return _times_factor(TRACES(row))


@pytest.mark.parametrize("kind", ["global", "nonlocal", "partial", "decorated", "method"])
@pytest.mark.parametrize("number", [float, np.float32])
def test_parallel_map_notices_other_numbers(kind: str, number: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    nonlocal_factor, traces, method = 0.0, TRACES.count, _Method()
    fn: Any = {
        "global": _global,
        "nonlocal": lambda row: row * nonlocal_factor,
        "partial": partial(lambda other, row: _times_factor(row), 0),
        "decorated": wraps(_times_factor)(lambda row: _times_factor(row)),
        "method": method.of,
    }[kind]
    for factor in (2.0, 2.0, 3.0, 3.0):
        nonlocal_factor = number(factor)
        monkeypatch.setattr(sys.modules[__name__], "FACTOR", nonlocal_factor)
        np.testing.assert_array_equal(devicemap.parallel_map(fn, X), factor * X)
    assert TRACES.count - traces == (2 if kind in ("global", "method") else 0)


def test_a_function_that_closes_over_the_users_graph() -> None:
    @tf.function
    def user(x: Any, scale: Any) -> Any:
        return devicemap.parallel_map(lambda row: row * scale, x, devices=TWO)

    np.testing.assert_allclose(user(X, tf.constant(3.0)), 3 * X)
    np.testing.assert_allclose(user(X[:5], tf.constant(4.0)), 4 * X[:5])


def test_variables_made_on_first_call() -> None:
    class Layer(tf.Module):
        weight: Any = None

        def __call__(self, row: Any) -> Any:
            if self.weight is None:
                self.weight = tf.Variable([1.0, 2.0, 3.0])
            return row * self.weight

    layer = Layer()
    mapper = devicemap.DeviceMap(layer, devices=TWO)
    np.testing.assert_allclose(mapper(X), X * [1.0, 2.0, 3.0])
    layer.weight.assign([0.0, 0.0, 1.0])
    np.testing.assert_allclose(mapper(X), X * [0.0, 0.0, 1.0])


def test_conversions_leave_no_trace_in_the_log(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Autograph would take long, and log that it cannot convert some functions of the library."""
    mapper = devicemap.DeviceMap(lambda number: 2 * number, devices=TWO)
    monkeypatch.setattr(tf.get_logger(), "propagate", True)
    traced(devicemap.DeviceMap(lambda s: tf.strings.length(s), devices=TWO), tf.constant(["abcd"]))
    np.testing.assert_array_equal(tf.map_fn(mapper, X), 2 * X)
    assert caplog.records == []
    assert tf.get_logger().filters == []


def _size_of_batch(batch: Any) -> Any:
    return 0 * batch + tf.cast(tf.shape(batch)[0], tf.float32)


def test_xla_compiles_a_shard_as_a_whole_and_chunks_of_few_sizes() -> None:
    options = {"batched": True, "jit_compile": True}
    mapper = devicemap.DeviceMap(_size_of_batch, devices=["CPU:1"], **options)
    for rows in (1, 6, 13):
        np.testing.assert_array_equal(mapper(X[:rows]), np.full([rows, 3], rows))
    for batch_size, rows, sizes in ((100, 1050, {100, 50}), ("auto", 1024, {2**i for i in range(8)})):
        mapper = devicemap.DeviceMap(_size_of_batch, devices=TWO, batch_size=batch_size, **options)
        assert {int(size) for size in mapper(tf.zeros([rows, 1]))[:, 0]} <= sizes
