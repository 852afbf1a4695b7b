"""A progress bar of a call, drawn by `rich.progress` from its events.

Without a terminal or a notebook there is no output and no thread. In notebooks, `rich` draws with `ipywidgets`.
"""

from __future__ import annotations

from contextlib import suppress

from rich import get_console
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from devicemap.events import CallFinished, CallStarted, ChunkFinished, Event, RowFailed

_NAME_CHARACTERS, _BAR_CHARACTERS = 20, 12
"""With these widths, up to a billion rows fit into 80 columns."""

_DRAWING_ERRORS = (Exception, SystemExit)
"""Errors of drawing, which do not reach the call. `rich` exits the program if its output is closed."""


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
