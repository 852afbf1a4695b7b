"""The jobs of `test_balance.py` on GPUs in software: kernels and copies are enqueued there, without waiting for them."""

from __future__ import annotations

import pytest
import tensorflow as tf

import devicemap
from benchmarks import jobs, peers, simulator, softgpu
from benchmarks.conftest import Scale
from benchmarks.measuring import Compare
from benchmarks.test_balance import NO_OPTIONS, TARGETS


@pytest.mark.parametrize("name", list(jobs.JOBS))
def test_balance_on_gpus(compare: Compare, emulated_gpus: softgpu.SoftGPUs, scale: Scale, name: str) -> None:
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
    ways = {"devicemap": lambda: mapper(data), "graph blocks": lambda: blocks(*data)}
    targets = {"least share": {"devicemap": TARGETS[name][NO_OPTIONS]}}
    compare(ways, name, answer=job.answer, ideal_seconds=job.ideal_seconds, targets=targets)
