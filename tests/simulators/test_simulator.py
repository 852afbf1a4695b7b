"""The simulator of accelerators does what its README says. What ran when is read from its own log, not from a clock."""

from __future__ import annotations

import itertools
import math
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import devicemap
from benchmarks import simulator
from benchmarks.simulator import building

DEVICES = [f"CPU:{i}" for i in range(8)]
ROWS = tf.reshape(tf.range(8, dtype=tf.float32), [4, 2])


def _on(devices: list[str], op: Callable[..., Any], seconds: float) -> None:
    """One call of one row on each device, all in one `tf.function`, and none waiting for another's result."""

    @tf.function
    def calls(rows: Any, costs: Any) -> Any:
        results = []
        for i, device in enumerate(devices):
            with tf.device(device):
                results.append(op(rows[i], costs[i]))  # a row of its own: equal stateless ops would be made one
        return results

    calls(tf.range(len(devices)), tf.fill([len(devices)], seconds))


def _busy(call: simulator.Call) -> float:
    return call.end_seconds - call.start_seconds


# What the ops return


@pytest.mark.parametrize("dtype", [tf.float32, tf.float64, tf.int32, tf.int64])
@pytest.mark.parametrize("name", ["work", "stateful_work"])
def test_results_tell_that_the_work_was_done_once(sim: simulator.Simulator, name: str, dtype: Any) -> None:
    results = getattr(sim, name)(tf.cast(ROWS, dtype), tf.zeros([4]))
    assert results.dtype == dtype
    np.testing.assert_array_equal(results, 2 * ROWS.numpy() + 1)


# Streams


def test_a_device_runs_its_calls_in_order_and_without_a_gap(sim: simulator.Simulator) -> None:
    _on(["CPU:1"] * 3, sim.work, seconds=0.1)
    calls = sim.calls("CPU:1")
    assert [call.outcome for call in calls] == ["finished"] * 3
    assert calls == sorted(calls, key=lambda call: call.arrived_seconds)
    assert calls[0].start_seconds == calls[0].arrived_seconds
    assert [call.start_seconds for call in calls[1:]] == [call.end_seconds for call in calls[:-1]]
    assert [_busy(call) for call in calls] == pytest.approx([0.1] * 3, abs=1e-6)


def test_devices_run_at_the_same_time_and_take_no_cpu(sim: simulator.Simulator) -> None:
    _on(DEVICES, sim.work, seconds=0.0)  # the threads of the streams start
    sim.reset()
    before = time.process_time()
    _on(DEVICES, sim.work, seconds=0.5)
    taken = time.process_time() - before
    calls = sim.calls()
    assert sorted(call.device for call in calls) == DEVICES
    assert max(call.start_seconds for call in calls) < min(call.end_seconds for call in calls)
    assert taken < 0.1 * sum(map(_busy, calls))


def test_devices_with_state_run_one_after_another(sim: simulator.Simulator) -> None:
    _on(DEVICES[:3], sim.stateful_work, seconds=0.05)
    calls = sorted(sim.calls(), key=lambda call: call.start_seconds)
    assert len(calls) == 3
    assert all(before.end_seconds <= after.start_seconds for before, after in itertools.pairwise(calls))


def test_calls_hold_no_thread(sim: simulator.Simulator) -> None:
    _on(DEVICES * 8, sim.work, seconds=0.1)
    calls = sim.calls()
    first_end = min(call.end_seconds for call in calls)
    assert len(calls) == 64
    waiting = sum(call.arrived_seconds < first_end for call in calls)
    assert waiting > tf.config.threading.get_inter_op_parallelism_threads()


# Devices that differ, fail, or hang


def test_speed_and_overhead(sim: simulator.Simulator) -> None:
    sim.configure("CPU:1", speed=4, overhead_seconds=0.05)
    sim.configure("CPU:2", speed=0.5)
    for device in DEVICES[:3]:
        with tf.device(device):
            sim.work(ROWS, [0.01, 0.02, 0.03, 0.04])
    assert [_busy(call) for call in sim.calls()] == pytest.approx([0.1, 0.025 + 0.05, 0.2], abs=1e-6)


def test_more_rows_than_memory(sim: simulator.Simulator) -> None:
    sim.configure("CPU:1", memory_rows=3)
    with tf.device("CPU:1"):
        with pytest.raises(tf.errors.ResourceExhaustedError, match=r"CPU:1 .* room for 3 rows per call, .* has 4"):
            sim.work(ROWS, tf.fill([4], 60.0))
        sim.work(ROWS[:3], tf.zeros([3]))
    assert sim.usage("CPU:1") == simulator.Usage(calls=1, rows=3, refused=1, cancelled=0)


@pytest.mark.parametrize(
    ("settings", "outcomes"),
    [
        ({}, "....."),
        ({"fails_from_call": 0}, "xxxxx"),
        ({"fails_from_call": 2}, "..xxx"),
        ({"fails_from_call": 1, "fails_for_calls": 2}, ".xx.."),
        ({"fails_from_call": 1, "fails_for_calls": 0}, "....."),
    ],
)
def test_breakdowns_are_counted(sim: simulator.Simulator, settings: Any, outcomes: str) -> None:
    with tf.device("CPU:1"):
        sim.work(ROWS, tf.zeros([4]))  # calls before the device is set up do not count
        sim.configure("CPU:1", **settings)
        seen = ""
        for _ in outcomes:
            try:
                sim.work(ROWS, tf.zeros([4]))
                seen += "."
            except tf.errors.UnavailableError:
                seen += "x"
    assert seen == outcomes
    assert sim.usage("CPU:1").refused == outcomes.count("x")


@pytest.mark.parametrize("poison", [-1.0, math.nan])
def test_poisoned_rows(sim: simulator.Simulator, poison: float) -> None:
    with pytest.raises(tf.errors.InvalidArgumentError, match="row 2 of the 4 rows of a call on CPU:1 is poisoned"):
        devicemap.parallel_map(sim.work, (ROWS, [0.0, 0.0, poison, poison]), devices=["CPU:1"], batched=True)
    assert {call.outcome for call in sim.calls()} == {"refused"}


def test_cancelled_calls_end_at_once_and_leave_the_stream(sim: simulator.Simulator) -> None:
    @tf.function
    def fail_soon(hang: Any, cost: Any) -> Any:
        with tf.device("CPU:1"):  # one runs, one is in the queue
            hanging = [sim.work(row, hang) for row in (1.0, 2.0)]
        with tf.device("CPU:2"):
            failing = tf.debugging.check_numerics(sim.work(hang, cost), "not finite")
        return hanging, failing

    with pytest.raises(tf.errors.InvalidArgumentError, match="not finite"):
        fail_soon(tf.constant(math.inf), tf.constant(0.2))
    (finished,) = sim.calls("CPU:2")
    running, queued = sorted(sim.calls("CPU:1"), key=_busy, reverse=True)
    assert running.outcome == queued.outcome == "cancelled"
    assert max(running.end_seconds, queued.end_seconds) - finished.end_seconds < 1
    assert queued.start_seconds >= running.end_seconds or _busy(queued) == 0  # whichever is cancelled first
    with tf.device("CPU:1"):
        sim.work(ROWS, tf.zeros([4]))
    after = sim.calls("CPU:1")[-1]
    assert (after.outcome, after.start_seconds) == ("finished", after.arrived_seconds)
    assert (sim.usage("CPU:1").calls, sim.usage("CPU:1").cancelled) == (1, 2)


def test_reset_makes_fresh_devices(sim: simulator.Simulator) -> None:
    sim.configure("CPU:0", fails_from_call=0, error_code=tf.errors.INTERNAL)
    with pytest.raises(tf.errors.InternalError, match="CPU:0 is broken: it fails call 0"), tf.device("CPU:0"):
        sim.work(ROWS, tf.zeros([4]))
    sim.reset()
    assert sim.calls() == []
    with tf.device("CPU:0"):
        sim.work(ROWS, tf.zeros([4]))
    assert sim.usage(0) == simulator.Usage(calls=1, rows=4, refused=0, cancelled=0)


def test_concurrent_builds_compile_once(tmp_path: Path) -> None:
    """The compiler is a Python script; the path of the library is its last argument."""
    calls = tmp_path / "calls"
    script = f"import sys; open(sys.argv[-1], 'w').write('library'); open('{calls}', 'a').write('called ')"
    with ThreadPoolExecutor(4) as pool:
        libraries = set(pool.map(lambda _: building.build(f'"{sys.executable}" -c "{script}"', tmp_path), range(4)))
    assert [path.read_text() for path in libraries] == ["library"]
    assert calls.read_text() == "called "
