"""Reducing results where they are computed, against mapping first and reducing what was gathered."""

from __future__ import annotations

from typing import Any

import pytest
import tensorflow as tf

import devicemap
from benchmarks.conftest import Scale
from benchmarks.measuring import Compare

ROWS, WIDTH, QUICK_ROWS = 8000, 25_000, 64
POINTS, BATCHES, QUICK_BATCHES = 100_000, 200, 8
FEW_ROWS = 100
MOST = 0.5


def _compare(compare: Compare, mapper: devicemap.DeviceMap, data: Any, op: str, case: str, **facts: Any) -> None:
    of_rows = {"sum": tf.reduce_sum, "mean": tf.reduce_mean}[op]
    ways = {
        "map, then reduce": lambda: tf.nest.map_structure(lambda leaf: of_rows(leaf, 0), mapper(data)),
        "devicemap": lambda: mapper.reduce(data, op),
    }
    compare(ways, case, tolerance=1e-3, **facts)


@pytest.mark.parametrize("op", ["sum", "mean"])
def test_large_results(compare: Compare, real_devices: list[str], scale: Scale, op: str) -> None:
    """Rows of 100 kB, which cost little but to be written."""
    rows = QUICK_ROWS if scale.quick else ROWS
    base = tf.random.stateless_uniform([WIDTH], [0, 0])
    mapper = devicemap.DeviceMap(lambda n: n * base, devices=real_devices)
    case = f"{op} of {rows} rows of {WIDTH * 4 // 1000} kB"
    targets = {"most ratio": {"devicemap": MOST}}
    _compare(compare, mapper, tf.range(float(rows)), op, case, targets=targets)


def test_monte_carlo_integral(compare: Compare, real_devices: list[str], scale: Scale) -> None:
    """The mean of an integrand and of its square, in batches of points that are drawn from the seeds of rows."""
    batches = QUICK_BATCHES if scale.quick else BATCHES

    def heights(n: Any, seed: Any) -> Any:
        points = tf.random.stateless_uniform([POINTS, 3], seed)
        values = tf.exp(-tf.reduce_sum(points * points, 1))
        return {"mean": tf.reduce_mean(values), "square": tf.reduce_mean(values * values)}

    mapper = devicemap.DeviceMap(heights, devices=real_devices, seed=0)
    case = f"Monte Carlo integral, {batches} rows of {POINTS} points"
    _compare(compare, mapper, tf.range(batches), "mean", case)


def test_short_call(compare: Compare, real_devices: list[str]) -> None:
    mapper = devicemap.DeviceMap(lambda row: tf.sin(row) * 2.0, devices=real_devices)
    data = tf.random.stateless_normal([FEW_ROWS, 16], [0, 0])
    _compare(compare, mapper, data, "sum", f"{FEW_ROWS} rows of 16 numbers", rounds=40, calls=20)
