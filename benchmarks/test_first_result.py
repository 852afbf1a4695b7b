"""Seconds to the first result - tracing, optimising, placing and the first run - on one device and on all.

Each turn makes its map anew. The hand-written graph inlines the same function in a tf.device block per device.
"""

from __future__ import annotations

from typing import Any

import pytest
import tensorflow as tf

import devicemap
from benchmarks import peers
from benchmarks.conftest import Scale
from benchmarks.functions import Case, cases
from benchmarks.measuring import Way, compare

ROWS = 32
MOST = 1.5
QUICK = ("small SVD",)

NAMES = ("ODE solver", "mel spectrogram", "Sinkhorn", "JPEG decoding", "small SVD", "serial scan", "Keras CNN")


@pytest.mark.parametrize("name", NAMES)
def test_first_result(benchmark: Any, real_devices: list[str], scale: Scale, name: str) -> None:
    if scale.quick and name not in QUICK:
        pytest.skip("takes long to compile by hand")
    case = cases()[name]
    x, count = case.data[:ROWS], len(real_devices)
    one, many = "devicemap, 1 device", f"devicemap, {count} devices"
    ways = {
        many: mapper(case, real_devices, x),
        one: mapper(case, real_devices[:1], x),
        f"graph blocks, {count} devices": by_hand(case, real_devices, x),
    }
    compare(
        benchmark, ways, topic="first_result", case=name, rounds=2 if scale.quick else 3, devices=count, tolerance=1e-2,
        subject=many, base=one, targets={"most ratio to base": {many: MOST}}, patience_seconds=2.0,
    )  # fmt: skip


def mapper(case: Case, devices: list[str], x: Any) -> Way:
    def first() -> Any:
        return devicemap.DeviceMap(lambda *args: case.fn(*args), devices=devices, batched=case.batched)(x)

    return first


def by_hand(case: Case, devices: list[str], x: Any) -> Way:
    """As the best user writes it: vectorised where that works."""

    def rows(batch: Any) -> Any:
        if case.batched:
            return case.fn(batch)
        try:
            return tf.vectorized_map(tf.function(case.fn), batch, fallback_to_while_loop=False)
        except ValueError:
            return tf.map_fn(tf.function(case.fn), batch, fn_output_signature=tf.float32)

    return lambda: peers.graph_blocks(rows, devices, "tf.concat")(x)
