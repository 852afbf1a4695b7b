"""Programs of the chaos tests: writers and readers of one directory, calls on remote hosts, and jobs of Ray."""

from __future__ import annotations

import os
import random
import sys
import threading
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf
import threads
from servers import Server
from stored import ComputedRows, read_rows

import devicemap
from benchmarks.simulator import Simulator, load
from devicemap.errors import JournalError

INTERRUPTED, FAILED = 130, 1
"""Exit codes."""

DEVICES = ["CPU:0", "CPU:1", "CPU:2"]
SECONDS_PER_ROW = 0.002


def is_bad(row: int) -> bool:
    """Return whether this row fails on each device."""
    return row % 37 == 5


def _change_devices(simulator: Simulator, seed: int) -> None:
    """Let two devices fail, slow down, recover, and change the rows that fit into their memory, for ever."""
    draw = random.Random(seed)
    while True:
        time.sleep(draw.uniform(0.01, 0.1))
        simulator.configure(
            draw.choice(DEVICES[1:]),
            speed=draw.choice([1.0, 0.1, 10.0]),
            memory_rows=draw.choice([None, 1, 5]),
            fails_from_call=draw.choice([None, None, 0, 3]),
            fails_for_calls=draw.choice([None, 1]),
            error_code=draw.choice([tf.errors.UNAVAILABLE, tf.errors.INTERNAL, tf.errors.ABORTED]),
        )


def write(directory: str, rows: int, seed: int) -> None:
    """Write all rows, as soon as no other process does."""
    devicemap.simulate_devices(len(DEVICES))
    simulator = load()
    threading.Thread(target=_change_devices, args=(simulator, seed), daemon=True).start()

    def fn(batch: Any) -> Any:
        with tf.control_dependencies([tf.debugging.assert_none_equal(batch % 37, tf.constant(5, tf.int64))]):
            return simulator.work(batch, tf.fill(tf.shape(batch), SECONDS_PER_ROW))

    mapper = devicemap.DeviceMap(
        fn, batched=True, batch_size=8, devices=DEVICES, on_error="skip", name="chaos", max_retries=30
    )
    while True:
        try:
            results = mapper.write(np.arange(rows), directory)
        except JournalError as error:
            if "is being written to" not in str(error):
                raise
            time.sleep(0.05)
        else:
            break
    assert results.complete
    assert not threads.running()


def read(directory: str, rows: int, seed: int) -> None:
    """Read for ever: each row that is there is right."""
    while True:
        check(read_rows(Path(directory)))


def check(found: dict[int, Any]) -> None:
    """Compare rows that were read, or their errors."""
    for row, result in found.items():
        assert isinstance(result, str) == is_bad(row), (row, result)
        assert is_bad(row) or result == 2 * row + 1, (row, result)


def _slowly(row: Any) -> Any:
    """Return zero, after some time."""
    total = tf.fill([100, 100], 0.01)
    for _ in range(20):  # no loop of autograph, which needs the source
        total = tf.tanh(total @ total)
    return 0 * total[0, 0]


def disturb_hosts(seed: int, seconds: float, counts: Any) -> None:
    """Map rows on two hosts of which one is stopped for a while, again and again; in most cases, one is killed at last."""
    draw, end = random.Random(seed), time.monotonic() + seconds
    servers = [Server(), Server()]
    devicemap.connect({"worker": [server.address for server in servers]})
    scale, happened, computed = tf.Variable(1.0), Counter[str](), ComputedRows()

    def disturb() -> None:
        while time.monotonic() < end - 10:
            time.sleep(draw.uniform(0, 1))
            draw.choice(servers).pause(draw.uniform(0, 2))
            happened["stops"] += 1
        if draw.random() < 0.7:
            happened["kills"] += 1
            servers[1].kill()

    mapper = devicemap.DeviceMap(
        lambda row: scale * row + _slowly(row),
        devices=["/job:worker", "CPU:0"],
        batch_size=5,
        progress=computed.observe,
    )
    disturbing = threading.Thread(target=disturb)
    disturbing.start()
    while time.monotonic() < end:
        rows = tf.range(float(draw.randrange(1, 400)))
        scale.assign(float(draw.randrange(9)))
        computed.clear()
        np.testing.assert_array_equal(mapper(rows), scale * rows)
        assert sorted(computed) == [*range(len(rows))]
        happened["calls"] += 1
    disturbing.join()
    for server in servers:
        server.kill()
    assert not threads.running()
    counts.put(happened)


def disturb_ray_nodes(seed: int, seconds: float, counts: Any) -> None:
    """Map datasets with Ray on two nodes, of which one is killed or shut down and replaced, again and again."""
    import ray.data
    from ray.cluster_utils import Cluster

    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import this module
    draw, end, happened = random.Random(seed), time.monotonic() + seconds, Counter[str]()
    soon = {"health_check_initial_delay_ms": 0, "health_check_period_ms": 500, "health_check_failure_threshold": 4}
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "_system_config": soon})
    cluster.add_node(num_cpus=1)
    ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")

    def noisy(row: Any, seed: Any) -> Any:
        return row["data"] + tf.random.stateless_uniform([], seed) + _slowly(row)

    def work() -> None:
        while time.monotonic() < end:
            rows, job = np.arange(draw.randrange(1, 300), dtype="f"), happened["jobs"]
            dataset = ray.data.from_numpy(rows).repartition(7)
            dataset.context.execution_options.preserve_order = True
            found = devicemap.ray.map_batches(dataset, noisy, concurrency=2, seed=job).take_all()
            wanted = devicemap.parallel_map(noisy, {"data": rows}, seed=job)
            np.testing.assert_allclose([row["result"] for row in found], wanted, rtol=1e-5)
            happened["jobs"] += 1

    with ThreadPoolExecutor(1) as thread:
        working = thread.submit(work)
        while time.monotonic() < end and not working.done():
            time.sleep(draw.uniform(5, 15))
            cluster.remove_node(draw.choice([*cluster.worker_nodes]), allow_graceful=draw.random() < 0.3)
            cluster.add_node(num_cpus=1)  # in the main thread only
            happened["nodes lost"] += 1
        working.result()
    assert happened["nodes lost"]
    ray.shutdown()
    cluster.shutdown()
    counts.put(happened)


def _was_interrupted(error: BaseException | None) -> bool:
    """Return whether a `KeyboardInterrupt` caused an error. TensorFlow's device scopes raise another error if it hits them."""
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__cause__ or error.__context__
    return error is not None


def run(target: Callable[..., None], log: str, ready: Any, *arguments: Any) -> None:
    """Call a function in this process, and exit with a code. The error of a failure is added to a file.

    `ready` is an event that is set when imports are done: some of them catch all errors, `KeyboardInterrupt` included.
    """
    warnings.simplefilter("ignore", RuntimeWarning)  # of lost devices and failed rows
    try:
        ready.set()
        target(*arguments)
    except BaseException as error:
        if _was_interrupted(error):
            os._exit(INTERRUPTED)
        with open(log, "a", encoding="utf-8") as file:
            file.write(traceback.format_exc())
        os._exit(FAILED)
    os._exit(0)
