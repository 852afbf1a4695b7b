"""Faults in whole calls: devices that run out of memory or break, rows that fail, and long jobs."""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import devicemap
from benchmarks.simulator import Simulator
from devicemap.devices import is_out_of_memory
from devicemap.errors import FunctionError
from devicemap.events import CallFinished, ChunkFailed, ChunkRetried, DeviceLost, Event, short_name

THREE = ["CPU:1", "CPU:2", "CPU:3"]
ALWAYS: dict[str, Any] = {"fails_from_call": 0}


@pytest.fixture(autouse=True)
def _no_thread_stays() -> Iterator[None]:
    yield
    assert [thread.name for thread in threading.enumerate() if thread.name.startswith("devicemap")] == []


@pytest.fixture(autouse=True)
def _one_core(monkeypatch: pytest.MonkeyPatch) -> None:
    """Further cores of a CPU take further chunks; here as many are in flight on a device as `prefetch` says."""
    monkeypatch.setattr(os, "cpu_count", lambda: 1)


def _of(events: list[Event], kind: type[Event]) -> list[Any]:
    return [event for event in events if isinstance(event, kind)]


def _work(sim: Simulator, rows: int, **options: Any) -> tuple[devicemap.DeviceMap, Any, Any]:
    """A mapper of simulated work, its data, and what has to come out; a row takes 20 microseconds."""
    data = tf.range(rows), tf.fill([rows], 2e-5)
    return devicemap.DeviceMap(sim.work, batched=True, **options), data, 2 * np.arange(rows) + 1


def _refused(sim: Simulator, devices: list[str] = THREE) -> list[int]:
    return [sim.usage(device).refused for device in devices]


def _lost(mapper: devicemap.DeviceMap) -> list[str]:
    return [short_name(device.device) for device in mapper.report.devices if device.lost]


def _python(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda rows: tf.ensure_shape(tf.py_function(function, [rows], rows.dtype), rows.shape)


# Out of memory


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (tf.errors.ResourceExhaustedError(None, None, ""), True),
        (tf.errors.InternalError(None, None, "Failed copying: Dst tensor is not initialized."), True),
        (tf.errors.InternalError(None, None, "Failed copying: Src tensor is not initialized."), True),
        (tf.errors.InternalError(None, None, "resource exhausted"), False),
        (tf.errors.InvalidArgumentError(None, None, "OOM: ran out of memory, resource exhausted"), False),
    ],
)
def test_out_of_memory_is_known_by_its_class(error: BaseException, expected: bool) -> None:
    assert is_out_of_memory(error) == expected


def test_each_limit_is_found_once(sim: Simulator) -> None:
    """One device, one chunk at a time: 64, 32 and 16 rows are refused, 8 fit, and no other chunk is refused ever again."""
    mapper, data, expected = _work(sim, 2048, devices=["CPU:1"], batch_size=64, prefetch=1)
    sim.configure("CPU:1", memory_rows=10)
    for retried in (True, False):
        np.testing.assert_array_equal(mapper(data), expected)
        assert _refused(sim) == [3, 0, 0]
        assert sum(device.back_offs for device in mapper.report.devices) == mapper.report.retries
        assert (mapper.report.retries > 0) == retried
    assert sim.usage("CPU:1").rows == 2 * 2048  # no row was computed twice


def test_only_the_device_without_room_gets_smaller_chunks(sim: Simulator) -> None:
    mapper, data, expected = _work(sim, 12_000, devices=THREE, batch_size=64)
    sim.configure("CPU:2", memory_rows=10)
    np.testing.assert_array_equal(mapper(data), expected)
    first = _refused(sim)
    assert first[0] == first[2] == 0
    assert 1 <= first[1] <= 2 * 3  # two chunks in flight, of which each may find the limit
    np.testing.assert_array_equal(mapper(data), expected)
    assert _refused(sim) == first
    largest = {call.device: 0 for call in sim.calls()}
    for call in sim.calls():
        largest[call.device] = max(largest[call.device], call.rows if call.outcome == "finished" else 0)
    assert largest == {"CPU:1": 64, "CPU:2": 8, "CPU:3": 64}
    chunks = list(mapper.stream(tf.data.Dataset.from_tensor_slices(data).batch(48)))
    assert [len(chunk) for chunk in chunks] == [48] * 250  # their size for the user
    np.testing.assert_array_equal(tf.concat(chunks, 0), expected)


@pytest.mark.parametrize("batch_size", [8, "auto"])
def test_a_row_that_does_not_fit_is_named(sim: Simulator, batch_size: int | str) -> None:
    sim.configure("CPU:3", memory_rows=0)
    mapper, data, _ = _work(sim, 1000, devices=["CPU:3"], batch_size=batch_size, prefetch=1)
    with pytest.raises(tf.errors.ResourceExhaustedError, match=r"work failed on row 0 on CPU:3: .*memory") as caught:
        mapper(data)
    assert isinstance(caught.value, FunctionError)
    assert [str(shard) for shard in caught.value.shards] == ["row 0 on CPU:3"]
    assert _refused(sim) == [0, 0, 4]  # 8, 4, 2 and 1


def test_a_chunk_from_a_broken_device_is_cut_for_the_one_that_takes_it(sim: Simulator) -> None:
    """CPU:2 has learned that it takes two rows; CPU:1 breaks with eight."""
    mapper, data, expected = _work(sim, 4096, devices=["CPU:1", "CPU:2"], batch_size=8, prefetch=1)
    sim.configure("CPU:2", memory_rows=2)
    np.testing.assert_array_equal(mapper(data), expected)
    refused = _refused(sim)
    assert refused == [0, 2, 0]
    sim.configure("CPU:1", **ALWAYS)
    with pytest.warns(RuntimeWarning, match="CPU:1 kept failing"):
        np.testing.assert_array_equal(mapper(data), expected)
    assert _refused(sim) == [3, 2, 0]


# Devices that break


@pytest.mark.parametrize("n", [0, 1, 5])
def test_a_device_that_breaks_for_good(sim: Simulator, n: int) -> None:
    events: list[Event] = []
    sim.configure("CPU:2", fails_from_call=n, error_code=tf.errors.INTERNAL)
    mapper, data, expected = _work(sim, 6000, devices=THREE, batch_size=16, prefetch=1, progress=events.append)
    message = r"work: CPU:2 kept failing, and got no more chunks in this call. Its last error was InternalError: "
    with pytest.warns(RuntimeWarning, match=message) as warned:
        np.testing.assert_array_equal(mapper(data), expected)
    assert [warning.filename for warning in warned] == [__file__]  # the line that called, not one of the library's
    assert sim.usage("CPU:2").refused == len(_of(events, ChunkFailed)) == 3
    assert sim.usage("CPU:2").calls == n
    assert [short_name(event.device) for event in _of(events, DeviceLost)] == ["CPU:2"]
    retries = _of(events, ChunkRetried)
    assert len(retries) == mapper.report.retries == 3
    assert all(short_name(event.shard.device) != "CPU:2" for event in retries)
    assert _lost(mapper) == ["CPU:2"]
    assert sum(sim.usage(device).rows for device in THREE) == 6000


def test_a_device_that_breaks_for_a_while_stays(sim: Simulator) -> None:
    sim.configure("CPU:2", fails_from_call=4, fails_for_calls=2, error_code=tf.errors.INTERNAL)
    mapper, data, expected = _work(sim, 6000, devices=["CPU:1", "CPU:2"], batch_size=16, prefetch=1)
    np.testing.assert_array_equal(mapper(data), expected)
    assert (sim.usage("CPU:2").refused, mapper.report.retries, _lost(mapper)) == (2, 2, [])
    assert sim.usage("CPU:2").calls > 4


@pytest.mark.parametrize("count", [1, 3])
def test_when_no_device_is_left_the_original_error_comes_at_once(sim: Simulator, count: int) -> None:
    for device in THREE[:count]:
        sim.configure(device, **ALWAYS, error_code=tf.errors.INTERNAL)
    mapper, data, _ = _work(sim, 100_000, devices=THREE[:count], batch_size=16, max_retries=1000)
    error = pytest.raises(tf.errors.InternalError, match=r"work failed on rows \d+ to \d+ on CPU:")
    with pytest.warns(RuntimeWarning, match="kept failing") as warned, error:
        mapper(data)
    assert len(warned) == count
    assert 3 * count <= len(sim.calls()) <= 4 * count  # and what was in flight besides


def test_a_warning_reaches_the_thread_that_consumes(sim: Simulator) -> None:
    sim.configure("CPU:2", **ALWAYS)
    mapper, data, expected = _work(sim, 4000, devices=["CPU:1", "CPU:2"], batch_size=2, prefetch=1)
    stream = mapper.stream(data)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        chunks = [next(stream)]
        with pytest.raises(RuntimeWarning, match="CPU:2 kept failing"):
            chunks.extend(stream)
    np.testing.assert_array_equal(tf.concat(chunks, 0), expected)


@pytest.mark.parametrize("code", [tf.errors.INTERNAL, tf.errors.UNAVAILABLE])
def test_a_device_that_breaks_costs_no_rows_that_may_be_left_out(sim: Simulator, code: int) -> None:
    sim.configure("CPU:2", **ALWAYS, error_code=code)
    mapper, data, expected = _work(sim, 4000, devices=THREE, batch_size=2, on_error="skip")
    with pytest.warns(RuntimeWarning, match="CPU:2 kept failing"):
        np.testing.assert_array_equal(mapper(data), expected)
    assert not mapper.report.failed_rows
    assert _lost(mapper) == ["CPU:2"]


# Rows that fail


def test_bad_input_is_not_tried_again(sim: Simulator) -> None:
    mapper, (rows, seconds), _ = _work(sim, 400, devices=THREE, batch_size=4, max_retries=5)
    seconds = tf.tensor_scatter_nd_update(seconds, [[37]], [-1.0])
    with pytest.raises(tf.errors.InvalidArgumentError) as caught:
        mapper((rows, seconds))
    (shard,) = caught.value.shards
    assert shard.start <= 37 < shard.stop
    assert sum(_refused(sim)) == 1


def test_an_assertion_is_raised_while_another_row_runs() -> None:
    """Row 1 would run for a minute. It is cancelled, and its thread ends with it."""
    release = threading.Event()

    def wait(row: Any) -> Any:
        if row == 1:
            release.wait(60)
        return row

    def fn(row: Any) -> Any:
        row = _python(wait)(row)
        tf.debugging.assert_greater(row, 0, message="too small")
        return row

    try:
        with pytest.raises(tf.errors.InvalidArgumentError, match=r"failed on row 0 on CPU:\d: .*too small"):
            devicemap.parallel_map(fn, tf.range(8), batch_size=1, devices=["CPU:1", "CPU:2"])
        assert not release.is_set()
    finally:
        release.set()
        _wait_for_threads()


def _wait_for_threads() -> None:
    """Wait for the threads of ops that were running when their call ended.

    Not with `Thread.join`: if it was interrupted, it takes a running thread for ended.
    """
    deadline = time.monotonic() + 10
    while any(thread.name.startswith("devicemap") for thread in threading.enumerate()):
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize("max_retries", [0, 1, 2])
@pytest.mark.parametrize(("kind", "again"), [(ZeroDivisionError, False), (KeyError, False), (ConnectionError, True)])
def test_a_row_that_fails_everywhere(kind: type[Exception], again: bool, max_retries: int) -> None:
    """The network may answer the next time; other exceptions of Python would occur again."""
    calls: list[int] = []
    delivered: list[int] = []

    def fails(row: Any) -> Any:
        calls.append(int(row))
        if row == 37:
            raise kind("the reason:\nin two lines")
        return row

    mapper = devicemap.DeviceMap(_python(fails), devices=THREE, batch_size=4, max_retries=max_retries, name="mine")
    with pytest.raises(tf.errors.UnknownError, match=f"{kind.__name__}: .*the reason") as caught:
        delivered.extend(row for chunk in mapper.stream(tf.range(400)) for row in chunk.numpy().tolist())
    tried = [short_name(shard.device) for shard in caught.value.shards]
    assert len(tried) == len({*tried}) == calls.count(37) == 1 + again * max_retries  # each time on another device
    assert str(caught.value).startswith(f"mine failed on rows 36 to 39 on {', then '.join(tried)}: UnknownError: ")
    assert delivered == list(range(len(delivered)))
    assert len(delivered) <= 36  # what was finished before the error


def test_side_effects_of_a_retried_chunk_happen_again(sim: Simulator) -> None:
    """As the documentation says: what failed may have happened in part before."""
    counter = tf.Variable(0, dtype=tf.int64)
    sim.configure("CPU:1", fails_from_call=0, fails_for_calls=2)

    def counting(rows: Any, seconds: Any) -> Any:
        with tf.control_dependencies([counter.assign_add(1)]):
            return sim.work(rows, seconds)

    rows = tf.range(40), tf.zeros([40])
    results = devicemap.DeviceMap(counting, batched=True, devices=["CPU:1"], batch_size=8, prefetch=1)(rows)
    np.testing.assert_array_equal(results, 2 * np.arange(40) + 1)
    assert int(counter) == sim.usage("CPU:1").calls + 2


def test_a_second_ctrl_c_does_not_lose_the_end_of_the_call() -> None:
    """The second one arrives while the call waits for its workers."""
    events: list[Event] = []

    def interrupt_twice(row: Any) -> Any:
        os.kill(os.getpid(), signal.SIGINT)
        frame = None
        while frame is None or frame.f_code.co_name != "join":
            frame = sys._current_frames()[threading.main_thread().ident or 0]
            while frame is not None and frame.f_code.co_name != "join":
                frame = frame.f_back
        os.kill(os.getpid(), signal.SIGINT)
        return row

    mapper = devicemap.DeviceMap(_python(interrupt_twice), devices=["CPU:1"], batch_size=1, progress=events.append)
    with pytest.raises(KeyboardInterrupt):
        mapper(tf.zeros([1]))
    assert isinstance(events[-1], CallFinished)
    assert mapper.report.error.startswith("KeyboardInterrupt")
    _wait_for_threads()


@pytest.mark.filterwarnings("ignore:.*kept failing:RuntimeWarning")  # a device that meets three failures in a row
def test_a_long_job_with_random_faults() -> None:
    """No row is lost or repeated."""
    draw, lock, rows = random.Random(20), threading.Lock(), 4000
    computed: list[int] = []
    failed, recent = 0, [False] * 8

    def fails(chunk: Any) -> Any:
        nonlocal failed, recent
        with lock:
            if len(chunk) > 2:
                raise MemoryError
            fault = draw.random() < 0.1 and not any(recent)
            recent = [*recent[1:], fault]
            failed += fault
            if fault:
                raise ConnectionError
            computed.extend(chunk.numpy().tolist())
        return chunk

    devices = [f"CPU:{i}" for i in range(4)]
    mapper = devicemap.DeviceMap(_python(fails), batched=True, devices=devices, batch_size=4, max_retries=20)
    chunks = [chunk.numpy().tolist() for chunk in mapper.stream(tf.data.Dataset.range(rows).batch(4))]
    assert chunks == [list(range(start, start + 4)) for start in range(0, rows, 4)]
    assert sorted(computed) == list(range(rows))
    assert failed > 20
