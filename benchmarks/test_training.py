"""Epochs of Keras models, by `tf.distribute.MirroredStrategy` and by `parallelize`: the same batches, by Keras's own steps."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.conftest import Scale
from benchmarks.epochs import MODELS, WAYS, Contender
from benchmarks.measuring import compare

STEPS = 16
"""In an epoch."""

ROWS = 8
"""Of each device, in each step: few, so that what is timed is what the ways add."""

MOST = 0.50


@pytest.mark.parametrize("name", MODELS)
def test_epoch(benchmark: Any, real_devices: list[str], scale: Scale, name: str) -> None:
    steps, rows = 2 if scale.quick else STEPS, ROWS * len(real_devices)
    ways = {way: Contender(way, name, len(real_devices), steps, rows) for way in WAYS}
    targets = {"most ratio": {"devicemap.parallelize": MOST}} if name == "mlp" else {}
    try:
        compare(
            benchmark, ways, topic="training", case=f"{name}, {steps} steps of {rows} rows", rounds=scale.rounds,
            devices=len(real_devices), targets=targets, patience_seconds=10.0,
        )  # fmt: skip
    finally:
        for contender in ways.values():
            contender.close()
