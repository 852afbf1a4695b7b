"""Other hosts, in processes that are killed and stopped at scripted moments. `test_cluster.py` runs it.

Two have two CPU devices each, and two a GPU in software.
"""

from __future__ import annotations

import os
import signal
import socket
import stat
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import oracle
import pytest
import tensorflow as tf
from servers import Server
from trainings import CASES

import devicemap
from benchmarks import softgpu
from devicemap.errors import DeviceError, HostLostError, OptionError
from devicemap.types import ChunkFinished, ChunkStarted, DeviceLost

TIMEOUT = 1.5
SOON = 20.0
"""Seconds in which whatever waits for a lost host has ended on a machine that others use, too; a minute would be a hang."""

JOBS = {"CPU": "worker", "GPU": "accelerators"}
try:
    softgpu.start(1, 64 << 20)  # this process is to know their kernels, too
except softgpu.Unavailable:
    del JOBS["GPU"]

ROWS = tf.reshape(tf.range(120.0), [60, 2])
scale: tf.Variable


@pytest.fixture(scope="module")
def servers() -> Iterator[dict[str, list[Server]]]:
    started = {job: [Server(gpus=int(kind == "GPU")) for _ in range(2)] for kind, job in JOBS.items()}
    addresses = {job: [server.address() for server in of_job] for job, of_job in started.items()}
    too_early = tf.Variable(1.0)
    with pytest.raises(DeviceError, match="too late"):
        devicemap.connect(addresses)
    del too_early
    devicemap.connect(addresses, TIMEOUT)
    global scale
    scale = tf.Variable(3.0)
    yield started
    for of_job in started.values():
        for server in of_job:
            server.end()


@pytest.fixture
def connect(servers: dict[str, list[Server]]) -> Iterator[Callable[[], None]]:
    """Brings all hosts back, and connects again."""

    def connect() -> None:
        for of_job in servers.values():
            for server in of_job:
                server.bring_back()
        devicemap.connect({job: [server.address() for server in of_job] for job, of_job in servers.items()}, TIMEOUT)

    yield connect
    connect()


@pytest.fixture(params=JOBS)
def job(request: pytest.FixtureRequest, connect: Callable[[], None]) -> str:
    """Of two hosts; its name chooses their devices."""
    return JOBS[request.param]


def work(row: Any) -> Any:
    """So much of it that chunks are under way when a host is lost."""
    product = tf.fill([60, 60], 0.1)
    for _ in tf.range(40):
        product = tf.tanh(product @ product)
    return scale * row + 0 * tf.reduce_sum(product)


def hosts_of(devices: Any) -> set[str]:
    return {device.partition("/device:")[0] for device in devices}


@pytest.mark.parametrize("batch_size", [None, 7])
def test_the_same_answer(job: str, batch_size: int | None) -> None:
    """Rows, states, random numbers, values of variables as they are in each call."""
    options = {"devices": f"/job:{job}", "batch_size": batch_size}
    mapper = devicemap.DeviceMap(lambda row: {"scaled": scale * row, "sum": tf.reduce_sum(row)}, **options)
    for factor in (3.0, 5.0):
        scale.assign(factor)
        oracle.assert_same(mapper(ROWS), {"scaled": factor * ROWS, "sum": tf.reduce_sum(ROWS, 1)})
    assert hosts_of(device.device for device in mapper.report.devices if device.rows) == {
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
def test_what_was_assigned_is_there(connect: Any, home: str) -> None:
    """TensorFlow's functions over several hosts overtake ops that eager code has sent to these."""
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
    mapper = devicemap.DeviceMap(lambda row: tf.reduce_sum(scale * row**2), devices=[f"/job:{job}", "CPU:0"])
    with tf.GradientTape() as tape:
        tape.watch(ROWS)
        loss = tf.reduce_sum(mapper(ROWS))
    oracle.assert_same([*tape.gradient(loss, [ROWS, scale])], [6 * ROWS, tf.reduce_sum(ROWS**2)])


@pytest.mark.parametrize("name", ["batch normalization", "moving average"])
def test_training(job: str, name: str) -> None:
    case = CASES[name]
    got = case.trained(devicemap.parallelize(case.made(), f"/job:{job}"))
    for one, other in zip(tf.nest.flatten(got), tf.nest.flatten(case.wanted)):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_pipeline(job: str, schedule: Any) -> None:
    """A stage on each host: results, those of a stream, and gradients in a `tf.function`, are those of one device."""
    kernel = tf.Variable(tf.random.stateless_normal([2, 2], [1, 2]))
    stages = [lambda rows: tf.tanh(rows @ kernel), lambda rows: tf.reduce_sum(scale * rows, 1)]
    by_host = {each.name.partition("/device:")[0]: each.name for each in devicemap.list_devices() if job in each.name}
    pipe = devicemap.Pipeline(stages, [*by_host.values()], 4, schedule)
    assert len(hosts_of(pipe.devices)) == 2

    def in_turn(rows: Any) -> Any:
        return stages[1](stages[0](rows))

    def loss_and_gradients(call: Callable[[Any], Any]) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(ROWS)
            loss = tf.reduce_mean(call(ROWS))
        return [loss, *tape.gradient(loss, [ROWS, kernel, scale])]

    oracle.assert_same(pipe(ROWS), in_turn(ROWS))
    oracle.assert_same(tf.function(loss_and_gradients)(pipe), loss_and_gradients(in_turn))
    batches = tf.data.Dataset.from_tensor_slices(ROWS).batch(25)
    for found, batch in zip(pipe.stream(batches), batches, strict=True):
        oracle.assert_same(found, in_turn(batch))


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_stage_is_lost(how: signal.Signals, connect: Any, servers: Any) -> None:
    devices = [f"/job:worker/task:{task}/CPU:0" for task in (0, 1)]
    pipe = devicemap.Pipeline([lambda rows: scale * rows, lambda rows: rows + 1], devices)
    oracle.assert_same(pipe(ROWS), 3 * ROWS + 1)
    servers["worker"][1].lose(how)
    for _ in range(2):
        began = time.monotonic()
        with pytest.raises(HostLostError, match="task:1"):
            pipe(ROWS)
        with pytest.raises(HostLostError, match="task:1"):
            [*pipe.stream(tf.data.Dataset.from_tensors(ROWS))]
        assert time.monotonic() - began < SOON
    with pytest.raises(HostLostError, match="task:1"):
        devicemap.Pipeline([tf.sin, tf.cos], [*devices, "CPU:0"])
    connect()
    oracle.assert_same(pipe(ROWS), 3 * ROWS + 1)


@pytest.mark.filterwarnings("ignore:.*lost")
def test_the_host_of_results_is_lost(connect: Any, servers: Any) -> None:
    """Whatever computes them is in order."""
    output_device = "/job:worker/task:1/CPU:0"
    mappers = [
        devicemap.DeviceMap(lambda row: scale * row, devices="CPU:0", output_device=output_device, batch_size=size)
        for size in (None, 7)
    ]
    for mapper in mappers:
        oracle.assert_same(mapper(ROWS), 3 * ROWS)
    servers["worker"][1].lose(signal.SIGKILL)
    for mapper in mappers:
        for _ in range(2):
            with pytest.raises(HostLostError, match="task:1"):
                mapper(ROWS)


@pytest.mark.filterwarnings("ignore:.*lost")
def test_who_listens_may_end_a_call_that_has_lost_a_host(connect: Any, servers: Any) -> None:
    lost = []

    def end(event: Any) -> None:
        if isinstance(event, ChunkStarted) and "task:1" in event.shard.device and not lost:
            lost.append(event)
            servers["worker"][1].lose(signal.SIGKILL)
        if isinstance(event, DeviceLost):
            raise ArithmeticError("enough")

    rows = tf.repeat(ROWS, 4, 0)
    mapper = devicemap.DeviceMap(work, devices="/job:worker", progress=end)
    with pytest.raises(ArithmeticError, match="enough"):
        mapper(rows)


def as_rows(mapper: devicemap.DeviceMap, folder: Path) -> Any:
    return mapper(ROWS)


def as_stream(mapper: devicemap.DeviceMap, folder: Path) -> Any:
    return tf.concat([*mapper.stream(tf.data.Dataset.from_tensor_slices(ROWS))], 0)


def as_files(mapper: devicemap.DeviceMap, folder: Path) -> Any:
    return mapper.write(ROWS, folder / str(time.monotonic())).load()


def as_sum(mapper: devicemap.DeviceMap, folder: Path) -> Any:
    return mapper.reduce(ROWS, "sum")


@pytest.mark.parametrize(
    ("how", "way"),
    [
        (signal.SIGKILL, as_rows),
        (signal.SIGSTOP, as_stream),
        (signal.SIGSTOP, as_files),
        (signal.SIGKILL, as_sum),
    ],
)
def test_a_host_is_lost(how: signal.Signals, way: Any, job: str, connect: Any, servers: Any, tmp_path: Path) -> None:
    """When it has begun its second chunk: each row once, the next call without it, and with it once it is back."""
    lost = f"/job:{job}/replica:0/task:1"
    events: list[Any] = []
    begun: list[Any] = []

    def watch(event: Any) -> None:
        events.append(event)
        if isinstance(event, ChunkStarted) and event.shard.device.startswith(lost):
            begun.append(event)
            if len(begun) == 2:
                servers[job][1].lose(how)

    mapper = devicemap.DeviceMap(work, devices=[f"/job:{job}", "CPU:0"], batch_size=2, progress=watch)
    wanted = tf.reduce_sum(3 * ROWS, 0) if way is as_sum else 3 * ROWS

    def call() -> set[str]:
        """The hosts that took part."""
        events.clear()
        began = time.monotonic()
        np.testing.assert_allclose(way(mapper, tmp_path), wanted, rtol=1e-5)
        assert time.monotonic() - began < SOON
        finished = [event.shard for event in events if isinstance(event, ChunkFinished)]
        assert sorted(row for shard in finished for row in range(shard.start, shard.stop)) == [*range(60)]
        return hosts_of(event.shard.device for event in events if isinstance(event, ChunkStarted))

    with pytest.warns(RuntimeWarning, match=f"{lost}.* has (ended|not answered)"):
        assert lost in call()
    gone = [event for event in events if isinstance(event, DeviceLost)]
    kind = "GPU" if JOBS.get("GPU") == job else "CPU"
    assert {event.device for event in gone} == {
        device.name for device in devicemap.list_devices(kind) if device.name.startswith(lost)
    }
    assert all(isinstance(event.error, HostLostError) for event in gone)
    left = {f"/job:{job}/replica:0/task:0", "/job:localhost/replica:0/task:0"}
    assert call() == left
    assert hosts_of(device.device for device in mapper.explain(ROWS).devices) <= left
    with pytest.raises(HostLostError):
        devicemap.DeviceMap(work, devices=f"/job:{job}/task:1")
    mapper = devicemap.DeviceMap(work, devices=[f"/job:{job}", "CPU:0"], batch_size=2, progress=watch)
    assert call() == left
    connect()
    assert lost in call()


@pytest.mark.parametrize(("how", "taped"), [(signal.SIGKILL, True), (signal.SIGSTOP, False)])
def test_lost_before_a_call_in_one_graph(
    how: signal.Signals, taped: bool, job: str, connect: Any, servers: Any
) -> None:
    mapper = devicemap.DeviceMap(lambda row: scale * row, devices=[f"/job:{job}", "CPU:0"])

    def call() -> None:
        began = time.monotonic()
        with tf.GradientTape() as tape:
            if taped:
                tape.watch(ROWS)
            result = mapper(ROWS)
        oracle.assert_same(result, 3 * ROWS)
        if taped:
            oracle.assert_same(tape.gradient(result, ROWS), tf.fill([60, 2], 3.0))
        assert time.monotonic() - began < SOON

    call()
    servers[job][0].lose(how)
    call()
    call()
    assert f"/job:{job}/replica:0/task:0" not in hosts_of(device.device for device in mapper.report.devices)
    connect()
    call()
    assert f"/job:{job}/replica:0/task:0" in hosts_of(device.device for device in mapper.report.devices)


@pytest.mark.filterwarnings("ignore:.*lost")  # of the one that was lost first
@pytest.mark.parametrize(("how", "batch_size"), [(signal.SIGKILL, None), (signal.SIGSTOP, 5)])
def test_all_are_lost(how: signal.Signals, batch_size: int | None, job: str, connect: Any, servers: Any) -> None:
    mapper = devicemap.DeviceMap(work, devices=f"/job:{job}", batch_size=batch_size)
    np.testing.assert_allclose(mapper(ROWS), 3 * ROWS)
    for server in servers[job]:
        server.lose(how)
    for _ in range(2):
        began = time.monotonic()
        with pytest.raises(HostLostError, match=r"task:\d.*devicemap serve"):
            mapper(ROWS)
        assert time.monotonic() - began < SOON
    connect()
    np.testing.assert_allclose(mapper(ROWS), 3 * ROWS)


def sent_bytes() -> int:
    """What all of this process's connections have sent, by the kernel's `tcp_info`."""
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
def test_what_is_captured_goes_once_to_a_host(connect: Any, kind: str, batch_size: int | None) -> None:
    """To a host with two devices: a variable for each call, a tensor once."""
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


def test_hosts_are_named(connect: Any, servers: Any) -> None:
    address = servers["worker"][1].address()
    (first, second) = [
        device for device in devicemap.list_devices() if device.name.startswith("/job:worker/replica:0/task:1")
    ]
    assert address in first.description
    mapper = devicemap.DeviceMap(lambda row: row, devices=["/job:worker/task:1/CPU:1", "CPU:0"], batch_size=2)
    assert [device.device for device in mapper.explain(ROWS).devices] == [
        second.name, "/job:localhost/replica:0/task:0/device:CPU:0"
    ]  # fmt: skip
    mapper(ROWS)
    for text in (repr(mapper), str(mapper.explain(ROWS)), str(mapper.report)):
        assert "/job:worker/task:1/CPU:1" in text, text


def test_python_stays_here(connect: Any) -> None:
    processes = set()

    def negative(row: Any) -> Any:
        processes.add(os.getpid())
        return -row

    def fn(row: Any) -> Any:
        return tf.ensure_shape(tf.numpy_function(negative, [row], tf.float32), [2])

    oracle.assert_same(devicemap.parallel_map(fn, ROWS, devices="/job:worker"), -ROWS)
    assert processes == {os.getpid()}


@pytest.mark.parametrize(
    ("cluster", "error"),
    [
        ({"worker": ["127.0.0.1:1"]}, DeviceError),
        ({"worker": "127.0.0.1:1"}, OptionError),
        ({"worker": ["127.0.0.1"]}, OptionError),
        ({"localhost": ["127.0.0.1:1"]}, OptionError),
        ({"worker": []}, OptionError),
        (["127.0.0.1:1"], OptionError),
    ],
)
def test_bad_clusters(connect: Any, cluster: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        devicemap.connect(cluster)
