"""What a report costs: the same calls with one, as they are by default, and with `report=False`."""

from __future__ import annotations

from typing import Any

import pytest
import tensorflow as tf

import devicemap
from benchmarks import jobs
from benchmarks.conftest import Scale
from benchmarks.measuring import Way, compare
from benchmarks.simulator import Simulator

MOST = 1.01
FEW = 16
WITH, WITHOUT = "devicemap", "devicemap, report=False"
BATCH_SIZES = {"one graph": None, "chunks of 16": 16}


@pytest.mark.parametrize("name", BATCH_SIZES)
def test_a_job(benchmark: Any, sim: Simulator, accelerators: list[str], scale: Scale, name: str) -> None:
    """Even work for simulated accelerators, of about a second."""
    job = jobs.make_job(scale.devices, scale.job_seconds, jobs.even, jobs.equal)
    job.configure(sim)
    ways = mapped(sim.work, accelerators, BATCH_SIZES[name], (job.rows, job.seconds))
    compare(
        benchmark, ways, topic="reporting", case=f"a job of {scale.job_seconds:g} s, {name}", devices=scale.devices,
        rounds=scale.rounds, answer=job.answer, base=WITHOUT, targets={"most ratio to base": {WITH: MOST}},
        patience_seconds=60.0,
    )  # fmt: skip


@pytest.mark.parametrize("name", BATCH_SIZES)
def test_few_rows(benchmark: Any, real_devices: list[str], scale: Scale, name: str) -> None:
    """A function that costs nothing, so that all there is to see is the call."""
    x = tf.random.stateless_normal([FEW, 3], [0, 0])
    ways = mapped(lambda rows: tf.sin(rows) * 2.0, real_devices, BATCH_SIZES[name] and 4, x)
    compare(
        benchmark, ways, topic="reporting", case=f"{FEW} rows, {name.replace('16', '4')}", devices=len(real_devices),
        rounds=5 if scale.quick else 60, calls=20, base=WITHOUT,
    )  # fmt: skip


def mapped(fn: Any, devices: list[str], batch_size: int | None, data: Any) -> dict[str, Way]:
    def way(report: bool) -> Way:
        mapper = devicemap.DeviceMap(fn, devices=devices, batched=True, batch_size=batch_size, report=report)
        return lambda: mapper(data)

    return {WITH: way(True), WITHOUT: way(False)}
