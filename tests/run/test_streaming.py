"""The scheduler of chunks: order, balance, the window, memory, and closing early; without TensorFlow's devices.

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

from devicemap.data.chunks import Chunk
from devicemap.run.dispatch import Dispatch, Rules
from devicemap.run.schedule import Pace
from devicemap.run.workers import Runner, run_chunks
from devicemap.types import (
    CallFinished,
    CallStarted,
    ChunkFailed,
    ChunkFinished,
    ChunkRetried,
    ChunkStarted,
    Event,
)

pytestmark = pytest.mark.usefixtures("_no_thread_stays")


@pytest.fixture
def _no_thread_stays() -> Iterator[None]:
    yield
    assert _threads() == set()


def _threads() -> set[str]:
    return {thread.name for thread in threading.enumerate() if thread.name.startswith("devicemap worker")}


class Rows:
    """Rows 0 to `count - 1`, whose one leaf is the row's index, in groups of `batch_size`."""

    specs = key = None
    reads = True

    def __init__(self, count: int | None, batch_size: int | None = 1):
        self.rows, self.batch_size = count, batch_size
        self.next = 0
        self.closed = False

    def take(self, rows: int, limit: int | None) -> Chunk | None:
        start = self.next
        if start == self.rows:
            return None
        size = self.batch_size or 1
        end = (start // size + 1) * size if self.batch_size else start + rows
        end = min(end, start + rows, start + (limit or rows), self.rows or 2**62)
        self.next = end
        group = start // size if self.batch_size else start
        last = self.batch_size is None or end % size == 0 or end == self.rows
        return IndexChunk(start, end - start, (list(range(start, end)),), group, last)

    def rows_left(self) -> int | None:
        return None if self.rows is None else self.rows - self.next

    def close(self) -> None:
        self.closed = True


class IndexChunk(Chunk):
    def split(self, sizes: list[int]) -> list[Chunk]:
        bounds = [sum(sizes[:i]) for i in range(len(sizes) + 1)]
        return [
            IndexChunk(self.start + a, b - a, (self.leaves[0][a:b],), self.group, self.last and b == self.count)
            for a, b in itertools.pairwise(bounds)
        ]


def _double(chunk: Chunk) -> Any:
    return [2 * row for row in chunk.leaves[0]]


def _runners(run: Callable[[str, Chunk], Any], devices: int = 2, in_flight: int = 2) -> list[Runner]:
    def on(device: str) -> Callable[[], Callable[[Chunk], Any]]:
        return lambda: lambda chunk: run(device, chunk)

    return [Runner(f"/device:CPU:{i}", on(f"/device:CPU:{i}"), in_flight) for i in range(devices)]


def _plain(devices: int, in_flight: int = 2) -> list[Runner]:
    return _runners(lambda device, chunk: _double(chunk), devices, in_flight)


def _flat(groups: Any) -> list[int]:
    return [row for group in groups for result in group.results for row in result]


@pytest.mark.parametrize("batch_size", [1, 4, None])
@pytest.mark.parametrize("devices", [1, 2, 8])
@pytest.mark.parametrize("count", [0, 1, 5, 200])
def test_every_row_once_and_in_order(devices: int, count: int, batch_size: int | None) -> None:
    source = Rows(count, batch_size)
    groups = list(run_chunks(source, _plain(devices), Rules()))
    assert _flat(groups) == [2 * i for i in range(count)]
    if batch_size is not None:  # delivered as asked for, however the devices cut them
        assert [sum(map(len, group.results)) for group in groups] == [
            min(batch_size, count - start) for start in range(0, count, batch_size)
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
    assert _flat(run_chunks(Rows(20, 1), runners, Rules())) == [2 * i for i in range(20)]


def test_what_cannot_be_made_ready_ends_the_call() -> None:
    def begin() -> Callable[[Chunk], Any]:
        raise LookupError("no function")

    with pytest.raises(LookupError, match="no function"):
        list(run_chunks(Rows(20, 1), [Runner("/device:CPU:0", begin, 2)], Rules()))


def test_as_they_finish() -> None:
    release = threading.Event()

    def run(device: str, chunk: Chunk) -> Any:
        if chunk.start == 0:
            assert release.wait(10)
        return _double(chunk)

    starts = []
    for group in run_chunks(Rows(20), _runners(run), Rules(deterministic=False)):
        starts.append(group.start)
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
    stream = run_chunks(source, _runners(run, in_flight=1), Rules(window=4))
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

    paces = {"/device:CPU:0": Pace(rows_per_second=1e5), "/device:CPU:1": Pace(rows_per_second=10.0)}
    assert _flat(run_chunks(Rows(6), _runners(run, in_flight=1), Rules(), paces)) == [2 * i for i in range(6)]


def test_two_wake_ups_in_a_row_reach_two_workers() -> None:
    """One worker reads, one waits for its turn: the first wake-up reaches that one, the second starts a further worker."""
    go_on, started = threading.Event(), []

    class Blocking(Rows):
        def take(self, rows: int, limit: int | None) -> Chunk | None:
            go_on.wait(10)
            return super().take(rows, limit)

    dispatch = Dispatch(Blocking(4), ["/device:CPU:0"], Rules(), {}, lambda: started.append(True))
    workers = [threading.Thread(target=dispatch.take, args=("/device:CPU:0",)) for _ in range(2)]
    for worker in workers:
        worker.start()
    while not dispatch._in_turn:
        pass
    with dispatch._lock:  # so that the worker cannot run in between
        dispatch._call_worker()
        dispatch._call_worker()
    assert len(started) == 1
    dispatch.stop()
    go_on.set()
    for worker in workers:
        worker.join(10)


def test_an_endless_source_is_read_no_further_than_the_window() -> None:
    source = Rows(None, 4)
    stream = run_chunks(source, _plain(2), Rules(window=8))
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
    stream = run_chunks(source, _runners(run), Rules(window=4, cancel=cancelled.set))
    assert [next(stream).start for _ in range(3)] == [0, 1, 2]
    assert begun.wait(10)
    stream.close()
    assert cancelled.is_set()
    assert source.next <= 3 + 4


def test_what_was_being_read_when_the_stream_was_left_does_not_run() -> None:
    ran: list[int] = []
    reading, left = threading.Event(), threading.Event()

    class Slow(Rows):
        def take(self, rows: int, limit: int | None) -> Chunk | None:
            if self.next == 1:
                reading.set()
                assert left.wait(10)
            return super().take(rows, limit)

    def run(device: str, chunk: Chunk) -> Any:
        ran.append(chunk.start)
        return _double(chunk)

    stream = run_chunks(Slow(5), _runners(run, devices=1, in_flight=1), Rules(cancel=left.set))
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
    streams.append(run_chunks(source, _plain(1), Rules(observe=close)))
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
        list(run_chunks(Rows(5), _runners(lambda device, chunk: 1 / 0), Rules(describe=describe)))


def test_a_stream_that_is_never_begun_reads_nothing() -> None:
    source = Rows(10)
    run_chunks(source, _plain(2), Rules()).close()
    assert source.next == 0


def test_one_call_tells_its_story() -> None:
    events: list[Event] = []
    _flat(run_chunks(Rows(30, 4), _plain(3), Rules(observe=events.append)))
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


class Endless(Rows):
    """Rows of unknown number: no chunk is made smaller for balance."""

    def rows_left(self) -> int | None:
        return None


def _failed(events: list[Event]) -> list[int]:
    return [len(event.shard) for event in events if isinstance(event, ChunkFailed)]


@pytest.mark.parametrize("fit", [1, 2, 3])
def test_fewer_chunks_are_in_flight_before_any_is_cut(fit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of four chunks that begin together so many fit, whatever their rows; they end when the others have failed."""
    events: list[Event] = []
    begun, all_failed = threading.Barrier(4), threading.Event()
    fail, given_up = Dispatch.fail, itertools.count(1)

    def failing(self: Dispatch, *args: Any) -> bool:
        lost = fail(self, *args)
        if next(given_up) == 4 - fit:
            all_failed.set()
        return lost

    monkeypatch.setattr(Dispatch, "fail", failing)

    def fails(device: str, chunk: Chunk, call: int) -> BaseException | None:
        if call < 4:
            begun.wait(10)
        if call < 4 and chunk.start < 4 * fit:
            assert all_failed.wait(10)
        return _full() if call < 4 and chunk.start >= 4 * fit else None

    under_way: list[int] = []

    def observe(event: Event) -> None:
        events.append(event)
        if all_failed.is_set() and isinstance(event, ChunkStarted):
            ended = [type(event) for event in events if isinstance(event, (ChunkFinished, ChunkFailed))]
            under_way.append(sum(isinstance(event, ChunkStarted) for event in events) - len(ended))

    paces: dict[str, Pace] = {}
    rules = Rules(max_retries=2, observe=observe)
    rows = _flat(run_chunks(Endless(200, 4), _runners(Faults(fails), 1, 4), rules, paces))
    assert rows == [2 * i for i in range(200)]
    assert _failed(events) == [4] * (4 - fit)
    assert {len(event.shard) for event in events if isinstance(event, ChunkStarted)} == {4}
    assert max(under_way) <= fit
    assert (paces["/device:CPU:0"].at_once, paces["/device:CPU:0"].limit) == (fit, None)


def test_only_a_chunk_that_never_shared_its_device_is_cut() -> None:
    """The first chunk fails when the other one has finished, and once more by itself."""
    events: list[Event] = []
    begun, finished = threading.Barrier(2), threading.Event()

    def fails(device: str, chunk: Chunk, call: int) -> BaseException | None:
        if call < 2:
            begun.wait(10)
        if chunk.start == 0 and call < 2:
            assert finished.wait(10)
        return _full() if chunk.start == 0 and chunk.count > 2 else None

    def observe(event: Event) -> None:
        events.append(event)
        if isinstance(event, ChunkFinished) and event.shard.start == 4:
            finished.set()

    rows = _flat(run_chunks(Endless(8, 4), _runners(Faults(fails), 1, 2), Rules(max_retries=2, observe=observe)))
    assert rows == [2 * i for i in range(8)]
    assert _failed(events) == [4, 4]
    retried = [event.shard for event in events if isinstance(event, ChunkRetried)]
    assert [(shard.start, shard.stop) for shard in retried] == [(0, 4), (0, 2), (2, 4)]


@pytest.mark.parametrize("message", ["Dst tensor is not initialized.", "Src tensor is not initialized."])
def test_a_copy_that_does_not_fit_is_out_of_memory(message: str) -> None:
    def fails(device: str, chunk: Chunk, call: int) -> BaseException | None:
        return tf.errors.InternalError(None, None, f"Failed copying: {message}") if chunk.count > 2 else None

    events: list[Event] = []
    rules = Rules(max_retries=2, observe=events.append)
    assert _flat(run_chunks(Endless(8, 4), _runners(Faults(fails), 1, 1), rules)) == [2 * i for i in range(8)]
    assert _failed(events) == [4]
