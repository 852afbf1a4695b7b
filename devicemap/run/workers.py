"""The workers of a call in chunks: daemon threads that compute the chunks in the queue of their device."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from queue import SimpleQueue
from typing import Any

from devicemap.data.sources import Chunk
from devicemap.events import (
    CallFinished,
    ChunkFailed,
    ChunkFinished,
    ChunkRetried,
    ChunkStarted,
    Event,
    RowFailed,
    Shard,
)
from devicemap.run.retries import AGAIN_SECONDS, RetryAction, action_after, failing_row


@dataclass(frozen=True)
class Runner:
    """One device of a call."""

    device: str
    """Full name."""

    make_function: Callable[[], Callable[[Chunk], Any]]
    """Factory for the function that computes a chunk. Each worker calls it once, before its first chunk."""

    in_flight: int
    """The most chunks in flight on the device, so that copying and computing overlap."""


@dataclass(frozen=True)
class QueuedChunk:
    """Rows of a chunk on their way to a device: all of them, or a part if the chunk failed or does not fit into memory."""

    number: int
    """Position of the chunk in the order of rows."""

    start: int
    count: int
    """Global index of the first row, and the number of rows, of the whole chunk."""

    rows: Chunk
    """The rows to compute."""

    again: bool = False
    """Whether they failed before."""

    tried: tuple[Shard, ...] = ()
    """The same rows on each device that tried them, with a transient error."""

    out_of_memory: bool = False
    """Whether a device ran out of memory with them."""

    alone: bool = False
    """Whether nothing else runs on the device."""

    waited_seconds: float = 0.0
    """How long the device was idle because the chunk was being read."""

    def cut(self, rows: int) -> tuple[QueuedChunk, QueuedChunk]:
        """Return the first `rows` rows, and the others, which no device has tried by themselves."""
        start, middle, stop = self.rows.start, self.rows.start + rows, self.rows.start + self.rows.count
        first = replace(self, rows=self.rows.cut(start, middle))
        return first, replace(self, rows=self.rows.cut(middle, stop), tried=(), waited_seconds=0.0)


@dataclass(frozen=True)
class Finished:
    """A message to the scheduler: a device computed rows between two times."""

    queued: QueuedChunk
    device: str
    started: float
    ended: float


@dataclass(frozen=True)
class Failed:
    """A message to the scheduler: rows failed. They are computed again, or were left out."""

    queued: QueuedChunk
    shard: Shard
    started: float
    error: BaseException
    action: RetryAction


@dataclass(frozen=True)
class ChunkResult:
    """A message to the consumer: the results of a chunk, or of a part of its rows."""

    number: int
    start: int
    count: int
    """Position, first row and number of rows of the chunk, as in `QueuedChunk`."""

    computed: int
    """How many of its rows were computed or left out."""

    results: dict[int, Any]
    """The results by their first row. Rows that are left out have none."""

    @property
    def parts(self) -> list[Any]:
        """The results in the order of rows."""
        return [self.results[start] for start in sorted(self.results)]


@dataclass(frozen=True)
class End:
    """A message to the consumer: the call ends after a number of chunks, perhaps with an error."""

    chunks: int
    error: BaseException | None


@dataclass
class Call:
    """How a call in chunks runs, and the state that its threads share: two queues and the time."""

    window: int | None = None
    """The most chunks that are read and not delivered; `None`: any number."""

    deterministic: bool = True
    """Whether chunks are delivered in input order, or as they finish."""

    choose_action: Callable[..., RetryAction] = action_after
    """Returns the action after rows failed. It takes the arguments of `action_after`."""

    are_tasks: bool = False
    """Whether chunks are Python tasks. Any idle device takes the next task, and running tasks finish after an error."""

    max_retries: int = 0
    """How often a chunk that failed is tried again."""

    skips: bool = False
    """Whether rows that fail by themselves are left out."""

    leave_out: Callable[[Chunk, Shard, BaseException], object] = lambda row, shard, error: None
    """Callback of the worker for a row that is left out: the row as a chunk, its device and its error."""

    may_repeat: bool = False
    """Whether a chunk that failed may run again in parts, to find the row that failed."""

    observe: Callable[[Event], object] = lambda event: None
    """Callback for the events of the call, one at a time, in order."""

    located_error: Callable[[BaseException, Sequence[Shard]], BaseException] = lambda error, shards: error
    """Returns the error to raise for the error of a chunk and the devices that tried its rows."""

    cancel: Callable[[], object] = lambda: None
    """Cancels the running chunks."""

    deadline: float = math.inf
    """Time of `time.monotonic` when the call ends with a `queue.Empty`."""

    to_scheduler: SimpleQueue[Any] = field(default_factory=SimpleQueue)
    to_consumer: SimpleQueue[Any] = field(default_factory=SimpleQueue)

    stopped: bool = False
    """Whether the call failed or the consumer has left. After that, no chunk starts, and the only event is `CallFinished`."""

    def __post_init__(self) -> None:
        self._began = time.perf_counter()
        self._notifying = threading.RLock()

    def now(self) -> float:
        """Return the seconds since the call began."""
        return time.perf_counter() - self._began

    def fail(self, error: BaseException) -> None:
        """End the call with an error, also while the consumer is busy with results."""
        self.stopped = True
        self.to_consumer.put(End(0, error))

    def start_worker(self, runner: Runner, queue: SimpleQueue[QueuedChunk | None]) -> threading.Thread:
        """Start a daemon thread that computes the chunks in a queue."""
        name = f"devicemap worker {runner.device}"
        thread = threading.Thread(target=run_worker, args=(self, runner, queue), name=name, daemon=True)
        thread.start()
        return thread

    def notify(self, kind: Callable[..., Event], **values: Any) -> None:
        """Pass an event to the observer, one at a time. An error that the observer raises ends the call."""
        with self._notifying:
            if not self.stopped or kind is CallFinished:
                self.observe(kind(seconds=self.now(), **values))


def run_worker(call: Call, runner: Runner, queue: SimpleQueue[QueuedChunk | None]) -> None:
    """Compute the chunks in a queue until `None` comes: the target of the thread of a worker."""
    try:
        run = runner.make_function()
        while (queued := queue.get()) is not None and not call.stopped:
            _compute(call, run, runner.device, queued)
    except BaseException as error:  # from the observer, from cutting a chunk, or from describing an error
        call.fail(error)


def _compute(call: Call, run: Callable[[Chunk], Any], device: str, queued: QueuedChunk) -> None:
    """Compute rows, and send their results to the consumer. If they fail, the scheduler may send them to a device again."""
    rows, started, attempts = queued.rows, call.now(), len(queued.tried) + 1
    shard = rows.on(device)
    if queued.again:
        call.notify(ChunkRetried, shard=shard, attempt=attempts, out_of_memory=queued.out_of_memory)
    call.notify(ChunkStarted, shard=shard, waited_seconds=queued.waited_seconds)
    try:
        result = run(rows)
    except BaseException as error:
        if call.stopped:  # the call was cancelled; the rows are not at fault
            return
        call.notify(ChunkFailed, shard=shard, started_seconds=started, error=error)
        action = call.choose_action(error, rows.count, attempts, call.max_retries, queued.alone, call.skips)
        if action is RetryAction.RAISE and not call.are_tasks:
            if call.may_repeat and call.now() - started < AGAIN_SECONDS:
                shard = failing_row(lambda start, stop: run(rows.cut(start, stop)), shard, error)
            call.fail(call.located_error(error, (*queued.tried, shard)))
            return
        if action is RetryAction.LEAVE_OUT:
            call.leave_out(rows, shard, error)
            call.notify(RowFailed, shard=shard, error=error)
            call.to_consumer.put(ChunkResult(queued.number, queued.start, queued.count, rows.count, {}))
        call.to_scheduler.put(Failed(queued, shard, started, error, action))
    else:
        call.notify(ChunkFinished, shard=shard, started_seconds=started)
        call.to_consumer.put(ChunkResult(queued.number, queued.start, queued.count, rows.count, {rows.start: result}))
        call.to_scheduler.put(Finished(queued, device, started, call.now()))
