"""What a training step sends, and what each GPU keeps, by the log of copies and TensorFlow's allocator."""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from simulators.softgpus.starting import start

import devicemap
from devicemap.errors import FunctionError

COUNT = 4
gpus = start(COUNT, 256 << 20)

WIDTH, LAYERS, ROWS = 128, 8, 32


def trained(spread: bool, batch_norm: bool = False, drop_remainder: bool = False, **compiled: Any) -> tuple[Any, Any]:
    """A parallelized model, and what makes one more step."""
    with devicemap.spread_variables() if spread else contextlib.nullcontext():
        layers: list[Any] = [keras.Input([WIDTH])]
        for _ in range(LAYERS):
            layers.append(keras.layers.Dense(WIDTH, "relu", use_bias=False))
            if batch_norm:
                layers.append(keras.layers.BatchNormalization())
        model = keras.Sequential(layers)
    model.compile(**({"optimizer": "adam", "loss": "mse", "jit_compile": False} | compiled))
    devicemap.parallelize(model)
    random = np.random.default_rng(0)
    x = random.normal(size=[ROWS, WIDTH]).astype("float32")
    batches = tf.data.Dataset.from_tensor_slices((x, x)).batch(ROWS, drop_remainder=drop_remainder).repeat()
    model.fit(batches, steps_per_epoch=2, shuffle=False, verbose=0)
    iterator = iter(batches)

    def step() -> None:
        model.train_function(iterator)
        time.sleep(0.2)  # what is enqueued ends

    return model, step


def received(step: Any) -> Counter[str]:
    """Bytes that come to each GPU."""
    step()
    gpus.clear()
    step()
    came: Counter[str] = Counter()
    for copy in gpus.copies():
        came[copy.receiver] += copy.bytes
    return came


ROWS_AND_RESULTS = 3 * ROWS * WIDTH * 4 + 1024
"""What comes besides: rows, targets, outputs, and numbers."""


def test_spread_variables_take_alike_of_each_gpu() -> None:
    """First, as models of other tests stay on GPU:0 for a while."""
    _, step = trained(True)
    for gpu in range(COUNT):
        tf.config.experimental.reset_memory_stats(f"GPU:{gpu}")
    before = [tf.config.experimental.get_memory_info(f"GPU:{gpu}")["current"] for gpu in range(COUNT)]
    step()
    peaks = [tf.config.experimental.get_memory_info(f"GPU:{gpu}")["peak"] for gpu in range(COUNT)]
    assert all(peak > held for peak, held in zip(peaks, before))
    assert max(peaks) <= 1.3 * min(peaks)


@pytest.mark.parametrize("drop_remainder", [True, False])
@pytest.mark.parametrize("batch_norm", [False, True])
def test_with_one_home_values_go_to_each_and_gradients_home(batch_norm: bool, drop_remainder: bool) -> None:
    model, step = trained(False, batch_norm, drop_remainder)
    size = sum(variable.value.shape.num_elements() * 4 for variable in model.variables)
    came = received(step)
    besides = ROWS_AND_RESULTS + 8 * WIDTH * 4 * (COUNT - 1) * LAYERS * batch_norm  # statistics, and their gradients
    assert came["GPU:0"] <= size * (COUNT - 1) + besides
    for gpu in range(1, COUNT):
        assert came[f"GPU:{gpu}"] <= size + besides
    assert came["host"] < ROWS_AND_RESULTS


@pytest.mark.parametrize("optimizer", ["adam", "adamw", "ema", "clipped"])
def test_spread_variables_are_summed_and_updated_where_they_are(optimizer: str) -> None:
    adam = {
        "adam": keras.optimizers.Adam(),
        "adamw": keras.optimizers.AdamW(weight_decay=0.01),
        "ema": keras.optimizers.Adam(use_ema=True),
        "clipped": keras.optimizers.Adam(clipnorm=1.0),
    }[optimizer]
    model, step = trained(True, optimizer=adam)
    size = sum(variable.value.shape.num_elements() * 4 for variable in model.trainable_variables)
    came = received(step)
    for gpu in range(COUNT):
        assert came[f"GPU:{gpu}"] <= 2 * size * (COUNT - 1) / COUNT + ROWS_AND_RESULTS
    assert came["host"] < ROWS_AND_RESULTS
    homes = {variable.path: variable.value.device for variable in model.trainable_variables}
    assert len(set(homes.values())) == COUNT
    slots = [variable.value.device for variable in model.optimizer.variables if len(variable.shape) > 1]
    assert Counter(slots) == {home: count * len(slots) // LAYERS for home, count in Counter(homes.values()).items()}


def test_out_of_memory_says_what_to_do() -> None:
    model, _ = trained(False)
    x = np.zeros([2**20, WIDTH], "float32")
    with tf.device("CPU:0"):
        batches = tf.data.Dataset.from_tensors((x, x))
    with pytest.raises(tf.errors.ResourceExhaustedError, match="batch_size") as raised:
        model.fit(batches, shuffle=False, verbose=0)
    assert isinstance(raised.value, FunctionError)
