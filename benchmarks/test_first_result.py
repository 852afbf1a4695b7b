"""Seconds to the first result - tracing, TensorFlow's optimising and placing, and the first run - on one device and on all.

The first result of a program, each turn in a process of its own, because TensorFlow's first call costs more than later ones;
and of a map that is made in a program that has run others. The hand-written graph inlines the same function in a tf.device
block per device.
"""

from __future__ import annotations

from collections.abc import Mapping
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import devicemap
from benchmarks import hardware, peers
from benchmarks.conftest import Scale
from benchmarks.functions import Case, cases
from benchmarks.measuring import Compare, Way
from benchmarks.programs import Program

ROWS = 32
"""Rows of the first call."""

MOST = 1.5
"""Times one device, on few devices; on more, sooner than the hand-written graph."""

FEW = 4

QUICK = ("small SVD",)

NAMES = ("ODE solver", "mel spectrogram", "Sinkhorn", "JPEG decoding", "small SVD", "serial scan", "Keras CNN")


def by_devicemap(case: Case, devices: list[str]) -> Way:
    """A map that is made in each call."""
    x = case.data[:ROWS]
    return lambda: devicemap.DeviceMap(lambda *args: case.fn(*args), devices=devices, batched=case.batched)(x)


def by_hand(case: Case, devices: list[str]) -> Way:
    """A graph that is made in each call, as the best user writes it: vectorised where that works."""
    x = case.data[:ROWS]

    def rows(batch: Any) -> Any:
        if case.batched:
            return case.fn(batch)
        try:
            return tf.vectorized_map(tf.function(case.fn), batch, fallback_to_while_loop=False)
        except ValueError:
            return tf.map_fn(tf.function(case.fn), batch, fn_output_signature=tf.float32)

    return lambda: peers.graph_blocks(rows, devices, "tf.concat")(x)


class Started:
    """A way that takes its turns in programs of their own, started before the clock is.

    Args:
        make: makes the way in the program.
        name: of the case.
        used: on how many of the devices that there are.
        count: how many there are.
    """

    def __init__(self, make: Any, name: str, used: int, count: int):
        self._arguments = make, name, used, count
        self._program: Program | None = None

    def prepare(self) -> None:
        self.end()
        self._program = Program(_give_first_result, *self._arguments)
        assert self._program.connection.recv() == "ready"

    def __call__(self) -> Any:
        assert self._program is not None
        return self._program.ask("go")

    def end(self) -> None:
        if self._program is not None:
            self._program.end()


def _give_first_result(connection: Connection, make: Any, name: str, used: int, count: int) -> None:
    hardware.cut_devices(count)
    tf.keras.utils.set_random_seed(0)  # the same weights in each program
    way = make(cases()[name], hardware.all_devices()[:used])
    connection.send("ready")
    connection.recv()
    connection.send(np.asarray(way()))


@pytest.mark.parametrize("name", NAMES)
def test_first_result_of_a_program(compare: Compare, real_devices: list[str], scale: Scale, name: str) -> None:
    count = len(real_devices)
    ways = {
        f"devicemap, {count} devices": Started(by_devicemap, name, count, count),
        "devicemap, 1 device": Started(by_devicemap, name, 1, count),
        f"graph blocks, {count} devices": Started(by_hand, name, count, count),
    }
    demand, most = ("most ratio to base", MOST) if count <= FEW else ("most ratio", 1.0)
    targets = {demand: {f"devicemap, {count} devices": most}}
    try:
        _compare(compare, ways, count, scale, name, targets=targets)
    finally:
        for way in ways.values():
            way.end()


@pytest.mark.parametrize("name", NAMES)
def test_first_result_of_a_further_map(compare: Compare, real_devices: list[str], scale: Scale, name: str) -> None:
    case, count = cases()[name], len(real_devices)
    ways = {
        f"devicemap, {count} devices": by_devicemap(case, real_devices),
        "devicemap, 1 device": by_devicemap(case, real_devices[:1]),
        f"graph blocks, {count} devices": by_hand(case, real_devices),
    }
    _compare(compare, ways, count, scale, f"{name}, a further map")


def _compare(compare: Compare, ways: Mapping[str, Way], count: int, scale: Scale, case: str, **facts: Any) -> None:
    if scale.quick and not case.startswith(QUICK):
        pytest.skip("takes long to compile by hand")
    names = {"subject": f"devicemap, {count} devices", "base": "devicemap, 1 device"}
    compare(ways, case, rounds=3, tolerance=1e-2, patience_seconds=2.0, **names, **facts)
