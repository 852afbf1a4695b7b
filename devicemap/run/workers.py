"""The workers of a call in chunks: daemon threads that compute the chunks in the queue of their device."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from queue import SimpleQueue
from typing import Any

from devicemap.data.sources import Chunk
from devicemap.devices import is_out_of_memory
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
from devicemap.run.retries import AGAIN_SECONDS, RetryAction, failing_row, retry_action, skip_action


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
    """A chunk on its way to a device."""

    number: int
    """Position of the chunk in the order of rows."""

    start: int
    """Global index of its first row."""

    chunk: Chunk
    """Its rows that are still to be computed."""

    parts: tuple[Any, ...] = ()
    """The results of earlier rows of the chunk."""

    tried: tuple[Shard, ...] = ()
    """The rows that failed, on each device that tried them."""

    out_of_memory: bool = False
    """Whether its device ran out of memory, and now computes the chunk with nothing else running."""

    limit: int | None = None
    """The most rows that the device computes at once."""

    waited_seconds: float = 0.0
    """How long the device was idle because the chunk was being read."""


@dataclass(frozen=True)
class Finished:
    """A message to the scheduler: a device computed a chunk between two times."""

    queued: QueuedChunk
    device: str
    started: float
    ended: float

    limit: int | None
    """The most rows that fit into its memory, as far as this chunk shows."""

    rows_failed: bool
    """Whether rows of the chunk were left out."""


@dataclass(frozen=True)
class Failed:
    """A message to the scheduler: rows of a chunk failed with an error of a device. `left` has all rows that are not
    computed."""

    queued: QueuedChunk
    left: QueuedChunk
    shard: Shard
    error: BaseException
    action: RetryAction


@dataclass(frozen=True)
class ChunkResult:
    """A message to the consumer: the results of a chunk, in one or several parts."""

    number: int
    start: int
    parts: list[Any]


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


def _run_rows(run: Callable[[Chunk], Any], chunk: Chunk, start: int, stop: int) -> Any:
    return run(chunk.cut(start, stop))


def _compute(call: Call, run: Callable[[Chunk], Any], device: str, queued: QueuedChunk) -> None:
    """Compute a chunk, in smaller ones if it has more rows than fit into the memory of the device, or if rows of it fail."""
    chunk, limit, began, parts = queued.chunk, queued.limit, call.now(), [*queued.parts]
    again, attempt, waited = bool(queued.tried) or queued.out_of_memory, len(queued.tried) + 1, queued.waited_seconds
    pending = [(chunk.start, chunk.start + chunk.count)]  # the rows left, the first ones last
    rows_failed = False
    tries = 0  # attempts of a single row, after it failed among others
    while pending:
        start, stop = pending.pop()
        if limit and limit < stop - start:
            pending.append((start + limit, stop))
            stop = start + limit
        rows = chunk.cut(start, stop)
        shard, started = rows.on(device), call.now()
        if again:
            call.notify(ChunkRetried, shard=shard, attempt=attempt, out_of_memory=queued.out_of_memory)
        call.notify(ChunkStarted, shard=shard, waited_seconds=waited)
        waited = 0.0
        try:
            parts.append(run(rows))
        except BaseException as error:
            if call.stopped:  # the call was cancelled; the rows are not at fault
                return
            call.notify(ChunkFailed, shard=shard, started_seconds=started, error=error)
            again, retries = True, call.max_retries
            action = retry_action(error, rows.count, attempt, retries, queued.out_of_memory)
            if action is RetryAction.RAISE and call.skips:
                tries += rows.count == 1
                action = skip_action(error, rows.count, chunk.count, tries, retries)
            match action:
                case RetryAction.RAISE:
                    soon = call.now() - started < AGAIN_SECONDS
                    if call.may_repeat and soon:
                        shard = failing_row(partial(_run_rows, run, rows), shard, error)
                    call.fail(call.located_error(error, (*queued.tried, shard)))
                    return
                case RetryAction.HALVE if queued.out_of_memory:
                    limit = rows.count // 2
                    pending.append((start, stop))
                case RetryAction.RETRY | RetryAction.HALVE:
                    left = replace(queued, chunk=chunk.cut(start, chunk.start + chunk.count), parts=tuple(parts))
                    call.to_scheduler.put(Failed(queued, left, shard, error, action))
                    return
                case RetryAction.SPLIT:
                    middle = start + rows.count // 2
                    pending += [(middle, stop), (start, middle)]
                case RetryAction.REPEAT:
                    pending.append((start, stop))
                case RetryAction.LEAVE_OUT:
                    call.leave_out(rows, shard, error)
                    call.notify(RowFailed, shard=shard, error=error)
                    rows_failed, tries = True, 0
                    if queued.out_of_memory and is_out_of_memory(error):  # this row is too large; others may not be
                        limit = None
        else:
            call.notify(ChunkFinished, shard=shard, started_seconds=started)
            tries = 0
    call.to_consumer.put(ChunkResult(queued.number, queued.start, parts))
    call.to_scheduler.put(Finished(queued, device, began, call.now(), limit, rows_failed))
