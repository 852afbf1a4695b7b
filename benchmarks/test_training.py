"""Epochs of Keras models with `tf.distribute.MirroredStrategy` and with `parallelize`: the same batches, in Keras's own steps.

The last case takes a step on simulated accelerators, and compares it with the ideal time.
"""

from __future__ import annotations

from typing import Any

import keras
import pytest
import tensorflow as tf

import devicemap
from benchmarks.conftest import Scale
from benchmarks.epochs import MODELS, WAYS, Contender
from benchmarks.measuring import Way, compare
from benchmarks.simulator import Simulator
from benchmarks.test_pipeline import BACKWARD, stage_of

STEPS = 16
"""In an epoch."""

ROWS = 8
"""Of each device, in each step: few, so that what is timed is what the ways add."""

OURS = "devicemap.parallelize"

MOST = 0.50

LEAST = 0.95


@pytest.mark.parametrize("name", MODELS)
def test_epoch(benchmark: Any, real_devices: list[str], scale: Scale, name: str) -> None:
    steps, rows = 2 if scale.quick else STEPS, ROWS * len(real_devices)
    ways = {way: Contender(way, name, len(real_devices), steps, rows) for way in WAYS}
    targets = {"most ratio": {OURS: MOST}} if name == "mlp" and len(real_devices) == 8 else {}
    try:
        compare(
            benchmark, ways, topic="training", case=f"{name}, {steps} steps of {rows} rows", rounds=scale.rounds,
            devices=len(real_devices), targets=targets, patience_seconds=10.0,
        )  # fmt: skip
    finally:
        for contender in ways.values():
            contender.close()


def test_step(benchmark: Any, sim: Simulator, accelerators: list[str], scale: Scale) -> None:
    """A step of a layer that keeps its accelerator busy forwards and backwards."""
    sim.reset()
    rows = 4 * len(accelerators)
    work = stage_of(sim, scale.job_seconds * len(accelerators) / rows / (1 + BACKWARD))
    x = tf.random.normal([rows, 16])

    def step_of(devices: list[str]) -> Way:
        keras.utils.set_random_seed(0)
        hidden = keras.layers.Dense(16), keras.layers.Lambda(work), keras.layers.Dense(16)
        model = keras.Sequential([keras.Input([16]), *hidden])
        model.compile(keras.optimizers.SGD(0.0), "mse", jit_compile=False)
        if len(devices) > 1:
            devicemap.parallelize(model, devices)
        return lambda: model.train_on_batch(x, x)

    compare(
        benchmark, {OURS: step_of(accelerators), "one device": step_of(accelerators[:1])}, topic="training",
        case="a step on simulated accelerators", rounds=scale.rounds, devices=len(accelerators),
        ideal_seconds=scale.job_seconds, targets={"least share": {OURS: LEAST}},
    )  # fmt: skip
