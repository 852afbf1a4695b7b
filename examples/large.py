"""Train a network that is too large for one device on several, with some of its layers on each.

`devicemap.split` cuts the model into stages of about equal size, and `devicemap.Pipeline` trains them.
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
    import matplotlib
    from matplotlib.figure import Figure  # draws with Agg where there is no pyplot
    from sklearn.datasets import load_digits
except ImportError as error:
    raise SystemExit(f"{error}; this example needs: pip install scikit-learn matplotlib") from error

WIDTH, LAYERS = 512, 12
BATCH_SIZE, MICROBATCHES, RATE = 128, 4, 0.1
LOGICAL = 4  # devices that a CPU is cut into where there is no GPU
MIB = 2**20
GREY, GREEN = "#9aa5b1", "#1a7f5a"


def make_model() -> keras.Model:
    """A tower of wide layers over the 64 pixels of a digit."""
    keras.utils.set_random_seed(0)
    hidden = [keras.layers.Dense(WIDTH, "relu", kernel_initializer="he_normal") for _ in range(LAYERS)]
    return keras.Sequential([keras.Input([64]), *hidden, keras.layers.Dense(10)])


def train(stages: list[keras.Model], pipe: devicemap.Pipeline, epochs: int) -> list[float]:
    """The mean loss of each epoch."""

    variables = [variable for stage in stages for variable in stage.trainable_variables]

    @tf.function
    def step(pixels: Any, digits: Any) -> Any:
        with tf.GradientTape() as tape:
            logits = pipe(pixels)
            loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(digits, logits))
        for variable, gradient in zip(variables, tape.gradient(loss, variables), strict=True):
            with tf.device(variable.value.device):
                variable.value.assign_sub(RATE * gradient)
        return loss

    pixels, digits = load_digits(return_X_y=True)
    data = (pixels / 16).astype(np.float32), digits.astype(np.int32)
    batches = tf.data.Dataset.from_tensor_slices(data).shuffle(2000, seed=0).batch(BATCH_SIZE, drop_remainder=True)
    return [float(np.mean([step(*batch) for batch in batches])) for _ in range(epochs)]


def draw(sizes: dict[str, float], file: Path) -> None:
    """Draw the MiB of variables on each device."""
    matplotlib.rcParams["font.size"] = 15
    figure = Figure(figsize=(9, 4.5), dpi=100, layout="constrained")
    axes = figure.subplots()
    bars = axes.bar([*sizes], [*sizes.values()], color=[GREY, *[GREEN] * (len(sizes) - 1)])
    axes.bar_label(bars, fmt="%.1f")
    axes.margins(y=0.12)
    axes.set(title="Variables of a network on one device, and in stages", ylabel="MiB")
    axes.spines[["top", "right"]].set_visible(False)
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file)


def main() -> None:
    """Read the flags, split the model, train it on several devices, and draw the size of its stages."""
    parser = argparse.ArgumentParser(description="Train a model that is too large for one device on several.")
    parser.add_argument("--epochs", type=int, default=5, metavar="N", help="times that each image is seen (5)")
    parser.add_argument(
        "--simulate", type=int, metavar="N", help=f"cut the CPU into N devices; without a GPU {LOGICAL}"
    )
    parser.add_argument("--output", type=Path, default=Path("output/large.png"), metavar="FILE", help="the picture")
    flags = parser.parse_args()
    if flags.epochs < 1:
        raise SystemExit(f"--epochs is {flags.epochs}; expected at least 1")
    if flags.simulate is None and not tf.config.list_physical_devices("GPU"):
        flags.simulate = LOGICAL
        print(f"No GPU: the CPU is cut into {LOGICAL} devices.")
    if flags.simulate is not None:
        devicemap.simulate_devices(flags.simulate)
    devices = [device.name for device in devicemap.list_devices("GPU") or devicemap.list_devices("CPU")][:LAYERS]
    with tf.device("CPU:0"):
        model = make_model()
    stages = devicemap.split(model, len(devices), by="bytes", devices=devices)
    # The loss needs the outputs of all rows, so all forward calls come first.
    pipe = devicemap.Pipeline(stages, devices, MICROBATCHES, "gpipe")
    plans = pipe.explain(tf.TensorSpec([None, 64])).stages
    sizes = {"one device": sum(plan.variable_bytes for plan in plans) / MIB}
    sizes |= {plan.device.rpartition("device:")[2]: plan.variable_bytes / MIB for plan in plans}
    for name, size in sizes.items():
        print(f"{name}: {size:.1f} MiB of variables")
    losses = train(stages, pipe, flags.epochs)
    model.set_weights([weight for stage in stages for weight in stage.get_weights()])
    print(f"Loss {losses[0]:.3f} in the first epoch, {losses[-1]:.3f} in the last, on {len(devices)} devices")
    draw(sizes, flags.output)
    print(f"Picture: {flags.output}")


if __name__ == "__main__":
    main()
