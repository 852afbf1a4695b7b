"""Streams: chunks in input order from a dataset, as a share of the slower of input and compute."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import devicemap
from benchmarks import jobs, peers
from benchmarks.conftest import Scale
from benchmarks.measuring import Compare
from benchmarks.simulator import Simulator

BATCH_SIZE = 8
"""Rows of a batch of the user's, of 5 ms each: 25 batches per device."""


LEAST = {"samples": 0.93, "ready batches": 0.90, "as_dataset": 0.90, "data in memory": 0.95}
"""Shares of the ideal time."""


@pytest.mark.parametrize("case", LEAST)
def test_stream(compare: Compare, sim: Simulator, accelerators: list[str], scale: Scale, case: str) -> None:
    """Against `Dataset.map` over the same rows."""
    job = even_job(scale)
    data = job.rows, job.seconds
    samples = untuned(tf.data.Dataset.from_tensor_slices(data))
    batches = samples.batch(BATCH_SIZE)
    batched = devicemap.DeviceMap(sim.work, devices=accelerators, batched=True)
    chunked = devicemap.DeviceMap(sim.work, devices=accelerators, batched=True, batch_size=BATCH_SIZE)
    per_sample = devicemap.DeviceMap(sim.work, devices=accelerators)
    dataset = untuned(chunked.as_dataset(data))
    streams = {
        "samples": lambda: per_sample.stream(samples),
        "ready batches": lambda: batched.stream(batches),
        "as_dataset": lambda: dataset,
        "data in memory": lambda: chunked.stream(data),
    }
    stream, dataset_map = streams[case], peers.dataset_map(sim.work, accelerators)(batches)
    ways = {"devicemap": lambda: joined(stream()), "Dataset.map": lambda: joined(dataset_map)}
    targets = {"least share": {"devicemap": LEAST[case]}}
    compare(ways, case, answer=job.answer, ideal_seconds=job.ideal_seconds, targets=targets)


def test_slow_input(compare: Compare, sim: Simulator, accelerators: list[str], scale: Scale) -> None:
    """The input takes twice as long as the devices; so the ideal is what reading alone takes, which is measured."""
    job = even_job(scale)
    batch_seconds = 2 * job.ideal_seconds * BATCH_SIZE / len(job.rows)

    def read(*batch: Any) -> Any:
        def wait(rows: np.ndarray) -> np.ndarray:
            time.sleep(batch_seconds)
            return rows

        rows = tf.ensure_shape(tf.numpy_function(wait, [batch[0]], tf.float32), [None, 4])
        return rows, batch[1]

    batches = tf.data.Dataset.from_tensor_slices((job.rows, job.seconds)).batch(BATCH_SIZE).map(read)
    reading = [seconds_to_last(batches.prefetch(tf.data.AUTOTUNE)) for _ in range(1 if scale.quick else 5)]
    mapper = devicemap.DeviceMap(sim.work, devices=accelerators, batched=True)
    dataset_map = peers.dataset_map(sim.work, accelerators)(batches)
    compare(
        {"devicemap": lambda: joined(mapper.stream(batches)), "Dataset.map": lambda: joined(dataset_map)},
        "input twice as slow as the devices", answer=job.answer, ideal_seconds=statistics.median(reading),
        targets={"least share": {"devicemap": 0.95}},
    )  # fmt: skip


def test_small_chunks(compare: Compare, real_devices: list[str]) -> None:
    """What handing out chunks costs: 32 batches that are ready, against one call of a graph for each."""
    rows = tf.random.stateless_uniform([32 * 512, 16], [1, 2])
    batches = untuned(tf.data.Dataset.from_tensor_slices(rows).batch(512).cache())
    graph = tf.function(row_sums, reduce_retracing=True)
    mapper = devicemap.DeviceMap(row_sums, devices=real_devices, batched=True)
    ways = {
        "devicemap": lambda: joined(mapper.stream(batches)),
        "a graph per batch": lambda: joined(map(graph, batches)),
    }
    compare_chunks(compare, "32 ready batches of 512 rows", ways, most=1.3)


def test_large_batches(compare: Compare, real_devices: list[str], scale: Scale) -> None:
    """4 MB each, in and out, which are not kept."""
    count = 16 if scale.quick else 1000
    rows = tf.random.stateless_uniform([1024, 1024], [1, 2])
    batches = untuned(tf.data.Dataset.from_tensors(rows).repeat(count))
    mapper = devicemap.DeviceMap(doubled, devices=real_devices, batched=True)
    dataset_map = peers.dataset_map(doubled, real_devices)(batches)
    graph = tf.function(doubled)
    ways = {
        "devicemap": lambda: last_row(mapper.stream(batches)),
        "a graph per batch": lambda: last_row(map(graph, batches)),
        "Dataset.map": lambda: last_row(dataset_map),
    }
    compare_chunks(compare, f"{count} batches of 4 MB", ways, most=1.1)


def compare_chunks(compare: Compare, case: str, ways: dict[str, Callable[[], Any]], most: float) -> None:
    targets = {"most ratio to base": {"devicemap": most}}
    compare(ways, case, topic="chunk_cost", base="a graph per batch", targets=targets, patience_seconds=15.0)


def last_row(chunks: Any) -> Any:
    """Of all chunks, of which each goes when the next one comes."""
    for chunk in chunks:
        last = chunk
    return last[-1]


def doubled(rows: Any) -> Any:
    return rows * 2.0


def row_sums(rows: Any) -> Any:
    return tf.reduce_sum(tf.sin(rows) * rows, -1)


def untuned(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """The dataset without autotuning, and those that derive from it. Its thread delays the end of some iterations to its next
    tick: 10, 30, 70, 150, 310, 630, ... ms after the start."""
    options = tf.data.Options()
    options.autotune.enabled = False
    return dataset.with_options(options)


def seconds_to_last(dataset: tf.data.Dataset) -> float:
    """Seconds to the last element. The end itself comes later, as in `untuned`."""
    start = last = time.perf_counter()
    for _ in dataset:
        last = time.perf_counter()
    return last - start


def even_job(scale: Scale) -> jobs.Job:
    return jobs.make_job(scale.devices, scale.job_seconds, jobs.even, jobs.equal)


def joined(chunks: Any) -> Any:
    return tf.concat(list(chunks), 0)
