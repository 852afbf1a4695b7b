"""Law 8: Ctrl-C stops at once, and nothing is left behind."""

from __future__ import annotations

import copy
import gc
import os
import pathlib
import pickle
import signal
import subprocess
import sys
import threading
import time
import weakref
from typing import Any

import pytest
import tensorflow as tf

import devicemap

ROOT = pathlib.Path(__file__).parents[2]
X = tf.reshape(tf.range(60, dtype=tf.float32), [20, 3])

ENDLESS = """
import sys, threading
import tensorflow as tf
import devicemap

devicemap.simulate_devices(3)

def announce():
    print("running\\n", end="", flush=True)
    return 0.0

def endless(row):
    if row[0] == 0.0:
        return row
    row += tf.py_function(announce, [], tf.float32)  # before the loops take all threads
    while tf.reduce_sum(row) >= 0.0:
        row = row + 1e-9
    return row

data = tf.ones([6, 2])
{before}
try:
    devicemap.parallel_map(endless, {data})
except KeyboardInterrupt:
    print("stopped", flush=True)
    alive = [t.name for t in threading.enumerate() if t.name.startswith("devicemap")]
    sys.exit(len(alive))
"""


QUICK = "for _ in range(3): devicemap.parallel_map(endless, tf.zeros([3, 2]))"


@pytest.mark.parametrize(
    ("data", "before"),
    [
        ("data", ""),
        ("tf.ones([100_000, 2])", QUICK),
        ("data, batch_size=1", ""),
        ("tf.data.Dataset.from_tensor_slices(data)", ""),
    ],
    ids=["one graph", "more rows than in quick calls before", "chunks", "dataset"],
)
def test_ctrl_c_stops_at_once(data: str, before: str, tmp_path: pathlib.Path) -> None:
    program = tmp_path / "endless.py"
    program.write_text(ENDLESS.format(data=data, before=before))
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen([sys.executable, program], env=environment, **pipes) as process:
        watchdog = threading.Timer(120, process.kill)  # readline has no timeout
        watchdog.start()
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "running\n"
            interrupted = time.monotonic()
            process.send_signal(signal.SIGINT)
            output, error = process.communicate(timeout=60)
        finally:
            watchdog.cancel()
            process.kill()
    assert "stopped" in output, error
    assert process.returncode == 0
    assert time.monotonic() - interrupted < 10  # the process's own end included; without cancelling it never ends


def test_no_thread_stays() -> None:
    before = set(threading.enumerate())
    mapper = devicemap.DeviceMap(lambda row: row * 2, devices=["CPU:0", "CPU:1"], batch_size=2)
    mapper(X)
    devicemap.parallel_map(tf.sin, X)
    with pytest.raises(tf.errors.InvalidArgumentError):
        devicemap.parallel_map(lambda row: tf.debugging.check_numerics(row / 0.0, "nan"), X, batch_size=1)
    assert set(threading.enumerate()) <= before


def test_a_mapper_that_is_dropped_frees_its_function_and_copies() -> None:
    class Scale(tf.Module):
        def __init__(self) -> None:
            self.by = tf.Variable(2.0)

        def __call__(self, row: Any) -> Any:
            return row * self.by

    scale = Scale()
    mapper = devicemap.DeviceMap(scale, devices=["CPU:1", "CPU:2"])
    mapper(X)
    dead = weakref.ref(scale)
    del scale, mapper
    gc.collect()
    assert dead() is None


def test_a_mapper_that_stays_frees_the_graphs_that_it_was_called_in() -> None:
    scale: list[Any] = []
    mapper = devicemap.DeviceMap(lambda row: row * scale[0], devices=["CPU:0", "CPU:1"])
    graphs = []
    for _ in range(2):

        @tf.function
        def user(x: Any) -> Any:
            scale[:] = [tf.reduce_sum(x)]
            graphs.append(weakref.ref(tf.compat.v1.get_default_graph()))
            return mapper(x) + mapper(x)

        user(X)
    del user
    scale.clear()
    gc.collect()
    assert [graph() for graph in graphs] == [None, None]


def test_calls_leave_global_state_alone() -> None:
    tf.random.set_seed(3)
    before = tf.random.normal([2]).numpy().tolist()
    tf.random.set_seed(3)
    devicemap.parallel_map(lambda row: row + tf.random.normal([3]), X, devices=["CPU:1", "CPU:2"])
    assert tf.random.normal([2]).numpy().tolist() == before


def test_a_map_is_copied_and_pickled_as_what_it_was_made_of() -> None:
    mapper = devicemap.DeviceMap(tf.square, devices=["CPU:1", "CPU:2"], batch_size=2)
    mapper(tf.range(5))
    for again in (copy.copy(mapper), copy.deepcopy(mapper), pickle.loads(pickle.dumps(mapper))):
        assert again(tf.range(5)).numpy().tolist() == [0, 1, 4, 9, 16]
        assert [row.device.endswith(("CPU:1", "CPU:2")) for row in again.report.devices] == [True, True]
