"""Train a grid of twelve small Keras models to read handwritten digits, one on each device at a time.

`devicemap.parallel_tasks` gives the next model to the first idle device. Each model equals one that is trained alone.
"""

from __future__ import annotations

import argparse
import itertools
import os
import time
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
import tensorflow as tf
from rich.console import Console
from rich.table import Table

import devicemap

try:
    from sklearn.datasets import load_digits
except ImportError as error:
    raise SystemExit(f"{error}; this example needs: pip install scikit-learn") from error

UNITS = (8, 16, 32, 64)
RATES = (1.0, 0.3, 0.1)
TRAINED = 1297  # of 1797 images; the others are for validation
SEED = 0


def load() -> tuple[np.ndarray, np.ndarray]:
    """Return images `[1797, 64]`, float32 in 0 to 1, and their digits `[1797]`, shuffled, the same each time."""
    ink, digits = load_digits(return_X_y=True)
    order = np.random.default_rng(SEED).permutation(len(ink))
    return (ink[order] / 16).astype(np.float32), digits[order]


def make_trainer(epochs: int) -> Any:
    """Return a function that trains a model with so many units and this learning rate, and returns its accuracy."""
    images, digits = load()  # all tasks read the same arrays

    def train(setting: tuple[int, float], device: str) -> tuple[float, str]:
        units, rate = setting
        seeds = [keras.initializers.GlorotUniform(SEED + i) for i in range(2)]
        model = keras.Sequential(
            [
                keras.Input([64]),
                keras.layers.Dense(units, "relu", kernel_initializer=seeds[0]),
                keras.layers.Dense(10, kernel_initializer=seeds[1]),
            ]
        )
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.SGD(rate), loss, metrics=["accuracy"])
        model.fit(images[:TRAINED], digits[:TRAINED], batch_size=50, epochs=epochs, shuffle=False, verbose=0)
        accuracy = model.evaluate(images[TRAINED:], digits[TRAINED:], verbose=0)[1]
        return accuracy, device.rpartition("device:")[2]

    return train


def main() -> None:
    """Read the flags, train all models, compare one with the same model trained alone, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=10, help="passes over the training images (10)")
    parser.add_argument("--simulate", type=int, help="cut the CPU into so many logical devices")
    options = parser.parse_args()
    if options.epochs < 1:
        raise SystemExit(f"--epochs is {options.epochs}; expected at least 1")
    if options.simulate or not tf.config.list_physical_devices("GPU"):
        devicemap.simulate_devices(options.simulate or 4)
    train, settings = make_trainer(options.epochs), list(itertools.product(UNITS, RATES))

    start = time.perf_counter()
    results = dict(zip(settings, devicemap.parallel_tasks(train, settings, name="models")))
    seconds = time.perf_counter() - start

    devices = len({device for _, device in results.values()})
    table = Table(
        "units", *(f"rate {rate:g}" for rate in RATES), title="Images read right, and the device that trained"
    )
    for units in UNITS:
        table.add_row(str(units), *("{:.1%} on {}".format(*results[units, rate]) for rate in RATES))
    Console().print(table)
    print(f"{len(settings)} models on {devices} devices in {seconds:.1f} s")
    best = max(results, key=lambda setting: results[setting][0])
    (alone,) = devicemap.parallel_tasks(train, [best], devices=devicemap.list_devices()[0])
    assert abs(alone[0] - results[best][0]) < 0.01, (alone, results[best])
    print(f"The best, {best[0]} units at rate {best[1]:g}, is as good when it is trained alone: {alone[0]:.1%}")


if __name__ == "__main__":
    main()
