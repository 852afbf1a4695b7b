"""The chunk engine without TensorFlow's devices, where threads meet at scripted moments.

Order, errors of the data, leaving early and events are tested through whole calls, in tests/laws/test_streams.py.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import tensorflow as tf
from indices import IndexSource

from devicemap.data.sources import Chunk
from devicemap.run.chunk_engine import run_chunks
from devicemap.run.chunk_sizes import Throughput
from devicemap.run.workers import Call, Runner

pytestmark = pytest.mark.usefixtures("no_thread_stays")
FAST = {"/device:CPU:0": Throughput(rows_per_second=1e5), "/device:CPU:1": Throughput(rows_per_second=10.0)}


def _runner(
    device: int,
    before: Callable[[Chunk], object] = lambda chunk: None,
    make_function: Callable[[], object] = lambda: None,
) -> Runner:
    """A device that calls `make_function` when it is made ready, and `before` for each chunk, whose rows it doubles."""

    def run(chunk: Chunk) -> Any:
        before(chunk)
        return [2 * row for row in chunk.leaves[0]]

    def make() -> Any:
        make_function()
        return run

    return Runner(f"/device:CPU:{device}", make, 1)


def _results(rows: int, runners: list[Runner], *arguments: Any, **options: Any) -> list[int]:
    results = run_chunks(IndexSource(rows), runners, Call(**options), *arguments)
    return [row for result in results for part in result.parts for row in part]


def test_a_device_works_while_others_are_made_ready() -> None:
    at_work = threading.Event()
    runners = [_runner(0, lambda chunk: at_work.set()), _runner(1, make_function=lambda: at_work.wait(10) or 1 / 0)]
    assert _results(20, runners) == [*range(0, 40, 2)]


def test_what_was_left_to_a_fast_device_goes_to_others_when_that_is_overdue() -> None:
    release = threading.Event()
    slow = _runner(0, lambda chunk: release.wait(10) or 1 / 0)
    assert _results(6, [slow, _runner(1, lambda chunk: chunk.start < 5 or release.set())], FAST) == [*range(0, 12, 2)]


def test_an_idle_device_takes_the_next_task_however_slow_it_was() -> None:
    both = threading.Barrier(2, timeout=10)
    measured = {**FAST, "/device:CPU:1": Throughput(rows_per_second=1e-6)}
    runners = [_runner(device, lambda chunk: both.wait()) for device in range(2)]
    assert _results(2, runners, measured, are_tasks=True) == [0, 2]


def test_an_error_while_a_call_begins_or_describes_an_error_ends_it() -> None:
    with pytest.raises(ZeroDivisionError):
        _results(20, [_runner(0, make_function=lambda: 1 / 0)])
    with pytest.raises(LookupError):
        _results(5, [_runner(0, lambda chunk: 1 / 0)], located_error=lambda error, shards: {}["no words"])


def test_failed_parts_of_chunks_run_before_the_rows_after_them() -> None:
    """As a function that writes variables in the order of rows needs it."""
    computed, faults = list[int](), iter([tf.errors.AbortedError(None, None, "again")])

    def before(chunk: Chunk) -> None:
        if chunk.count > 4:
            raise tf.errors.ResourceExhaustedError(None, None, "full")
        if chunk.start == 8 and (fault := next(faults, None)):
            raise fault
        computed.extend(chunk.leaves[0])

    results = run_chunks(IndexSource(24, 8), [_runner(0, before)], Call(max_retries=2))
    assert [[len(part) for part in result.parts] for result in results] == [[4, 4]] * 3
    assert computed == [*range(24)]
