"""A progress bar of a call, drawn by `rich.progress` from its events.

Where there is neither a terminal nor a notebook, there is no output and no thread. In notebooks, `rich` draws with
`ipywidgets`.
"""

from __future__ import annotations

from contextlib import suppress
from datetime import timedelta

from rich import get_console
from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn
from rich.text import Text

from devicemap.events import CallFinished, CallStarted, ChunkFinished, ChunkStarted, Event
from devicemap.tell.render import short_names

_REFRESHES_PER_SECOND = 4
_FEW_SECONDS = 10
_WHOLE_ROWS = 100
"""From so many rows per second on, parts of a row are of no interest."""

_TROUBLE = (Exception, SystemExit)
"""What drawing may raise; `rich` exits the program when nobody reads its output any more."""


class ProgressBar:
    """Draws the progress of one call from its events; made anew for each call.

    The call has to hand it its `CallFinished` whatever happens, as that takes the bar off the terminal. Nothing that goes wrong
    with drawing reaches the call.
    """

    def __init__(self, name: str = "", console: Console | None = None):
        """Make a bar after a `name`, and show nothing yet.

        It is drawn on `rich`'s global console, so that other things which `rich` draws are not written over: on stdout, unless
        `rich.reconfigure(stderr=True)` says otherwise.
        """
        console = console or get_console()
        self._progress = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            _Numbers(),
            TextColumn("{task.fields[shares]}", style="dim"),
            console=console,
            refresh_per_second=_REFRESHES_PER_SECOND,
            disable=not (console.is_jupyter or console.is_interactive),
        )
        self._task = self._progress.add_task(name, start=False, total=None, shares="", first=None, last=0.0, ended=None)
        self._rows: dict[str, int] = {}

    def __call__(self, event: Event) -> None:
        if isinstance(event, CallStarted):
            self._rows = dict.fromkeys(event.devices, 0)
            self._progress.update(self._task, total=event.rows)
            with suppress(*_TROUBLE):  # something else is drawn there, or the terminal has gone
                self._progress.start()
                self._progress.start_task(self._task)
        elif isinstance(event, ChunkStarted):
            if self._progress.tasks[0].fields["first"] is None:  # tracing comes before, and tells nothing of the speed
                self._progress.update(self._task, first=event.seconds)
        elif isinstance(event, ChunkFinished):
            self._rows[event.shard.device] = self._rows.get(event.shard.device, 0) + len(event.shard)
            self._progress.update(self._task, advance=len(event.shard), shares=self._shares(), last=event.seconds)
        elif isinstance(event, CallFinished):
            (task,) = self._progress.tasks
            total = task.completed if task.total is None else task.total
            ended = f"{'in' if event.error is None else 'stopped after'} {_clock(event.seconds)}"
            self._progress.update(self._task, total=total, ended=ended)
            with suppress(*_TROUBLE):
                self._progress.stop()

    def _shares(self) -> str:
        """Each device's part of the rows that are done, where there are several."""
        names, done = short_names(self._rows), sum(self._rows.values())
        return "  ".join(f"{names[d]} {n / done:.0%}" for d, n in self._rows.items()) if len(self._rows) > 1 else ""


class _Numbers(ProgressColumn):
    """Rows, rows per second from the first chunk's start to the newest result, and time."""

    def render(self, task: Task) -> Text:
        """As `80/100 rows  20 rows/s  1.0 s left`."""
        rows = "?" if task.total is None else f"{task.total:.0f}"
        took = task.fields["last"] - (task.fields["first"] or 0.0)
        speed = task.completed / took if task.completed and took > 0 else None
        parts = [f"{task.completed:.0f}/{rows} rows"]
        if speed is not None:
            parts.append(f"{speed:,.0f} rows/s" if speed >= _WHOLE_ROWS else f"{speed:.3g} rows/s")
        parts.append(task.fields["ended"] or self._time(task, speed))
        return Text("  ".join(parts))

    def _time(self, task: Task, speed: float | None) -> str:
        elapsed = task.elapsed or 0.0
        if task.total is None or speed is None:
            return f"for {_clock(elapsed)}"
        return f"{_clock(max(0.0, (task.total - task.completed) / speed - (elapsed - task.fields['last'])))} left"


def _clock(seconds: float) -> str:
    """Hours, minutes and whole seconds; seconds alone below ten of them.

    >>> _clock(3725.2), _clock(1.52)
    ('1:02:05', '1.5 s')
    """
    return f"{seconds:.1f} s" if seconds < _FEW_SECONDS else str(timedelta(seconds=round(seconds)))
