"""Faults in whole calls: devices that run out of memory or break, rows that fail, and long jobs."""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
import threads
from histories import history

import devicemap
from benchmarks.simulator import Simulator
from devicemap.devices import is_out_of_memory
from devicemap.errors import FunctionError
from devicemap.events import ChunkFailed, ChunkFinished, ChunkRetried, DeviceLost, Event, short_name

THREE = ["CPU:1", "CPU:2", "CPU:3"]


pytestmark = pytest.mark.usefixtures("no_thread_stays")


@pytest.fixture(autouse=True)
def _one_core(monkeypatch: pytest.MonkeyPatch) -> None:
    """Further cores of a CPU take further chunks; here as many are in flight on a device as `prefetch` says."""
    monkeypatch.setattr(os, "cpu_count", lambda: 1)


def _work(sim: Simulator, rows: int, **options: Any) -> tuple[devicemap.DeviceMap, Any, Any]:
    """A mapper of simulated work, its data, and what has to come out; a row takes 20 microseconds."""
    data = tf.range(rows), tf.fill([rows], 2e-5)
    return devicemap.DeviceMap(sim.work, batched=True, **options), data, 2 * np.arange(rows) + 1


def _refused(sim: Simulator) -> list[int]:
    return [sim.usage(device).refused for device in THREE]


def _python(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda rows: tf.ensure_shape(tf.py_function(function, [rows], rows.dtype), rows.shape)


# Devices


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


BROKEN: dict[str, Any] = {"fails_from_call": 0, "error_code": tf.errors.INTERNAL}
FAULTS: dict[str, tuple[dict[str, dict[str, Any]], dict[str, Any], list[int], list[str]]] = {
    # faulty devices, options, how many calls CPU:1 to CPU:3 refuse if that is certain, which devices are lost
    "memory of one": ({"CPU:2": {"memory_rows": 10}}, {"batch_size": 64}, [0, 3, 0], []),
    "at once": ({"CPU:2": BROKEN}, {}, [0, 3, 0], ["CPU:2"]),
    "for two calls": ({"CPU:2": {"fails_from_call": 4, "fails_for_calls": 2}}, {}, [0, 2, 0], []),
    "a chunk is cut for the device that takes it": (
        {"CPU:1": {"fails_from_call": 9}, "CPU:2": {"memory_rows": 2}},
        {"devices": ["CPU:1", "CPU:2"], "batch_size": 8},
        [3, 2, 0],
        ["CPU:1"],
    ),
    "broken, with on_error": ({"CPU:2": BROKEN}, {"on_error": "skip"}, [], ["CPU:2"]),
}


@pytest.mark.parametrize("name", FAULTS)
def test_faulty_devices(sim: Simulator, name: str) -> None:
    """All rows are computed once, and the limits of memory are found once."""
    faults, options, refused, lost = FAULTS[name]
    events: list[Event] = []
    options = {"devices": THREE, "batch_size": 16, "prefetch": 1, "progress": events.append, **options}
    mapper, data, expected = _work(sim, 6000, **options)
    for device, settings in faults.items():
        sim.configure(device, **settings)
    message = (
        "work: CPU:. kept failing, and got no more chunks in this call. Its last error was (Internal|Unavailable)Error"
    )
    with pytest.warns(RuntimeWarning, match=message) if lost else nullcontext([]) as warned:
        np.testing.assert_array_equal(mapper(data), expected)
    assert [warning.filename for warning in warned] == [__file__] * len(lost)  # the line that called the library
    assert [short_name(event.device) for event in events if isinstance(event, DeviceLost)] == lost
    assert [short_name(device.device) for device in mapper.report.devices if device.lost] == lost
    assert sum(sim.usage(device).rows for device in THREE) == 6000
    assert not mapper.report.failed_rows
    assert [event.seconds for event in events] == sorted(event.seconds for event in events)
    if refused:
        assert _refused(sim) == refused
        counts = Counter(map(type, events))
        assert counts[ChunkRetried] == mapper.report.retries >= counts[ChunkFailed] == sum(refused)
    if "memory" in name:
        assert sum(device.back_offs for device in mapper.report.devices) == mapper.report.retries
        np.testing.assert_array_equal(mapper(data), expected)
        assert (mapper.report.retries, _refused(sim)) == (0, refused)
        largest = {
            call.device: call.rows for call in sorted(sim.calls(), key=lambda c: c.rows) if call.outcome == "finished"
        }
        assert largest == {device: 8 if device in faults else 64 for device in largest}


def test_a_row_that_does_not_fit_is_named(sim: Simulator) -> None:
    sim.configure("CPU:3", memory_rows=0)
    mapper, data, _ = _work(sim, 1000, devices=["CPU:3"], batch_size="auto", prefetch=1)
    with pytest.raises(tf.errors.ResourceExhaustedError, match=r"work failed on row 0 on CPU:3: .*memory") as caught:
        mapper(data)
    assert isinstance(caught.value, FunctionError)
    assert [str(shard) for shard in caught.value.shards] == ["row 0 on CPU:3"]
    assert _refused(sim) == [0, 0, 4]  # 8, 4, 2 and 1


def test_failures_of_chunks_that_run_at_the_same_time_count_once() -> None:
    """As when the network fails for a moment."""
    counts = Counter(map(type, history([(1, 1.0)] * 8, devices=1, in_flight=4, failing=range(4))))
    assert (counts[ChunkFailed], counts[ChunkFinished], counts[DeviceLost]) == (4, 8, 0)


@pytest.mark.parametrize("count", [1, 3])
def test_when_no_device_is_left_the_original_error_comes_at_once(sim: Simulator, count: int) -> None:
    for device in THREE[:count]:
        sim.configure(device, **BROKEN)
    mapper, data, _ = _work(sim, 100_000, devices=THREE[:count], batch_size=16, max_retries=1000)
    error = pytest.raises(tf.errors.InternalError, match=r"work failed on rows \d+ to \d+ on CPU:")
    with pytest.warns(RuntimeWarning, match="kept failing") as warned, error:
        mapper(data)
    assert len(warned) == count
    assert 3 * count <= len(sim.calls()) <= 6 * count  # two are in flight


# Rows that fail


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
        threads.wait_until_ended()


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
