"""Remote hosts in processes of their own. `test_cluster.py` runs it; the last test kills a host.

Two hosts have two CPU devices each, and two have an emulated GPU.
"""

from __future__ import annotations

import os
import signal
import socket
import stat
import struct
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import oracle
import pytest
import tensorflow as tf
from servers import Server
from trainings import CASES

import devicemap
from benchmarks import softgpu
from devicemap.errors import DeviceError, FunctionError
from devicemap.types import ChunkFinished, ChunkStarted, DeviceLost

JOBS = {"CPU": "worker", "GPU": "accelerators"}
try:
    softgpu.start(1, 64 << 20)  # this process needs the kernels, too
except softgpu.Unavailable:
    del JOBS["GPU"]

ROWS = tf.reshape(tf.range(120.0), [60, 2])
scale: tf.Variable


@pytest.fixture(scope="module", autouse=True)
def servers() -> Iterator[dict[str, list[Server]]]:
    started = {job: [Server(gpus=int(kind == "GPU")) for _ in range(2)] for kind, job in JOBS.items()}
    addresses = {job: [server.address for server in of_job] for job, of_job in started.items()}
    early = tf.Variable(1.0)
    with pytest.raises(DeviceError, match="too late"):
        devicemap.connect(addresses)
    del early
    devicemap.connect(addresses)
    global scale
    scale = tf.Variable(3.0)
    yield started
    for of_job in started.values():
        for server in of_job:
            server.kill()


@pytest.fixture(params=JOBS)
def job(request: pytest.FixtureRequest) -> str:
    """A job of two hosts. Its name selects their devices."""
    return JOBS[request.param]


def hosts_of(devices: Any) -> set[str]:
    return {device.partition("/device:")[0] for device in devices}


@pytest.mark.parametrize("batch_size", [None, 7])
def test_the_same_answer(job: str, batch_size: int | None) -> None:
    """Rows, reductions, random numbers and current values of variables equal those of local devices."""
    options = {"devices": f"/job:{job}", "batch_size": batch_size}
    mapper = devicemap.DeviceMap(lambda row: {"scaled": scale * row, "sum": tf.reduce_sum(row)}, **options)
    for factor in (3.0, 5.0):
        scale.assign(factor)
        oracle.assert_same(mapper(ROWS), {"scaled": factor * ROWS, "sum": tf.reduce_sum(ROWS, 1)})
    assert hosts_of(device.device for device in mapper.report.devices if device.rows) <= {
        f"/job:{job}/replica:0/task:0", f"/job:{job}/replica:0/task:1"
    }  # fmt: skip
    total = devicemap.parallel_reduce(lambda row: scale * row, ROWS, "sum", **options)
    np.testing.assert_allclose(total, 5 * tf.reduce_sum(ROWS, 0), rtol=1e-5)

    def noisy(row: Any, seed: Any) -> Any:
        return row + tf.random.stateless_normal([2], seed)

    found = devicemap.parallel_map(noisy, ROWS, seed=4, **options)
    oracle.assert_same(found, devicemap.parallel_map(noisy, ROWS, seed=4, devices="CPU:0"))
    scale.assign(3.0)


@pytest.mark.parametrize("home", ["CPU:0", "/job:worker/task:1/CPU:0"])
def test_variables_are_current(home: str) -> None:
    """Functions over several hosts wait for pending assignments: TensorFlow itself does not (2.21)."""
    with tf.device(home):
        variable = tf.Variable(0.0)
    mappers = [
        devicemap.DeviceMap(lambda row: variable * row, devices="/job:worker", batch_size=size) for size in (None, 7)
    ]
    for _ in range(50):
        for mapper in mappers:
            variable.assign_add(1.0)
            oracle.assert_same(mapper(ROWS), variable.numpy() * ROWS)


def test_gradients(job: str) -> None:
    mapper = devicemap.DeviceMap(lambda row: scale * row**2, devices=[f"/job:{job}", "CPU:0"])
    oracle.assert_same(oracle.gradients_of(mapper, ROWS, scale), [36 * ROWS**3, 6 * tf.reduce_sum(ROWS**4)])


@pytest.mark.parametrize("name", ["batch normalization", "moving average"])
def test_training(job: str, name: str) -> None:
    case = CASES[name]
    got = case.trained(devicemap.parallelize(case.made(), f"/job:{job}"))
    oracle.assert_close(got, case.wanted, rtol=1e-5)


@pytest.mark.filterwarnings("ignore:a Pipeline called under a tape")
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_pipeline(job: str, schedule: Any) -> None:
    """A stage on each host gives the results, streamed results and gradients of one device."""
    kernel = tf.Variable(tf.random.stateless_normal([2, 2], [1, 2]))
    stages = [lambda rows: tf.tanh(rows @ kernel), lambda rows: tf.reduce_sum(scale * rows, 1)]
    by_host = {each.name.partition("/device:")[0]: each.name for each in devicemap.list_devices() if job in each.name}
    pipe = devicemap.Pipeline(stages, [*by_host.values()], 4, schedule)
    assert len(hosts_of(pipe.devices)) == 2

    def in_turn(rows: Any) -> Any:
        return stages[1](stages[0](rows))

    oracle.assert_same(pipe(ROWS), in_turn(ROWS))
    sources = [ROWS, kernel, scale]
    oracle.assert_same(tf.function(oracle.gradients_of)(pipe, *sources), oracle.gradients_of(in_turn, *sources))
    batches = tf.data.Dataset.from_tensor_slices(ROWS).batch(25)
    for found, batch in zip(pipe.stream(batches), batches, strict=True):
        oracle.assert_same(found, in_turn(batch))


def sent_bytes() -> int:
    """The bytes that all connections of this process have sent, from the `tcp_info` of the kernel."""
    total = 0
    for number in os.listdir("/dev/fd"):
        try:
            if not stat.S_ISSOCK(os.stat(f"/dev/fd/{number}").st_mode):
                continue
            with socket.socket(fileno=os.dup(int(number))) as connection:
                info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 232)
        except OSError:
            continue
        total += struct.unpack_from("Q", info, 200)[0]
    return total


@pytest.mark.parametrize("batch_size", [None, 15])
@pytest.mark.parametrize("kind", ["variable", "tensor"])
def test_captures_are_sent_once_per_host(kind: str, batch_size: int | None) -> None:
    """A host with two devices receives a variable once per call and a tensor once."""
    table = tf.random.stateless_normal([1 << 19], [1, 2])
    size = 4 << 19
    captured = tf.Variable(table) if kind == "variable" else table
    mapper = devicemap.DeviceMap(
        lambda row: row + tf.gather(tf.convert_to_tensor(captured), 5),
        devices="/job:worker/task:0",
        batch_size=batch_size,
    )
    counts = [sent_bytes()]
    for _ in range(3):
        oracle.assert_same(mapper(ROWS), ROWS + table[5])
        counts.append(sent_bytes())
    sent = np.diff(counts) / size
    wanted = [1, 1, 1] if kind == "variable" else [1, 0, 0]
    np.testing.assert_allclose(sent, wanted, atol=0.2)


@pytest.mark.parametrize("batch_size", [None, 7])
def test_maps_in_tasks(job: str, batch_size: int | None) -> None:
    def task(factor: float) -> Any:
        mapper = devicemap.DeviceMap(lambda row: factor * scale * row, batch_size=batch_size)
        chunks = list(mapper.stream(ROWS))
        total = mapper.reduce(ROWS, "sum")
        return mapper(ROWS), tf.concat(chunks, 0), total, tf.constant(0).device

    found = devicemap.parallel_tasks(task, [1.0, 2.0, 3.0], devices=f"/job:{job}")
    for factor, (rows, streamed, total, device) in enumerate(found, 1):
        oracle.assert_same([rows, streamed], [factor * 3.0 * ROWS] * 2)
        np.testing.assert_allclose(total, factor * 3.0 * tf.reduce_sum(ROWS, 0), rtol=1e-5)
        assert f"/job:{job}" in device


def test_python_functions_run_locally() -> None:
    processes = set()

    def negative(row: Any) -> Any:
        processes.add(os.getpid())
        return -row

    def fn(row: Any) -> Any:
        return tf.ensure_shape(tf.numpy_function(negative, [row], tf.float32), [2])

    oracle.assert_same(devicemap.parallel_map(fn, ROWS, devices="/job:worker"), -ROWS)
    assert processes == {os.getpid()}


def test_a_second_cluster() -> None:
    with pytest.raises(DeviceError, match=r"already connected to .* TensorFlow has one cluster per process"):
        devicemap.connect({"worker": ["127.0.0.1:2222"]})


@pytest.mark.parametrize("batch_size", [None, 7])
def test_ctrl_c_while_a_host_is_stopped(servers: Any, batch_size: int | None) -> None:
    mapper = devicemap.DeviceMap(lambda row: scale * row, devices=["/job:worker", "CPU:0"], batch_size=batch_size)
    mapper(ROWS)
    start = time.monotonic()
    with servers["worker"][0].stopped(seconds=20):
        threading.Timer(0.5, signal.raise_signal, [signal.SIGINT]).start()
        with pytest.raises(KeyboardInterrupt):
            mapper(ROWS)
    assert time.monotonic() - start < 10
    oracle.assert_same(mapper(ROWS), 3 * ROWS)


def test_a_host_is_killed(servers: Any) -> None:
    """In its second chunk: each row is computed once. Calls in chunks continue without it, others name its devices."""
    lost = "/job:worker/replica:0/task:1"
    events: list[Any] = []
    begun: list[Any] = []

    def watch(event: Any) -> None:
        events.append(event)
        if isinstance(event, ChunkStarted) and event.shard.device.startswith(lost):
            begun.append(event)
            if len(begun) == 2:
                servers["worker"][1].kill()

    def work(row: Any) -> Any:
        product = tf.fill([60, 60], 0.1)
        for _ in tf.range(40):
            product = tf.tanh(product @ product)
        return scale * row + 0 * tf.reduce_sum(product)

    options = {"devices": ["/job:worker", "CPU:0"]}
    in_graph = devicemap.DeviceMap(lambda row: scale * row, **options)
    oracle.assert_same(in_graph(ROWS), 3 * ROWS)
    in_chunks = devicemap.DeviceMap(work, **options, batch_size=2, progress=watch)
    for _ in range(2):
        events.clear()
        with pytest.warns(RuntimeWarning, match="task:1.*UnavailableError"):
            np.testing.assert_allclose(in_chunks(ROWS), 3 * ROWS, rtol=1e-5)
        finished = [event.shard for event in events if isinstance(event, ChunkFinished)]
        assert sorted(row for shard in finished for row in range(shard.start, shard.stop)) == [*range(60)]
        gone = [event.device for event in events if isinstance(event, DeviceLost)]
        assert sorted(gone) == [f"{lost}/device:CPU:{number}" for number in (0, 1)]
        scale.assign(3.0)
    with pytest.raises(FunctionError, match=r"rows \d+.*task:1.*UnavailableError.*leave out its devices"):
        in_graph(ROWS)
