"""The last call, kept until somebody asks for its report: building one takes longer than a small call."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Literal

from devicemap.errors import DeviceMapError, brief
from devicemap.run.one_graph import Run
from devicemap.tell.report.meter import GpuMeter
from devicemap.tell.report.report import Report
from devicemap.types import (
    CallFinished,
    CallStarted,
    ChunkFailed,
    ChunkFinished,
    ChunkStarted,
    DeviceLost,
    Event,
)

_KEPT_EVENTS = 100_000
"""An endless stream has no end of events; a report of more than these tells of its latest part."""


class Recorder:
    """Listens to one call, and makes its report when asked."""

    def __init__(self, way: Literal["one graph", "chunks"], traces: int, gpus: Mapping[str, int]):
        """`gpus`: for the full name of each GPU among the devices, the index of the physical one."""
        self._way = way
        self._traces = traces
        self.meter = GpuMeter(gpus)
        """To be entered for as long as the call lasts."""
        self._begin: Event | None = None
        self._events: deque[Event] = deque(maxlen=_KEPT_EVENTS)
        self._report: Report | None = None
        self.told_apart = True
        """Whether the events tell when each device was done."""
        self._lock = threading.RLock()  # several threads may ask for the report of the last call

    def __call__(self, event: Event) -> None:
        if isinstance(event, ChunkFailed | DeviceLost):  # its traceback holds the tensors of the chunk
            event = replace(event, error=DeviceMapError(f"{type(event.error).__name__}: {brief(event.error)}"))
        if isinstance(event, CallStarted):
            self._begin = event
        else:
            self._events.append(event)
        if isinstance(event, CallFinished) and event.error is not None:
            self.report()

    def report(self) -> Report:
        """The report of the call, which has finished."""
        with self._lock:
            if self._report is None:
                assert self._begin is not None
                events = [self._begin, *self._events]
                self._report = Report.of(
                    events,
                    way=self._way,
                    traces=self._traces,
                    told_apart=self.told_apart,
                    usage=self.meter.usage,
                )
                self._events.clear()
            return self._report


class GraphCall:
    """A call in one graph, timed: a context for as long as it lasts. What its graphs did is told when it ends."""

    def __init__(
        self,
        rows: int,
        devices: Sequence[str],
        traces: int,
        gpus: Mapping[str, int],
        listeners: Sequence[Callable[[Event], object]],
        finished: Callable[[GraphCall], None] | None,
    ):
        """`listeners` hear of the call as of any other; `finished`, if any, gets it when it has ended."""
        self.runs: list[Run] = []
        """What its graphs have done: set by whoever runs them."""
        self._rows, self._devices = rows, tuple(devices)
        self._listeners = listeners
        self._finished = finished
        self._recorder = Recorder("one graph", traces, gpus)
        self._lock = threading.RLock()
        self._seconds = 0.0
        self._error: BaseException | None = None
        self._told = False

    def __enter__(self) -> GraphCall:
        self._began_at = time.time()
        self._began = time.perf_counter()
        if self._listeners:
            self._tell([CallStarted(0.0, self._rows, self._devices)])
        if self._finished is not None:
            self._recorder.meter.__enter__()
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self._seconds = time.perf_counter() - self._began
        self._recorder.meter.__exit__()
        self._error = error
        finished, self._finished = self._finished, None  # whoever keeps this call is not kept by it
        if finished is not None:
            finished(self)
        try:
            if self._listeners:
                self._tell(self._events())
        finally:
            if error is not None:
                self.report()

    def report(self) -> Report:
        """The report of the call, which has finished."""
        with self._lock:
            if not self._told:
                for event in (CallStarted(0.0, self._rows, self._devices), *self._events()):
                    self._recorder(event)
                self._recorder.told_apart = len(self._devices) < 2 or all(run.tells_apart for run in self.runs)
                self._told, self._error, self.runs = True, None, []
            return self._recorder.report()

    def _tell(self, events: Sequence[Event]) -> None:
        for event in events:
            for listener in self._listeners:
                listener(event)

    def _events(self) -> list[Event]:
        """What happened since the call began."""
        events: list[Event] = []
        for run in self.runs:
            for shard, *times in run.spans():
                started, finished = (min(max(at - self._began_at, 0.0), self._seconds) for at in times)
                events += [ChunkStarted(started, shard, 0.0), ChunkFinished(finished, shard, started)]
        events.sort(key=lambda event: event.seconds)  # of two at one time, the start comes first: sorting is stable
        return [*events, CallFinished(self._seconds, self._error)]
