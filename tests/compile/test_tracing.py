"""Law 3: fn is traced once, for all device counts, sizes and calls; and how the loop over rows is chosen."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import devicemap
from devicemap.compile.random import row_seeds
from devicemap.compile.trace import trace
from devicemap.data.rows import as_rows
from devicemap.options import check_options

X = tf.reshape(tf.range(60, dtype=tf.float32), [20, 3])


class Counting:
    """A function that counts how often Python runs it."""

    def __init__(self, batched: bool = False) -> None:
        self.traces = 0

    def __call__(self, row: Any) -> Any:
        self.traces += 1
        return row * 2


@pytest.mark.in_ci(2)
@pytest.mark.parametrize("options", [{}, {"batched": True}, {"vectorize": False}, {"jit_compile": True}])
def test_one_trace_whatever_comes(options: dict[str, Any], devices: list[str]) -> None:
    if "jit_compile" in options and devices[0].startswith("GPU"):
        pytest.skip("not applicable: XLA does not compile for emulated GPUs")
    fn = Counting()
    mapper = devicemap.DeviceMap(fn, devices=devices, **options)
    for rows in (20, 1, 7, 0, 2, 20):
        np.testing.assert_allclose(mapper(X[:rows]), 2 * X[:rows])
        np.testing.assert_allclose(mapper(X.numpy()[:rows]), 2 * X[:rows])
    mapper(tf.data.Dataset.from_tensor_slices(X).batch(3) if options.get("batched") else _samples())
    tf.function(lambda x: mapper(x))(X)
    with tf.GradientTape() as tape:
        tape.watch(X)
        mapper(X)
    assert fn.traces == 1


def _samples() -> Any:
    return tf.data.Dataset.from_tensor_slices(X)


def test_a_new_dtype_rank_or_inner_shape_is_one_more() -> None:
    fn = Counting()
    mapper = devicemap.DeviceMap(fn, devices=["CPU:0", "CPU:1"])
    for data in (X, tf.cast(X, tf.int32), X[:, :2], X[:, :, None], X, X[:, :2]):
        mapper(data)
    assert fn.traces == 4


def test_parallel_map_remembers_its_function() -> None:
    fn = Counting()
    for _ in range(3):
        devicemap.parallel_map(fn, X, devices=["CPU:0", "CPU:1"])
        devicemap.parallel_map(fn, X[:1], devices=["CPU:0", "CPU:1"])
    assert fn.traces == 1
    devicemap.parallel_map(fn, X, devices=["CPU:1"])
    assert fn.traces == 2


def test_one_is_not_true() -> None:
    devicemap.parallel_map(tf.sin, X, batch_size=1)
    with pytest.raises(devicemap.errors.OptionError, match="batch_size=True"):
        devicemap.parallel_map(tf.sin, X, batch_size=True)


def test_threads_share_one_mapper_and_its_trace() -> None:
    fn = Counting()
    mapper = devicemap.DeviceMap(fn, devices=["CPU:0", "CPU:1", "CPU:2"])
    with ThreadPoolExecutor(8) as pool:
        sizes = [1, 20, 3, 7, 0, 12, 2, 5] * 4
        for size, y in zip(sizes, pool.map(lambda n: mapper(X[:n]), sizes)):
            np.testing.assert_allclose(y, 2 * X[:size])
    assert fn.traces == 1


def test_a_function_that_closes_over_the_users_graph() -> None:
    @tf.function
    def user(x: Any, scale: Any) -> Any:
        return devicemap.parallel_map(lambda row: row * scale, x, devices=["CPU:0", "CPU:1"])

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
    mapper = devicemap.DeviceMap(layer, devices=["CPU:1", "CPU:2"])
    np.testing.assert_allclose(mapper(X), X * [1.0, 2.0, 3.0])
    layer.weight.assign([0.0, 0.0, 1.0])
    np.testing.assert_allclose(mapper(X), X * [0.0, 0.0, 1.0])


def test_an_unbuilt_keras_model() -> None:
    model = tf.keras.Sequential([tf.keras.layers.Dense(4), tf.keras.layers.Dense(2)])
    y = devicemap.parallel_map(model, X, batched=True, devices=["CPU:1", "CPU:2"])
    np.testing.assert_allclose(y, model(X), rtol=1e-5, atol=1e-5)


def _traced(fn: Any, data: Any, **options: Any) -> Any:
    return trace(fn, as_rows(data).specs, check_options(fn, options))


@pytest.mark.parametrize(
    ("fn", "data", "reason"),
    [
        (tf.sin, X, "every op of fn has a vectorised form"),
        (lambda row: row[0] + tf.random.normal([]), X, "every op of fn has a vectorised form"),
        (tf.io.decode_raw, tf.constant(["abcd"]), "could not"),
        (
            lambda s: tf.unique(tf.strings.bytes_split(s))[0],
            tf.constant(["abcd"]),
            "StringSplit has no vectorised form",
        ),
        (lambda row: tf.numpy_function(np.sin, [row], tf.float32), X, "PyFunc acts once per row"),
        (lambda row: tf.RaggedTensor.from_tensor(row[None]), X, "ragged or sparse"),
        (lambda row: tf.reduce_sum(row), tf.ragged.constant([[1.0], []]), "ragged or sparse"),
    ],
)
def test_why_rows_are_vectorised_or_not(fn: Any, data: Any, reason: str) -> None:
    if reason == "could not":
        with pytest.raises(devicemap.errors.FunctionError, match="could not be traced for one row"):
            _traced(fn, data)
        return
    traced = _traced(fn, data)
    assert traced.vectorized is reason.startswith("every op of fn has a vectorised form")
    assert reason in traced.reason


def test_the_choice_can_be_made_by_hand() -> None:
    assert not _traced(tf.sin, X, vectorize=False).vectorized
    assert _traced(tf.sin, X, vectorize=True).vectorized
    with pytest.raises(devicemap.errors.FunctionError, match="vectorize=True: Unique has no vectorised form"):
        _traced(lambda row: tf.unique(row)[0], X, vectorize=True)


def test_lists_that_grow_are_vectorised() -> None:
    """`tf.vectorized_map` converts them, too, and fails when it runs."""

    def powers(row: Any) -> Any:
        array = tf.TensorArray(tf.float32, 0, dynamic_size=True)
        for i in tf.range(4):
            array = array.write(i, row)
            row *= 2.0
        return array.stack()

    assert _traced(powers, X).vectorized
    np.testing.assert_array_equal(devicemap.parallel_map(powers, X, devices=["CPU:1", "CPU:2"]), tf.map_fn(powers, X))


def test_a_failed_conversion_leaves_no_trace_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    tf.get_logger().propagate = True
    try:
        _traced(lambda s: tf.strings.length(s), tf.constant(["abcd"]))
    finally:
        tf.get_logger().propagate = False
    assert caplog.records == []
    assert tf.get_logger().filters == []


def test_xla_compiles_a_shard_as_a_whole() -> None:
    fn = devicemap.DeviceMap(
        lambda batch: batch + tf.cast(tf.shape(batch)[0], tf.float32), batched=True, jit_compile=True, devices=["CPU:1"]
    )
    for rows in (1, 6, 13):
        np.testing.assert_array_equal(fn(X[:rows]), X[:rows] + rows)


@pytest.mark.parametrize(("batch_size", "sizes"), [(100, {100, 50}), ("auto", {2**i for i in range(8)})])
def test_chunks_for_xla_have_few_sizes(batch_size: int | str, sizes: set[int]) -> None:
    found = devicemap.DeviceMap(
        lambda batch: 0 * batch + tf.cast(tf.shape(batch)[0], tf.float32),
        batched=True, jit_compile=True, batch_size=batch_size, devices=["CPU:1", "CPU:2"],
    )(tf.zeros([1050 if batch_size == 100 else 1024, 1]))  # fmt: skip
    assert {int(size) for size in found[:, 0]} <= sizes


def test_row_seeds_differ_for_every_row_and_do_not_depend_on_the_cut() -> None:
    whole = row_seeds(7, 0, 100).numpy()
    assert whole.shape == (100, 2)
    assert len({tuple(seed) for seed in whole}) == 100
    np.testing.assert_array_equal(row_seeds(7, 40, 60), whole[40:])
    assert not set(map(tuple, row_seeds(8, 0, 100).numpy())) & set(map(tuple, whole))
    assert row_seeds(2**32 - 1, 2**31, 2).numpy().dtype == np.int32
