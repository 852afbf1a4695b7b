"""Train a Keras model to read handwritten digits, on one device and on all of them: the curves lie on each other.

A convolutional network with batch normalization, fitted by Keras's own `fit`; `devicemap.parallelize` is one more line.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
import tensorflow as tf

import devicemap

try:
    import matplotlib
    from matplotlib.figure import Figure  # draws with Agg where there is no pyplot
    from sklearn.datasets import load_digits
except ImportError as error:
    raise SystemExit(f"{error}; this example needs: pip install scikit-learn matplotlib") from error

BATCH_SIZE = 100  # of all devices together; the last batch has fewer
LOGICAL = 8  # devices that a CPU is cut into where there is no GPU
FOR_VALIDATION = 0.3  # of the images
TOLERANCE = 0.02  # of losses after some hundred steps, over which differences of rounding grow
ORANGE, BLUE = "#d55e00", "#0072b2"

History = dict[str, list[float]]


def load() -> tuple[np.ndarray, np.ndarray]:
    """Images `[1797, 8, 8, 1]`, float32 in 0 to 1, and their digits `[1797]`, shuffled, the same each time."""
    ink, digits = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(ink))
    return (ink[order].reshape(-1, 8, 8, 1) / 16).astype(np.float32), digits[order]


def make_model() -> keras.Model:
    """The same weights each time."""
    keras.utils.set_random_seed(0)
    hidden = []
    for filters in (16, 32):
        hidden += [
            keras.layers.Conv2D(filters, 3, padding="same"),
            keras.layers.BatchNormalization(momentum=0.9),
            keras.layers.ReLU(),
        ]
        hidden.append(keras.layers.MaxPooling2D())
    model = keras.Sequential([keras.Input([8, 8, 1]), *hidden, keras.layers.Flatten(), keras.layers.Dense(10)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.05, momentum=0.9), loss, metrics=["accuracy"])
    return model


def train(model: keras.Model, epochs: int) -> History:
    """Fit it, and tell what it is worth after each epoch."""
    start = time.perf_counter()
    images, digits = load()
    kept = {"validation_split": FOR_VALIDATION, "batch_size": BATCH_SIZE, "shuffle": False, "verbose": 0}
    history: History = model.fit(images, digits, epochs=epochs, **kept).history
    on = "all devices" if hasattr(model, "detach") else "one device"
    accuracy, loss = history["val_accuracy"][-1], history["loss"][-1]
    print(f"On {on}: loss {loss:.4f}, right {accuracy:.1%}, in {time.perf_counter() - start:.1f} s")
    return history


def draw(histories: dict[str, History], file: Path) -> None:
    """Loss and accuracy after each epoch, of one way as a broad line and of the other as points on it."""
    matplotlib.rcParams["font.size"] = 13  # legible at half size
    figure = Figure(figsize=(11, 4.5), dpi=100, layout="constrained")
    figure.suptitle("A network that reads digits, trained on one device and on several", weight="bold")
    styles = [{"linewidth": 7, "alpha": 0.35}, {"marker": "o", "markersize": 4, "linewidth": 1}]
    for axes, (what, title) in zip(figure.subplots(1, 2), {"loss": "Loss", "accuracy": "Images read right"}.items()):
        for (name, history), style in zip(histories.items(), styles):
            epochs = range(1, len(history[what]) + 1)
            axes.plot(epochs, history[what], color=ORANGE, label=f"{name}, training", **style)
            axes.plot(epochs, history[f"val_{what}"], color=BLUE, label=f"{name}, validation", **style)
        axes.set(title=title, xlabel="epoch")
        axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file)


def main() -> None:
    """Read the flags, train twice, compare, and draw."""
    parser = argparse.ArgumentParser(description="Train a Keras model on one device and on several.")
    parser.add_argument("--epochs", type=int, default=12, metavar="N", help="times that each image is seen (12)")
    parser.add_argument(
        "--simulate", type=int, metavar="N", help=f"cut the CPU into N devices; without a GPU {LOGICAL}"
    )
    parser.add_argument("--output", type=Path, default=Path("output/training.png"), metavar="FILE", help="the picture")
    flags = parser.parse_args()
    if flags.epochs < 1:
        raise SystemExit(f"--epochs is {flags.epochs}; expected at least 1")
    if flags.simulate is None and not tf.config.list_physical_devices("GPU"):
        flags.simulate = LOGICAL
        print(f"No GPU: the CPU is cut into {LOGICAL} devices, which share its cores, to show where rows go.")
    if flags.simulate is not None:
        devicemap.simulate_devices(flags.simulate)
    tf.config.experimental.enable_tensor_float_32_execution(False)  # or GPUs round to three digits
    devices = devicemap.list_devices("GPU") or devicemap.list_devices("CPU")
    one = train(make_model(), flags.epochs)
    several = train(devicemap.parallelize(make_model()), flags.epochs)
    np.testing.assert_allclose(several["loss"], one["loss"], rtol=TOLERANCE, atol=TOLERANCE)
    gap = np.max(np.abs(np.subtract(several["loss"], one["loss"])))
    print(f"The losses after each of {flags.epochs} epochs agree; the largest difference is {gap:.1g}.")
    draw({"one device": one, f"{len(devices)} devices": several}, flags.output)
    print(f"Picture: {flags.output}")


if __name__ == "__main__":
    main()
