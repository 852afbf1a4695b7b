"""The jobs of `test_balance.py` on GPUs in software: kernels and copies are enqueued there, and nobody waits for them."""

from __future__ import annotations

from typing import Any

import pytest
import tensorflow as tf

import devicemap
from benchmarks import jobs, peers, simulator, softgpu
from benchmarks.conftest import Scale
from benchmarks.measuring import compare
from benchmarks.traffic import CopyLog

TARGETS = {
    "even": 0.97,
    "a hot block, first": 0.93,
    "a hot block, last": 0.95,
    "half of the devices 4 times slower": 0.96,
    "one device 10 times slower": 0.95,
    "a ramp of costs": 0.95,
    "forty dear rows": 0.90,
    "speeds from 1 down to 0.3": 0.95,
}
"""Least shares of the ideal time, with 8 devices and a job of a second; inside a `tf.function` 0.93."""


@pytest.mark.parametrize("name", list(jobs.JOBS))
def test_balance_on_gpus(benchmark: Any, copy_log: CopyLog | None, scale: Scale, name: str) -> None:
    if copy_log is None:
        pytest.skip("needs --softgpus")
    gpus, work = softgpu.start(scale.devices), simulator.load().work
    devices = [f"GPU:{i}" for i in range(scale.devices)]
    with tf.device("CPU:0"):
        job = jobs.make_job(scale.devices, scale.job_seconds, *jobs.JOBS[name])
    for device, speed in enumerate(job.speeds):
        gpus.configure(device, speed=speed)
    data = job.rows, job.seconds
    mapper = devicemap.DeviceMap(work, devices=devices, batched=True)
    inside = tf.function(devicemap.DeviceMap(work, devices=devices, batched=True).__call__)
    blocks = peers.graph_blocks(work, devices)
    for _ in range(1 if scale.quick else 4):  # until the graph that balances itself is worth compiling
        mapper(data)
        inside(data)
    ways = {
        "devicemap": lambda: mapper(data),
        "devicemap, in a tf.function": lambda: inside(data),
        "graph blocks": lambda: blocks(*data),
    }
    compare(
        benchmark, ways, topic="balance_gpus", case=name, rounds=scale.rounds, devices=scale.devices, answer=job.answer,
        ideal_seconds=job.ideal_seconds,
        targets={"least share": {"devicemap": TARGETS[name], "devicemap, in a tf.function": min(0.93, TARGETS[name])}},
    )  # fmt: skip
