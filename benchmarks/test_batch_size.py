"""Time against batch size, where a call costs something of its own: small batches pay it often, large ones balance badly."""

from __future__ import annotations

from typing import Any

import pytest

import devicemap
from benchmarks import jobs, peers
from benchmarks.conftest import Scale
from benchmarks.measuring import Compare
from benchmarks.simulator import Simulator

CALL_SECONDS = 0.002
"""What a call of a device costs besides its rows."""

JOB_SECONDS = 0.4


@pytest.mark.parametrize("batch_size", [1, 4, 16, 64, "auto"])
def test_batch_size(compare: Compare, sim: Simulator, accelerators: list[str], scale: Scale, batch_size: Any) -> None:
    if scale.quick and batch_size not in (4, "auto"):
        pytest.skip("a short run takes two of them")
    job = jobs.make_job(scale.devices, min(scale.job_seconds, JOB_SECONDS), jobs.even, jobs.equal)
    for device in range(scale.devices):
        sim.configure(device, overhead_seconds=CALL_SECONDS)
    data = job.rows, job.seconds
    mapper = devicemap.DeviceMap(sim.work, devices=accelerators, batched=True, batch_size=batch_size)
    ways = {"devicemap": lambda: mapper(data)}
    if batch_size != "auto":
        threads = peers.joblib_threads(sim.work, accelerators, batch_size)
        dataset = peers.in_memory(peers.dataset_map(sim.work, accelerators), batch_size)
        ways |= {"joblib threads": lambda: threads(*data), "Dataset.map": lambda: dataset(*data)}
    compare(ways, str(batch_size), answer=job.answer, ideal_seconds=job.ideal_seconds, patience_seconds=1.5)
