"""Train a network that is too large for the memory of one device on several, a part of its layers on each.

What does not fit is told before anything runs: `explain` plans the memory of each device, `devicemap.split` cuts the model, and
`devicemap.Pipeline` trains it.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
import tensorflow as tf

import devicemap

try:
    from matplotlib.figure import Figure  # draws with Agg where there is no pyplot
    from sklearn.datasets import load_digits
except ImportError as error:
    raise SystemExit(f"{error}; this example needs: pip install scikit-learn matplotlib") from error

WIDTH, LAYERS = 512, 12
BATCH_SIZE, MICROBATCHES, RATE = 128, 4, 0.1
LOGICAL = 4  # devices that a CPU is cut into where there is no GPU
MIB = 2**20
GREY, GREEN, RED = "#9aa5b1", "#1a7f5a", "#c0392b"


def make_model() -> keras.Model:
    """A tower of wide layers over the 64 pixels of a digit."""
    keras.utils.set_random_seed(0)
    hidden = [keras.layers.Dense(WIDTH, "relu", kernel_initializer="he_normal") for _ in range(LAYERS)]
    return keras.Sequential([keras.Input([64]), *hidden, keras.layers.Dense(10)])


def train(model: keras.Model, pipe: devicemap.Pipeline, epochs: int) -> list[float]:
    """The mean loss of each epoch."""

    @tf.function
    def step(pixels: Any, digits: Any) -> Any:
        with tf.GradientTape() as tape:
            logits = pipe(pixels)
            loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(digits, logits))
        variables = model.trainable_variables
        for variable, gradient in zip(variables, tape.gradient(loss, variables), strict=True):
            with tf.device(variable.value.device):
                variable.value.assign_sub(RATE * gradient)
        return loss

    pixels, digits = load_digits(return_X_y=True)
    data = (pixels / 16).astype(np.float32), digits.astype(np.int32)
    batches = tf.data.Dataset.from_tensor_slices(data).shuffle(2000, seed=0).batch(BATCH_SIZE, drop_remainder=True)
    return [float(np.mean([step(*batch) for batch in batches])) for _ in range(epochs)]


def draw(plans: dict[str, Any], limit: float, file: Path) -> None:
    """What each device takes, against its limit."""
    figure = Figure(figsize=(9, 4.5), dpi=110, layout="constrained")
    axes = figure.subplots()
    named = [(f"{name}\n{memory.device[-5:]}", memory) for name, plan in plans.items() for memory in plan.memory]
    labels, held = [label for label, _ in named], [memory.held_bytes / MIB for _, memory in named]
    peaks = [memory.peak_bytes(BATCH_SIZE) / MIB for _, memory in named]
    axes.bar(labels, peaks, color=GREEN, label=f"at most, in a step of {BATCH_SIZE} rows")
    axes.bar(labels, held, color=GREY, label="of that, variables")
    axes.axhline(limit / MIB, color=RED, linestyle="--", label="the memory of a device")
    axes.set(title="A network that one device cannot train", ylabel="MiB")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file)


def main() -> None:
    """Read the flags, plan for one device and for several, train on several, and draw."""
    parser = argparse.ArgumentParser(description="Train a model that is too large for one device on several.")
    parser.add_argument("--epochs", type=int, default=5, metavar="N", help="times that each image is seen (5)")
    parser.add_argument("--memory", type=float, default=20, metavar="MIB", help="that each device may take (20)")
    parser.add_argument(
        "--simulate", type=int, metavar="N", help=f"cut the CPU into N devices; without a GPU {LOGICAL}"
    )
    parser.add_argument("--output", type=Path, default=Path("output/large.png"), metavar="FILE", help="the picture")
    flags = parser.parse_args()
    if flags.epochs < 1:
        raise SystemExit(f"--epochs is {flags.epochs}; expected at least 1")
    if flags.simulate is None and not tf.config.list_physical_devices("GPU"):
        flags.simulate = LOGICAL
        print(f"No GPU: the CPU is cut into {LOGICAL} devices, to show what each would take.")
    if flags.simulate is not None:
        devicemap.simulate_devices(flags.simulate)
    devices = [device.name for device in devicemap.list_devices("GPU") or devicemap.list_devices("CPU")][:LAYERS]
    limit = flags.memory * MIB
    spec, model = tf.TensorSpec([None, 64]), make_model()
    # The loss needs the outputs of all rows, so that all forward calls come first.
    plans = {"alone": devicemap.Pipeline([model], devices, MICROBATCHES, "gpipe").explain(spec, gradients=True)}
    pipe = devicemap.Pipeline(devicemap.split(model, len(devices), by="bytes"), devices, MICROBATCHES, "gpipe")
    plans[f"{len(devices)} stages"] = pipe.explain(spec, gradients=True)
    for name, plan in plans.items():
        most = max(memory.peak_bytes(BATCH_SIZE) for memory in plan.memory) / MIB
        rows = plan.largest_batch(limit)
        print(f"{name}: {most:.1f} of {flags.memory:g} MiB for {BATCH_SIZE} rows; {rows or 'no'} rows fit")
    if rows < BATCH_SIZE:
        raise SystemExit(f"{rows} rows fit into --memory {flags.memory:g}; expected {BATCH_SIZE}, or more devices")
    losses = train(model, pipe, flags.epochs)
    print(f"Loss {losses[0]:.3f} in the first epoch, {losses[-1]:.3f} in the last, on {len(devices)} devices")
    draw(plans, limit, flags.output)
    print(f"Picture: {flags.output}")


if __name__ == "__main__":
    main()
