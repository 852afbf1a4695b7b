"""The jobs of `test_balance.py` on GPUs in software: kernels and copies are enqueued there, without waiting for them."""

from __future__ import annotations

from typing import Any

import pytest
import tensorflow as tf

import devicemap
from benchmarks import jobs, peers, simulator, softgpu
from benchmarks.conftest import Scale
from benchmarks.measuring import compare

TARGETS = {
    "even": 0.95,
    "a hot block, first": 0.95,
    "a hot block, last": 0.92,
    "half of the devices 4 times slower": 0.96,
    "one device 10 times slower": 0.96,
    "a ramp of costs": 0.95,
    "forty expensive rows": 0.88,
    "speeds from 1 down to 0.3": 0.95,
}
"""Least shares of the ideal time, with 8 devices and a job of a second."""


@pytest.mark.parametrize("name", list(jobs.JOBS))
def test_balance_on_gpus(benchmark: Any, emulated_gpus: softgpu.SoftGPUs, scale: Scale, name: str) -> None:
    work = simulator.load().work
    devices = [f"GPU:{i}" for i in range(scale.devices)]
    with tf.device("CPU:0"):
        job = jobs.make_job(scale.devices, scale.job_seconds, *jobs.JOBS[name])
    for device, speed in enumerate(job.speeds):
        emulated_gpus.configure(device, speed=speed)
    data = job.rows, job.seconds
    mapper = devicemap.DeviceMap(work, devices=devices, batched=True)
    blocks = peers.graph_blocks(work, devices)
    for _ in range(2):  # the third call is the first to be measured
        mapper(data)
    ways = {
        "devicemap": lambda: mapper(data),
        "graph blocks": lambda: blocks(*data),
    }
    compare(
        benchmark, ways, topic="balance_gpus", case=name, rounds=scale.rounds, devices=scale.devices, answer=job.answer,
        ideal_seconds=job.ideal_seconds,
        targets={"least share": {"devicemap": TARGETS[name]}},
    )  # fmt: skip
