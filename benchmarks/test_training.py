"""Epochs of Keras models, by `tf.distribute.MirroredStrategy` and by `parallelize`: the same batches, by Keras's own steps.

The learning rate is 0, so that each epoch has the loss of the first, which all ways have to give.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import devicemap
from benchmarks.conftest import Scale
from benchmarks.measuring import compare

STEPS = 16
"""In an epoch."""

ROWS = 8
"""Of each device, in each step: few, so that what is timed is what the ways add."""

MOST = 0.50


def mlp() -> keras.Model:
    return keras.Sequential([keras.Input([32]), *(layers.Dense(64, "relu") for _ in range(6)), layers.Dense(1)])


def cnn() -> keras.Model:
    hidden = []
    for filters in (8, 16):
        hidden += [layers.Conv2D(filters, 3), layers.BatchNormalization(), layers.ReLU()]
    return keras.Sequential([keras.Input([12, 12, 3]), *hidden, layers.GlobalAveragePooling2D(), layers.Dense(1)])


def lstm() -> keras.Model:
    return keras.Sequential([keras.Input([16, 8]), layers.LSTM(32), layers.Dense(1)])


def transformer() -> keras.Model:
    x = inputs = keras.Input([16, 32])
    for _ in range(2):
        x = layers.LayerNormalization()(x + layers.MultiHeadAttention(4, 8)(x, x))
        x = layers.LayerNormalization()(x + layers.Dense(32)(layers.Dense(64, "gelu")(x)))
    return keras.Model(inputs, layers.Dense(1)(layers.GlobalAveragePooling1D()(x)))


def epochs(model: keras.Model, data: tf.data.Dataset, batches: Any) -> Callable[[], Any]:
    """Epochs, each of which tells its loss; the first by `fit`, all others by its function alone, which a new iterator would
    have traced anew for the strategy."""
    fitted = []

    def epoch() -> Any:
        if not fitted:
            fitted.append(model.fit(data, verbose=0))
            return fitted[0].history["loss"]
        model.reset_metrics()
        for _ in range(len(data)):
            logs = model.train_function(batches)
        return [logs["loss"]]

    return epoch


@pytest.mark.parametrize("make", [mlp, cnn, lstm, transformer])
def test_epoch(benchmark: Any, real_devices: list[str], scale: Scale, make: Callable[[], keras.Model]) -> None:
    def made(scope: contextlib.AbstractContextManager[Any]) -> keras.Model:
        keras.utils.set_random_seed(0)
        with scope:
            model = make()
            model.compile(keras.optimizers.SGD(0.0), "mse", jit_compile=False)
        return model

    # Not the collective ops that it takes by itself: those of a second strategy in a process fail.
    strategy = tf.distribute.MirroredStrategy(real_devices, tf.distribute.ReductionToOneDevice())
    mirrored = made(strategy.scope())
    # as the strategy has it, whose synchronized one has no gradient here
    ours = devicemap.parallelize(made(contextlib.nullcontext()), real_devices, batch_norm="local")
    steps, rows = 2 if scale.quick else STEPS, ROWS * len(real_devices)
    random = np.random.default_rng(0)
    x = random.normal(size=(steps * rows, *ours.input_shape[1:])).astype("f")
    data = tf.data.Dataset.from_tensor_slices((x, x.reshape(len(x), -1)[:, :1])).batch(rows)
    ways = {
        "MirroredStrategy": epochs(mirrored, data, iter(strategy.experimental_distribute_dataset(data.repeat()))),
        "devicemap.parallelize": epochs(ours, data, iter(data.repeat())),
    }
    targets = {"most ratio": {"devicemap.parallelize": MOST}} if make is mlp else {}
    compare(
        benchmark, ways, topic="training", case=f"{make.__name__}, {steps} steps of {rows} rows", rounds=scale.rounds,
        devices=len(real_devices), targets=targets, patience_seconds=10.0,
    )  # fmt: skip
