"""A row takes the memory that the plan tells, by TensorFlow's allocator, on one GPU of 2 GiB."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from simulators.softgpus.parts import gpus as gpus

import devicemap

with tf.device("GPU:0"):
    tf.zeros([300 << 20])  # one region of memory, instead of ever larger ones, which are left in pieces

w, v = tf.Variable(tf.ones([64, 256])), tf.Variable(tf.ones([256, 32]))
kernel = tf.Variable(tf.ones([3, 3, 3, 8]))


def normal(*shape: int) -> Any:
    with tf.device("CPU:0"):
        return tf.random.stateless_normal(shape, [1, 2])


def rows(count: int) -> Any:
    return normal(count, 64)


def short_rows(count: int) -> Any:
    return normal(count, 32)


def pictures(count: int) -> Any:
    return normal(count, 16, 16, 3)


def ragged(count: int) -> Any:
    lengths = np.random.default_rng(0).integers(1, 40, size=count)
    with tf.device("CPU:0"):
        return tf.RaggedTensor.from_row_lengths(normal(lengths.sum()), lengths)


def dense(x: Any) -> Any:
    return tf.nn.relu(x @ w + 1.0) @ v


def dense_of_row(row: Any) -> Any:
    return tf.linalg.matvec(v, tf.nn.relu(tf.linalg.matvec(w, row, transpose_a=True)), transpose_a=True)


def convolution(x: Any) -> Any:
    return tf.reduce_mean(tf.nn.relu(tf.nn.conv2d(x, kernel, 1, "SAME")), [1, 2])


def looping(row: Any) -> Any:
    return tf.while_loop(lambda i, _: i < 9, lambda i, state: (i + 1, tf.sin(state) + row), (0, row))[1]


def several(row: Any) -> Any:
    a, b = tf.sin(row), tf.cos(row)
    c = a * b + row
    return tf.reduce_sum(tf.nn.softmax(c) * a) + c


def outer(row: Any) -> Any:
    return tf.reduce_sum(tf.exp(-((row[:, None] * row[None, :]) ** 2)), 0)


def keras() -> tf.keras.Model:
    layers = tf.keras.layers
    convolved = [layers.Conv2D(8, 3, activation="relu"), layers.MaxPool2D(), layers.Flatten()]
    return tf.keras.Sequential([tf.keras.Input([16, 16, 3]), *convolved, layers.Dense(10, activation="softmax")])


def peak_bytes(mapper: devicemap.DeviceMap, data: Any) -> int:
    """The least of three: steps of a loop overlap now and then."""
    mapper(data)
    peaks = []
    for _ in range(3):
        tf.config.experimental.reset_memory_stats("GPU:0")
        before = tf.config.experimental.get_memory_info("GPU:0")["current"]
        mapper(data)
        peaks.append(tf.config.experimental.get_memory_info("GPU:0")["peak"] - before)
    return min(peaks)


ONE_BY_ONE, BATCHED = {"vectorize": False}, {"batched": True}
CASES: dict[str, tuple[Callable[[Any], Any], Callable[[int], Any], int, dict[str, Any]]] = {
    "dense, batched": (dense, rows, 1 << 14, BATCHED),
    "dense": (dense_of_row, rows, 1 << 14, {}),
    "dense, one by one": (dense_of_row, rows, 500, ONE_BY_ONE),
    "convolution": (convolution, pictures, 1 << 12, BATCHED),
    "loop": (looping, rows, 1 << 14, {}),
    "loop, batched": (looping, rows, 1 << 14, BATCHED),
    "several": (several, rows, 1 << 14, {}),
    "several, one by one": (several, rows, 500, ONE_BY_ONE),
    "outer": (outer, short_rows, 1 << 12, {}),
    "Keras": (keras(), pictures, 1 << 12, BATCHED),
    "ragged": (lambda row: tf.reduce_sum(tf.sin(row)), ragged, 100, {}),
    "to ragged": (lambda row: tf.sin(row) * 2, ragged, 100, {}),
    "ragged, batched": (lambda batch: tf.reduce_sum(batch * batch, 1), ragged, 1 << 14, BATCHED),
    "ragged to dense": (lambda batch: tf.reduce_sum(tf.sin(batch.to_tensor()), 1), ragged, 1 << 16, BATCHED),
}


@pytest.mark.parametrize("case", CASES)
def test_a_row_takes_what_the_plan_tells(case: str) -> None:
    if case == "to ragged" and tf.__version__.startswith("2.16."):
        pytest.skip("this TensorFlow takes the list of results to the device and back in each step")
    fn, data, few, options = CASES[case]
    mapper = devicemap.DeviceMap(fn, devices="GPU:0", output_device="CPU:0", **options)
    measured = (peak_bytes(mapper, data(2 * few)) - peak_bytes(mapper, data(few))) / few
    told = mapper.explain(data(few)).memory_bytes_per_row
    assert told is not None
    assert 0.9 <= told / measured <= 1.2, (told, measured)
