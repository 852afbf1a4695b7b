"""The simulator of accelerators does what its README says. What ran when is read from its own log, not from a clock."""

from __future__ import annotations

import math
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf

from benchmarks import simulator
from benchmarks.simulator import building

ROWS = tf.reshape(tf.range(8, dtype=tf.float32), [4, 2])


def _busy(call: simulator.Call) -> float:
    return call.end_seconds - call.start_seconds


def test_a_device_runs_its_calls_in_order_and_without_a_gap(sim: simulator.Simulator) -> None:
    @tf.function
    def work(rows: Any, cost: Any) -> Any:
        with tf.device("CPU:1"):
            return [sim.work(row, cost) for row in tf.unstack(rows)]  # equal stateless ops would be made one

    work(tf.range(3), tf.constant(0.1))
    calls = sim.calls("CPU:1")
    assert [call.outcome for call in calls] == ["finished"] * 3
    assert calls == sorted(calls, key=lambda call: call.arrived_seconds)
    assert calls[0].start_seconds == calls[0].arrived_seconds
    assert [call.start_seconds for call in calls[1:]] == [call.end_seconds for call in calls[:-1]]
    assert [_busy(call) for call in calls] == pytest.approx([0.1] * 3, abs=1e-6)


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


def test_concurrent_builds_compile_once(tmp_path: Path) -> None:
    """The compiler is a Python script; the path of the library is its last argument."""
    calls = tmp_path / "calls"
    script = f"import sys; open(sys.argv[-1], 'w').write('library'); open('{calls}', 'a').write('called ')"
    with ThreadPoolExecutor(4) as pool:
        libraries = set(pool.map(lambda _: building.build(f'"{sys.executable}" -c "{script}"', tmp_path), range(4)))
    assert [path.read_text() for path in libraries] == ["library"]
    assert calls.read_text() == "called "
