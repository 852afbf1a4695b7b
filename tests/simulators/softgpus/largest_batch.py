"""`BenchmarkResult.largest_batch` on two GPUs of 64 MiB: that batch runs, and 1.15 times as many rows do not."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import devicemap
from benchmarks import softgpu

COUNT = 2
gpus = softgpu.start(COUNT, 64 << 20)


def dense() -> keras.Model:
    layers = [keras.layers.Dense(1024, "relu"), keras.layers.Dense(1024, "relu"), keras.layers.Dense(16)]
    return keras.Sequential([keras.Input([256]), *layers])


def cnn() -> keras.Model:
    convolutions = [keras.layers.Conv2D(16, 3, activation="relu"), keras.layers.Conv2D(32, 3, activation="relu")]
    pooled = [keras.layers.GlobalAveragePooling2D(), keras.layers.Dense(10)]
    return keras.Sequential([keras.Input([32, 32, 3]), *convolutions, *pooled])


def lstm(features: int = 32, units: int = 64) -> keras.Model:
    layer = keras.layers.LSTM(units, use_cudnn=False)
    return keras.Sequential([keras.Input([20, features]), layer, keras.layers.Dense(4)])


def outer(row: Any) -> Any:
    return tf.reduce_sum(tf.sin(tf.tensordot(row, row, 0)))


def looped(row: Any) -> Any:
    total = tf.reduce_sum(row)
    while total > 10.0:  # as many steps as the row says
        total /= 2.0
    return tf.tile(row, [8]) * total


CASES: dict[str, tuple[Callable[[], Any], list[int], dict[str, Any]]] = {
    "vectorised": (lambda: outer, [128], {"vectorize": True}),
    "row by row": (lambda: looped, [512], {"vectorize": False}),
    "dense": (dense, [256], {"batched": True}),
    "cnn": (cnn, [32, 32, 3], {"batched": True}),
    # more features than units: TensorFlow computes gates of later steps ahead if there is memory
    "lstm": (lambda: lstm(512, 16), [20, 512], {"batched": True}),
}
"""Functions without variables first: they need most of a GPU in one piece, and models of other tests stay there a while."""


def random_rows(*shape: int) -> Any:
    with tf.device("CPU:0"):
        return tf.random.stateless_uniform(shape, [0, 0])


@pytest.fixture(autouse=True)
def _without_models_of_other_tests() -> None:
    keras.backend.clear_session()
    gc.collect()


def fits(call: Callable[..., Any], *data: Any) -> bool:
    gc.collect()
    try:
        call(*data)
    except tf.errors.ResourceExhaustedError:
        return False
    return True


@pytest.mark.parametrize("case", CASES)
def test_the_largest_batch_of_a_function(case: str) -> None:
    make, shape, options = CASES[case]
    fn = make()
    result = devicemap.benchmark(fn, random_rows(64, *shape), devices="GPU", rounds=1, seconds=120, **options)
    largest = result.largest_batch()
    assert largest
    assert result.no_memory is None

    def run(rows: int) -> bool:
        size = math.ceil(rows / COUNT)
        mapper = devicemap.DeviceMap(fn, devices="GPU", batch_size=size, prefetch=1, max_retries=0, **options)
        return fits(mapper, random_rows(rows, *shape))

    assert run(largest)
    assert not run(math.ceil(1.15 * largest))


@pytest.mark.parametrize("make", [dense, cnn, lstm])
def test_the_largest_batch_of_a_training_step(make: Callable[[], Any]) -> None:
    keras.utils.set_random_seed(0)
    model = make()
    model.compile("adam", "mse", metrics=["mae"], jit_compile=False)
    devicemap.parallelize(model)

    def data(rows: int) -> tuple[Any, Any]:
        return random_rows(rows, *model.input_shape[1:]), random_rows(rows, *model.output_shape[1:])

    model.train_on_batch(*data(64))
    variables = [*model.variables, *model.metrics_variables, *model.optimizer.variables]
    before = [variable.numpy() for variable in variables]
    largest = devicemap.benchmark(model, data(64), rounds=1, seconds=120).largest_batch()
    assert largest
    for variable, value in zip(variables, before):
        np.testing.assert_array_equal(variable.numpy(), value)
    assert fits(model.train_on_batch, *data(largest))
    assert not fits(model.train_on_batch, *data(math.ceil(1.15 * largest)))
