"""Share of the ideal time on simulated accelerators: even work, a hot block, uneven devices, functions with state."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import devicemap
from benchmarks import jobs, peers
from benchmarks.conftest import Scale
from benchmarks.measuring import Compare, Way
from benchmarks.simulator import Simulator

BATCH_SIZE = 16
"""Rows per chunk, of 5 ms each: a hundred chunks for 8 devices. Chosen of 4, 16 and 64 for devicemap (which came within 0.02
of each other; a hot block in front is the case that depends on it most), of 4 and 16 for joblib's threads."""

NO_OPTIONS, FIRST = "devicemap", "devicemap, the first call"
CHUNKS, AUTO = "devicemap, batch_size=16", 'devicemap, batch_size="auto"'

TARGETS = {
    "even": {NO_OPTIONS: 0.95, FIRST: 0.85, CHUNKS: 0.95, AUTO: 0.80},
    "even, stateful": {NO_OPTIONS: 0.95, FIRST: 0.85, CHUNKS: 0.93, AUTO: 0.80},
    "even, random in a map_fn": {NO_OPTIONS: 0.93, CHUNKS: 0.93, AUTO: 0.80},
    "a hot block, first": {NO_OPTIONS: 0.95, FIRST: 0.85, CHUNKS: 0.95, AUTO: 0.80},
    "a hot block, last": {NO_OPTIONS: 0.92, FIRST: 0.85, CHUNKS: 0.90, AUTO: 0.80},
    "half of the devices 4 times slower": {NO_OPTIONS: 0.96, FIRST: 0.85, CHUNKS: 0.93, AUTO: 0.80},
    "one device 10 times slower": {NO_OPTIONS: 0.96, FIRST: 0.85, CHUNKS: 0.88, AUTO: 0.80},
    "a ramp of costs": {NO_OPTIONS: 0.95, FIRST: 0.85, CHUNKS: 0.90, AUTO: 0.80},
    "forty expensive rows": {NO_OPTIONS: 0.88, FIRST: 0.85, CHUNKS: 0.80, AUTO: 0.80},
    "speeds from 1 down to 0.3": {NO_OPTIONS: 0.95, FIRST: 0.85, CHUNKS: 0.90, AUTO: 0.80},
}
"""Least shares of the ideal time, with 8 devices and a job of a second."""


@pytest.mark.parametrize("name", list(jobs.JOBS))
def test_balance(compare: Compare, sim: Simulator, accelerators: list[str], scale: Scale, name: str) -> None:
    job = jobs.make_job(scale.devices, scale.job_seconds, *jobs.JOBS[name])
    job.configure(sim)
    ways = ours(sim.work, accelerators, job, batched=True) | theirs(sim.work, accelerators, job)
    measure(compare, ways, job, name)


def test_stateful(compare: Compare, sim: Simulator, accelerators: list[str], scale: Scale) -> None:
    job = jobs.make_job(scale.devices, scale.job_seconds, jobs.even, jobs.equal)
    ways = ours(sim.stateful_work, accelerators, job, batched=True) | theirs(sim.stateful_work, accelerators, job)
    measure(compare, ways, job, "even, stateful")


def test_random(compare: Compare, sim: Simulator, accelerators: list[str], scale: Scale) -> None:
    """A `fn` of one sample that draws a random number, in a `tf.map_fn` with all."""
    job = jobs.make_job(scale.devices, scale.job_seconds, jobs.even, jobs.equal)

    def row(values: Any, seconds: Any) -> Any:
        return sim.work(values, seconds) + 0.0 * tf.random.normal([])

    def batch(rows: Any, seconds: Any) -> Any:
        return tf.map_fn(lambda pair: row(*pair), (rows, seconds), fn_output_signature=tf.float32)

    ways = ours(row, accelerators, job, batched=False) | theirs(batch, accelerators, job)
    measure(compare, ways, job, "even, random in a map_fn")


def ours(fn: Callable[..., Any], devices: list[str], job: jobs.Job, batched: bool) -> dict[str, Way]:
    def mapped(batch_size: int | str | None) -> Way:
        mapper = devicemap.DeviceMap(fn, devices=devices, batched=batched, batch_size=batch_size)
        for _ in range(2):  # the third call is the first to be measured
            mapper((job.rows, job.seconds))
        return lambda: mapper((job.rows, job.seconds))

    def first() -> Any:  # traced and compiled in each call
        return devicemap.DeviceMap(fn, devices=devices, batched=batched)((job.rows, job.seconds))

    return {FIRST: first, NO_OPTIONS: mapped(None), CHUNKS: mapped(BATCH_SIZE), AUTO: mapped("auto")}


def theirs(fn: Callable[..., Any], devices: list[str], job: jobs.Job) -> dict[str, Way]:
    graph = peers.graph_blocks(fn, devices)
    # one step where all rows and devices are alike; else small steps, so that no device gets all of the hot rows
    alike = np.ptp(job.seconds) == 0
    strategy = peers.mirrored_strategy(fn, devices, len(job.rows) // len(devices) if alike else 4)
    threads = peers.joblib_threads(fn, devices, BATCH_SIZE)
    dataset = peers.in_memory(
        peers.dataset_map(fn, devices), 4
    )  # 4: better than 16 on even work and a hot block in front, worse on one at the end
    data = job.rows, job.seconds
    return {
        "graph blocks": lambda: graph(*data),
        "MirroredStrategy": lambda: strategy(*data),
        "joblib threads": lambda: threads(*data),
        "Dataset.map": lambda: dataset(*data),
    }


def measure(compare: Compare, ways: dict[str, Way], job: jobs.Job, case: str) -> None:
    targets = {"least share": TARGETS[case]}
    compare(ways, case, answer=job.answer, ideal_seconds=job.ideal_seconds, targets=targets, subject=CHUNKS)
