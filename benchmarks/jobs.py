"""Jobs for simulated accelerators: what each row costs, and how fast each device is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

ROW_SECONDS = 0.005
"""What a row of even work takes at speed 1: as long as functions that are worth a device of their own."""

Speeds = Callable[[int], "list[float]"]
Costs = Callable[[int], np.ndarray]


@dataclass(frozen=True)
class Job:
    """Rows with costs, and devices with speeds, such that the ideal time is the one that was asked for."""

    rows: Any
    """float32 `[n, 4]`."""

    seconds: Any
    """float32 `[n]`: what each row takes at speed 1."""

    speeds: tuple[float, ...]
    """Of each device."""

    ideal_seconds: float
    """All work by all speed: how long the job takes at least."""

    @property
    def answer(self) -> np.ndarray:
        """What the simulator's ops give."""
        return 2 * self.rows.numpy() + 1

    def configure(self, simulator: Any) -> None:
        """Give the simulated devices their speeds."""
        simulator.reset()
        for device, speed in enumerate(self.speeds):
            simulator.configure(device, speed=speed)


def make_job(devices: int, ideal_seconds: float, costs: Costs, speeds: Speeds) -> Job:
    """A job of that ideal time, of as many rows for any costs and speeds: a multiple of the number of devices."""
    count = devices * max(1, round(ideal_seconds / ROW_SECONDS))
    relative, fast = costs(count), tuple(speeds(devices))
    seconds = tf.constant(relative * (ideal_seconds * sum(fast) / relative.sum()), tf.float32)
    rows = tf.reshape(tf.range(4.0 * count), [count, 4])
    return Job(rows, seconds, fast, ideal_seconds)


def even(rows: int) -> np.ndarray:
    """All rows cost the same."""
    return np.ones(rows)


def hot_first(rows: int) -> np.ndarray:
    """The first sixteenth of the rows is 17 times as expensive: more than half of all work."""
    costs = np.ones(rows)
    costs[: max(1, rows // 16)] = 17
    return costs


def hot_last(rows: int) -> np.ndarray:
    """The same at the end, where little is left to balance it with."""
    return hot_first(rows)[::-1]


def ramp(rows: int) -> np.ndarray:
    """The last row is 15 times as expensive as the first."""
    return np.linspace(1, 15, rows)


def spikes(rows: int) -> np.ndarray:
    """Forty rows, here and there, are 18 times as expensive as the others."""
    costs = np.ones(rows)
    costs[np.random.default_rng(0).choice(rows, min(40, rows), replace=False)] = 18
    return costs


def equal(devices: int) -> list[float]:
    """All devices are as fast."""
    return [1.0] * devices


def half_slow(devices: int) -> list[float]:
    """The second half of the devices is 4 times slower."""
    return [1.0] * (devices - devices // 2) + [0.25] * (devices // 2)


def one_slow(devices: int) -> list[float]:
    """The last device is 10 times slower."""
    return [1.0] * (devices - 1) + [0.1]


def falling(devices: int) -> list[float]:
    """From full speed down to 0.3 of it."""
    return np.linspace(1, 0.3, devices).tolist()


JOBS: dict[str, tuple[Costs, Speeds]] = {
    "even": (even, equal),
    "a hot block, first": (hot_first, equal),
    "a hot block, last": (hot_last, equal),
    "half of the devices 4 times slower": (even, half_slow),
    "one device 10 times slower": (even, one_slow),
    "a ramp of costs": (ramp, equal),
    "forty expensive rows": (spikes, equal),
    "speeds from 1 down to 0.3": (even, falling),
}
