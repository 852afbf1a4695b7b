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
from benchmarks.simulator import building, simulation

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


def _one_after_another(calls: list[simulator.Call]) -> bool:
    calls = sorted(calls, key=lambda call: call.start_seconds)
    return all(before.end_seconds <= after.start_seconds for before, after in itertools.pairwise(calls))


# What the ops return


@pytest.mark.parametrize("dtype", [tf.float32, tf.float64, tf.int32, tf.int64])
@pytest.mark.parametrize("name", ["work", "stateful_work"])
def test_results_tell_that_the_work_was_done_once(sim: simulator.Simulator, name: str, dtype: Any) -> None:
    results = getattr(sim, name)(tf.cast(ROWS, dtype), tf.zeros([4]))
    assert results.dtype == dtype
    np.testing.assert_array_equal(results, 2 * ROWS.numpy() + 1)


@pytest.mark.parametrize("name", ["work", "stateful_work"])
def test_batches_and_single_rows(sim: simulator.Simulator, name: str) -> None:
    fn, data = getattr(sim, name), (ROWS, tf.zeros([4]))
    batches = devicemap.parallel_map(fn, data, devices=["CPU:1", "CPU:2"], batched=True)
    single = devicemap.parallel_map(fn, data, devices=["CPU:3", "CPU:4"])
    mapped = tf.map_fn(lambda row: fn(*row), data, fn_output_signature=tf.float32)
    for results in (batches, single, mapped):
        np.testing.assert_array_equal(results, 2 * ROWS + 1)
    usages = [(sim.usage(device).calls, sim.usage(device).rows) for device in DEVICES]
    assert usages == [(4, 4), (1, 2), (1, 2), (2, 2), (2, 2), (0, 0), (0, 0), (0, 0)]


@pytest.mark.parametrize(
    ("rows", "seconds", "results"),
    [
        ([None, 2], [4], [4, 2]), ([4, 2], [None], [4, 2]), ([None, 2], [None], [None, 2]), ([3, 2], [], [3, 2]),
        (None, [4], None), ([4, 2], None, [4, 2]),
    ],
)  # fmt: skip
def test_static_shapes(sim: simulator.Simulator, rows: Any, seconds: Any, results: Any) -> None:
    traced = tf.function(sim.work).get_concrete_function(
        tf.TensorSpec(rows, tf.float32), tf.TensorSpec(seconds, tf.float32)
    )
    shape = traced.output_shapes
    assert (None if shape.rank is None else shape.as_list()) == results


def test_rows_and_seconds_that_do_not_match(sim: simulator.Simulator) -> None:
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"\[3\].*\[4,2\].*expected seconds \[n\]"):
        sim.work(ROWS, tf.zeros([3]))
    with pytest.raises(ValueError, match="Dimensions must be equal"):
        tf.function(sim.work)(ROWS, tf.zeros([3]))
    assert sim.calls() == []


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
    assert len(sim.calls()) == 3
    assert _one_after_another(sim.calls())


def test_calls_hold_no_thread(sim: simulator.Simulator) -> None:
    _on(DEVICES * 8, sim.work, seconds=0.1)
    calls = sim.calls()
    first_end = min(call.end_seconds for call in calls)
    assert len(calls) == 64
    waiting = sum(call.arrived_seconds < first_end for call in calls)
    assert waiting > tf.config.threading.get_inter_op_parallelism_threads()


def test_many_short_calls(sim: simulator.Simulator) -> None:
    data = (tf.range(2000), tf.fill([2000], 1e-5))
    results = devicemap.parallel_map(sim.work, data, devices=DEVICES, vectorize=False)
    np.testing.assert_array_equal(results, 2 * np.arange(2000) + 1)
    assert sum(sim.usage(device).rows for device in DEVICES) == 2000
    for device in DEVICES:
        assert sim.usage(device).calls == sim.usage(device).rows
        assert _one_after_another(sim.calls(device))


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
    assert sim.usage("CPU:1") == simulator.Usage(0, calls=1, rows=3, refused=1, cancelled=0)


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


# Control


def test_reset_makes_fresh_devices(sim: simulator.Simulator) -> None:
    sim.configure("CPU:0", fails_from_call=0, error_code=tf.errors.INTERNAL)
    with pytest.raises(tf.errors.InternalError, match="CPU:0 is broken: it fails call 0"), tf.device("CPU:0"):
        sim.work(ROWS, tf.zeros([4]))
    sim.reset()
    assert sim.calls() == []
    with tf.device("CPU:0"):
        sim.work(ROWS, tf.zeros([4]))
    assert sim.usage(0) == simulator.Usage(0, calls=1, rows=4, refused=0, cancelled=0)


@pytest.mark.parametrize(
    "name", [3, "CPU:3", "cpu:3", "/CPU:3", "/device:CPU:3", "/job:localhost/replica:0/task:0/device:CPU:3"]
)
def test_names_of_devices(sim: simulator.Simulator, name: int | str) -> None:
    sim.configure(name, overhead_seconds=0.01)
    with tf.device("CPU:3"):
        sim.work(ROWS, tf.zeros([4]))
    assert sim.usage(name).busy_seconds == pytest.approx(0.01, abs=1e-6)


@pytest.mark.parametrize("name", [8, -1, "CPU:8", "GPU:0", "CPU"])
def test_devices_that_are_not_there(sim: simulator.Simulator, name: int | str) -> None:
    with pytest.raises(ValueError, match="expected one of the logical CPU devices, CPU:0 to CPU:7"):
        sim.configure(name)


@pytest.mark.parametrize(
    "settings",
    [
        {"speed": 0}, {"speed": math.inf}, {"overhead_seconds": -1}, {"memory_rows": -1}, {"fails_from_call": -1},
        {"fails_for_calls": -1}, {"error_code": tf.errors.OK},
    ],
    ids=str,
)  # fmt: skip
def test_settings_out_of_range(sim: simulator.Simulator, settings: dict[str, Any]) -> None:
    ((setting, value),) = settings.items()
    with pytest.raises(ValueError, match=f"{setting} is {value}; expected"):
        sim.configure("CPU:0", **settings)


def test_accounting() -> None:
    times = {"arrived_seconds": 1.0, "start_seconds": 2.0, "end_seconds": 4.5}
    calls = [
        simulator.Call("CPU:0", 3, outcome=outcome, **times)
        for outcome in ("finished", "finished", "refused", "cancelled")
    ]
    assert simulator.account(calls) == simulator.Usage(10.0, calls=2, rows=6, refused=1, cancelled=1)
    assert simulator.ideal_seconds([0.25] * 8, [1, 1, 0.25, 0.25]) == pytest.approx(0.8)


# Building, with compilers that are Python scripts: the name of the library is their last argument.


def _compiler(script: str) -> str:
    return f'"{sys.executable}" -c "import sys; {script}"'


WRITES = _compiler("open(sys.argv[-1], 'w').write('library')")


def test_no_compiler(tmp_path: Path) -> None:
    with pytest.raises(simulator.Unavailable, match="there is no compiler 'no-such-compiler'; install g"):
        building.build("no-such-compiler", tmp_path)


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ("sys.exit('in file\\na.h:7: error: no such header\\n1 error generated')", r"code 1\): a.h:7: error: no such"),
        ("sys.exit('killed')", r"code 1\): killed"),
        ("sys.exit(3)", r"code 3\): it gave no reason"),
        ("", r"code 0\): it gave no reason"),
    ],
)
def test_a_compiler_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, reason: str) -> None:
    monkeypatch.setenv("CXX", _compiler(script.replace("\n", "\\n")))
    with pytest.raises(simulator.Unavailable, match=f"could not compile accelerator.cc .exit {reason}"):
        building.build(cache=tmp_path)
    assert not [*tmp_path.glob("*.so")]


def test_a_cache_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(simulator.Unavailable, match=r"cannot be compiled into .*file"):
        building.build(WRITES, tmp_path / "file" / "build")


def test_a_library_that_does_not_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = building.build(WRITES, tmp_path)
    monkeypatch.setattr(simulation, "build", lambda: library)
    with pytest.raises(simulator.Unavailable, match=f"{library.name} does not load into TensorFlow"):
        simulator.load.__wrapped__()


def test_the_cache_is_used_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = building.build(WRITES, tmp_path)
    library.write_text("kept")
    assert building.build(WRITES, tmp_path) == library
    assert library.read_text() == "kept"
    monkeypatch.setattr(tf, "__version__", "0.0.0")
    assert building.build(WRITES, tmp_path) != library


def test_several_that_build_at_once_compile_once(tmp_path: Path) -> None:
    calls = tmp_path / "calls"
    compiler = _compiler(f"open(sys.argv[-1], 'w').write('library'); open('{calls}', 'a').write('called ')")
    with ThreadPoolExecutor(4) as pool:
        libraries = set(pool.map(lambda _: building.build(compiler, tmp_path), range(4)))
    assert [path.read_text() for path in libraries] == ["library"]
    assert calls.read_text() == "called "
