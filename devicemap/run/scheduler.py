"""The scheduler of a call in chunks, which reads the source and sends each chunk to an idle device.

    source ── take ──> scheduler ── a queue per device ──> workers ── ChunkResult, End ──────> consumer
                           ^──────── Finished, Failed ────────┘──────── DELIVERED ─────────┘

The scheduler runs in a thread of its own, which owns all state of the call, so that it needs no lock. It guarantees:

- The source is read in order. Each row is computed once, more often only if a chunk fails and is tried again.
- A chunk with a transient error goes to a device that has not tried it, if there is one.
- A device that ran out of memory computes one chunk at a time, with at most as many rows as fit.
- At most `window` chunks are read and not delivered.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from queue import Empty, SimpleQueue
from typing import Any

import tensorflow as tf

from devicemap._tensorflow.runtime import allocator_bytes
from devicemap.data.sources import Source
from devicemap.devices import is_out_of_memory, kind_of
from devicemap.errors import add_note
from devicemap.events import DeviceLost
from devicemap.hosts import host_of, is_remote
from devicemap.run.chunk_sizes import Throughput, next_chunk_size
from devicemap.run.retries import FAILURES_IN_A_ROW, RetryAction, is_row_error
from devicemap.run.workers import Call, End, Failed, Finished, QueuedChunk, Runner

DELIVERED, STOP = "delivered", "stop"
"""Messages to the scheduler: the consumer took a chunk; the consumer has left."""

_OVERDUE_SECONDS = 0.005
"""How often the scheduler reconsiders idle devices. The last rows wait for faster devices, whose chunks may be overdue."""


@dataclass
class DeviceState:
    """The state of a device in a call."""

    runner: Runner
    throughput: Throughput

    most_running: int
    """The most chunks in flight: 1 after the device ran out of memory."""

    queue: SimpleQueue[QueuedChunk | None] = field(default_factory=SimpleQueue)
    threads: list[threading.Thread] = field(default_factory=list)

    running: int = 0
    """Chunks in flight."""

    failures: int = 0
    """Failures since the last success. With `on_error="skip"`, an error of a row counts when another device computes it."""

    last_error: BaseException | None = None
    """The error of the last failure."""

    failed_at: float = 0.0
    """When it last failed. Failures of chunks that began earlier count as the same."""

    busy_since: float = 0.0
    """When it last finished a chunk or was sent one while idle, in seconds since the call began."""

    peak_before: float = 0.0
    """Peak memory use of the process before the call, divided by the memory of the device."""

    @property
    def has_room(self) -> bool:
        """Whether it may get another chunk."""
        return self.running < self.most_running


class Scheduler:
    """Schedules the chunks of a call."""

    def __init__(self, call: Call, source: Source, runners: Sequence[Runner], measured: Mapping[str, Throughput]):
        """`measured` holds measurements of earlier calls."""
        self._call, self._source = call, source
        self._devices = {
            runner.device: DeviceState(
                runner, measured.get(runner.device, Throughput()).between_calls(), most_running=runner.in_flight
            )
            for runner in runners
        }
        self._alive = list(self._devices)
        self._retries: deque[QueuedChunk] = deque()
        self._read = self._delivered = 0
        self._at_end = False
        self.error: BaseException | None = None  # of the first task that failed

    def run(self) -> None:
        """Schedule chunks until all are computed, the call fails, or the consumer leaves: the target of the thread."""
        try:
            while not self._call.stopped:
                if self._send_next():
                    while not self._call.to_scheduler.empty():
                        self._handle(self._call.to_scheduler.get())
                elif self._at_end and not self._unfinished:
                    if self.error is not None:
                        self._call.fail(self.error)
                    return
                else:
                    self._wait()
        except BaseException as error:  # from the observer, or from describing an error
            self._call.fail(error)
        finally:
            self.error = None  # its traceback will refer to the scheduler

    def close(self) -> None:
        """End the scheduler, and each worker after its current chunk."""
        self._call.to_scheduler.put(STOP)
        for state in self._devices.values():
            for _ in range(state.runner.in_flight):
                state.queue.put(None)

    @property
    def threads(self) -> list[threading.Thread]:
        """The threads of all workers."""
        return [thread for state in self._devices.values() for thread in state.threads]

    def throughput(self) -> dict[str, Throughput]:
        """Return the measurements of the devices."""
        return {name: state.throughput for name, state in self._devices.items()}

    @property
    def _unfinished(self) -> bool:
        return bool(self._retries) or any(state.running for state in self._devices.values())

    @property
    def _may_read(self) -> bool:
        window = self._call.window
        return not self._at_end and (window is None or self._read - self._delivered < window)

    def _send_next(self) -> bool:
        """Send one chunk, failed ones first, to a device with room. Return whether one was sent."""
        for queued in self._retries:
            tried = {shard.device for shard in queued.tried}
            untried = [name for name in self._alive if name not in tried] or self._alive
            if free := self._with_room(untried) or (self._with_room(self._alive) if self._call.are_tasks else []):
                self._retries.remove(queued)
                self._send(free[0], queued)
                return True
        return self._may_read and self._read_next()

    def _with_room(self, names: Sequence[str]) -> list[str]:
        """Return the devices that may get another chunk, those with the fewest chunks first."""
        free = [name for name in names if self._devices[name].has_room]
        return sorted(free, key=lambda name: self._devices[name].running)

    def _read_next(self) -> bool:
        """Read a chunk for the first device that takes one, and send it."""
        left, chunk_rows, now = self._source.rows_left(), self._source.chunk_rows, self._call.now()
        expected = {name: s.throughput.after(now - s.busy_since) for name, s in self._devices.items()}
        for name in self._with_room(self._alive):
            others = [expected[other] for other in self._alive if other != name]
            # An estimate of 0 rows may be wrong. Only the source knows its end.
            rows = next_chunk_size(expected[name], others, left or None, chunk_rows)
            if rows or self._call.are_tasks:  # the durations of tasks are unrelated
                return self._read_for(name, rows)
        return False

    def _read_for(self, name: str, rows: int) -> bool:
        began = self._call.now()
        try:
            chunk, error = self._source.take(rows), None
        except BaseException as raised:  # from the user's data; raised after the rows before it
            chunk, error = None, raised
            if self._call.skips and isinstance(raised, tf.errors.OpError):
                add_note(raised, "on_error='skip' leaves out rows of fn; dataset.ignore_errors() leaves out elements")
        if chunk is None:
            self._at_end = True
            self._call.to_consumer.put(End(self._read, error))
            return False
        idle = self._source.reads and not self._devices[name].running
        waited = self._call.now() - began if idle else 0.0
        self._send(name, QueuedChunk(self._read, chunk.start, chunk.count, chunk, waited_seconds=waited))
        self._read += 1
        return True

    def _send(self, name: str, queued: QueuedChunk) -> None:
        """Queue a chunk for a device, as many rows as fit into its memory, and start another worker if all are busy."""
        if self._call.stopped:  # while the chunk was read
            return
        state = self._devices[name]
        limit = state.throughput.limit
        if limit is not None and limit < queued.rows.count:
            queued, rest = queued.cut(limit)
            self._retries.appendleft(rest)
        state.busy_since = state.busy_since if state.running else self._call.now()
        state.running += 1
        state.throughput = state.throughput.taking(queued.rows.count)
        if not state.threads:
            state.peak_before = _peak_share(name)
        state.queue.put(replace(queued, alone=state.most_running == 1))
        if len(state.threads) < state.running:
            state.threads.append(self._call.start_worker(state.runner, state.queue))

    def _wait(self) -> None:
        """Wait for a message, or until devices are considered again."""
        idle = self._may_read and bool(self._with_room(self._alive))
        with contextlib.suppress(Empty):
            self._handle(self._call.to_scheduler.get(timeout=_OVERDUE_SECONDS if idle else None))

    def _handle(self, message: Any) -> None:
        if message == DELIVERED:
            self._delivered += 1
        elif isinstance(message, Finished):
            self._finish(message)
        elif isinstance(message, Failed):
            self._handle_failure(message)

    def _finish(self, message: Finished) -> None:
        state, started, ended = self._devices[message.device], message.started, message.ended
        peak = _peak_share(message.device)
        state.throughput = state.throughput.finishing(
            message.queued.rows.count,
            ended - max(started, state.busy_since),
            ended - started,
            peak if peak > state.peak_before else None,
        )
        state.busy_since = ended
        state.running -= 1
        state.failures = 0
        if self._call.skips:
            for name in {shard.device for shard in message.queued.tried} - {message.device}:
                self._blame(name, message.queued)

    def _handle_failure(self, message: Failed) -> None:
        """Queue the rows again, in front of all others, because `fn` may depend on the order of rows."""
        name, error, halve = message.shard.device, message.error, message.action is RetryAction.HALVE
        queued = replace(message.queued, again=True, out_of_memory=halve, waited_seconds=0.0)
        state = self._devices[name]
        state.running -= 1
        state.throughput = state.throughput.giving_up(queued.rows.count)
        match message.action:
            case RetryAction.HALVE:
                state.throughput = state.throughput.limited(max(1, queued.rows.count // 2))
                state.most_running = 1
                self._retries.appendleft(queued)
            case RetryAction.SPLIT:
                self._retries.extendleft(reversed(replace(queued, tried=()).cut(queued.rows.count // 2)))
            case RetryAction.LEAVE_OUT:
                if is_out_of_memory(error):  # this row is too large for all devices that tried it; others may not be
                    for each in self._devices.values():
                        each.throughput = each.throughput.limited(None)
            case RetryAction.RETRY:
                queued = replace(queued, tried=(*queued.tried, message.shard))
                self._retries.appendleft(queued)
                if not self._call.are_tasks:
                    self._suspect(name, queued, message.started, error)
            case RetryAction.RAISE:  # when running tasks have finished
                self.error, self._at_end = self.error or error, True
        if self.error is not None:
            self._retries.clear()

    def _suspect(self, name: str, queued: QueuedChunk, started: float, error: BaseException) -> None:
        """Set a device aside if its transient errors show that it does not work."""
        state = self._devices[name]
        state.last_error = error
        # If failing rows are left out, another device shows later whether the rows or this device are at fault.
        if started >= state.failed_at and not (self._call.skips and is_row_error(error)):
            state.failed_at = self._call.now()
            self._blame(name, queued)
        if isinstance(error, tf.errors.UnavailableError) and is_remote(name):
            self._set_aside([other for other in self._alive if host_of(other) == host_of(name)], error, queued)

    def _blame(self, name: str, queued: QueuedChunk) -> None:
        """Count a failure of a device with this chunk, and set the device aside after several in a row."""
        state = self._devices[name]
        state.failures += 1
        if state.failures >= FAILURES_IN_A_ROW and state.last_error is not None:
            self._set_aside([name], state.last_error, queued)

    def _set_aside(self, lost: Sequence[str], error: BaseException, queued: QueuedChunk) -> None:
        """Send no more chunks to these devices, because of this error with this chunk."""
        for each in [each for each in lost if each in self._alive]:
            self._alive.remove(each)
            self._call.notify(DeviceLost, device=each, error=error)
        if not self._alive:
            raise self._call.located_error(error, queued.tried)


def peak_bytes(device: str) -> int | None:
    """Return the peak memory of a local device since the last reset; `None` if TensorFlow does not count it."""
    try:
        counted = kind_of(device) != "CPU" and not is_remote(device)
        return int(tf.config.experimental.get_memory_info(device)["peak"]) if counted else None
    except (ValueError, tf.errors.OpError):  # ValueError is the documented error of allocators without counters
        return None


def _peak_share(device: str) -> float:
    """Return the peak memory use of a device divided by its memory; 0 if it does not report both, like CPUs."""
    peak = peak_bytes(device)
    memory = _memory_bytes().get(device) if peak else None
    return peak / memory if peak and memory else 0.0


_memory_bytes = cache(allocator_bytes)
