"""Observers of the calls of a map: the recorder behind `DeviceMap.report`, the progress bar, the user's callback.

`rich.progress` draws the bar. Without a terminal or a notebook there is no output and no thread. In notebooks, `rich` draws
with `ipywidgets`.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Any

from rich import get_console
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from devicemap.compile.compiled import CompiledMap
from devicemap.compile.program import Program
from devicemap.errors import error_text, warn_user
from devicemap.events import (
    CallFinished,
    CallStarted,
    ChunkFailed,
    ChunkFinished,
    ChunkRetried,
    ChunkStarted,
    DeviceLost,
    Event,
    FailedRow,
    RowFailed,
    Shard,
    short_name,
)
from devicemap.inspect.gpu_usage import GpuUsage
from devicemap.inspect.report import DeviceReport, Report, Span
from devicemap.run.graph_engine import CallObservers

_Observer = Callable[[Event], object]
_Events = Callable[[], Iterable[Event]]

_KEPT_SPANS = 10_000
"""The most spans in a report, which bounds its memory for an endless stream."""


_CLOSED = "closing the stream before its last chunk"
"""The `Report.error` of a stream that was closed, which raises no error."""

_DRAWING_ERRORS = (Exception, SystemExit)
"""Errors of drawing, which do not reach the call. `rich` exits the program if its output is closed."""


class Recorder:
    """Updates counters and spans by the events of one call. It keeps no events, which refer to errors and tensors."""

    def __init__(self, gpus: Mapping[str, int], **facts: Any):
        """`gpus` is as for `GpuUsage`; `facts` are fields of `Report` that are known before the call."""
        self._facts = facts
        self._usage = GpuUsage(gpus)
        self._rows: int | None = None
        self._seconds = 0.0
        self._error: str | None = None
        self._devices: dict[str, DeviceReport] = {}
        self._running: dict[Shard, float] = {}
        self._failed_rows: list[FailedRow] = []
        self._lost: list[str] = []
        self._spans: deque[Span] = deque(maxlen=_KEPT_SPANS)

    def __call__(self, event: Event) -> None:
        for name in {shard.device for shard in self._running}:
            self._device(name).busy_seconds += event.seconds - self._seconds
        self._seconds = event.seconds
        if isinstance(event, ChunkStarted):
            self._device(event.shard.device).waiting_seconds += event.waited_seconds
            self._running[event.shard] = event.seconds
        elif isinstance(event, ChunkFinished | ChunkFailed):
            failed, device = isinstance(event, ChunkFailed), self._device(event.shard.device)
            device.calls += 1
            device.rows += 0 if failed else len(event.shard)
            started = self._running.pop(event.shard)
            self._spans.append(Span(event.shard, started, event.seconds, "failed" if failed else "finished"))
            self._usage.sample(event.seconds)
        elif isinstance(event, ChunkRetried):
            self._device(event.shard.device).retries += 1
            self._device(event.shard.device).back_offs += event.out_of_memory
        elif isinstance(event, RowFailed):
            self._failed_rows.append(FailedRow(event.shard.start, event.shard.device, error_text(event.error)))
        elif isinstance(event, DeviceLost):
            self._device(event.device).lost = True
            self._lost.append(
                f"{short_name(event.device)} kept failing, and got no more chunks in this call. Its last error was "
                f"{error_text(event.error)}"
            )
        elif isinstance(event, CallStarted):
            self._rows = event.rows
            self._devices = {device: DeviceReport(device) for device in event.devices}
        elif isinstance(event, CallFinished):
            self._usage.close()
            closed = isinstance(event.error, GeneratorExit)
            self._error = _CLOSED if closed else None if event.error is None else error_text(event.error)

    def _device(self, name: str) -> DeviceReport:
        return self._devices.setdefault(name, DeviceReport(name))

    def warnings(self, of_rows: bool) -> list[str]:
        """Return warnings for lost devices and, with `of_rows` or if no chunk succeeded, for rows that failed."""
        failed, succeeded = self._failed_rows, any(device.rows for device in self._devices.values())
        if not failed or (succeeded and not of_rows):
            return self._lost
        first = min(failed, key=lambda each: each.row)
        count = "1 row failed and is" if len(failed) == 1 else f"{len(failed)} rows failed and are"
        everything = "" if succeeded or len(failed) == 1 else "all "
        where = f"row {first.row} on {short_name(first.device)}"
        return [*self._lost, f"{everything}{count} left out; the first: {where}: {first.error}"]

    def report(self) -> Report:
        """Return the report of the events so far."""
        unfinished = [Span(shard, start, self._seconds, "unfinished") for shard, start in self._running.items()]
        rows, devices = sum(device.rows for device in self._devices.values()), []
        for device in self._devices.values():
            busy = min(self._seconds, device.busy_seconds)  # rounding may exceed the duration
            finished = replace(
                device,
                share=device.rows / rows if rows else 0.0,
                busy_seconds=busy,
                idle_seconds=self._seconds - busy,
                waiting_seconds=min(self._seconds - busy, device.waiting_seconds),
                utilisation_percent=self._usage.percent(device.device),
            )
            devices.append(finished)
        return Report(
            rows=rows,
            expected_rows=self._rows,
            wall_seconds=self._seconds,
            error=self._error,
            failed_rows=tuple(sorted(self._failed_rows, key=lambda failed: failed.row)),
            devices=tuple(devices),
            spans=(*self._spans, *unfinished),
            **self._facts,
        )


class Observers(CallObservers):
    """The observers that the options of a map request."""

    def __init__(self, program: Program, warns_of_rows: bool = False):
        """`warns_of_rows`: whether calls warn of failed rows, because there is no report."""
        self._name, self._progress, self._gpus = program.name, program.options.progress, program.gpus
        self._warns_of_rows = warns_of_rows
        self._last: Callable[[], Report] | None = None

    def report(self) -> Report | None:
        """Return the report of the last call that finished."""
        return None if self._last is None else self._last()

    @contextmanager
    def of_graph(
        self, rows: int, devices: Sequence[str], compiled: CompiledMap
    ) -> Iterator[Callable[[_Events], object]]:
        """Yield a callable that takes the events of the graph. Only observers of the user see events during the call."""
        facts, observers = self._facts("one graph", compiled), self._observers()
        facts["in_turn"] = compiled.traced.audit.ordered and len(devices) > 1
        started, made, error = CallStarted(0.0, rows, tuple(devices)), list[_Events](), None
        began = time.perf_counter()
        try:
            _notify(observers, started)
            yield made.append
        except BaseException as raised:
            error = raised
            raise
        finally:
            seconds = time.perf_counter() - began
            # The report must not keep the error alive, whose traceback refers to tensors.
            text = None if error is None else error_text(error)
            self._last = partial(_report_of_graph, facts, started, made, seconds, text)
            if observers:
                _notify(observers, *(event for events in made for event in events()), CallFinished(seconds, error))
            error = None

    @contextmanager
    def of_chunks(self, compiled: CompiledMap) -> Iterator[_Observer]:
        """Yield a callable that takes the events of a call in chunks."""
        recorder = Recorder(self._gpus, **self._facts("chunks", compiled))
        observers: tuple[_Observer, ...] = recorder, *self._observers()
        try:
            yield partial(_notify, observers)
        finally:
            self._last = recorder.report
            # A warning in the scheduler's thread would not name a line of the user's program.
            for message in recorder.warnings(self._warns_of_rows):
                warn_user(f"{self._name}: {message}")

    def _facts(self, engine: str, compiled: CompiledMap) -> dict[str, Any]:
        """Return the fields of a report that are known before the call."""
        traced = compiled.traced
        one_by_one = f"{traced.reason}: {traced.remedy}" if traced.remedy and not traced.audit.ordered else None
        return {"engine": engine, "traces": compiled.take_traces(), "row_by_row": one_by_one}

    def _observers(self) -> tuple[_Observer, ...]:
        """Return the observers besides the recorder."""
        progress = self._progress
        return (ProgressBar(self._name),) if progress is True else (progress,) if callable(progress) else ()


def _report_of_graph(
    facts: dict[str, Any], started: CallStarted, made: Sequence[_Events], seconds: float, error: str | None
) -> Report:
    recorder = Recorder({}, **facts)
    _notify([recorder], started, *(event for events in made for event in events()), CallFinished(seconds, None))
    return replace(recorder.report(), error=error)


def _notify(observers: Iterable[_Observer], *events: Event) -> None:
    for event in events:
        for observe in observers:
            observe(event)


_NAME_CHARACTERS, _BAR_CHARACTERS = 20, 12
"""With these widths, up to a billion rows fit into 80 columns."""


class ProgressBar:
    """Draw the progress of one call from its events. The call must send `CallFinished`, which removes the bar."""

    def __init__(self, name: str = "", console: Console | None = None):
        """Make a bar after a `name`, without drawing it.

        By default, the bar uses the global console of `rich`, so that it does not overwrite other output of `rich`. That is on
        stdout, unless `rich.reconfigure(stderr=True)` was called.
        """
        console = console or get_console()
        self.display = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(_BAR_CHARACTERS),
            MofNCompleteColumn(),
            TextColumn("{task.fields[state]}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=console,
            refresh_per_second=4,
            disable=not (console.is_jupyter or console.is_interactive),
        )
        short = name if len(name) <= _NAME_CHARACTERS else f"{name[: _NAME_CHARACTERS - 3]}..."
        self._failed = 0
        self._task = self.display.add_task(short, start=False, total=None, state="rows")

    def __call__(self, event: Event) -> None:
        if isinstance(event, CallStarted):
            self.display.update(self._task, total=event.rows)
            with suppress(*_DRAWING_ERRORS):  # the console draws another bar, or the terminal is closed
                self.display.start()
                self.display.start_task(self._task)
        elif isinstance(event, ChunkFinished):
            self.display.update(self._task, advance=len(event.shard))
        elif isinstance(event, RowFailed):
            self._failed += 1
            self.display.update(self._task, advance=1, state=f"rows, {self._failed} failed")
        elif isinstance(event, CallFinished):
            (task,) = self.display.tasks
            total = task.completed if task.total is None else task.total
            state = task.fields["state"] if event.error is None else "stopped"
            self.display.update(self._task, total=total, state=state)
            with suppress(*_DRAWING_ERRORS):
                self.display.stop()
