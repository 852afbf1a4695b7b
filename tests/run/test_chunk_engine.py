"""The chunk engine: order, balance, the window, memory, errors, and leaving early; without TensorFlow's devices.

Devices that break and rows that fail are tested through whole calls, in test_faults.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import tensorflow as tf

from devicemap.data.sources import Chunk
from devicemap.run.chunk_engine import run_chunks
from devicemap.run.chunk_sizes import Throughput
from devicemap.run.workers import ChunkOptions, Runner
from devicemap.types import (
    CallFinished,
    CallStarted,
    ChunkFailed,
    ChunkFinished,
    ChunkRetried,
    ChunkStarted,
    DeviceLost,
    Event,
)

pytestmark = pytest.mark.usefixtures("_no_thread_stays")


@pytest.fixture
def _no_thread_stays() -> Iterator[None]:
    yield
    assert _threads() == set()


def _threads() -> set[str]:
    return {thread.name for thread in threading.enumerate() if thread.name.startswith("devicemap")}


class Rows:
    """Rows 0 to `count - 1`, whose one leaf is the row's index."""

    specs = key = None
    reads = True

    def __init__(self, count: int | None, chunk_rows: int | None = 1):
        self.rows, self.chunk_rows = count, chunk_rows
        self.next = 0
        self.closed = False

    def take(self, rows: int) -> Chunk | None:
        start = self.next
        if start == self.rows:
            return None
        self.next = min(start + (self.chunk_rows or rows), self.rows or 2**62)
        return IndexChunk(start, self.next - start, (list(range(start, self.next)),))

    def rows_left(self) -> int | None:
        return None if self.rows is None else self.rows - self.next

    def close(self) -> None:
        self.closed = True


class IndexChunk(Chunk):
    def cut(self, start: int, stop: int) -> Chunk:
        return IndexChunk(start, stop - start, (self.leaves[0][start - self.start : stop - self.start],))


def _double(chunk: Chunk) -> Any:
    return [2 * row for row in chunk.leaves[0]]


def _runners(run: Callable[[str, Chunk], Any], devices: int = 2, in_flight: int = 2) -> list[Runner]:
    def on(device: str) -> Callable[[], Callable[[Chunk], Any]]:
        return lambda: lambda chunk: run(device, chunk)

    return [Runner(f"/device:CPU:{i}", on(f"/device:CPU:{i}"), in_flight) for i in range(devices)]


def _plain(devices: int, in_flight: int = 2) -> list[Runner]:
    return _runners(lambda device, chunk: _double(chunk), devices, in_flight)


def _flat(results: Any) -> list[int]:
    return [row for result in results for part in result.parts for row in part]


@pytest.mark.parametrize("chunk_rows", [1, 4, None])
@pytest.mark.parametrize("devices", [1, 2, 8])
@pytest.mark.parametrize("count", [0, 1, 5, 200])
def test_every_row_once_and_in_order(devices: int, count: int, chunk_rows: int | None) -> None:
    source = Rows(count, chunk_rows)
    results = list(run_chunks(source, _plain(devices), ChunkOptions()))
    assert _flat(results) == [2 * i for i in range(count)]
    if chunk_rows is not None:
        assert [len(_flat([result])) for result in results] == [
            min(chunk_rows, count - start) for start in range(0, count, chunk_rows)
        ]
    assert source.closed


def test_a_device_works_while_others_are_made_ready() -> None:
    at_work = threading.Event()

    def first() -> Callable[[Chunk], Any]:
        return lambda chunk: at_work.set() or _double(chunk)

    def second() -> Callable[[Chunk], Any]:
        assert at_work.wait(10)
        return _double

    runners = [Runner("/device:CPU:0", first, 1), Runner("/device:CPU:1", second, 1)]
    assert _flat(run_chunks(Rows(20, 1), runners, ChunkOptions())) == [2 * i for i in range(20)]


def test_what_cannot_be_made_ready_ends_the_call() -> None:
    def begin() -> Callable[[Chunk], Any]:
        raise LookupError("no function")

    with pytest.raises(LookupError, match="no function"):
        list(run_chunks(Rows(20, 1), [Runner("/device:CPU:0", begin, 2)], ChunkOptions()))


def test_as_they_finish() -> None:
    release = threading.Event()

    def run(device: str, chunk: Chunk) -> Any:
        if chunk.start == 0:
            assert release.wait(10)
        return _double(chunk)

    starts = []
    for result in run_chunks(Rows(20), _runners(run), ChunkOptions(deterministic=False)):
        starts.append(result.start)
        if len(starts) == 19:
            release.set()
    assert starts[-1] == 0
    assert sorted(starts) == list(range(20))


def test_a_slow_chunk_does_not_stop_the_others_until_the_window_is_full() -> None:
    release, started = threading.Event(), [threading.Event() for _ in range(10)]

    def run(device: str, chunk: Chunk) -> Any:
        started[chunk.start].set()
        if chunk.start == 0:
            assert release.wait(10)
        return _double(chunk)

    source = Rows(10)
    stream = run_chunks(source, _runners(run, in_flight=1), ChunkOptions(window=4))
    consumed: list[int] = []
    consumer = threading.Thread(target=lambda: consumed.extend(_flat(stream)))
    consumer.start()
    assert started[3].wait(10)
    assert source.next == 4  # read and not delivered: no more than the window
    release.set()
    consumer.join(10)
    assert consumed == [2 * i for i in range(10)]


def test_what_was_left_to_a_fast_device_goes_to_others_when_that_is_overdue() -> None:
    release = threading.Event()

    def run(device: str, chunk: Chunk) -> Any:
        if device.endswith("0"):
            assert release.wait(10)
        elif chunk.start == 5:
            release.set()
        return _double(chunk)

    throughput = {"/device:CPU:0": Throughput(rows_per_second=1e5), "/device:CPU:1": Throughput(rows_per_second=10.0)}
    assert _flat(run_chunks(Rows(6), _runners(run, in_flight=1), ChunkOptions(), throughput)) == [
        2 * i for i in range(6)
    ]


def test_an_endless_source_is_read_no_further_than_the_window() -> None:
    source = Rows(None, 4)
    stream = run_chunks(source, _plain(2), ChunkOptions(window=8))
    assert [next(stream).start for _ in range(5)] == [0, 4, 8, 12, 16]
    stream.close()
    assert source.next <= 4 * (5 + 8)
    assert source.closed


def test_leaving_early_stops_reading_and_cancels_what_runs() -> None:
    begun, cancelled = threading.Event(), threading.Event()

    def run(device: str, chunk: Chunk) -> Any:
        if chunk.start > 2:
            begun.set()
            assert cancelled.wait(10)
        return _double(chunk)

    source = Rows(1000)
    stream = run_chunks(source, _runners(run), ChunkOptions(window=4, cancel=cancelled.set))
    assert [next(stream).start for _ in range(3)] == [0, 1, 2]
    assert begun.wait(10)
    stream.close()
    assert cancelled.is_set()
    assert source.next <= 3 + 4


def test_what_was_being_read_when_the_stream_was_left_does_not_run() -> None:
    ran: list[int] = []
    reading, left = threading.Event(), threading.Event()

    class Slow(Rows):
        def take(self, rows: int) -> Chunk | None:
            if self.next == 1:
                reading.set()
                assert left.wait(10)
            return super().take(rows)

    def run(device: str, chunk: Chunk) -> Any:
        ran.append(chunk.start)
        return _double(chunk)

    stream = run_chunks(Slow(5), _runners(run, devices=1, in_flight=1), ChunkOptions(cancel=left.set))
    next(stream)
    assert reading.wait(10)
    threading.Timer(0.1, left.set).start()
    stream.close()
    assert ran == [0]


def test_an_observer_may_close_the_stream() -> None:
    source, streams, errors = Rows(1000), [], []

    def close(event: Event) -> None:
        if isinstance(event, ChunkFinished) and event.shard.start == 2:
            began.wait(10)
            try:
                streams[0].close()
            except BaseException as error:
                errors.append(error)

    began = threading.Event()
    streams.append(run_chunks(source, _plain(1), ChunkOptions(observe=close)))
    next(streams[0])
    began.set()
    deadline = time.monotonic() + 10
    while _threads() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not errors
    assert not _threads()
    assert source.closed


def test_an_error_that_cannot_be_described_is_raised_instead_of_waiting_for_ever() -> None:
    def describe(error: BaseException, shards: Any) -> BaseException:
        raise KeyError("no words")

    with pytest.raises(KeyError, match="no words"):
        list(run_chunks(Rows(5), _runners(lambda device, chunk: 1 / 0), ChunkOptions(describe=describe)))


def test_a_stream_that_is_never_begun_reads_nothing() -> None:
    source = Rows(10)
    run_chunks(source, _plain(2), ChunkOptions()).close()
    assert source.next == 0


def test_one_call_tells_its_story() -> None:
    events: list[Event] = []
    _flat(run_chunks(Rows(30, 4), _plain(3), ChunkOptions(observe=events.append)))
    assert isinstance(events[0], CallStarted)
    assert events[0].rows == 30
    assert len(events[0].devices) == 3
    assert isinstance(events[-1], CallFinished)
    assert events[-1].error is None
    assert [event.seconds for event in events] == sorted(event.seconds for event in events)
    started = [event.shard for event in events if isinstance(event, ChunkStarted)]
    finished = [event.shard for event in events if isinstance(event, ChunkFinished)]
    assert sorted(started, key=lambda shard: shard.start) == sorted(finished, key=lambda shard: shard.start)
    assert sum(map(len, finished)) == 30


class Faults:
    """Devices that fail by a script: `fails(device, chunk, call)` returns an error to raise, or None."""

    def __init__(self, fails: Callable[[str, Chunk, int], BaseException | None]):
        self.calls: Counter[str] = Counter()
        self._fails = fails
        self._lock = threading.Lock()

    def __call__(self, device: str, chunk: Chunk) -> Any:
        with self._lock:
            call = self.calls[device]
            self.calls[device] += 1
        if (error := self._fails(device, chunk, call)) is not None:
            raise error
        return _double(chunk)


def _full() -> BaseException:
    return tf.errors.ResourceExhaustedError(None, None, "full")


class Unknown(Rows):
    """Rows of unknown number: devices take as many chunks as may be in flight."""

    def rows_left(self) -> int | None:
        return None


def _of(events: list[Event], kind: type[Event]) -> list[tuple[int, int]]:
    return [(event.shard.start, event.shard.stop) for event in events if isinstance(event, kind)]


def test_a_chunk_that_does_not_fit_runs_in_halves_and_the_next_call_knows() -> None:
    """The device has memory for four rows."""
    events: list[Event] = []
    throughput: dict[str, Throughput] = {}
    faults = Faults(lambda device, chunk, call: _full() if chunk.count > 4 else None)
    options = ChunkOptions(max_retries=2, observe=events.append)
    assert _flat(run_chunks(Rows(64, 16), _runners(faults, 1, 1), options, throughput)) == [2 * i for i in range(64)]
    assert _of(events, ChunkFailed) == [(0, 16), (0, 8)]
    assert _of(events, ChunkRetried)[:3] == [(0, 8), (0, 4), (4, 8)]
    assert _of(events, ChunkFinished) == [(i, i + 4) for i in range(0, 64, 4)]
    assert throughput["/device:CPU:0"].limit == 4
    events.clear()
    assert _flat(run_chunks(Rows(64, 16), _runners(faults, 1, 1), options, throughput)) == [2 * i for i in range(64)]
    assert _of(events, ChunkFailed) == _of(events, ChunkRetried) == []


def test_a_chunk_that_does_not_fit_waits_until_it_is_alone() -> None:
    """Four chunks start together on one device, which has memory for two."""
    lock, begun = threading.Lock(), threading.Barrier(4)
    running: set[int] = set()
    beside: dict[int, set[int]] = {}

    def run(device: str, chunk: Chunk) -> Any:
        first = chunk.count == 4 and chunk.start < 16
        if first:
            begun.wait(10)
        with lock:
            running.add(chunk.start)
            beside[chunk.start] = running - {chunk.start}
        try:
            if first and chunk.start in (4, 12):
                raise _full()
            return _double(chunk)
        finally:
            with lock:
                running.remove(chunk.start)

    options = ChunkOptions(max_retries=2)
    assert _flat(run_chunks(Unknown(40, 4), _runners(run, 1, 4), options)) == [2 * i for i in range(40)]
    assert beside[4] == beside[6] == beside[12] == beside[14] == set()


def test_a_device_that_was_set_aside_leaves_a_chunk_that_does_not_fit_to_others() -> None:
    """Four chunks run on it: three fail, so that it is set aside, and then the fourth does not fit."""
    set_aside, begun, numbers = threading.Event(), threading.Barrier(4), itertools.count()

    def run(device: str, chunk: Chunk) -> Any:
        if device.endswith("1"):
            assert set_aside.wait(10)
            return _double(chunk)
        if (number := next(numbers)) < 4:
            begun.wait(10)
        if number == 3:
            assert set_aside.wait(10)
            raise _full()
        raise tf.errors.UnavailableError(None, None, "broken")

    def observe(event: Event) -> None:
        if isinstance(event, DeviceLost):
            set_aside.set()

    options = ChunkOptions(max_retries=9, observe=observe)
    runners = [*_runners(run, 1, 4), *_runners(run, 2, 1)[1:]]
    assert _flat(run_chunks(Unknown(40, 4), runners, options)) == [2 * i for i in range(40)]


def test_one_row_that_does_not_fit_beside_others_waits_until_it_is_alone() -> None:
    begun, others = threading.Barrier(3), threading.Event()
    calls: Counter[int] = Counter()

    def run(device: str, chunk: Chunk) -> Any:
        calls[chunk.start] += 1
        if chunk.start < 3 and calls[chunk.start] == 1:
            begun.wait(10)
            if chunk.start == 0:
                others.set()
                raise _full()
            assert others.wait(10)
        return _double(chunk)

    results = run_chunks(Unknown(9, 1), _runners(run, 1, 3), ChunkOptions(max_retries=2))
    assert _flat(results) == [2 * i for i in range(9)]
    assert calls[0] == 2


@pytest.mark.parametrize(
    "error",
    [
        tf.errors.InvalidArgumentError(None, None, "assertion failed"),
        tf.errors.DataLossError(None, None, "lost"),
        TimeoutError("slow"),
        ValueError("a bug"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_an_error_that_is_not_transient_is_raised_at_once(error: BaseException) -> None:
    """Other rows are still running, and the source has more: neither is waited for."""
    release, read_on = threading.Event(), threading.Event()

    class Live(Rows):
        def take(self, rows: int) -> Chunk | None:
            if self.next == 2:
                assert read_on.wait(10)
            return super().take(rows)

    def run(device: str, chunk: Chunk) -> Any:
        if chunk.start == 0:
            assert release.wait(10)
        else:
            raise error
        return _double(chunk)

    options = ChunkOptions(max_retries=5, cancel=lambda: (release.set(), read_on.set()))
    with pytest.raises(type(error)):
        list(run_chunks(Live(100), _runners(run, in_flight=1), options))


def test_results_do_not_wait_for_rows_that_are_still_to_come() -> None:
    read_on = threading.Event()

    class Live(Rows):
        def take(self, rows: int) -> Chunk | None:
            if self.next == 3:
                assert read_on.wait(10)
            return super().take(rows)

    stream = run_chunks(Live(5), _plain(2), ChunkOptions(window=8))
    assert [next(stream).start for _ in range(3)] == [0, 1, 2]
    read_on.set()
    assert [result.start for result in stream] == [3, 4]


def test_an_error_of_the_source_follows_the_rows_before_it() -> None:
    release = threading.Event()

    class Broken(Unknown):
        def take(self, rows: int) -> Chunk | None:
            if self.next == 3:
                release.set()
                raise LookupError("no more data")
            return super().take(rows)

    def run(device: str, chunk: Chunk) -> Any:
        assert release.wait(10)
        return _double(chunk)

    stream = run_chunks(Broken(5), _runners(run), ChunkOptions())
    assert [next(stream).start for _ in range(3)] == [0, 1, 2]
    with pytest.raises(LookupError, match="no more data"):
        next(stream)


@pytest.mark.parametrize("message", ["Dst tensor is not initialized.", "Src tensor is not initialized."])
def test_a_copy_that_does_not_fit_is_out_of_memory(message: str) -> None:
    def fails(device: str, chunk: Chunk, call: int) -> BaseException | None:
        return tf.errors.InternalError(None, None, f"Failed copying: {message}") if chunk.count > 2 else None

    events: list[Event] = []
    options = ChunkOptions(max_retries=2, observe=events.append)
    assert _flat(run_chunks(Rows(8, 4), _runners(Faults(fails), 1, 1), options)) == [2 * i for i in range(8)]
    assert _of(events, ChunkFailed) == [(0, 4)]
