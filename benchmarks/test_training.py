"""Epochs of Keras models with `tf.distribute.MirroredStrategy` and with `parallelize`: the same batches, in Keras's own steps.

Each model trains in a process of its own: a second `MirroredStrategy` in a process fails with the collective ops that it uses
by default. The last case takes a step on simulated accelerators, and compares it with the ideal time.
"""

from __future__ import annotations

import contextlib
import functools
from multiprocessing.connection import Connection

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import devicemap
from benchmarks import hardware
from benchmarks.conftest import Scale
from benchmarks.measuring import Compare, Way
from benchmarks.programs import Program
from benchmarks.simulator import Simulator
from benchmarks.test_pipeline import BACKWARD, stage_of

STEPS = 16
"""In an epoch."""

ROWS = 8
"""Of each device, in each step: few, so that what is timed is what the ways add."""

PEER, OURS = "MirroredStrategy", "devicemap.parallelize"

MOST = 0.50

LEAST = 0.95


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


def _train(connection: Connection, way: str, name: str, devices: int, steps: int, rows: int) -> None:
    """Train a model, an epoch per message, and send its loss.

    The strategy has its default all-reduce, and devicemap the strategy's batch normalization: its synchronized one has no
    gradient here. The learning rate is 0, so that each epoch has the loss of the first, which both ways have to give.
    """
    hardware.cut_devices(devices)
    names = hardware.all_devices()[:devices]
    strategy = tf.distribute.MirroredStrategy(names) if way == PEER else None
    keras.utils.set_random_seed(0)
    with strategy.scope() if strategy else contextlib.nullcontext():
        model = MODELS[name]()
        model.compile(keras.optimizers.SGD(0.0), "mse", jit_compile=False)
    x = np.random.default_rng(0).normal(size=(steps * rows, *model.input_shape[1:])).astype("f")
    data = tf.data.Dataset.from_tensor_slices((x, x.reshape(len(x), -1)[:, :1])).batch(rows)
    batches = data.repeat()
    if strategy:
        batches = strategy.experimental_distribute_dataset(batches)
    else:
        devicemap.parallelize(model, names, batch_norm="local")
    connection.recv()
    connection.send(model.fit(data, verbose=0).history["loss"])
    batches = iter(batches)
    while connection.recv():  # by its function alone: a new iterator would retrace it for the strategy
        model.reset_metrics()
        for _ in range(steps):
            logs = model.train_function(batches)
        connection.send([float(logs["loss"])])


@pytest.mark.parametrize("name", MODELS)
def test_epoch(compare: Compare, real_devices: list[str], scale: Scale, name: str) -> None:
    steps, rows = 2 if scale.quick else STEPS, ROWS * len(real_devices)
    programs = {way: Program(_train, way, name, len(real_devices), steps, rows) for way in (PEER, OURS)}
    ways = {way: functools.partial(program.ask, "epoch") for way, program in programs.items()}
    targets = {"most ratio": {OURS: MOST}} if name == "mlp" and len(real_devices) == 8 else {}
    try:
        compare(ways, f"{name}, {steps} steps of {rows} rows", targets=targets, patience_seconds=10.0)
    finally:
        for program in programs.values():
            program.end()


def test_step(compare: Compare, sim: Simulator, accelerators: list[str], scale: Scale) -> None:
    """A step of a layer that keeps its accelerator busy forwards and backwards."""
    sim.reset()
    rows = 4 * len(accelerators)
    work = stage_of(sim, scale.job_seconds * len(accelerators) / rows / (1 + BACKWARD))
    x = tf.random.normal([rows, 16])

    def step_of(devices: list[str]) -> Way:
        keras.utils.set_random_seed(0)
        hidden = layers.Dense(16), layers.Lambda(work), layers.Dense(16)
        model = keras.Sequential([keras.Input([16]), *hidden])
        model.compile(keras.optimizers.SGD(0.0), "mse", jit_compile=False)
        if len(devices) > 1:
            devicemap.parallelize(model, devices)
        return lambda: model.train_on_batch(x, x)

    ways = {OURS: step_of(accelerators), "one device": step_of(accelerators[:1])}
    targets = {"least share": {OURS: LEAST}}
    compare(ways, "a step on simulated accelerators", ideal_seconds=scale.job_seconds, targets=targets)
