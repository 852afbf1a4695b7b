"""Who hears of the calls of a map: its report, a bar, the user's callable.

The last call is kept until somebody asks for its report: building one takes longer than a small call.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from itertools import accumulate
from typing import Any, Literal

from devicemap.base.options import Options
from devicemap.errors import DeviceMapError, brief
from devicemap.events import (
    CallFinished,
    CallStarted,
    ChunkFailed,
    ChunkFinished,
    ChunkStarted,
    DeviceLost,
    Event,
    Shard,
)
from devicemap.tell.report.meter import GpuMeter
from devicemap.tell.report.progress import ProgressBar
from devicemap.tell.report.report import Report

_Listener = Callable[[Event], object]

_KEPT_EVENTS = 100_000
"""An endless stream has no end of events; a report of more than these tells of its latest part."""


class Recorder:
    """Listens to one call, and makes its report when asked."""

    _told_apart = True
    """Whether the events tell when each device was done."""

    def __init__(self, way: Literal["one graph", "chunks"], traces: int, gpus: Mapping[str, int]):
        """`gpus`: for the full name of each GPU among the devices, the index of the physical one."""
        self._way, self._traces = way, traces
        self.meter = GpuMeter(gpus)
        """To be entered for as long as the call lasts."""
        self._begin: Event | None = None
        self._events: deque[Event] = deque(maxlen=_KEPT_EVENTS)
        self._report: Report | None = None
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
                events, usage = [self._begin, *self._events], self.meter.usage
                self._report = Report.of(
                    events, way=self._way, traces=self._traces, told_apart=self._told_apart, usage=usage
                )
                self._events.clear()
            return self._report


class GraphCall(Recorder):
    """A call that is one graph, timed: a context for as long as it lasts. Its shards begin together, or one by one."""

    arrivals: Sequence[Any] = ()
    """Set by whoever runs the graph: one tensor, float64 `[shards]`, when the results of each shard were there, in seconds
    since the epoch; or none, where the graph does not tell."""

    def __init__(
        self,
        shards: Sequence[Shard],
        in_turn: bool,
        traces: int,
        gpus: Mapping[str, int],
        listeners: Sequence[_Listener],
        finished: Callable[[GraphCall], None] | None,
    ):
        """`in_turn`: whether each shard waits for the one before it. `listeners` hear of the call as of any other;
        `finished`, if any, gets it when it has ended."""
        super().__init__("one graph", traces, gpus)
        self._shards: Sequence[Shard] | None = shards
        self._in_turn, self._listeners, self._finished = in_turn, listeners, finished
        self._seconds = 0.0
        self._error: BaseException | None = None

    def __enter__(self) -> GraphCall:
        self._began_at = time.time()
        self._began = time.perf_counter()
        if self._listeners:
            _tell(self._listeners, *self._first_events())
        if self._finished is not None:
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
                _tell(self._listeners, *self._last_events())
        finally:
            if error is not None:
                self.report()

    def report(self) -> Report:
        """The report of the call, which has finished."""
        with self._lock:
            if self._shards is not None:
                self._begin, *events = *self._first_events(), *self._last_events()
                self._events.extend(events)
                self._told_apart = bool(self.arrivals) or len({shard.device for shard in self._shards}) < 2
                self._shards, self._error, self.arrivals = None, None, ()
            return super().report()

    def _first_events(self) -> list[Event]:
        shards = self._shards or ()
        devices = tuple(dict.fromkeys(shard.device for shard in shards))
        begun = shards[:1] if self._in_turn else shards
        return [CallStarted(0.0, sum(map(len, shards)), devices), *(ChunkStarted(0.0, shard, 0.0) for shard in begun)]

    def _last_events(self) -> list[Event]:
        events: list[Event] = []
        if self._error is None:
            shards = self._shards or ()
            finished = self._finish_seconds(len(shards))
            started = [0.0, *finished[:-1]] if self._in_turn and self.arrivals else [0.0] * len(shards)
            later = zip(started[1:], shards[1:]) if self._in_turn else ()
            events += [ChunkStarted(seconds, shard, 0.0) for seconds, shard in later]
            events += [ChunkFinished(stop, shard, start) for start, stop, shard in zip(started, finished, shards)]
            events.sort(key=lambda event: event.seconds)  # of two at one time, the start comes first: sorting is stable
        return [*events, CallFinished(self._seconds, self._error)]

    def _finish_seconds(self, shards: int) -> list[float]:
        """When each shard was done, in seconds since the call began."""
        if not self.arrivals:
            return [self._seconds] * shards
        # The clock of the graph is that of the day, which may be set meanwhile.
        since = [min(max(at - self._began_at, 0.0), self._seconds) for at in self.arrivals[0].numpy().tolist()]
        since = since[:shards]  # a graph for any number of rows has a place for each device
        return [*accumulate(since, max)] if self._in_turn else since


class Observers:
    """Those of the calls of a map, as its options say; `run.calls.Observers` tells what calls ask of it."""

    def __init__(self, name: str, options: Options, gpus: Mapping[str, int]):
        """`gpus`: for the full name of each GPU among the devices, the index of the physical one."""
        self._name, self._options, self._gpus = name, options, gpus
        self.last: Recorder | None = None
        """The last call that has finished."""

    def of_graph(
        self, shards: Sequence[Shard], in_turn: bool, traces: Callable[[], int]
    ) -> AbstractContextManager[GraphCall | None]:
        """What times a call in one graph, where somebody hears of it."""
        listeners = self._listeners()
        if not self._options.report and not listeners:
            return nullcontext()
        keep = self._keep if self._options.report else None
        return GraphCall(shards, in_turn, traces(), self._gpus, listeners, keep)

    @contextmanager
    def of_chunks(self, traces: Callable[[], int]) -> Iterator[_Listener]:
        """What hears of a call in chunks."""
        listeners = self._listeners()
        if not self._options.report:
            yield partial(_tell, listeners)
            return
        recorder = Recorder("chunks", traces(), self._gpus)
        try:
            with recorder.meter:
                yield partial(_tell, (recorder, *listeners))
        finally:
            self._keep(recorder)

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
