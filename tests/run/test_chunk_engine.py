"""The chunk engine without TensorFlow's devices, where threads meet at scripted moments.

Order, errors of the data and events are tested through whole calls, in tests/laws/test_streams.py.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from queue import SimpleQueue
from typing import Any

import pytest
import threads
from indices import IndexSource

from devicemap.data.sources import Chunk
from devicemap.run.chunk_engine import run_chunks
from devicemap.run.chunk_sizes import Throughput
from devicemap.run.workers import Call, Runner
from devicemap.types import ChunkFinished, Event

pytestmark = pytest.mark.usefixtures("no_thread_stays")


def _double(chunk: Chunk) -> Any:
    return [2 * row for row in chunk.leaves[0]]


def _runners(before: Callable[[str, Chunk], object], devices: int = 2, in_flight: int = 2) -> list[Runner]:
    """Devices that call `before` with their name, such as "1", and a chunk, before they compute it."""

    def on(device: str) -> Callable[[], Callable[[Chunk], Any]]:
        def run(chunk: Chunk) -> Any:
            before(device, chunk)
            return _double(chunk)

        return lambda: run

    return [Runner(f"/device:CPU:{i}", on(str(i)), in_flight) for i in range(devices)]


def _flat(results: Any) -> list[int]:
    return [row for result in results for part in result.parts for row in part]


def _doubles(count: int) -> list[int]:
    return list(range(0, 2 * count, 2))


def _wait(event: threading.Event) -> None:
    assert event.wait(10)


def _fail(error: BaseException) -> None:
    raise error


# Nothing waits without need


def test_a_device_works_while_others_are_made_ready() -> None:
    at_work = threading.Event()

    def second() -> Callable[[Chunk], Any]:
        _wait(at_work)
        return _double

    runners = [*_runners(lambda device, chunk: at_work.set(), 1, 1), Runner("/device:CPU:1", second, 1)]
    assert _flat(run_chunks(IndexSource(20), runners, Call())) == _doubles(20)


def test_as_they_finish() -> None:
    release = threading.Event()
    runners = _runners(lambda device, chunk: chunk.start or _wait(release))
    starts = []
    for result in run_chunks(IndexSource(20), runners, Call(deterministic=False)):
        starts.append(result.start)
        if len(starts) == 19:
            release.set()
    assert starts[-1] == 0
    assert sorted(starts) == list(range(20))


def test_a_slow_chunk_does_not_stop_the_others_until_the_window_is_full() -> None:
    release, started = threading.Event(), [threading.Event() for _ in range(10)]
    before = lambda device, chunk: started[chunk.start].set() or chunk.start or _wait(release)
    source, consumed = IndexSource(10), []
    stream = run_chunks(source, _runners(before, in_flight=1), Call(window=4))
    consumer = threading.Thread(target=lambda: consumed.extend(_flat(stream)))
    consumer.start()
    _wait(started[3])
    assert source.next == 4  # read and not delivered: no more than the window
    release.set()
    consumer.join(10)
    assert consumed == _doubles(10)


def test_what_was_left_to_a_fast_device_goes_to_others_when_that_is_overdue() -> None:
    release = threading.Event()

    def before(device: str, chunk: Chunk) -> None:
        if device == "0":
            _wait(release)
        elif chunk.start == 5:
            release.set()

    throughput = {"/device:CPU:0": Throughput(rows_per_second=1e5), "/device:CPU:1": Throughput(rows_per_second=10.0)}
    assert _flat(run_chunks(IndexSource(6), _runners(before, in_flight=1), Call(), throughput)) == _doubles(6)


@pytest.mark.parametrize("failing", [None, 2])
def test_neither_results_nor_errors_wait_for_rows_that_are_still_to_come(failing: int | None) -> None:
    read_on = threading.Event()
    source = IndexSource(5, before={3: lambda: _wait(read_on)})
    runners = _runners(lambda device, chunk: chunk.start == failing and _fail(ValueError("bad row")))
    stream = run_chunks(source, runners, Call(window=8, max_retries=5, cancel=read_on.set))
    if failing:
        with pytest.raises(ValueError, match="bad row"):  # perhaps before the rows that precede it
            list(stream)
    else:
        assert [next(stream).start for _ in range(3)] == [0, 1, 2]
        read_on.set()
        assert [result.start for result in stream] == [3, 4]


# Leaving early


def test_leaving_early_stops_reading_and_cancels_what_runs() -> None:
    begun, cancelled = threading.Event(), threading.Event()

    def before(device: str, chunk: Chunk) -> None:
        if chunk.start > 8:
            begun.set()
            _wait(cancelled)

    source = IndexSource(None, 4)
    stream = run_chunks(source, _runners(before), Call(window=4, cancel=cancelled.set))
    assert [next(stream).start for _ in range(3)] == [0, 4, 8]
    _wait(begun)
    stream.close()
    assert cancelled.is_set()
    assert source.next <= 4 * (3 + 4)
    assert source.closed
    unread = IndexSource(10)
    run_chunks(unread, _runners(lambda device, chunk: None), Call()).close()
    assert unread.next == 0


def test_what_was_being_read_when_the_stream_was_left_does_not_run() -> None:
    ran: list[int] = []
    reading, left = threading.Event(), threading.Event()
    source = IndexSource(5, before={1: lambda: reading.set() or _wait(left)})
    runners = _runners(lambda device, chunk: ran.append(chunk.start), devices=1, in_flight=1)
    stream = run_chunks(source, runners, Call(cancel=left.set))
    next(stream)
    _wait(reading)
    threading.Timer(0.1, left.set).start()
    stream.close()
    assert ran == [0]


def test_a_worker_that_starts_while_the_call_ends_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    starting, cancelled = threading.Event(), threading.Event()
    start_worker = Call.start_worker

    def start(call: Call, runner: Runner, queue: SimpleQueue[Any]) -> threading.Thread:
        if runner.device == "/device:CPU:1":
            starting.set()
            _wait(cancelled)
            time.sleep(0.05)  # the consumer waits for threads now
            runner = replace(runner, begin=lambda: time.sleep(0.1) or _double)
        return start_worker(call, runner, queue)

    def fail(device: str, chunk: Chunk) -> None:
        _wait(starting)
        raise ValueError("a row")

    monkeypatch.setattr(Call, "start_worker", start)
    with pytest.raises(ValueError, match="a row"):
        list(run_chunks(IndexSource(10), _runners(fail), Call(cancel=cancelled.set)))


def test_an_observer_may_close_the_stream() -> None:
    source, streams, closed, began = IndexSource(1000), [], threading.Event(), threading.Event()

    def close(event: Event) -> None:
        if isinstance(event, ChunkFinished) and event.shard.start == 2:
            _wait(began)
            streams[0].close()
            closed.set()

    streams.append(run_chunks(source, _runners(lambda device, chunk: None, 1), Call(observe=close)))
    next(streams[0])
    began.set()
    _wait(closed)
    threads.wait_until_ended()
    assert source.closed


# Errors


def test_an_error_while_a_call_begins_or_describes_an_error_ends_it() -> None:
    error = LookupError("no words")
    with pytest.raises(LookupError, match="no words"):
        list(run_chunks(IndexSource(20), [Runner("/device:CPU:0", lambda: _fail(error), 2)], Call()))
    options = Call(describe=lambda found, shards: _fail(error))
    with pytest.raises(LookupError, match="no words"):
        list(run_chunks(IndexSource(5), _runners(lambda device, chunk: 1 / 0), options))
