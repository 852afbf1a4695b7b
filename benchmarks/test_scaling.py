"""Eager against graph, on more and more devices: the same `tf.device` blocks one after another, in a tf.function, and ours.

Each count of devices has the same ideal time, and as much more work. Functions with state are where the graph loses its
devices: TensorFlow runs such ops one after another.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import tensorflow as tf

import devicemap
from benchmarks import jobs, peers
from benchmarks.conftest import Scale
from benchmarks.measuring import Compare
from benchmarks.simulator import Simulator

JOB_SECONDS = 0.3
"""Shorter than elsewhere: what runs one device after another takes 16 times as long on 16."""

ROUNDS = 3
"""Fewer than elsewhere, on five numbers of devices."""


def functions(sim: Simulator) -> dict[str, Callable[[Any, Any], Any]]:
    def random(rows: Any, seconds: Any) -> Any:
        def row(values: tuple[Any, Any]) -> Any:
            return sim.work(values[0], values[1]) + 0.0 * tf.random.normal([])

        return tf.map_fn(row, (rows, seconds), fn_output_signature=tf.float32)

    return {"stateless": sim.work, "stateful": sim.stateful_work, "random in a map_fn": random}


@pytest.mark.parametrize("name", ["stateless", "stateful", "random in a map_fn"])
def test_eager_against_graph(
    compare: Compare, sim: Simulator, accelerators: list[str], scale: Scale, name: str
) -> None:
    job = jobs.make_job(scale.devices, min(scale.job_seconds, JOB_SECONDS), jobs.even, jobs.equal)
    job.configure(sim)
    fn, data = functions(sim)[name], (job.rows, job.seconds)
    eager, graph = peers.eager_blocks(fn, accelerators), peers.graph_blocks(fn, accelerators)
    mapper = devicemap.DeviceMap(fn, devices=accelerators, batched=True)
    ways = {
        "eager blocks": lambda: eager(*data),
        "graph blocks": lambda: graph(*data),
        "devicemap": lambda: mapper(data),
    }
    if name != "random in a map_fn":
        strategy = peers.mirrored_strategy(fn, accelerators, len(job.rows) // scale.devices)
        threads = peers.joblib_threads(fn, accelerators, 8)
        ways |= {"MirroredStrategy": lambda: strategy(*data), "joblib threads": lambda: threads(*data)}
    compare(ways, name, rounds=ROUNDS, answer=job.answer, ideal_seconds=job.ideal_seconds)


def test_real_devices(compare: Compare, real_devices: list[str], scale: Scale) -> None:
    """Products of matrices on GPUs; on logical CPU devices, which share the cores, nothing could be seen."""
    if "GPU" not in real_devices[0]:
        pytest.skip("there is no GPU")
    size, rows = (256, 64) if scale.quick else (2048, 64 * len(real_devices))
    matrices = tf.random.stateless_normal([size, size], [0, 0]) / size**0.5

    def fn(batch: Any) -> Any:
        state = batch[:, None] * matrices
        for _ in range(8):
            state = tf.tanh(state @ matrices)
        return tf.reduce_mean(state, [1, 2])

    data = tf.random.stateless_normal([rows // len(real_devices) * len(real_devices), size], [1, 1])
    eager, graph = peers.eager_blocks(fn, real_devices), peers.graph_blocks(fn, real_devices)
    one = tf.function(fn)
    mapper = devicemap.DeviceMap(fn, devices=real_devices, batched=True)
    chunks = devicemap.DeviceMap(fn, devices=real_devices, batched=True, batch_size="auto")
    ways = {
        "tf.function, one device": lambda: one(data),
        "eager blocks": lambda: eager(data),
        "graph blocks": lambda: graph(data),
        "devicemap": lambda: mapper(data),
        'devicemap, batch_size="auto"': lambda: chunks(data),
    }
    compare(ways, f"tanh(x @ m) of size {size}, 8 times", topic="gpu", tolerance=1e-2)
