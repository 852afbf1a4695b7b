"""Integrate a function for each of many parameter sets by Monte Carlo, with an error for each: the same on any devices.

A row is a parameter set of Genz's Gaussian peak (Genz 1984), whose integral over the unit cube is known. Its points are
drawn until the estimate is as precise as was asked for, so that one row takes more work than another. The points depend
on `seed=` and the row alone: one device and all of them draw the same, in one piece or in chunks. A single integral is a
reduction: its rows are blocks of points, of which none is kept. See also `--help`.
"""

from __future__ import annotations

import argparse
import math
import os
import time
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import numpy as np
import tensorflow as tf

import devicemap

try:
    import matplotlib
    import rich.table
    from matplotlib.figure import Figure  # draws with Agg where there is no pyplot
except ImportError as error:
    raise SystemExit(f"{error}; this example needs: pip install matplotlib rich") from error

DIMENSIONS = 5
POINTS = 1024  # points that are drawn at once
MOST_BLOCKS = 500
SHOWN = 20  # integrals that are drawn with their errors, about
GREEN, GREY = "#1a7f5a", "#8a919c"
TOLERANCE = 1e-9  # relative, between devices: the points are the same, sums of other shapes may round differently


def integral_to(precision: float) -> Callable[..., dict[str, tf.Tensor]]:
    """The function to map: one parameter set -> the integral of exp(-|sharpness (x - peak)|^2), and its standard error.

    It takes `{"sharpness": [5], "peak": [5]}` and a `seed` `[2]`, and draws until the error is `precision` times the
    estimate; all results are scalars.
    """

    def integrate(row: dict[str, tf.Tensor], seed: tf.Tensor) -> dict[str, tf.Tensor]:
        count, total, squares = 0, tf.constant(0.0, tf.float64), tf.constant(0.0, tf.float64)
        mean, error = tf.constant(0.0, tf.float64), tf.constant(math.inf, tf.float64)
        while error > precision * mean and count < MOST_BLOCKS:
            own = tf.random.fold_in(seed, count)  # a seed for each block of points
            points = tf.random.stateless_uniform([POINTS, DIMENSIONS], own)
            away = row["sharpness"] * (points - row["peak"])
            heights = tf.cast(tf.exp(-tf.reduce_sum(away * away, -1)), tf.float64)
            count, total, squares = count + 1, total + tf.reduce_sum(heights), squares + tf.reduce_sum(heights**2)
            drawn = tf.cast(count * POINTS, tf.float64)
            mean = total / drawn
            error = tf.sqrt((squares / drawn - mean**2) / (drawn - 1))
        return {"integral": mean, "error": error, "points": count * POINTS}

    return integrate


def reduced(row: dict[str, np.ndarray], blocks: int, seed: int) -> tuple[float, float]:
    """The integral for one parameter set by so many blocks of points, in the memory of a few, and its standard error."""

    def moments(block: tf.Tensor, seed: tf.Tensor) -> dict[str, tf.Tensor]:
        points = tf.random.stateless_uniform([POINTS, DIMENSIONS], seed)
        away = row["sharpness"] * (points - row["peak"])
        heights = tf.cast(tf.exp(-tf.reduce_sum(away * away, -1)), tf.float64)
        return {"mean": tf.reduce_mean(heights), "square": tf.reduce_mean(heights**2)}

    found = devicemap.parallel_reduce(moments, tf.data.Dataset.range(blocks), "mean", seed=seed)
    variance = found["square"] - found["mean"] ** 2
    return float(found["mean"]), math.sqrt(variance / (blocks * POINTS - 1))


def parameter_sets(rows: int) -> dict[str, np.ndarray]:
    """`rows` peaks of several widths and places, float32 `[rows, 5]` each."""
    draw = np.random.default_rng(0)
    width = draw.uniform(0.5, 3.0, [rows, 1])  # one factor for all axes: narrow peaks take many points
    sharpness = width * draw.uniform(0.7, 1.3, [rows, DIMENSIONS])
    return {"sharpness": sharpness.astype("f"), "peak": draw.uniform(0.2, 0.8, [rows, DIMENSIONS]).astype("f")}


def truth(rows: dict[str, np.ndarray]) -> np.ndarray:
    """The integrals, float64 `[rows]`: the peak is a product over the axes, each an error function."""
    erf = np.vectorize(math.erf)
    a, u = rows["sharpness"].astype("d"), rows["peak"].astype("d")
    return np.prod(math.sqrt(math.pi) / (2 * a) * (erf(a * (1 - u)) + erf(a * u)), -1)


def compare(ways: dict[str, Callable[[], dict[str, tf.Tensor]]], exact: np.ndarray) -> dict[str, np.ndarray]:
    """Check that all ways give the results of the first and that those fit the truth; print and return them."""
    table = rich.table.Table("way", title=f"{len(exact)} integrals in {DIMENSIONS} dimensions")
    for heading in ("first call", "third call", "points", "largest difference"):
        table.add_column(heading, justify="right")
    first: dict[str, np.ndarray] | None = None
    for name, run in ways.items():
        seconds = []
        for _ in range(3):  # a map without options tries other ways in its second call, and compiles them
            start = time.perf_counter()
            answer = {key: value.numpy() for key, value in run().items()}
            seconds.append(time.perf_counter() - start)
        first = first or answer
        np.testing.assert_array_equal(answer["points"], first["points"], err_msg=f"{name} drew other points")
        gap = np.max(np.abs(answer["integral"] / first["integral"] - 1))
        assert gap < TOLERANCE, f"{name} differs by {gap:.1g}"
        table.add_row(name, *(f"{s:.2f} s" for s in seconds[::2]), f"{answer['points'].sum():,}", f"{gap:.1g}")
    rich.print(table)
    assert first is not None
    pulls = (first["integral"] - exact) / first["error"]
    assert np.max(np.abs(pulls)) < 5, f"an integral is {np.max(np.abs(pulls)):.1f} errors from the truth"
    return first


def draw(answer: dict[str, np.ndarray], exact: np.ndarray, file: Path) -> None:
    """Draw some integrals with their errors, the points of all, and how many errors the estimates are off."""
    pulls = (answer["integral"] - exact) / answer["error"]
    matplotlib.rcParams["font.size"] = 14
    figure = Figure(figsize=(13, 5), dpi=100, layout="constrained")
    figure.suptitle("Monte Carlo integrals, one per parameter set, against the truth", weight="bold")
    left, middle, right = figure.subplots(1, 3)
    some = np.argsort(exact)[:: max(1, len(exact) // SHOWN)]
    relative, errors = (100 * values[some] / exact[some] for values in (answer["integral"] - exact, answer["error"]))
    left.errorbar(exact[some], relative, errors, fmt="o", ms=6, lw=2, color=GREEN)
    left.axhline(0, color="black", lw=1)
    left.set(
        xscale="log",
        xlim=(0.02, 1.1),
        xlabel="true integral",
        ylabel="estimate, % off",
        title=f"{len(some)} integrals, with errors",
    )
    left.tick_params(axis="x", which="minor", labelbottom=False)
    middle.loglog(exact, answer["points"], "o", ms=4, color=GREEN)
    middle.set(xlabel="true integral", ylabel="points drawn", title="Narrow peaks take more points")
    right.hist(pulls, np.linspace(-4, 4, 25), density=True, color=GREEN, alpha=0.6)
    x = np.linspace(-4, 4, 200)
    right.plot(x, np.exp(-x * x / 2) / math.sqrt(2 * math.pi), color="black", lw=2)
    right.set(xlabel="(estimate - truth) / error", yticks=[], title="Line: normal distribution")
    for panel in (left, middle, right):
        panel.spines[["top", "right"]].set_visible(False)
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file)


def main() -> None:
    """Read the flags, integrate on one device, on all, and in chunks, check, print and draw."""
    parser = argparse.ArgumentParser(description="A Monte Carlo integral per parameter set, with its error.")
    parser.add_argument("--rows", type=int, default=400, metavar="N", help="parameter sets (400)")
    parser.add_argument("--precision", type=float, default=0.01, metavar="P", help="relative error to reach (0.01)")
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="another seed, other points (0)")
    parser.add_argument("--simulate", type=int, metavar="N", help="cut the CPU into N devices first")
    parser.add_argument("--output", type=Path, default=Path("output/integrals.png"), metavar="FILE", help="the picture")
    flags = parser.parse_args()
    if flags.rows < 1 or not flags.precision > 0:
        raise SystemExit(f"--rows {flags.rows} --precision {flags.precision}; expected at least 1, and more than 0")
    if flags.simulate is not None:
        devicemap.simulate_devices(flags.simulate)
    rows, integrate = parameter_sets(flags.rows), integral_to(flags.precision)
    exact = truth(rows)
    devices = devicemap.list_devices("GPU") or devicemap.list_devices("CPU")
    one = devicemap.DeviceMap(integrate, seed=flags.seed, devices=devices[:1])
    every = devicemap.DeviceMap(integrate, seed=flags.seed, devices=devices)
    chunks = devicemap.DeviceMap(integrate, seed=flags.seed, devices=devices, batch_size=16)
    count = f"{len(devices)} device" + "s" * (len(devices) > 1)
    answer = compare(
        {
            "1 device": lambda: one(rows),
            f"{count}, no options": lambda: every(rows),
            f"{count}, chunks of up to 16 rows": lambda: chunks(rows),
        },
        exact,
    )
    draw(answer, exact, flags.output)
    pulls = np.abs(answer["integral"] - exact) / answer["error"]
    print(
        f"Within one error of the truth: {np.mean(pulls < 1):.0%} (68% expected); the worst is {pulls.max():.1f} off."
    )
    print(f"The same on 1 device and on {count}, to a relative {TOLERANCE:g}. Picture: {flags.output}")
    mean, error = reduced({name: values[0] for name, values in rows.items()}, MOST_BLOCKS, flags.seed)
    print(
        f"The first of {MOST_BLOCKS * POINTS:,} points, none of them kept: {mean:.5f} +- {error:.5f}; truth {exact[0]:.5f}"
    )
    assert abs(mean - exact[0]) < 5 * error


if __name__ == "__main__":
    main()
