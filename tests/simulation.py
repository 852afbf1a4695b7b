"""Calls in chunks on a simulated clock: the real scheduler and workers, in one thread, without devices and without waiting."""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any

from devicemap.data.sources import Chunk, Source
from devicemap.run.chunk_sizes import Throughput
from devicemap.run.scheduler import Scheduler
from devicemap.run.workers import Call, QueuedChunk, Runner, run_worker


@dataclass
class SimulatedDevice:
    """How long chunks take, and which of them fail."""

    seconds: Callable[[Chunk], float]
    in_flight: int = 2
    fault: Callable[[Chunk], BaseException | None] = lambda chunk: None
    in_turn: bool = True
    """Whether the device computes its chunks one after another."""
    busy_until: float = 0.0
    workers: int = 0
    running: list[QueuedChunk] = field(default_factory=list)


class SimulatedCall(Call):
    """A call on simulated devices, whose chunks finish when the scheduler looks for messages."""

    expected: tuple[type[BaseException], ...] = ()
    """Errors that may end the call. Others end the test."""

    def __init__(
        self,
        devices: dict[str, SimulatedDevice],
        source: Source,
        measured: Mapping[str, Throughput] | None = None,
        **options: Any,
    ):
        super().__init__(**options)
        self.to_scheduler: Any = self
        self.time = 0.0
        self.devices = devices
        self.sizes: list[int] = []
        """Rows of the chunks, in the order in which they began."""
        self._messages = deque[Any]()
        self._agenda: list[tuple[float, int, Callable[[], object]]] = []
        self._numbers = itertools.count()  # of functions to call at the same time
        self._queues: dict[str, SimpleQueue[QueuedChunk | None]] = {}
        self._runners = {
            name: Runner(name, lambda name=name: partial(self._compute, name), device.in_flight)
            for name, device in devices.items()
        }
        self.scheduler = Scheduler(self, source, [*self._runners.values()], measured or {})

    def now(self) -> float:
        return self.time

    def start_worker(self, runner: Runner, queue: SimpleQueue[QueuedChunk | None]) -> Thread:
        self._queues[runner.device] = queue
        self.devices[runner.device].workers += 1
        assert self.devices[runner.device].workers <= runner.in_flight
        return Thread()

    def at(self, time: float, action: Callable[[], object]) -> None:
        """Call a function at a time."""
        heapq.heappush(self._agenda, (time, next(self._numbers), action))

    def happen(self) -> bool:
        """Let the next thing happen, and return whether there is one."""
        if self._agenda:
            time, _, action = heapq.heappop(self._agenda)
            self.time = max(self.time, time)
            action()
            return True
        return False

    def fail(self, error: BaseException) -> None:
        if not isinstance(error, self.expected):
            raise error
        super().fail(error)

    def put(self, message: Any) -> None:
        self._messages.append(message)

    def empty(self) -> bool:
        self._begin_chunks()
        while self._agenda and self._agenda[0][0] <= self.time:
            self.happen()
        return not self._messages

    def get(self, timeout: float | None = None) -> Any:
        self._begin_chunks()
        while not self._messages:
            if timeout is not None and not (self._agenda and self._agenda[0][0] <= self.time + timeout):
                self.time += timeout
                raise Empty
            assert self.happen(), "the scheduler waits, and nothing will happen"
        return self._messages.popleft()

    def _begin_chunks(self) -> None:
        for name, device in self.devices.items():
            while len(device.running) < device.workers and not self._queues[name].empty():
                queued: Any = self._queues[name].get()
                end = max(self.time, device.busy_until * device.in_turn) + device.seconds(queued.rows)
                device.busy_until = end
                device.running.append(queued)
                self.sizes.append(queued.rows.count)
                self.at(end, partial(self._finish, name, self.time, queued))

    def _finish(self, name: str, began: float, queued: QueuedChunk) -> None:
        """Run a worker from the beginning to the end of a chunk."""
        queue = SimpleQueue[QueuedChunk | None]()
        queue.put(queued)
        queue.put(None)
        self._end, self.time = self.time, began
        run_worker(self, self._runners[name], queue)
        self.time = self._end
        self.devices[name].running.remove(queued)

    def _compute(self, name: str, chunk: Chunk) -> Any:
        self.time = self._end
        if (error := self.devices[name].fault(chunk)) is not None:
            raise error
        return chunk.leaves[0]
