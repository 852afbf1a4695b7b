"""What the workers and the consumer of a call share: what is read, under way, to be tried again, and not delivered yet.

The contract: the source is read by one thread at a time, in order. Each row is computed once, more often only where a
chunk fails and is tried again; its result is delivered once. A device without memory for a chunk gets it again, whole or in
parts, when it has room; one that has no chunk is given any, whatever is known of its memory, so that nothing waits for ever.
At most `window` groups of chunks are read and not yet delivered. The first error that is not remedied stops reading, and is
raised when its turn comes: everything before it has been delivered.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import tensorflow as tf

from devicemap.base.hosts import host_of, is_remote
from devicemap.data.chunks import Chunk, Source
from devicemap.events import Event, Shard
from devicemap.run.recovery import FAILURES_IN_A_ROW, Remedy, remedy
from devicemap.run.reorder import Group, Groups
from devicemap.run.schedule import PATIENCE_SECONDS, Pace, are_quick, rows_to_take
from devicemap.run.tasks import Queue, Task

_SIGNAL_SECONDS = 0.1
"""How often the consumer looks up from waiting: a wait without an end can miss a signal that another thread gets."""


@dataclass(frozen=True)
class Rules:
    """How chunks are handed out and delivered."""

    window: int | None = None
    """The most groups that may be read and not yet delivered; `None`: any number."""

    deterministic: bool = True
    """Whether groups are delivered in input order, or as they finish."""

    max_retries: int = 0
    """How often a chunk that failed is tried again."""

    few_sizes: bool = False
    """Whether chunks have `batch_size` rows, or 1, 2, 4, 8, ... with `"auto"`, so that XLA compiles for few shapes."""

    observe: Callable[[Event], None] = lambda event: None
    """Gets what happens, one event at a time, in order."""

    describe: Callable[[BaseException, Sequence[Shard]], BaseException] = lambda error, shards: error
    """Makes the error that is raised, of the original and where it happened, attempt by attempt."""

    cancel: Callable[[], None] = lambda: None
    """Ends the chunks that are running."""


@dataclass
class _Standing:
    """What has been seen of a device in this call."""

    pace: Pace
    failures: int = 0
    """In a row."""

    last_finish: float = 0.0
    """When it last finished a chunk, in seconds since the call began."""

    busy_since: float = 0.0
    """When that was, or when it began with nothing else under way."""

    running: dict[int, bool] = field(default_factory=dict)
    """Chunks that it has been given and not finished, by their first row: whether it never had another one meanwhile."""

    def begin(self, chunk: Chunk, now: float) -> None:
        """It is given a chunk."""
        self.busy_since = self.busy_since if self.running else now
        self.running = dict.fromkeys([*self.running, chunk.start], not self.running)
        self.pace = self.pace.taking(chunk.count)

    def finish(self, chunk: Chunk, started: float, now: float) -> None:
        """It finished a chunk, which it worked on alone since the one before."""
        del self.running[chunk.start]
        self.pace = self.pace.finishing(chunk.count, now - max(started, self.last_finish), now - started)
        self.last_finish = self.busy_since = now
        self.failures = 0

    def give_up(self, chunk: Chunk) -> bool:
        """It could not compute a chunk; returns whether it had that one alone."""
        self.pace = self.pace.giving_up(chunk.count)
        return self.running.pop(chunk.start)


class Dispatch:
    """The state of a call. `_lock` guards everything, and is not held while a chunk is read or run (only while one that
    does not fit is cut); whoever sets `_reading` reads the source alone.

    Waking a thread takes as long as a small chunk. So nobody is woken but the consumer for a group that is due, those whom
    a chunk that ended may let take another, and one worker at a time to read; each calls the next one, if that pays.
    """

    def __init__(
        self,
        source: Source,
        devices: Iterable[str],
        rules: Rules,
        paces: Mapping[str, Pace],
        start_worker: Callable[[], object] = lambda: None,
    ):
        """`start_worker` lets one more worker begin, if there is one that has not."""
        self._source = source
        self._rules = rules
        self._began = time.perf_counter()
        self._start_worker = start_worker
        self._lock = threading.RLock()
        self._due = threading.Condition(self._lock)  # what the consumer waits for
        self._turn = threading.Condition(
            self._lock
        )  # what workers wait for while another one reads, or the window is full
        self._in_turn = 0
        self._changed = threading.Condition(self._lock)  # and those whose device is to take nothing now
        self._standings = {device: _Standing(paces.get(device, Pace()).between_calls()) for device in devices}
        self._alive = set(self._standings)
        self._groups = Groups(rules.window, rules.deterministic)
        self._waiting = Queue()
        self._running = 0
        self._reading = False
        self._at_end = False
        self._error: BaseException | None = None
        self.stopped = False  # for good: nothing is taken, and nothing but the end is told, any more

    def now(self) -> float:
        """Seconds since the call began."""
        return time.perf_counter() - self._began

    def take(self, device: str) -> tuple[Task, float] | None:
        """The next chunk for a device, and how long the device stood idle for want of input; `None` to end.

        Raises:
            Exception: of the user's input, or of cutting a chunk.
        """
        while True:
            with self._lock:
                while True:
                    if self.stopped:
                        return None
                    if device not in self._alive:
                        self._call_worker()
                        return None
                    task = self._waiting.first(device, self._alive)
                    if task is not None and self._standings[device].pace.may_take:
                        self._waiting.remove(task)
                        self._call_worker()
                        return self._handed_to(device, task), 0.0
                    if task is None and (rows := self._rows_for(device)):  # what has waited comes first
                        break
                    if self._at_end and not self._running and not self._waiting:
                        return None
                    self._wait()
                self._reading = True
                pace = self._standings[device].pace
            asked = self.now()
            chunk = self._source.take(rows, pace.limit)
            with self._lock:
                self._reading = False
                if chunk is None:
                    self._at_end = True
                    self._wake_all()
                    continue
                if self.stopped:  # meanwhile: what began now would be cancelled by nobody
                    return None
                self._groups.add(chunk)
                read_seconds = self.now() - asked
                paces = [self._standings[name].pace for name in self._alive]
                if read_seconds > PATIENCE_SECONDS or not are_quick(chunk.count, paces):
                    self._call_worker()
                waited = read_seconds if not pace.rows_in_flight and self._source.reads else 0.0
                return self._handed_to(device, Task(chunk)), waited

    def finish(self, task: Task, shard: Shard, started: float, result: Any) -> None:
        """A chunk was computed, which its device began at `started`."""
        with self._lock:
            self._running -= 1
            self._changed.notify_all()
            self._standings[shard.device].finish(task.chunk, started, self.now())
            self._groups.finish(task.chunk, result)
            if self._groups.due or not self._running:
                self._due.notify()

    def fail(self, task: Task, shard: Shard, error: BaseException) -> Sequence[str]:
        """Remedy a failure, or let it be raised; returns the devices that are lost by it."""
        with self._lock:
            self._running -= 1
            self._wake_all()
            standing = self._standings[shard.device]
            alone = standing.give_up(task.chunk)
            tried = (*task.tried, shard)
            retries = 0 if self.stopped else self._rules.max_retries
            action = remedy(error, len(shard), len(tried), retries, alone)
            if action is Remedy.RETRY:
                return self._try_again(replace(task, tried=tried, again=True), error)
            if action in (Remedy.FEWER, Remedy.SPLIT):
                standing.pace = standing.pace.running_out_of_memory(len(shard), alone)
                # First: it holds the earliest rows that the device had. Cut, if it is to be, when it is handed out.
                self._waiting.add_first([Task(task.chunk, only=shard.device, again=True)])
            else:
                self._groups.fail(task.chunk, self._rules.describe(error, tried))
                self._waiting.drop(task.chunk.group)
                self._at_end = True
            return ()

    def next_group(self) -> Group | None:
        """Wait for the group whose turn it is, and take it out; `None` after the last one.

        Raises:
            BaseException: the first error, in its turn.
        """
        patience = PATIENCE_SECONDS
        with self._lock:
            while True:
                was_full = self._groups.full
                if (group := self._groups.take_due()) is not None:
                    if was_full:
                        self._call_worker()
                    return group
                reading = self._reading and self._error is None  # after an error, nobody computes what is still read
                going_on = self._running or reading or (self._waiting and self._alive)
                if self._at_end and not going_on:
                    if self._error is not None:
                        raise self._error
                    if not self._groups:
                        return None
                if not self._due.wait(patience):  # a chunk that is overdue: others may get what was left to its device
                    self._changed.notify_all()
                    self._call_worker()
                    patience = min(2 * patience, _SIGNAL_SECONDS)

    def end_with(self, error: BaseException) -> None:
        """The call cannot go on: the error is raised when nothing more can be delivered."""
        with self._lock:
            self._error = self._error or error
            self._at_end, self._reading = True, False
            self._wake_all()

    def stop(self) -> bool:
        """Let the workers end; returns whether some still have work."""
        with self._lock:
            self.stopped = True
            self._wake_all()
            return self._running > 0

    def paces(self) -> dict[str, Pace]:
        """Return the throughput of the devices, for the next call."""
        return {device: standing.pace for device, standing in self._standings.items()}

    def _wait(self) -> None:
        """Until the worker may find something to take."""
        if self._waiting:
            self._start_worker()  # perhaps one of the device that may take it
        if self._at_end or not (self._reading or self._groups.full):
            self._call_worker()  # to read, if this one is not to
            self._changed.wait()
        else:
            self._in_turn += 1
            self._turn.wait()

    def _call_worker(self) -> None:
        """Let one more worker look for something to take."""
        if self.stopped or (self._at_end and not self._waiting):
            return
        if self._in_turn:
            self._in_turn -= 1  # here, not by the worker: a second call before it runs has to reach another one
            self._turn.notify()
        else:
            self._start_worker()

    def _wake_all(self) -> None:
        self._in_turn = 0
        for condition in (self._changed, self._turn, self._due):
            condition.notify_all()

    def _handed_to(self, device: str, task: Task) -> Task:
        standing = self._standings[device]
        limit = standing.pace.limit
        if limit is not None and task.chunk.count > limit:  # cut before that was known, or for another device
            task, *rest = task.cut(limit)
            self._waiting.add_first(rest)
            self._wake_all()
        self._running += 1
        standing.begin(task.chunk, self.now())
        return task

    def _rows_for(self, device: str) -> int:
        """How many rows the device takes from the source now."""
        if self._at_end or self._reading or self._groups.full:
            return 0
        left = self._source.rows_left()
        if left == 0:
            return 1  # the source says itself that it is at its end
        now = self.now()
        paces = {name: standing.pace.after(now - standing.busy_since) for name, standing in self._standings.items()}
        others = [paces[name] for name in self._alive if name != device]
        rows = rows_to_take(paces[device], others, left, self._source.batch_size)
        if self._rules.few_sizes and rows:
            rows = self._source.batch_size or 1 << (rows.bit_length() - 1)
        return rows if self._standings[device].pace.may_take else 0

    def _try_again(self, task: Task, error: BaseException) -> Sequence[str]:
        """Let another device retry the chunk. Set aside a device that keeps failing, or all devices of a lost host."""
        device = task.tried[-1].device
        standing = self._standings[device]
        standing.failures += 1
        lost = [device] if standing.failures >= FAILURES_IN_A_ROW else []
        if isinstance(error, tf.errors.UnavailableError) and is_remote(device):
            lost = [name for name in self._standings if host_of(name) == host_of(device)]
        lost = [name for name in lost if name in self._alive]
        self._alive.difference_update(lost)
        if self._alive:
            self._waiting.add_last(task)
        else:
            self._error = self._error or self._rules.describe(error, task.tried)
            self._at_end = True
        return lost
