"""A progress bar: the events of a call -> a tally (pure) -> a line that `rich` draws, in terminals and notebooks.

The bar is a listener like any other: it gets the events of one call, one at a time, in order. While the call lasts, a
thread draws it anew four times a second, as events may be far apart. One bar is drawn at a time; the bars of calls that
run at once in other threads stay quiet, since they could only write over it. Where there is neither a terminal nor a
notebook, there is no output and no thread.
"""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from datetime import timedelta
from typing import Any

from devicemap.tell.report.screens import Screen, has_screen, screen_of
from devicemap.tell.report.tally import Tally
from devicemap.types import CallFinished, CallStarted, Event

_REFRESH_SECONDS = 0.25
_BAR_CHARACTERS = 40
_FEW_SECONDS = 10
_WHOLE_ROWS = 100
"""From so many rows per second on, parts of a row are of no interest."""

_FAREWELL_SECONDS = 1.0
"""How long to wait for the thread that draws, when the call has ended; a drawing takes a few milliseconds."""

_TROUBLE = (Exception, SystemExit)
"""What drawing may raise; `rich` exits the program when nobody reads its output any more."""


class ProgressBar:
    """Draws the progress of one call from its events; made anew for each call.

    The call has to hand it its `CallFinished` whatever happens, as that takes the bar off the terminal. Nothing that
    goes wrong with drawing reaches the call: the bar goes quiet.
    """

    _one_at_a_time = threading.Lock()

    def __init__(self, name: str = "", console: Any = None):
        """Make a bar, and show nothing yet.

        Args:
            name: what stands before it.
            console: a `rich.console.Console`; `None` for the global one, so that other things which `rich` draws are
                not written over. It writes to stdout, unless `rich.reconfigure(stderr=True)` says otherwise.

        Raises:
            ImportError: without `rich`.
        """
        try:
            from rich import get_console
        except ImportError as error:
            raise ImportError("progress=True takes rich, which is not installed: pip install rich") from error
        self._name = name
        self._console = console or get_console()
        self._tally = Tally()
        self._began = 0.0
        self._drawing = False
        self._screen: Screen | None = None
        self._painter: threading.Thread | None = None
        self._ended = threading.Event()

    def __call__(self, event: Event) -> None:
        self._tally = self._tally.after(event)
        if isinstance(event, CallStarted):
            self._began = time.monotonic() - event.seconds
            self._open()
        elif isinstance(event, CallFinished):
            self._close()

    def _open(self) -> None:
        if not has_screen(self._console):
            return
        self._drawing = self._one_at_a_time.acquire(blocking=False)
        if not self._drawing:
            return
        try:
            self._screen = screen_of(self._console)
            self._paint()
            self._painter = threading.Thread(target=self._keep_painting, name="devicemap progress", daemon=True)
            self._painter.start()
        except _TROUBLE:  # something else is drawn there, or the terminal has gone
            self._close()

    def _close(self) -> None:
        """Draw how it ended, and give everything back; also half-way through `_open`, and twice."""
        self._ended.set()
        painter, self._painter = self._painter, None
        screen, self._screen = self._screen, None
        try:
            if painter is not None and painter.ident is not None:
                painter.join(_FAREWELL_SECONDS)
            if screen is not None:
                with suppress(*_TROUBLE):
                    screen.show(draw(self._tally, self._tally.ended_seconds or 0.0, self._name))
        finally:
            if screen is not None:
                with suppress(*_TROUBLE):
                    screen.close()
            if self._drawing:
                self._drawing = False
                self._one_at_a_time.release()

    def _keep_painting(self) -> None:
        with suppress(*_TROUBLE):  # nobody can see any more what cannot be drawn
            while not self._ended.wait(_REFRESH_SECONDS):
                self._paint()

    def _paint(self) -> None:
        screen = self._screen
        if screen is not None:
            screen.show(draw(self._tally, time.monotonic() - self._began, self._name))


def draw(tally: Tally, now_seconds: float, name: str = "") -> Any:
    """A tally as a `rich` table: the bar with numbers beside it, below it the devices' shares where there are several."""
    from rich.progress_bar import ProgressBar as Bar
    from rich.table import Table
    from rich.text import Text

    rows = tally.done if tally.rows is None and tally.ended_seconds is not None else tally.rows
    speed = tally.rows_per_second
    line = Table.grid(padding=(0, 2, 0, 0))
    line.add_column()
    line.add_column(max_width=_BAR_CHARACTERS)
    # No rows are a full bar; an unknown number of them is one that pulses.
    line.add_row(
        Text(name),
        Bar(total=None if rows is None else max(1, rows), completed=1 if rows == 0 else tally.done),
        Text(f"{tally.done}/{'?' if rows is None else rows} rows"),
        Text("" if speed is None else f"{speed:,.0f} rows/s" if speed >= _WHOLE_ROWS else f"{speed:.3g} rows/s"),
        Text(_time(tally, now_seconds)),
    )
    if len(tally.by_device) < 2:
        return line
    both = Table.grid()
    both.add_row(line)
    both.add_row(Text("  ".join(f"{device} {share:.0%}" for device, share in tally.shares.items()), style="dim"))
    return both


def _time(tally: Tally, now_seconds: float) -> str:
    if tally.ended_seconds is not None:
        return f"{'stopped after' if tally.failed else 'in'} {_clock(tally.ended_seconds)}"
    left = tally.seconds_left(now_seconds)
    return f"for {_clock(now_seconds)}" if left is None else f"{_clock(left)} left"


def _clock(seconds: float) -> str:
    """Hours, minutes and whole seconds; seconds alone below ten of them.

    >>> _clock(3725.2), _clock(1.52)
    ('1:02:05', '1.5 s')
    """
    return f"{seconds:.1f} s" if seconds < _FEW_SECONDS else str(timedelta(seconds=round(seconds)))
