"""What a training step sends, and what each GPU keeps, by the log of copies and TensorFlow's allocator."""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import devicemap
from benchmarks import softgpu

COUNT = 4
gpus = softgpu.start(COUNT, 128 << 20)

WIDTH, LAYERS, ROWS = 128, 8, 32


def step_of(model: keras.Model, data: Any, rows: int, drop_remainder: bool, **options: Any) -> Callable[[], None]:
    """Parallelize a model, train it for two steps, and return what makes one more step."""
    devicemap.parallelize(model, **options)
    batches = data.batch(rows, drop_remainder=drop_remainder)
    model.fit(batches, steps_per_epoch=2, shuffle=False, verbose=0)
    iterator = iter(batches)

    def step() -> None:
        model.train_function(iterator)
        time.sleep(0.2)  # what is enqueued ends

    return step


def trained(spread: bool, batch_norm: bool = False, drop_remainder: bool = False, optimizer: Any = "adam") -> Any:
    """A parallelized model, and what makes one more step."""
    with devicemap.spread_variables() if spread else contextlib.nullcontext():
        layers: list[Any] = [keras.Input([WIDTH])]
        for _ in range(LAYERS):
            layers.append(keras.layers.Dense(WIDTH, "relu", use_bias=False))
            if batch_norm:
                layers.append(keras.layers.BatchNormalization())
        model = keras.Sequential(layers)
    model.compile(optimizer, "mse", jit_compile=False)
    x = np.random.default_rng(0).normal(size=[ROWS, WIDTH]).astype("float32")
    return model, step_of(model, tf.data.Dataset.from_tensor_slices((x, x)).repeat(), ROWS, drop_remainder)


def transferred(step: Any) -> tuple[Counter[str], Counter[str]]:
    """Bytes that come to and leave each GPU."""
    step()
    gpus.clear()
    step()
    came, went = Counter[str](), Counter[str]()
    for copy in gpus.copies():
        came[copy.receiver] += copy.bytes
        went[copy.sender] += copy.bytes
    return came, went


ROWS_AND_RESULTS = 3 * ROWS * WIDTH * 4 + 1024
"""What comes besides: rows, targets, outputs, and numbers."""

BY_HOST = 2 * ROWS * WIDTH * 4
"""Outputs of an unknown number of rows, and their gradients, come by the host."""

STATISTICS = 8 * WIDTH * 4 * (COUNT - 1) * LAYERS
"""Of batch normalization, and their gradients."""


def test_spread_variables_take_alike_of_each_gpu() -> None:
    """First, as models of other tests stay on GPU:0 for a while."""
    _, step = trained(True)
    names = [f"GPU:{gpu}" for gpu in range(COUNT)]
    before = [tf.config.experimental.get_memory_info(name)["current"] for name in names]
    peaks = []
    for _ in range(8):  # updates of two variables overlap now and then
        for name in names:
            tf.config.experimental.reset_memory_stats(name)
        step()
        peaks.append([tf.config.experimental.get_memory_info(name)["peak"] for name in names])
    least = np.min(peaks, 0)
    assert all(least > before)
    assert max(least) <= 1.3 * min(least)


@pytest.mark.parametrize("drop_remainder", [True, False])
@pytest.mark.parametrize("batch_norm", [False, True])
def test_no_gpu_sends_or_gets_more_than_twice_the_variables(batch_norm: bool, drop_remainder: bool) -> None:
    model, step = trained(False, batch_norm, drop_remainder)
    size = sum(variable.value.shape.num_elements() * 4 for variable in model.variables)
    came, went = transferred(step)
    besides = ROWS_AND_RESULTS + STATISTICS * batch_norm + BY_HOST * (not drop_remainder)
    for gpu in range(COUNT):
        assert max(came[f"GPU:{gpu}"], went[f"GPU:{gpu}"]) <= 2 * size + besides
    assert came["host"] < ROWS_AND_RESULTS + BY_HOST * (not drop_remainder)


def test_small_variables_are_sent_together() -> None:
    """Their values, and their gradients, cross each edge of the tree once. Each edge also has rows and results."""
    _, step = trained(False)
    transferred(step)
    assert sum(copy.kind == "between" for copy in gpus.copies()) <= 4 * (COUNT - 1)


def test_steps_of_recurrent_layers_send_nothing() -> None:
    """Copies are of variables, gradients, statistics, results, and their numbers of rows."""
    recurrent = keras.layers.LSTM(16, use_cudnn=False), keras.layers.BatchNormalization()
    model = keras.Sequential([keras.Input([20, 8]), *recurrent, keras.layers.Dense(1)])
    model.compile("sgd", "mse", jit_compile=False)
    data = tf.data.Dataset.from_tensors((np.ones([20, 8], "f"), np.ones([1], "f"))).repeat()
    transferred(step_of(model, data, ROWS, True))
    assert sum(copy.kind == "between" for copy in gpus.copies()) <= 12 * (COUNT - 1)


def test_no_gradients_of_frozen_variables_are_sent() -> None:
    """Copies into GPU:0 are those of the gradients of the head."""
    base = keras.Sequential([keras.layers.Dense(120) for _ in range(6)])
    base.trainable = False
    model = keras.Sequential([keras.Input([4]), base, keras.layers.Dense(1)])
    model.compile("sgd", "mse", jit_compile=False)
    data = tf.data.Dataset.from_tensors((np.ones([4], "f"), np.ones([1], "f"))).repeat()
    transferred(step_of(model, data, ROWS, True))
    came = sum(copy.bytes for copy in gpus.copies() if copy.kind == "between" and copy.receiver == "GPU:0")
    assert 0 < came < 8 * 121 * (COUNT - 1)


@pytest.mark.parametrize("batch_norm", [False, True])
def test_spread_variables_are_summed_and_updated_where_they_are(batch_norm: bool) -> None:
    adam = keras.optimizers.Adam(use_ema=True, clipnorm=1.0, weight_decay=0.01)
    model, step = trained(True, batch_norm, optimizer=adam)
    matrices = [variable for variable in model.trainable_variables if len(variable.shape) > 1]
    size = sum(variable.value.shape.num_elements() * 4 for variable in model.variables)
    besides = ROWS_AND_RESULTS + STATISTICS * batch_norm + BY_HOST
    came, went = transferred(step)
    for gpu in range(COUNT):
        assert max(came[f"GPU:{gpu}"], went[f"GPU:{gpu}"]) <= 2 * size * (COUNT - 1) / COUNT + besides
    assert came["host"] < besides
    homes = {variable.path: variable.value.device for variable in matrices}
    assert len(set(homes.values())) == COUNT
    slots = [variable.value.device for variable in model.optimizer.variables if len(variable.shape) > 1]
    assert Counter(slots) == {home: count * len(slots) // LAYERS for home, count in Counter(homes.values()).items()}


def test_microbatches_are_added_before_they_are_sent() -> None:
    model = keras.Sequential([keras.Input([WIDTH]), *(keras.layers.Dense(WIDTH, "relu") for _ in range(LAYERS))])
    model.compile("sgd", "mse", jit_compile=False)
    data = tf.data.Dataset.from_tensors((np.ones([WIDTH], "f"), np.ones([WIDTH], "f"))).repeat()
    came, went = transferred(step_of(model, data, ROWS, True, accumulate=4))
    size = 4 * model.count_params()
    for gpu in range(COUNT):
        assert max(came[f"GPU:{gpu}"], went[f"GPU:{gpu}"]) <= 2 * size + ROWS_AND_RESULTS


@pytest.mark.parametrize("drop_remainder", [True, False])
@pytest.mark.parametrize("batch_norm", [False, True])
def test_outputs_stay_where_their_losses_are(batch_norm: bool, drop_remainder: bool) -> None:
    """Neither outputs nor their gradients leave a GPU if all losses and metrics have a value for each row."""
    rows, classes = 64, 4096
    norm = [keras.layers.BatchNormalization()] if batch_norm else []
    hidden = keras.layers.Dense(8), *norm, keras.layers.Dropout(0.1)
    model = keras.Sequential([keras.Input([8]), *hidden, keras.layers.Dense(classes, "softmax")])
    loss = "sparse_categorical_crossentropy"
    model.compile("sgd", loss, metrics=[loss], jit_compile=False)
    data = tf.data.Dataset.from_tensors((np.ones([8], "f"), np.int32(1))).repeat()
    step = step_of(model, data, rows, drop_remainder)
    assert model.explain(np.ones([rows, 8], "f")).gathered_for == ()
    came, went = transferred(step)
    size = sum(variable.value.shape.num_elements() * 4 for variable in model.variables)
    for gpu in range(COUNT):
        times = 2 if batch_norm else 1 if gpu else COUNT - 1
        assert max(came[f"GPU:{gpu}"], went[f"GPU:{gpu}"]) <= times * size + rows * classes
    assert came["host"] < rows * classes


class Chained(keras.Model):
    """A step in which a layer takes what another one returns."""

    def __init__(self) -> None:
        super().__init__()
        self.first = keras.Sequential([keras.layers.Dense(WIDTH), keras.layers.BatchNormalization()])
        self.last = keras.Sequential([keras.layers.BatchNormalization(), keras.layers.Dense(1)])

    def train_step(self, data: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(
                (self.last(tf.tanh(self.first(data[0], training=True)), training=True) - data[1]) ** 2
            )
        variables = self.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables))
        return {"cost": loss}


@pytest.mark.parametrize("drop_remainder", [True, False])
def test_what_layers_return_does_not_go_by_the_host(drop_remainder: bool) -> None:
    rows = 512
    model = Chained()
    model.compile("sgd", jit_compile=False)
    data = tf.data.Dataset.from_tensors((np.ones([WIDTH], "f"), np.ones([1], "f"))).repeat()
    came, _ = transferred(step_of(model, data, rows, drop_remainder))
    assert came["host"] < rows * WIDTH * 4 / COUNT


def blocks(narrow: int, wide: int, count: int) -> keras.Model:
    """Layers that make `count` tensors as wide, each of which its gradient needs."""
    keras.utils.set_random_seed(0)
    half = count // 2 - 1

    def block(name: str) -> keras.Model:
        hidden = [keras.layers.Activation("tanh") for _ in range(half)]
        return keras.Sequential([keras.layers.Dense(wide, "tanh"), *hidden, keras.layers.Dense(narrow)], name=name)

    model = keras.Sequential([keras.Input([narrow]), block("wide"), block("other")])
    model.compile(keras.optimizers.Adam(0.01), "mse", metrics=["mae"], jit_compile=False)
    return model


def peak_bytes(model: keras.Model, x: Any) -> int:
    """That of a step on the last GPU, where nothing is gathered."""
    gpu = f"GPU:{COUNT - 1}"
    model.train_on_batch(x, x)
    tf.config.experimental.reset_memory_stats(gpu)
    before = tf.config.experimental.get_memory_info(gpu)["current"]
    model.train_on_batch(x, x)
    return tf.config.experimental.get_memory_info(gpu)["peak"] - before


def test_microbatches_and_recomputation_take_less_memory() -> None:
    rows = 2048
    x = np.random.default_rng(0).normal(size=[COUNT * rows, 16]).astype("float32")

    def measured(**options: Any) -> int:
        return peak_bytes(devicemap.parallelize(blocks(16, 256, 20), **options), x)

    plain = measured()
    assert plain > 18 * rows * 256 * 4
    assert measured(accumulate=8) < 0.2 * plain
    assert measured(recompute=True) < 0.65 * plain
    assert measured(recompute=["wide"]) < 0.9 * plain
