"""Programs that train a Keras model, an epoch each time they are asked: one process for each contender.

A second `tf.distribute.MirroredStrategy` in a process fails with the collective ops that it uses by default.
"""

from __future__ import annotations

import contextlib
import multiprocessing
from multiprocessing.connection import Connection
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import layers

import devicemap
from benchmarks import hardware


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


MODELS = {"mlp": mlp, "cnn": cnn, "lstm": lstm, "transformer": transformer}


def by_strategy(devices: list[str]) -> tuple[contextlib.AbstractContextManager[Any], Any, Any]:
    """Train by `tf.distribute.MirroredStrategy` with its default all-reduce."""
    strategy = tf.distribute.MirroredStrategy(devices)
    return strategy.scope(), lambda model: model, strategy.experimental_distribute_dataset


def by_devicemap(devices: list[str]) -> tuple[contextlib.AbstractContextManager[Any], Any, Any]:
    """Train by `parallelize`, with the batch normalization of the strategy, whose synchronized one has no gradient here."""
    return (
        contextlib.nullcontext(),
        lambda model: devicemap.parallelize(model, devices, batch_norm="local"),
        lambda data: data,
    )


WAYS = {"MirroredStrategy": by_strategy, "devicemap.parallelize": by_devicemap}


class Contender:
    """A model that trains in a process of its own. A call runs an epoch and returns its loss."""

    def __init__(self, way: str, name: str, devices: int, steps: int, rows: int):
        processes = multiprocessing.get_context("spawn")
        self._connection, other = processes.Pipe()
        self._process = processes.Process(target=_serve, args=(other, way, name, devices, steps, rows), daemon=True)
        self._process.start()

    def __call__(self) -> list[float]:
        self._connection.send("epoch")
        loss: list[float] = self._connection.recv()
        return loss

    def close(self) -> None:
        """End the process."""
        self._connection.send("end")
        self._process.join()


def _serve(connection: Connection, way: str, name: str, devices: int, steps: int, rows: int) -> None:
    """Train a model, an epoch per message.

    The learning rate is 0, so that each epoch has the loss of the first, which all contenders have to give.
    """
    hardware.cut_devices(devices)
    scope, prepared, distributed = WAYS[way](hardware.all_devices()[:devices])
    keras.utils.set_random_seed(0)
    with scope:
        model = MODELS[name]()
        model.compile(keras.optimizers.SGD(0.0), "mse", jit_compile=False)
    model = prepared(model)
    x = np.random.default_rng(0).normal(size=(steps * rows, *model.input_shape[1:])).astype("f")
    data = tf.data.Dataset.from_tensor_slices((x, x.reshape(len(x), -1)[:, :1])).batch(rows)
    batches = iter(distributed(data.repeat()))
    fitted = False
    while connection.recv() == "epoch":
        if not fitted:
            loss, fitted = model.fit(data, verbose=0).history["loss"], True
        else:  # by its function alone: a new iterator would retrace it for the strategy
            model.reset_metrics()
            for _ in range(steps):
                logs = model.train_function(batches)
            loss = [float(logs["loss"])]
        connection.send(loss)
