"""Seconds to the first result - tracing, TensorFlow's optimising and placing, and the first run - on one device and on all.

The first result of a program, each turn in a process of its own; and of a map that is made in one that has run others. The
hand-written graph inlines the same function in a tf.device block per device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest

from benchmarks.conftest import Scale
from benchmarks.functions import cases
from benchmarks.measuring import Way, compare
from benchmarks.starting import Program, by_devicemap, by_hand

MOST = 1.5
"""Times one device, on few devices; on more, sooner than the hand-written graph."""

FEW = 4

QUICK = ("small SVD",)

NAMES = ("ODE solver", "mel spectrogram", "Sinkhorn", "JPEG decoding", "small SVD", "serial scan", "Keras CNN")


class Started:
    """A way that takes its turns in programs of their own, started before the clock is."""

    def __init__(self, start: Callable[[], Program]):
        self._start = start
        self._ready: Program | None = None
        self._ran: Program | None = None

    def prepare(self) -> None:
        if self._ran is not None:
            self._ran.end()
            self._ran = None
        self._ready = self._ready or self._start()

    def end(self) -> None:
        for program in filter(None, (self._ran, self._ready)):
            program.end()

    def __call__(self) -> Any:
        assert self._ready is not None
        self._ran, self._ready = self._ready, None
        return self._ran.result()


@pytest.mark.parametrize("name", NAMES)
def test_first_result_of_a_program(benchmark: Any, real_devices: list[str], scale: Scale, name: str) -> None:
    count = len(real_devices)

    def started(way: str, used: int) -> Started:
        return Started(lambda: Program(name, way, used, count))

    ways = {
        f"devicemap, {count} devices": started("devicemap", count),
        "devicemap, 1 device": started("devicemap", 1),
        f"graph blocks, {count} devices": started("by-hand", count),
    }
    demand, most = ("most ratio to base", MOST) if count <= FEW else ("most ratio", 1.0)
    targets = {demand: {f"devicemap, {count} devices": most}}
    try:
        _compare(benchmark, ways, count, scale, name, targets=targets)
    finally:
        for way in ways.values():
            way.end()


@pytest.mark.parametrize("name", NAMES)
def test_first_result_of_a_further_map(benchmark: Any, real_devices: list[str], scale: Scale, name: str) -> None:
    case, count = cases()[name], len(real_devices)
    ways = {
        f"devicemap, {count} devices": by_devicemap(case, real_devices),
        "devicemap, 1 device": by_devicemap(case, real_devices[:1]),
        f"graph blocks, {count} devices": by_hand(case, real_devices),
    }
    _compare(benchmark, ways, count, scale, f"{name}, a further map")


def _compare(benchmark: Any, ways: Mapping[str, Way], count: int, scale: Scale, case: str, **facts: Any) -> None:
    if scale.quick and not case.startswith(QUICK):
        pytest.skip("takes long to compile by hand")
    compare(
        benchmark, ways, topic="first_result", case=case, rounds=1 if scale.quick else 3, devices=count, tolerance=1e-2,
        subject=f"devicemap, {count} devices", base="devicemap, 1 device", patience_seconds=2.0, **facts,
    )  # fmt: skip
