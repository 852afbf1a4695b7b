"""Recognise handwritten digits by optimal transport: a Python loop, `tf.map_fn` and a `devicemap.DeviceMap` compared.

Each image is a heap of ink on an 8 x 8 grid; its distance to a digit is the work of moving that ink onto the mean image
of the digit, by Sinkhorn's iteration (Cuturi 2013), which takes one image more steps than another. See also `--help`.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import numpy as np
import tensorflow as tf

import devicemap

try:
    import rich.table
    from matplotlib.figure import Figure  # draws with Agg where there is no pyplot
    from sklearn.datasets import load_digits
except ImportError as error:
    raise SystemExit(f"{error}; this example needs: pip install scikit-learn matplotlib rich") from error

DIGITS = 10
GREEN, RED, GREY = "#1a7f5a", "#c0392b", "#d0d4da"
FOR_MEANS = 500  # images that the means are left with, at least
LOGICAL = 4  # devices that a CPU is cut into where there is no GPU
TOLERANCE = 1e-4  # relative; the ways round differently, and may stop an iteration apart


def transport_to(means: np.ndarray) -> Callable[[tf.Tensor], tf.Tensor]:
    """The function to map: one image `[64]` -> its transport cost to each mean of `means` `[10, 64]`, float32 `[10]`.

    Ink moves at the cost of its way in pixels, at most 2 (Pele and Werman 2009), with entropic regularisation 0.5.
    """
    place = np.stack(np.meshgrid(np.arange(8), np.arange(8)), -1).reshape(64, 2)
    cost = tf.constant(np.minimum(np.linalg.norm(place[:, None] - place, axis=-1), 2.0), tf.float32)
    kernel, goal = tf.exp(-cost / 0.5), tf.constant(means, tf.float32)

    def distances(image: tf.Tensor) -> tf.Tensor:
        v = tf.ones([DIGITS, 64])
        u = image / (v @ kernel)
        while tf.reduce_max(tf.abs(v * (u @ kernel) - goal)) > 1e-6:  # ink that is not where it should be
            v = goal / (u @ kernel)
            u = image / (v @ kernel)
        return tf.reduce_sum(u * (v @ (kernel * cost)), -1)

    return distances


def load(count: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """`count` images of unit ink `[count, 64]`, their digits `[count]`, and the mean digits in the rest `[10, 64]`."""
    ink, digits = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(ink))
    ink, digits = (ink / ink.sum(1, keepdims=True)).astype(np.float32)[order], digits[order]
    if not 1 <= count <= len(ink) - FOR_MEANS:
        raise SystemExit(f"--images is {count}; expected 1 to {len(ink) - FOR_MEANS}: the means need the other images")
    return ink[:count], digits[:count], np.stack([ink[count:][digits[count:] == k].mean(0) for k in range(DIGITS)])


def compare(ways: dict[str, Callable[[], tf.Tensor]]) -> np.ndarray:
    """Check that all ways give the answer of the first, print how long they take, return the answer `[rows, 10]`."""
    loop, answers = next(iter(ways)), dict[str, np.ndarray]()
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(10):  # in turns, so that what disturbs the machine disturbs all; the slow loop in four of them
        for name, run in ways.items():
            if turn < 4 or name != loop:
                start = time.perf_counter()
                answers[name] = run().numpy()
                seconds[name].append(time.perf_counter() - start)
                np.testing.assert_allclose(answers[name], answers[loop], TOLERANCE, err_msg=f"{name} is not {loop}")
    rows = len(answers[loop])
    table = rich.table.Table(
        "way", title=f"Distances of {rows} images to {DIGITS} digits", caption="later calls: the median"
    )
    for heading in ("first call", "later calls", "images/s", "speed-up"):
        table.add_column(heading, justify="right")
    medians = {name: statistics.median(later) for name, (_, *later) in seconds.items()}
    for name, later in medians.items():
        speed = f"{rows / later:,.0f}", f"{medians[loop] / later:.1f} x"
        table.add_row(name, f"{seconds[name][0]:.2f} s", f"{later:.3f} s", *speed)
    rich.print(table)
    gap = max(np.max(np.abs(answer / answers[loop] - 1)) for answer in answers.values())
    print(f"The answers agree to a relative {TOLERANCE:g}; the largest difference is {gap:.1g}.")
    return answers[loop]


def draw(images: np.ndarray, digits: np.ndarray, distances: np.ndarray, file: Path) -> None:
    """Draw images `[rows, 64]` with their `distances` `[rows, 10]`: clear ones, close calls and mistakes."""
    guesses = distances.argmin(1)
    order = np.argsort(-np.diff(np.sort(distances, 1))[:, 0])  # the clearest first
    right, wrong = order[guesses[order] == digits[order]], order[guesses[order] != digits[order]]
    figure = Figure(figsize=(12, 8.5), dpi=110, layout="constrained")
    figure.suptitle("Handwritten digits, classified by the cost of moving their ink", fontsize=17, weight="bold")
    rows = {"Clearest": right, "Closest calls": right[::-1], "Worst mistakes": wrong}
    for strip, (title, chosen) in zip(figure.subfigures(3, 1, hspace=0.04), rows.items()):
        strip.suptitle(title, x=0.01, ha="left", fontsize=13)
        cells = strip.subplots(1, 8, width_ratios=[1, 1.2] * 4)
        firsts = np.sort(np.unique(digits[chosen], return_index=True)[1])[:4]  # the first of each digit
        for row, picture, bars in zip(chosen[firsts], cells[::2], cells[1::2]):
            digit, guess = digits[row], guesses[row]
            verdict, colour = (f"{digit}", GREEN) if guess == digit else (f"{guess}, but is {digit}", RED)
            picture.set_title(verdict, color=colour, weight="bold")
            picture.imshow(images[row].reshape(8, 8), cmap="gray_r")
            picture.set(xticks=[], yticks=[])
            colours = [GREEN if k == digit else RED if k == guess else GREY for k in range(DIGITS)]
            bars.barh(np.arange(DIGITS), distances[row], color=colours)
            bars.set(xticks=[], yticks=range(DIGITS), ylim=(DIGITS - 0.4, -0.6))
            bars.spines[["top", "right", "bottom"]].set_visible(False)
        for unused in cells[2 * len(firsts) :]:
            unused.axis("off")
    figure.supxlabel("Bars: distance to the mean of each digit. Green is the true digit, red a wrong guess.")
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file)


def main() -> None:
    """Read the flags, compare the three ways, print how often the digit is right, and draw."""
    parser = argparse.ArgumentParser(description="Recognise handwritten digits by optimal transport, in three ways.")
    parser.add_argument("--images", type=int, default=600, metavar="N", help="images to classify (600)")
    parser.add_argument(
        "--simulate", type=int, metavar="N", help=f"cut the CPU into N devices; without a GPU {LOGICAL}"
    )
    parser.add_argument("--output", type=Path, default=Path("output/digits.png"), metavar="FILE", help="the picture")
    flags = parser.parse_args()
    if flags.simulate is None and not tf.config.list_physical_devices("GPU"):
        flags.simulate = LOGICAL
        print(f"No GPU: the CPU is cut into {LOGICAL} devices, which share its cores, to show where rows go.")
    if flags.simulate is not None:
        devicemap.simulate_devices(flags.simulate)
    tf.config.experimental.enable_tensor_float_32_execution(False)  # or GPUs round to three digits
    ink, digits, means = load(flags.images)
    distances, images = transport_to(means), tf.constant(ink)
    serial = tf.function(lambda images: tf.map_fn(distances, images))
    devices = devicemap.list_devices("GPU") or devicemap.list_devices("CPU")
    for device in devicemap.list_devices():
        print(f"{device.kind} {device.name}" + ", used" * (device in devices))
    mapper = devicemap.DeviceMap(distances, devices=devices)
    ways: dict[str, Callable[[], tf.Tensor]] = {
        "Python loop, eager": lambda: tf.stack([distances(image) for image in images]),
        "tf.map_fn in a tf.function": lambda: serial(images),
        "devicemap.DeviceMap": lambda: mapper(images),
    }
    answer = compare(ways)
    print(f"The last call of the DeviceMap: {mapper.report}")
    draw(ink, digits, answer, flags.output)
    right, plain = (np.mean(d.argmin(1) == digits) for d in (answer, np.linalg.norm(ink[:, None] - means, axis=-1)))
    print(f"Right: {right:.1%} (plain Euclidean distance: {plain:.1%}). Picture: {flags.output}")


if __name__ == "__main__":
    main()
