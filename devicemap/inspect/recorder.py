"""Who hears of the calls of a map: its report, a bar, the user's callable.

The last call is kept until somebody asks for its report: building one takes longer than a small call.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Literal

from devicemap.compile.compiled import CompiledMap
from devicemap.errors import DeviceMapError, brief
from devicemap.events import (
    CallFinished,
    CallStarted,
    ChunkFailed,
    ChunkFinished,
    ChunkStarted,
    DeviceLost,
    Event,
)
from devicemap.inspect.gpu_usage import GpuMeter
from devicemap.inspect.plan_advice import reason_for_loop
from devicemap.inspect.progress import ProgressBar
from devicemap.inspect.report import Report
from devicemap.options import Options
from devicemap.run.graph_engine import GraphRun

_Listener = Callable[[Event], object]

_KEPT_EVENTS = 100_000
"""An endless stream has no end of events; a report of more than these tells of its latest part."""


def _without_traceback(event: Event) -> Event:
    """An event to be kept: the traceback of an error on a device holds the tensors of the chunk."""
    if isinstance(event, ChunkFailed | DeviceLost):
        return replace(event, error=DeviceMapError(f"{type(event.error).__name__}: {brief(event.error)}"))
    return event


class Recorder:
    """Listens to one call, and makes its report when asked."""

    def __init__(
        self,
        engine: Literal["one graph", "chunks"],
        traces: int,
        gpus: Mapping[str, int],
        row_by_row: str | None = None,
    ):
        """`gpus`: for the full name of each GPU among the devices, the index of the physical one."""
        self._engine, self._traces, self._row_by_row = engine, traces, row_by_row
        self.meter = GpuMeter(gpus)
        """To be entered for as long as the call lasts."""
        self._begin: Event | None = None
        self._events: deque[Event] = deque(maxlen=_KEPT_EVENTS)
        self._report: Report | None = None
        self._lock = threading.RLock()  # several threads may ask for the report of the last call

    def __call__(self, event: Event) -> None:
        if isinstance(event, CallStarted):
            self._begin = event
        else:
            self._events.append(_without_traceback(event))
        if isinstance(event, CallFinished) and event.error is not None:
            self.report()

    def report(self) -> Report:
        """The report of the call, which has finished."""
        with self._lock:
            if self._report is None:
                assert self._begin is not None
                events, usage = [self._begin, *self._events], self.meter.usage
                self._report = Report.of(
                    events, engine=self._engine, traces=self._traces, usage=usage, row_by_row=self._row_by_row
                )
                self._events.clear()
            return self._report


class GraphCall(Recorder):
    """A call in one graph, timed: a context for as long as it lasts. What its graphs did is told when it ends."""

    def __init__(
        self,
        rows: int,
        devices: Sequence[str],
        traces: int,
        gpus: Mapping[str, int],
        listeners: Sequence[_Listener],
        finished: Callable[[GraphCall], None],
        row_by_row: str | None = None,
    ):
        """The call notifies `listeners` of its events, and passes itself to `finished` when it ends."""
        super().__init__("one graph", traces, gpus, row_by_row)
        self.runs: list[GraphRun] = []
        """What its graphs have done: set by whoever runs them."""
        self._start = CallStarted(0.0, rows, tuple(devices))
        self._listeners = listeners
        self._finished: Callable[[GraphCall], None] | None = finished
        self._seconds = 0.0
        self._error: BaseException | None = None

    def __enter__(self) -> GraphCall:
        self._began_at = time.time()
        self._began = time.perf_counter()
        if self._listeners:
            _tell(self._listeners, self._start)
        self.meter.__enter__()
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self._seconds = time.perf_counter() - self._began
        self.meter.__exit__()
        self._error = error
        finished, self._finished = self._finished, None  # whoever keeps this call is not kept by it
        if finished is not None:
            finished(self)
        try:
            if self._listeners:
                _tell(self._listeners, *self._happened())
        finally:
            if error is not None:
                self.report()

    def report(self) -> Report:
        """The report of the call, which has finished."""
        with self._lock:
            if self._begin is None:
                self._begin = self._start
                self._events.extend(self._happened())
                self._error, self.runs = None, []
            return super().report()

    def _happened(self) -> list[Event]:
        """What there is to tell besides the start."""
        events: list[Event] = []
        for run in self.runs:
            for shard, *times in run.spans():
                started, finished = (min(max(at - self._began_at, 0.0), self._seconds) for at in times)
                events += [ChunkStarted(started, shard, 0.0), ChunkFinished(finished, shard, started)]
        events.sort(key=lambda event: event.seconds)  # of two at one time, the start comes first: sorting is stable
        return [*events, CallFinished(self._seconds, self._error)]


class Observers:
    """Those of the calls of a map, as its options say; `run.mapper.CallObservers` is the protocol."""

    def __init__(self, name: str, options: Options, gpus: Mapping[str, int]):
        """`gpus`: for the full name of each GPU among the devices, the index of the physical one."""
        self._name, self._options, self._gpus = name, options, gpus
        self.last: Recorder | None = None
        """The last call that has finished."""

    def of_graph(self, rows: int, devices: Sequence[str], compiled: CompiledMap) -> GraphCall:
        """Return a context that times a call in one graph."""
        reason = self._reason_for_loop(compiled)
        return GraphCall(rows, devices, compiled.take_traces(), self._gpus, self._listeners(), self._keep, reason)

    @contextmanager
    def of_chunks(self, compiled: CompiledMap) -> Iterator[_Listener]:
        """Yield a callable that takes the events of a call in chunks."""
        recorder = Recorder("chunks", compiled.take_traces(), self._gpus, self._reason_for_loop(compiled))
        try:
            with recorder.meter:
                yield partial(_tell, (recorder, *self._listeners()))
        finally:
            self._keep(recorder)

    def _reason_for_loop(self, compiled: CompiledMap) -> str | None:
        traced = compiled.traced
        return reason_for_loop(self._options.batched, traced.vectorized, traced.audit.ordered, traced.reason)

    def _listeners(self) -> tuple[_Listener, ...]:
        """Who hears of a call besides its report."""
        progress = self._options.progress
        return (ProgressBar(self._name),) if progress is True else (progress,) if progress else ()

    def _keep(self, call: Recorder) -> None:
        self.last = call


def _tell(listeners: Sequence[_Listener], *events: Event) -> None:
    for event in events:
        for listener in listeners:
            listener(event)
