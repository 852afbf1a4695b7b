"""A progress bar of a call, drawn by `rich.progress` from its events.

Without a terminal or a notebook there is no output and no thread. In notebooks, `rich` draws with `ipywidgets`.
"""

from __future__ import annotations

from contextlib import suppress

from rich import get_console
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from devicemap.events import CallFinished, CallStarted, ChunkFinished, Event
from devicemap.inspect.render import short_names

_REFRESHES_PER_SECOND = 4

_DRAWING_ERRORS = (Exception, SystemExit)
"""Errors of drawing. `rich` exits the program if its output is closed."""


class ProgressBar:
    """Draw the progress of one call from its events.

    The call must pass its `CallFinished` in any case: it removes the bar from the terminal. Errors of drawing do not reach
    the call.
    """

    def __init__(self, name: str = "", console: Console | None = None):
        """Make a bar after a `name`, and show nothing yet.

        It is drawn on `rich`'s global console, so that it does not overwrite other output of `rich`: on stdout, unless
        `rich.reconfigure(stderr=True)` was called.
        """
        console = console or get_console()
        self._progress = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("rows {task.fields[stopped]}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[shares]}", style="dim"),
            console=console,
            refresh_per_second=_REFRESHES_PER_SECOND,
            disable=not (console.is_jupyter or console.is_interactive),
        )
        self._task = self._progress.add_task(name, start=False, total=None, shares="", stopped="")
        self._rows: dict[str, int] = {}

    def __call__(self, event: Event) -> None:
        if isinstance(event, CallStarted):
            self._rows = dict.fromkeys(event.devices, 0)
            self._progress.update(self._task, total=event.rows)
            with suppress(*_DRAWING_ERRORS):  # something else is drawn there, or the terminal is closed
                self._progress.start()
                self._progress.start_task(self._task)
        elif isinstance(event, ChunkFinished):
            self._rows[event.shard.device] = self._rows.get(event.shard.device, 0) + len(event.shard)
            self._progress.update(self._task, advance=len(event.shard), shares=self._shares())
        elif isinstance(event, CallFinished):
            (task,) = self._progress.tasks
            total = task.completed if task.total is None else task.total
            self._progress.update(self._task, total=total, stopped="" if event.error is None else "(stopped)")
            with suppress(*_DRAWING_ERRORS):
                self._progress.stop()

    def _shares(self) -> str:
        """Return each device's share of the finished rows, if there are several devices."""
        names, done = short_names(self._rows), sum(self._rows.values())
        return "  ".join(f"{names[d]} {n / done:.0%}" for d, n in self._rows.items()) if len(self._rows) > 1 else ""
