"""The progress bar in terminals and notebooks."""

from __future__ import annotations

import io
import re
import sys
import threading
from collections.abc import Iterator
from typing import Any
from unittest.mock import MagicMock

import pytest
import tensorflow as tf
from histories import history
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

import devicemap
from devicemap.inspect.recorder import ProgressBar
from devicemap.run.retries import FAILURES_IN_A_ROW
from devicemap.types import CallFinished, Event

EVENTS = history([(10, 1.0)] * 10, devices=2)


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    """After each test: no thread, and the program writes where it wrote before."""
    streams = sys.stdout, sys.stderr
    yield
    for thread in threading.enumerate():
        if type(thread).__module__.startswith("rich"):
            thread.join(5)
            assert not thread.is_alive()
    assert (sys.stdout, sys.stderr) == streams


def _terminal(**options: Any) -> Console:
    default = {"force_terminal": True, "force_jupyter": False, "_environ": {"TERM": "xterm"}, "width": 140}
    return Console(file=io.StringIO(), **{**default, **options})


def _drawn(events: list[Event], name: str = "", console: Console | None = None) -> str:
    """The text on the terminal after these events."""
    console = console or _terminal()
    bar = ProgressBar(name, console)
    for event in events:
        bar(event)
    if not isinstance(events[-1], CallFinished):
        bar.display.refresh()
    text: str = console.file.getvalue()
    bar.display.stop()
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)


@settings(deadline=None, max_examples=30)
@given(
    st.lists(st.tuples(st.integers(1, 20), st.sampled_from([0.0, 0.5, 3.0])), max_size=12),
    st.integers(1, 4),
    st.sets(st.integers(0, 11), max_size=FAILURES_IN_A_ROW - 1),
    st.booleans(),
)
def test_it_counts_each_row_once(chunks: list[Any], devices: int, faulty: set[int], known: bool) -> None:
    rows = sum(rows for rows, _ in chunks)
    drawn = _drawn(history(chunks, devices=devices, failing=faulty, known=known))
    assert f"{rows}/{rows} rows" in drawn.splitlines()[-1]


UNKNOWN = history([(10, 0.05)] * 3, devices=1, known=False)
SHOWN = {  # events, and the last line
    "running": (EVENTS[:-4], r"simulate \[x\] [━╸╺ ]+ 80/100 rows +0:00:00 +\S+$"),
    "finished": (EVENTS, "100/100 rows"),
    "failed": ([*EVENTS[:6], CallFinished(3.0, ValueError("odd"))], "/100 stopped"),
    "interrupted": ([*EVENTS[:6], CallFinished(3.0, KeyboardInterrupt())], "/100 stopped"),
    "unknown number": (UNKNOWN[:-2], r"20/\? rows"),
    "unknown number, finished": (UNKNOWN, "30/30 rows"),
}


def test_an_observer_that_is_false_gets_events() -> None:
    """As an empty list with a method `__call__`."""
    logs = MagicMock(), MagicMock()
    for log in logs:
        log.__bool__.return_value = False
    devicemap.parallel_map(tf.identity, tf.range(3), progress=logs[0])
    devicemap.parallel_tasks(abs, [1, 2], progress=logs[1])
    assert all(log.called for log in logs)


@pytest.mark.parametrize("name", SHOWN)
def test_what_it_shows(name: str) -> None:
    events, last = SHOWN[name]
    console = _terminal()
    assert re.search(last, _drawn(events, "simulate [x]", console).splitlines()[-1])
    if isinstance(events[-1], CallFinished):
        assert console.file.getvalue().endswith("\x1b[?25h")  # the cursor is back


@pytest.mark.parametrize("error", [None, ValueError("odd")])
def test_it_fits_80_columns(error: Any) -> None:
    events = history([(100_000_000, 1.0)] * 10)
    for end in range(2, len(events) + 1):
        drawn = _drawn([*events[:end], CallFinished(1.0, error)], "features.extract_all_of_them", _terminal(width=80))
        *_, last = lines = drawn.split("\r")
        assert all(len(line.rstrip("\n")) <= 80 for line in lines)
        assert re.search(r"extract_\.\.\. [━╸╺ ]{12} +\d+/1000000000 (rows|stopped) +[\d:]+ [\d:-]+", last)


@pytest.mark.parametrize("options", [{"force_terminal": False}, {"_environ": {"TERM": "dumb"}}], ids=["file", "dumb"])
def test_it_is_quiet_without_a_terminal(options: dict[str, Any]) -> None:
    console, before = _terminal(**options), threading.active_count()
    bar = ProgressBar(console=console)
    for event in EVENTS:
        bar(event)
        assert threading.active_count() == before
    assert console.file.getvalue() == ""
