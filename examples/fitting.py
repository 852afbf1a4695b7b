"""Fit the parameters of a simulation by its gradients, which go through `devicemap` to all devices and back.

A row is an initial number of prey and predators; the simulation is Lotka and Volterra's pair of differential equations.
Observations that were made with known parameters and noise are fitted by L-BFGS with gradients of a `tf.GradientTape`; the
result must be within its errors of the truth. See also `--help`.
"""

from __future__ import annotations

import argparse
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
    from scipy.optimize import OptimizeResult, minimize
except ImportError as error:
    raise SystemExit(f"{error}; this example needs: pip install scipy matplotlib rich") from error

NAMES = "growth of prey", "loss to predators", "gain from prey", "death of predators"
TRUTH = np.array([1.1, 0.4, 0.1, 0.4])
START = np.array([0.8, 0.6, 0.15, 0.6])
TIMES = 20  # observations, one per unit of time
STEPS = 10  # of the solver between two observations
STEP = 1 / STEPS
NOISE = 0.1  # of the logarithm of an observation
BLUE, ORANGE, GREY = "#0072b2", "#d55e00", "#8a919c"


def simulation(logarithms: tf.Variable) -> Callable[[tf.Tensor], tf.Tensor]:
    """The function to map: initial states `[rows, 2]` -> the logarithms of later states, float64 `[rows, 20, 2]`.

    It takes a batch, since NumPy's way of writing does for many rows at once what it does for one. All is done with
    logarithms, of the numbers of animals and of the parameters `[4]`, which keeps them positive.
    """

    def simulate(starts: tf.Tensor) -> tf.Tensor:
        growth, loss, gain, death = tf.unstack(tf.exp(logarithms))
        alone = tf.stack([growth, -death])
        together = tf.stack([[0 * gain, gain], [-loss, 0 * loss]])

        def speed(states: tf.Tensor) -> tf.Tensor:
            return alone + tf.exp(states) @ together

        def step(states: tf.Tensor, _: tf.Tensor) -> tf.Tensor:  # the classic Runge-Kutta method
            a = speed(states)
            b = speed(states + a * STEP / 2)
            c = speed(states + b * STEP / 2)
            return states + (a + 2 * b + 2 * c + speed(states + c * STEP)) * STEP / 6

        states = tf.scan(step, tf.range(TIMES * STEPS), tf.math.log(starts))[STEPS - 1 :: STEPS]
        return tf.transpose(states, [1, 0, 2])

    return simulate


def fit(loss_of: Callable[[np.ndarray], tuple[float, np.ndarray]]) -> tuple[OptimizeResult, np.ndarray]:
    """The logarithms `[4]` with the least loss, and their standard errors `[4]`.

    `loss_of` gives half the sum of squares in units of the noise, and its gradient; so the inverse of the second
    derivatives, taken from gradients at points nearby, is the covariance.
    """
    best = minimize(loss_of, np.log(START), jac=True, method="L-BFGS-B", options={"ftol": 1e-12, "maxiter": 200})
    assert best.success, f"the fit did not end: {best.message}"
    nearby = 1e-4 * np.eye(len(best.x))
    curvature = np.stack([(loss_of(best.x + step)[1] - loss_of(best.x - step)[1]) / 2e-4 for step in nearby])
    return best, np.sqrt(np.diag(np.linalg.inv((curvature + curvature.T) / 2)))


def draw(observed: np.ndarray, before: np.ndarray, after: np.ndarray, file: Path) -> None:
    """Draw four of the rows: what was observed, the simulation before the fit, and after; logarithms `[rows, 20, 2]`."""
    matplotlib.rcParams["font.size"] = 13  # legible at half size
    figure = Figure(figsize=(12, 6), dpi=100, layout="constrained")
    figure.suptitle("Prey and predators, fitted by gradients through devicemap", weight="bold")
    panels = figure.subplots(2, 4, sharex=True, sharey="row", squeeze=False)
    time_axis = np.arange(1, TIMES + 1)
    for kind, (strip, name) in enumerate(zip(panels, ("prey", "predators"))):
        strip[0].set_ylabel(name)
        for panel, row in zip(strip, range(len(observed))):
            panel.plot(time_axis, np.exp(before[row, :, kind]), color=GREY, ls="--", lw=2, label="before the fit")
            panel.plot(time_axis, np.exp(after[row, :, kind]), color=BLUE, lw=2, label="after")
            panel.plot(time_axis, np.exp(observed[row, :, kind]), "o", ms=4, color=ORANGE, label="observed")
            panel.set_yscale("log")
            panel.spines[["top", "right"]].set_visible(False)
    panels[1, 1].legend(frameon=False, loc="lower center", fontsize=12)
    figure.supxlabel("time; a column is a row of the data, an initial state")
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file)


def main() -> None:
    """Read the flags, make observations, check a gradient against the serial one, fit, check, print and draw."""
    parser = argparse.ArgumentParser(description="Fit the parameters of a simulation by its gradients.")
    parser.add_argument("--rows", type=int, default=64, metavar="N", help="initial states (64)")
    parser.add_argument("--simulate", type=int, metavar="N", help="cut the CPU into N devices first")
    parser.add_argument("--output", type=Path, default=Path("output/fitting.png"), metavar="FILE", help="the picture")
    flags = parser.parse_args()
    if flags.rows < 1:
        raise SystemExit(f"--rows {flags.rows}; expected at least 1")
    if flags.simulate is not None:
        devicemap.simulate_devices(flags.simulate)
    rng = np.random.default_rng(0)
    starts = tf.constant(rng.uniform([5, 1], [20, 5], [flags.rows, 2]))
    logarithms = tf.Variable(np.log(TRUTH))  # devicemap reads it in each call
    devices = devicemap.list_devices("GPU") or devicemap.list_devices("CPU")
    mapper = devicemap.DeviceMap(simulation(logarithms), devices=devices, batched=True)
    observed = mapper(starts).numpy() + NOISE * rng.standard_normal([flags.rows, TIMES, 2])

    def loss_with(simulate: Callable[[tf.Tensor], tf.Tensor]) -> Callable[[np.ndarray], tuple[float, np.ndarray]]:
        def loss_of(values: np.ndarray) -> tuple[float, np.ndarray]:
            logarithms.assign(values)
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(((simulate(starts) - observed) / NOISE) ** 2) / 2
            return float(loss), tape.gradient(loss, logarithms).numpy()

        return loss_of

    loss_of = loss_with(mapper)
    serial = tf.function(simulation(logarithms))
    here, there = loss_of(np.log(START)), loss_with(serial)(np.log(START))
    np.testing.assert_allclose(here[1], there[1], rtol=1e-6, err_msg="the gradient is not that of one tf.function")
    before = mapper(starts).numpy()

    start = time.perf_counter()
    best, errors = fit(loss_of)
    seconds = time.perf_counter() - start
    pulls = (best.x - np.log(TRUTH)) / errors
    table = rich.table.Table("parameter", title=f"{flags.rows} initial states on {len(devices)} device(s)")
    for heading in ("start", "fitted", "error", "truth", "errors off"):
        table.add_column(heading, justify="right")
    for name, first, value, error, true, pull in zip(NAMES, START, np.exp(best.x), errors, TRUTH, pulls, strict=True):
        table.add_row(name, f"{first:g}", f"{value:.4f}", f"{error * value:.4f}", f"{true:g}", f"{pull:+.1f}")
    rich.print(table)
    assert np.max(np.abs(pulls)) < 5, "a parameter is far from the truth"
    logarithms.assign(best.x)
    draw(observed, before, mapper(starts).numpy(), flags.output)
    squares, evaluations = [2 * value / observed.size for value in (here[0], best.fun)], best.nfev + 2 * len(NAMES)
    print(f"Squares per observation: {squares[0]:.0f} before the fit, {squares[1]:.2f} now.")
    print(f"{evaluations} gradients in {seconds:.1f} s, the first as one tf.function gives it. Picture: {flags.output}")


if __name__ == "__main__":
    main()
