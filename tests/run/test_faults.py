"""Faults in whole calls: devices that run out of memory or break, rows that fail, and long jobs.

Faults are scripted in two ways: on simulated accelerators, where the fault comes out of an op, and without a compiler, where
the function that a device runs raises what a script says. The scheduler alone is tested in test_streaming.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import devicemap
from benchmarks import simulator
from devicemap.compile.compiled import CompiledMap
from devicemap.errors import FunctionError
from devicemap.events import CallFinished, ChunkFailed, ChunkRetried, DeviceLost, Event, short_name


@pytest.fixture(autouse=True)
def _no_thread_stays() -> Iterator[None]:
    yield
    assert [thread.name for thread in threading.enumerate() if thread.name.startswith("devicemap")] == []


@pytest.fixture(autouse=True)
def _one_core(monkeypatch: pytest.MonkeyPatch) -> None:
    """Further cores of a CPU take further chunks; here as many are in flight on a device as `prefetch` says."""
    monkeypatch.setattr(os, "cpu_count", lambda: 1)


Script = Callable[[str, list[int], int], BaseException | None]
"""Device, rows and which call of the device it is -> what to raise."""


@dataclass
class Faults:
    """Raises what a script says instead of running a device's function, and counts. The data is the rows' indices."""

    script: Script = lambda device, rows, call: None
    calls: Counter[str] = field(default_factory=Counter)
    failed: list[tuple[str, list[int]]] = field(default_factory=list)
    computed: list[int] = field(default_factory=list)
    largest: Counter[str] = field(default_factory=Counter)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def around(self, device: str, begin: Callable[[], Callable[..., Any]]) -> Callable[..., Any]:
        name, function = short_name(device), begin()

        def call(rows: Any) -> Any:
            indices = rows.numpy().tolist()
            with self.lock:
                number = self.calls[name]
                self.calls[name] += 1
                error = self.script(name, indices, number)
                if error is not None:
                    self.failed.append((name, indices))
            if error is not None:
                raise error
            result = function(rows)
            with self.lock:
                self.computed += indices
                self.largest[name] = max(self.largest[name], len(indices))
            return result

        return call


@pytest.fixture
def faults(monkeypatch: pytest.MonkeyPatch) -> Faults:
    """What stands between the library and its devices."""
    faults, functions = Faults(), CompiledMap.chunk_functions

    def scripted(self: CompiledMap, *args: Any) -> Any:
        return {device: partial(faults.around, device, begin) for device, begin in functions(self, *args).items()}

    monkeypatch.setattr(CompiledMap, "chunk_functions", scripted)
    return faults


def _oom() -> BaseException:
    return tf.errors.ResourceExhaustedError(None, None, "no room")


def _broken() -> BaseException:
    return tf.errors.UnavailableError(None, None, "it broke")


def _triple(row: Any) -> Any:
    return 3 * row + 1


def _of(events: list[Event], kind: type[Event]) -> list[Any]:
    return [event for event in events if isinstance(event, kind)]


def _take(chunks: Iterable[Any], into: list[int]) -> None:
    for chunk in chunks:
        into += chunk.numpy().tolist()


# Out of memory


def _work(sim: simulator.Simulator, rows: int, **options: Any) -> tuple[devicemap.DeviceMap, Any, Any]:
    """A mapper of simulated work, its data, and what has to come out; a row takes 20 microseconds."""
    data = tf.range(rows), tf.fill([rows], 2e-5)
    return devicemap.DeviceMap(sim.work, batched=True, **options), data, 2 * np.arange(rows) + 1


def _back_offs(mapper: devicemap.DeviceMap) -> int:
    return sum(device.back_offs for device in mapper.report.devices)


def _lost(mapper: devicemap.DeviceMap) -> list[str]:
    return [short_name(device.device) for device in mapper.report.devices if device.lost]


def test_each_limit_is_found_once(sim: simulator.Simulator) -> None:
    """One device, one chunk at a time: 64, 32 and 16 rows are refused, 8 fit, and no other chunk is refused ever again."""
    mapper, data, expected = _work(sim, 2048, devices=["CPU:1"], batch_size=64, prefetch=1)
    sim.configure("CPU:1", memory_rows=10)
    np.testing.assert_array_equal(mapper(data), expected)
    assert sim.usage("CPU:1").refused == 3
    assert _back_offs(mapper) == mapper.report.retries > 0
    np.testing.assert_array_equal(mapper(data), expected)
    assert sim.usage("CPU:1").refused == 3
    assert (_back_offs(mapper), mapper.report.retries) == (0, 0)
    assert sim.usage("CPU:1").rows == 2 * 2048  # no row was computed twice


def test_only_the_device_without_room_gets_smaller_chunks(sim: simulator.Simulator) -> None:
    devices = ["CPU:1", "CPU:2", "CPU:3"]
    mapper, data, expected = _work(sim, 12_000, devices=devices, batch_size=64)
    sim.configure("CPU:2", memory_rows=10)
    np.testing.assert_array_equal(mapper(data), expected)
    first = [sim.usage(device).refused for device in devices]
    assert first[0] == first[2] == 0
    assert 1 <= first[1] <= 2 * 3  # two chunks in flight, of which each may find the limit
    np.testing.assert_array_equal(mapper(data), expected)
    assert [sim.usage(device).refused for device in devices] == first
    calls = [call for call in sim.calls() if call.outcome == "finished"]
    assert {device: max(call.rows for call in calls if call.device == device) for device in devices} == {
        "CPU:1": 64,
        "CPU:2": 8,
        "CPU:3": 64,
    }


def test_batches_of_a_dataset_keep_their_size_for_the_user(sim: simulator.Simulator) -> None:
    sim.configure("CPU:1", memory_rows=10)
    mapper, data, expected = _work(sim, 640, devices=["CPU:1", "CPU:2"])
    chunks = list(mapper.stream(tf.data.Dataset.from_tensor_slices(data).batch(32)))
    assert [len(chunk) for chunk in chunks] == [32] * 20
    np.testing.assert_array_equal(tf.concat(chunks, 0), expected)


@pytest.mark.parametrize("batch_size", [8, "auto"])
def test_a_row_that_does_not_fit_is_named(sim: simulator.Simulator, batch_size: int | str) -> None:
    sim.configure("CPU:3", memory_rows=0)
    mapper, data, _ = _work(sim, 1000, devices=["CPU:3"], batch_size=batch_size, prefetch=1)
    with pytest.raises(tf.errors.ResourceExhaustedError, match=r"work failed on row 0 on CPU:3: .*memory") as caught:
        mapper(data)
    assert isinstance(caught.value, FunctionError)
    assert [str(shard) for shard in caught.value.shards] == ["row 0 on CPU:3"]
    assert sim.usage("CPU:3").refused == 4  # 8, 4, 2 and 1


def test_out_of_memory_is_known_by_its_class(faults: Faults) -> None:
    """A text that speaks of memory is not enough, and none is needed."""
    silent = tf.errors.ResourceExhaustedError(None, None, "")
    faults.script = lambda device, rows, call: silent if len(rows) > 2 else None
    mapper = devicemap.DeviceMap(_triple, devices=["CPU:1"], batch_size=8, prefetch=1)
    assert mapper(tf.range(64)).numpy().tolist() == [3 * i + 1 for i in range(64)]
    assert [len(rows) for _, rows in faults.failed] == [8, 4]
    talking = tf.errors.InvalidArgumentError(None, None, "OOM: ran out of memory, resource exhausted")
    faults.script = lambda device, rows, call: talking
    with pytest.raises(tf.errors.InvalidArgumentError, match="ran out of memory"):
        devicemap.DeviceMap(_triple, devices=["CPU:1"], batch_size=8)(tf.range(8))


def test_a_chunk_from_a_broken_device_is_cut_for_the_one_that_takes_it(faults: Faults) -> None:
    """CPU:2 has learned that it takes two rows; CPU:1 breaks with eight."""

    def fails(device: str, rows: list[int], call: int) -> BaseException | None:
        if device == "CPU:2":
            return _oom() if len(rows) > 2 else None
        return None if breaks.is_set() is False else _broken()

    breaks = threading.Event()
    faults.script = fails
    mapper = devicemap.DeviceMap(_triple, devices=["CPU:1", "CPU:2"], batch_size=8, prefetch=1)
    expected = [3 * i + 1 for i in range(4096)]
    assert mapper(tf.range(4096)).numpy().tolist() == expected
    refused = len(faults.failed)
    assert refused <= 3
    breaks.set()
    with pytest.warns(RuntimeWarning, match="CPU:1 kept failing"):
        assert mapper(tf.range(4096)).numpy().tolist() == expected
    assert [device for device, _ in faults.failed[refused:]].count("CPU:2") <= 2  # none, if it had learned its limit


# Devices that break


@pytest.mark.parametrize("n", [0, 1, 5])
def test_a_device_that_breaks_for_good(sim: simulator.Simulator, n: int) -> None:
    events: list[Event] = []
    devices = ["CPU:1", "CPU:2", "CPU:3"]
    sim.configure("CPU:2", fails_from_call=n, error_code=tf.errors.INTERNAL)
    mapper, data, expected = _work(sim, 6000, devices=devices, batch_size=16, prefetch=1, progress=events.append)
    message = r"work: CPU:2 kept failing, and got no more chunks in this call. Its last error was InternalError: "
    with pytest.warns(RuntimeWarning, match=message) as warned:
        np.testing.assert_array_equal(mapper(data), expected)
    assert len(warned) == 1
    assert warned[0].filename == __file__  # the line that called, not one of the library's
    assert sim.usage("CPU:2").refused == len(_of(events, ChunkFailed)) == 3
    assert sim.usage("CPU:2").calls == n
    assert [short_name(event.device) for event in _of(events, DeviceLost)] == ["CPU:2"]
    retries = _of(events, ChunkRetried)
    assert len(retries) == mapper.report.retries == 3
    assert all(short_name(event.shard.device) != "CPU:2" for event in retries)
    assert _lost(mapper) == ["CPU:2"]
    assert sum(sim.usage(device).rows for device in devices) == 6000


def test_a_device_that_breaks_for_a_while_stays(sim: simulator.Simulator) -> None:
    events: list[Event] = []
    sim.configure("CPU:2", fails_from_call=4, fails_for_calls=2, error_code=tf.errors.INTERNAL)
    mapper, data, expected = _work(
        sim, 6000, devices=["CPU:1", "CPU:2"], batch_size=16, prefetch=1, progress=events.append
    )
    np.testing.assert_array_equal(mapper(data), expected)
    assert (sim.usage("CPU:2").refused, mapper.report.retries, _lost(mapper)) == (2, 2, [])
    assert sim.usage("CPU:2").calls > 4
    assert _of(events, DeviceLost) == []


@pytest.mark.parametrize("count", [1, 3])
def test_when_no_device_is_left_the_original_error_comes_at_once(sim: simulator.Simulator, count: int) -> None:
    devices = [f"CPU:{i}" for i in range(count)]
    for device in devices:
        sim.configure(device, fails_from_call=0, error_code=tf.errors.INTERNAL)
    mapper, data, _ = _work(sim, 100_000, devices=devices, batch_size=16, max_retries=1000)
    with (
        pytest.warns(RuntimeWarning, match="kept failing") as warned,
        pytest.raises(tf.errors.InternalError, match=r"work failed on rows \d+ to \d+ on CPU:"),
    ):
        mapper(data)
    assert len(warned) == count
    assert 3 * count <= len(sim.calls()) <= 4 * count  # and what was in flight besides


def test_a_warning_reaches_the_thread_that_consumes(faults: Faults) -> None:
    faults.script = lambda device, rows, call: _broken() if device == "CPU:2" else None
    stream = devicemap.DeviceMap(_triple, devices=["CPU:1", "CPU:2"], batch_size=2, prefetch=1).stream(tf.range(4000))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        chunks = [next(stream)]
        with pytest.raises(RuntimeWarning, match="CPU:2 kept failing"):
            chunks.extend(stream)
    np.testing.assert_array_equal(tf.concat(chunks, 0), 3 * np.arange(4000) + 1)


@pytest.mark.parametrize("error", [tf.errors.InternalError, tf.errors.UnavailableError])
def test_a_device_that_breaks_costs_no_rows_that_may_be_left_out(
    faults: Faults, error: type[tf.errors.OpError]
) -> None:
    faults.script = lambda device, rows, call: error(None, None, "bad") if device == "CPU:2" else None
    mapper = devicemap.DeviceMap(_triple, devices=["CPU:1", "CPU:2", "CPU:3"], batch_size=2, on_error="skip")
    with pytest.warns(RuntimeWarning, match="CPU:2 kept failing"):
        np.testing.assert_array_equal(mapper(tf.range(4000)), 3 * np.arange(4000) + 1)
    assert not mapper.report.failed_rows
    assert _lost(mapper) == ["CPU:2"]


# Rows that fail


def test_bad_input_is_not_tried_again(sim: simulator.Simulator) -> None:
    mapper, (rows, seconds), _ = _work(sim, 400, devices=["CPU:1", "CPU:2"], batch_size=4, max_retries=5)
    seconds = tf.tensor_scatter_nd_update(seconds, [[37]], [-1.0])
    with pytest.raises(tf.errors.InvalidArgumentError) as caught:
        mapper((rows, seconds))
    (shard,) = caught.value.shards
    assert shard.start <= 37 < shard.stop
    assert sum(sim.usage(device).refused for device in ("CPU:1", "CPU:2")) == 1


def test_an_assertion_is_raised_while_another_row_runs() -> None:
    """Row 1 would run for a minute. It is cancelled, and its thread ends with it."""
    release = threading.Event()

    def wait(row: Any) -> Any:
        if row == 1:
            release.wait(60)
        return row

    def fn(row: Any) -> Any:
        row = tf.ensure_shape(tf.py_function(wait, [row], tf.int32), [])
        tf.debugging.assert_greater(row, 0, message="too small")
        return row

    try:
        with pytest.raises(tf.errors.InvalidArgumentError, match=r"failed on row 0 on CPU:\d: .*too small"):
            devicemap.parallel_map(fn, tf.range(8), batch_size=1, devices=["CPU:1", "CPU:2"])
        assert not release.is_set()
    finally:
        release.set()
        _wait_for_threads()


@pytest.mark.parametrize(("kind", "attempts"), [(ZeroDivisionError, 1), (KeyError, 1), (ConnectionError, 3)])
def test_a_bug_in_python_code_is_raised_at_once(kind: type[Exception], attempts: int) -> None:
    """The network may answer the next time; other exceptions of Python would occur again."""
    calls: list[int] = []

    def fails(row: Any) -> Any:
        calls.append(int(row))
        raise kind("the reason:\nin two lines")

    mapper = devicemap.DeviceMap(
        lambda row: tf.py_function(fails, [row], tf.int32), devices=["CPU:1", "CPU:2"], batch_size=1, prefetch=1
    )
    with pytest.raises(tf.errors.UnknownError, match=f"{kind.__name__}: .*the reason"):
        mapper(tf.range(1))
    assert len(calls) == attempts


def _wait_for_threads() -> None:
    """Wait for the threads of ops that were running when their call ended."""
    deadline = time.monotonic() + 10
    while any(thread.name.startswith("devicemap") for thread in threading.enumerate()):
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize("max_retries", [0, 1, 2])
def test_a_row_that_fails_everywhere(faults: Faults, max_retries: int) -> None:
    faults.script = lambda device, rows, call: _broken() if 37 in rows else None
    devices = ["CPU:1", "CPU:2", "CPU:3"]
    mapper = devicemap.DeviceMap(_triple, devices=devices, batch_size=4, max_retries=max_retries, name="triple")
    delivered: list[int] = []
    with pytest.raises(tf.errors.UnavailableError, match="it broke") as caught:
        _take(mapper.stream(tf.range(400)), delivered)
    tried = [device for device, _ in faults.failed]
    assert len(tried) == len(set(tried)) == 1 + max_retries  # each time on another device
    assert [short_name(shard.device) for shard in caught.value.shards] == tried
    first, last = faults.failed[0][1][0], faults.failed[0][1][-1]
    assert first <= 37 <= last
    where = f"row {first}" if first == last else f"rows {first} to {last}"
    message = f"triple failed on {where} on {', then '.join(tried)}: UnavailableError: it broke"
    assert str(caught.value) == message
    assert delivered == [3 * i + 1 for i in range(len(delivered))]
    assert len(delivered) <= 36  # what was finished before the error
    assert len(faults.computed) == len(set(faults.computed))


def test_side_effects_of_a_retried_chunk_happen_again(sim: simulator.Simulator) -> None:
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

    mapper = devicemap.DeviceMap(
        lambda row: tf.ensure_shape(tf.numpy_function(interrupt_twice, [row], tf.float32), []),
        devices=["CPU:1"], batch_size=1, progress=events.append,
    )  # fmt: skip
    with pytest.raises(KeyboardInterrupt):
        mapper(tf.zeros([1]))
    assert isinstance(events[-1], CallFinished)
    assert mapper.report.error.startswith("KeyboardInterrupt")
    deadline = time.monotonic() + 10  # not Thread.join: if it was interrupted, it takes a running thread for ended
    while any(thread.name.startswith("devicemap") for thread in threading.enumerate()):
        assert time.monotonic() < deadline


# A long job


def test_a_long_job_with_random_faults(faults: Faults) -> None:
    """No row is lost or repeated."""
    draw, recent = random.Random(20), {f"CPU:{i}": [False] * 8 for i in range(4)}

    def fails(device: str, rows: list[int], call: int) -> BaseException | None:
        if len(rows) > 2 + int(device[-1]):
            return _oom()
        # The scheduler removes a device that fails three times in a row, in whatever order its calls end.
        error = _broken() if draw.random() < 0.04 and not any(recent[device]) else None
        recent[device] = [*recent[device][1:], error is not None]
        return error

    faults.script = fails
    rows = 4 * 1000
    mapper = devicemap.DeviceMap(_triple, devices=list(recent), batch_size=4, max_retries=20)
    chunks = [chunk.numpy().tolist() for chunk in mapper.stream(tf.data.Dataset.range(rows))]
    assert chunks == [[3 * (start + i) + 1 for i in range(4)] for start in range(0, rows, 4)]
    assert sorted(faults.computed) == list(range(rows))
    assert len(faults.failed) > 20
