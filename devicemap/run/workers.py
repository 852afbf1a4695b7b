"""A call in chunks: each device's threads take the next chunk when they are idle, and a generator gives the results.

What is handed out and delivered, and when an error is raised, is the contract of `run/dispatch.py`. Here: what happens is told
one event at a time, from `CallStarted` to `CallFinished`, and leaving the generator, in whatever way, stops the threads:
what runs is cancelled, nothing more is read.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from devicemap.data.chunks import Chunk, Source
from devicemap.events import (
    CallFinished,
    CallStarted,
    ChunkFailed,
    ChunkFinished,
    ChunkRetried,
    ChunkStarted,
    DeviceLost,
    Event,
)
from devicemap.run.dispatch import Dispatch, Rules
from devicemap.run.reorder import Group
from devicemap.run.schedule import Pace
from devicemap.run.tasks import Task

_FAREWELL_SECONDS = 0.8
"""How long to wait for cancelled workers; an op that is running cannot be stopped, and its thread ends after it."""


@dataclass(frozen=True)
class Runner:
    """One device's side of a call."""

    device: str
    """Full name."""

    begin: Callable[[], Callable[[Chunk], Any]]
    """Gives what computes a chunk: asked for by each of the device's threads, before its first one."""

    in_flight: int
    """How many chunks may be under way on the device, so that copying and computing overlap."""


def run_chunks(
    source: Source, runners: Sequence[Runner], rules: Rules, paces: dict[str, Pace] | None = None
) -> Iterator[Group]:
    """Compute all chunks of `source`; `paces` is what is known of the devices, and learns what is seen."""
    devices = tuple(runner.device for runner in runners)
    crew = _Crew(runners, rules.observe)
    dispatch = crew.dispatch = Dispatch(source, devices, rules, paces or {}, crew.start_another)
    error: BaseException | None = None
    try:
        crew.tell(CallStarted, rows=source.rows, devices=devices)
        crew.start_another()
        while (group := dispatch.next_group()) is not None:
            yield group
    except BaseException as raised:
        error = raised
        raise
    finally:
        try:
            if dispatch.stop():
                rules.cancel()
            crew.join()
        finally:  # also after a second Ctrl-C
            source.close()
            if paces is not None:
                paces.update(dispatch.paces())
            crew.tell_end(error)


class _Crew:
    """The workers of a call, a thread for each chunk that may be under way, and what they tell the observer."""

    dispatch: Dispatch

    def __init__(self, runners: Sequence[Runner], observe: Callable[[Event], None]):
        self._observe = observe
        self._telling = threading.RLock()
        self._threads = [
            threading.Thread(target=self._work, args=(runner,), name=f"devicemap worker {runner.device}", daemon=True)
            for number in range(max(runner.in_flight for runner in runners))
            for runner in runners
            if number < runner.in_flight
        ]
        self._unstarted = iter(self._threads)

    def start_another(self) -> None:
        """Let one more worker begin, if there is one that has not: one at a time, on all devices before twice on any."""
        if (thread := next(self._unstarted, None)) is not None:
            thread.start()

    def join(self) -> None:
        """Wait for the workers, who have been told to stop, but not for ever."""
        deadline = time.monotonic() + _FAREWELL_SECONDS
        for thread in self._threads:
            started = thread.ident is not None  # the interruption may have come before
            # An observer may close the generator, and the garbage collector may do so in any thread, a worker included.
            if started and thread is not threading.current_thread():
                thread.join(max(0.0, deadline - time.monotonic()))

    def tell(self, kind: Callable[..., Event], **what: Any) -> None:
        """Hand an event to the observer. What it raises ends the call; nothing follows the end of the call."""
        with self._telling:
            if self.dispatch.stopped:
                return
            try:
                self._observe(kind(seconds=self.dispatch.now(), **what))
            except BaseException as error:  # raised again by the consumer
                self.dispatch.end_with(error)

    def tell_end(self, error: BaseException | None) -> None:
        """Hand the last event to the observer."""
        with self._telling:
            self._observe(CallFinished(self.dispatch.now(), error))

    def _work(self, runner: Runner) -> None:
        """A worker's life: take the next chunk, run it, hand in the result."""
        try:
            run = runner.begin()
            while (taken := self.dispatch.take(runner.device)) is not None:
                self._run(runner.device, run, *taken)
        except BaseException as error:  # of the input, of cutting, of describing an error: nobody may wait for it
            self.dispatch.end_with(error)

    def _run(self, device: str, run: Callable[[Chunk], Any], task: Task, waited_seconds: float) -> None:
        shard, started = task.chunk.on(device), self.dispatch.now()
        if task.again:
            self.tell(ChunkRetried, shard=shard, attempt=len(task.tried) + 1)
        self.tell(ChunkStarted, shard=shard, waited_seconds=waited_seconds)
        try:
            result = run(task.chunk)
        except BaseException as error:  # remedied, or raised again by the consumer
            self.tell(ChunkFailed, shard=shard, started_seconds=started, error=error)
            for lost in self.dispatch.fail(task, shard, error):
                self.tell(DeviceLost, device=lost, error=error)
        else:
            self.tell(ChunkFinished, shard=shard, started_seconds=started)
            self.dispatch.finish(task, shard, started, result)
