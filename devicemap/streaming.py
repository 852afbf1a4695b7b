"""Dispatched chunks: each device takes the next chunk when it is idle; results come out in input order, or as they finish.

The contract: the source is read by one thread at a time, in order. Each row is computed once, more often only where a
chunk fails and is tried again; its result is delivered once. At most `window` groups of chunks are read and not yet
delivered. The first error that is not remedied stops reading, and is raised when its turn comes: everything before it has
been delivered. Leaving the generator, in whatever way, stops the workers: what runs is cancelled, nothing more is read.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from devicemap.chunking import Chunk, Source
from devicemap.recovery import FAILURES_IN_A_ROW, Remedy, parts, remedy
from devicemap.scheduling import Pace, rows_to_take
from devicemap.types import (
    CallFinished,
    CallStarted,
    ChunkFailed,
    ChunkFinished,
    ChunkRetried,
    ChunkStarted,
    DeviceLost,
    Event,
    Shard,
)

_FAREWELL_SECONDS = 0.8
"""How long to wait for cancelled workers; an op that is running cannot be stopped, and its thread ends after it."""

_SIGNAL_SECONDS = 0.1
"""How often the consumer looks up from waiting: a wait without an end can miss a signal that another thread gets."""


@dataclass(frozen=True)
class Lane:
    """One device's side of a call."""

    device: str
    """Full name."""

    run: Callable[[Chunk], Any]
    """Computes a chunk; may be called by several threads at once."""

    in_flight: int
    """How many chunks may be under way on the device, so that copying and computing overlap."""


@dataclass(frozen=True)
class Rules:
    """How chunks are handed out and delivered."""

    window: int | None = None
    """The most groups that may be read and not yet delivered; `None`: any number."""

    deterministic: bool = True
    """Whether groups are delivered in input order, or as they finish."""

    max_retries: int = 0
    """How often a chunk that failed is tried again."""

    observe: Callable[[Event], None] = lambda event: None
    """Gets what happens, one event at a time, in order."""

    describe: Callable[[BaseException, Sequence[Shard]], BaseException] = lambda error, shards: error
    """Makes the error that is raised, of the original and where it happened, attempt by attempt."""

    cancel: Callable[[], None] = lambda: None
    """Ends the chunks that are running."""


@dataclass(frozen=True)
class Group:
    """Results that are delivered as one: those of a batch of the user's, or of `batch_size` rows."""

    start: int
    """Global index of the first row."""

    count: int
    """How many rows."""

    results: list[Any]
    """What the chunks of the group gave, in row order."""


def run_chunks(
    source: Source, lanes: Sequence[Lane], rules: Rules, paces: dict[str, Pace] | None = None
) -> Iterator[Group]:
    """Compute all chunks of `source`; `paces` is what is known of the devices, and learns what is seen."""
    dispatch = _Dispatch(source, lanes, rules, paces or {})
    threads = [
        threading.Thread(target=dispatch.work, args=(lane,), name=f"devicemap worker {lane.device}", daemon=True)
        for lane in lanes
        for _ in range(lane.in_flight)
    ]
    error: BaseException | None = None
    try:
        dispatch.tell(CallStarted, rows=source.rows, devices=tuple(lane.device for lane in lanes))
        for thread in threads:
            thread.start()
        yield from dispatch.deliver()
    except BaseException as raised:
        error = raised
        raise
    finally:
        if dispatch.stop():
            rules.cancel()
        deadline = time.monotonic() + _FAREWELL_SECONDS
        for thread in threads:
            started = thread.ident is not None  # the interruption may have come before
            # An observer may close the generator, and the garbage collector may do so in any thread, a worker included.
            if started and thread is not threading.current_thread():
                thread.join(max(0.0, deadline - time.monotonic()))
        source.close()
        if paces is not None:
            paces.update({device: pace.between_calls() for device, pace in dispatch.paces.items()})
        dispatch.tell_end(error)


@dataclass
class _Task:
    """A chunk and its history."""

    chunk: Chunk
    tried: tuple[Shard, ...] = ()
    """Where it failed."""

    only: str | None = None
    """The device whose memory it was cut for."""

    again: bool = False
    """Whether some of its rows failed before."""


def _cut(task: _Task, limit: int) -> list[_Task]:
    """The task in parts of at most `limit` rows, each with the history of the whole."""
    return [
        replace(task, chunk=piece, tried=tuple(piece.on(shard.device) for shard in task.tried))
        for piece in task.chunk.split(parts(task.chunk.count, limit))
    ]


@dataclass
class _Open:
    """A group whose results are not all delivered."""

    start: int
    left: int = 0
    """Rows that were taken and are not finished."""

    closed: bool = False
    """Whether its last chunk was taken."""

    finished: dict[int, tuple[int, Any]] = field(default_factory=dict)
    """By first row: rows and results."""

    error: BaseException | None = None

    @property
    def ready(self) -> bool:
        return self.closed and not self.left

    def as_group(self) -> Group:
        in_order = [self.finished[start] for start in sorted(self.finished)]
        return Group(self.start, sum(rows for rows, _ in in_order), [result for _, result in in_order])


class _Dispatch:
    """What the workers and the consumer share. `_changed` guards everything, and is not held while a chunk is read or
    run (only while one that does not fit is cut); whoever sets `_reading` reads the source alone."""

    def __init__(self, source: Source, lanes: Sequence[Lane], rules: Rules, paces: Mapping[str, Pace]):
        self._source = source
        self._rules = rules
        self._began = time.perf_counter()
        self._changed = threading.Condition()
        self._telling = threading.RLock()
        self.paces = {lane.device: paces.get(lane.device, Pace()) for lane in lanes}
        self._failures = dict.fromkeys(self.paces, 0)
        self._last_finish = dict.fromkeys(self.paces, 0.0)
        self._alive = set(self.paces)
        self._groups: dict[int, _Open] = {}  # in the order in which they were read
        self._retries: list[_Task] = []
        self._running = 0
        self._reading = False
        self._at_end = False
        self._error: BaseException | None = None
        self._stopped = False

    def tell(self, kind: Callable[..., Event], **what: Any) -> None:
        """Hand an event to the observer. What it raises ends the call; nothing follows the end of the call."""
        with self._telling:
            if self._stopped:
                return
            try:
                self._rules.observe(kind(seconds=self._now(), **what))
            except BaseException as error:  # raised again by the consumer
                self._end_with(error)

    def tell_end(self, error: BaseException | None) -> None:
        """Hand the last event to the observer."""
        with self._telling:
            self._rules.observe(CallFinished(self._now(), error))

    def work(self, lane: Lane) -> None:
        """A worker's life: take the next chunk, run it, hand in the result."""
        try:
            while (taken := self._take(lane.device)) is not None:
                self._run(lane, *taken)
        except BaseException as error:  # of cutting a chunk, or of describing an error: nobody may wait for it
            self._end_with(error)

    def deliver(self) -> Iterator[Group]:
        """The consumer's side: groups until all are out, or the first error."""
        while (group := self._next_ready()) is not None:
            yield group

    def stop(self) -> bool:
        """Let the workers end; returns whether some still have work."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
            return self._running > 0

    def _run(self, lane: Lane, task: _Task, waited_seconds: float) -> None:
        shard, started = task.chunk.on(lane.device), self._now()
        if task.again:
            self.tell(ChunkRetried, shard=shard, attempt=len(task.tried) + 1)
        self.tell(ChunkStarted, shard=shard, waited_seconds=waited_seconds)
        try:
            result = lane.run(task.chunk)
        except BaseException as error:  # remedied, or raised again by the consumer
            self.tell(ChunkFailed, shard=shard, started_seconds=started, error=error)
            if self._fail(task, shard, error):
                self.tell(DeviceLost, device=lane.device, error=error)
        else:
            self.tell(ChunkFinished, shard=shard, started_seconds=started)
            self._finish(task, shard, started, result)

    def _take(self, device: str) -> tuple[_Task, float] | None:
        """The next chunk for a device, and how long the device stood idle for want of input; `None` to end."""
        while True:
            with self._changed:
                while True:
                    if self._stopped or device not in self._alive:
                        return None
                    if (task := self._retry_for(device)) is not None:
                        return self._handed_to(device, task), 0.0
                    if rows := self._rows_for(device):
                        break
                    if self._at_end and not self._running and not self._retries:
                        return None
                    self._changed.wait()
                self._reading = True
                pace = self.paces[device]
            asked = self._now()
            try:
                chunk = self._source.take(rows, pace.limit)
            except BaseException as error:  # the user's input failed
                self._end_with(error)
                return None
            with self._changed:
                self._reading = False
                self._changed.notify_all()
                if chunk is None:
                    self._at_end = True
                    continue
                if self._stopped:  # meanwhile: what began now would be cancelled by nobody
                    return None
                group = self._groups.setdefault(chunk.group, _Open(chunk.start))
                group.left += chunk.count
                group.closed |= chunk.last
                idle = not pace.rows_in_flight and self._source.reads
                waited = self._now() - asked if idle else 0.0
                return self._handed_to(device, _Task(chunk)), waited

    def _handed_to(self, device: str, task: _Task) -> _Task:
        limit = self.paces[device].limit
        if limit is not None and task.chunk.count > limit:  # cut before that was known, or for another device
            task, *rest = _cut(task, limit)
            self._retries[:0] = rest
            self._changed.notify_all()
        self._running += 1
        self.paces[device] = self.paces[device].taking(task.chunk.count)
        return task

    def _rows_for(self, device: str) -> int:
        """How many rows the device takes from the source now."""
        if self._at_end or self._reading:
            return 0
        window = self._rules.window
        if window is not None and len(self._groups) >= window and all(group.closed for group in self._groups.values()):
            return 0
        left = self._source.rows_left()
        if left == 0:
            return 1  # the source says itself that it is at its end
        others = [self.paces[name] for name in self._alive if name != device]
        return rows_to_take(self.paces[device], others, left, self._source.batch_size)

    def _retry_for(self, device: str) -> _Task | None:
        """The first failed chunk that this device may try: one that it has not tried, if another device has not either."""
        for i, task in enumerate(self._retries):
            tried = {shard.device for shard in task.tried}
            if device == task.only or (task.only not in self._alive and (device not in tried or tried >= self._alive)):
                return self._retries.pop(i)
        return None

    def _finish(self, task: _Task, shard: Shard, started: float, result: Any) -> None:
        with self._changed:
            now = self._now()
            seconds = now - max(started, self._last_finish[shard.device])
            self._last_finish[shard.device] = now
            self.paces[shard.device] = self.paces[shard.device].finishing(len(shard), seconds)
            self._failures[shard.device] = 0
            self._running -= 1
            group = self._groups[task.chunk.group]
            group.finished[shard.start] = len(shard), result
            group.left -= len(shard)
            self._changed.notify_all()

    def _fail(self, task: _Task, shard: Shard, error: BaseException) -> bool:
        """Remedy a failure, or let it be raised; returns whether the device is lost."""
        with self._changed:
            self._running -= 1
            self._changed.notify_all()
            pace = self.paces[shard.device] = self.paces[shard.device].giving_up(len(shard))
            tried = (*task.tried, shard)
            action = Remedy.GIVE_UP if self._stopped else remedy(error, len(shard), len(tried), self._rules.max_retries)
            lost = False
            if action is Remedy.SPLIT:
                pace = self.paces[shard.device] = pace.running_out_of_memory(len(shard))
                assert pace.limit is not None
                whole = _Task(task.chunk, only=shard.device, again=True)
                self._retries[:0] = _cut(whole, pace.limit)  # first: they are the earliest rows that the device had
            elif action is Remedy.RETRY:
                self._failures[shard.device] += 1
                lost = shard.device in self._alive and self._failures[shard.device] >= FAILURES_IN_A_ROW
                if lost:
                    self._alive.discard(shard.device)
                if self._alive:
                    self._retries.append(replace(task, tried=tried, again=True))
                else:
                    self._error = self._error or self._rules.describe(error, tried)
                    self._at_end = True
            else:
                self._groups[task.chunk.group].error = self._rules.describe(error, tried)
                self._retries = [other for other in self._retries if other.chunk.group != task.chunk.group]
                self._at_end = True
            return lost

    def _next_ready(self) -> Group | None:
        """Wait for the group whose turn it is, and take it out."""
        with self._changed:
            while True:
                turn = list(self._groups)[:1] if self._rules.deterministic else list(self._groups)
                for number in turn:
                    if self._groups[number].ready:
                        self._changed.notify_all()
                        return self._groups.pop(number).as_group()
                for number in turn:
                    if (error := self._groups[number].error) is not None:
                        raise error
                reading = self._reading and self._error is None  # after an error, nobody computes what is still read
                going_on = self._running or reading or (self._retries and self._alive)
                if self._at_end and not going_on:
                    if self._error is not None:
                        raise self._error
                    if not self._groups:
                        return None
                self._changed.wait(_SIGNAL_SECONDS)

    def _end_with(self, error: BaseException) -> None:
        """The call cannot go on: the error is raised when nothing more can be delivered."""
        with self._changed:
            self._error = self._error or error
            self._at_end, self._reading = True, False
            self._changed.notify_all()

    def _now(self) -> float:
        return time.perf_counter() - self._began
