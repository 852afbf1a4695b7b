"""The tally of a call, and the bar that draws it in terminals and notebooks, and nowhere else."""

from __future__ import annotations

import errno
import io
import re
import sys
import threading
import types
from collections.abc import Iterator
from typing import Any

import pytest
from histories import device, history, one_graph
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console
from rich.live import Live

from devicemap.tell.report import progress
from devicemap.tell.report.progress import ProgressBar, draw
from devicemap.tell.report.tables import plain_text
from devicemap.tell.report.tally import Tally
from devicemap.types import CallFinished, CallStarted, ChunkFinished, ChunkStarted, Event, Shard

EVENTS = history([(10, 1.0)] * 10, devices=2)


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    """After each test: no thread, the right to draw is free, and the program writes where it wrote before."""
    streams = sys.stdout, sys.stderr
    yield
    assert [thread.name for thread in threading.enumerate() if thread.name == "devicemap progress"] == []
    assert not ProgressBar._one_at_a_time.locked()
    assert (sys.stdout, sys.stderr) == streams


def _terminal(file: Any = None, width: int = 100, **options: Any) -> Console:
    file = io.StringIO() if file is None else file
    options = {"force_terminal": True, "force_jupyter": False, "_environ": {"TERM": "xterm"}, **options}
    return Console(file=file, width=width, **options)


def _drawn(console: Console) -> str:
    text: str = console.file.getvalue()  # type: ignore[attr-defined]
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)


def _tally(events: list[Event]) -> Tally:
    tally = Tally()
    for event in events:
        tally = tally.after(event)
    return tally


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 20), st.floats(0.0, 3.0)), max_size=12),
    st.integers(1, 4),
    st.sets(st.integers(0, 11)),
    st.booleans(),
)
def test_a_tally_counts_each_row_once(chunks: list[Any], devices: int, faulty: set[int], known: bool) -> None:
    events = history(chunks, devices=devices, failing=faulty, known=known)
    tally = _tally(events)
    assert tally.done == sum(tally.by_device.values()) == sum(rows for rows, _ in chunks)
    assert sum(tally.shares.values()) == pytest.approx(1.0 if chunks else 0.0)
    assert tally.ended_seconds == events[-1].seconds
    assert not tally.failed
    for at in range(len(events)):
        assert plain_text(draw(_tally(events[:at]), 3.0), 80)


def test_speed_and_time_left_are_from_the_first_chunk_to_the_newest_result() -> None:
    shards = [Shard(device(0), row, row + 10) for row in (0, 10)]
    tally = _tally([CallStarted(0.0, 50, (device(0),)), ChunkStarted(5.0, shards[0], 0.0)])
    assert (tally.rows_per_second, tally.seconds_left(6.0)) == (None, None)
    tally = tally.after(ChunkFinished(7.0, shards[0], 5.0))
    assert (tally.rows_per_second, tally.seconds_left(7.0), tally.seconds_left(8.0)) == (5.0, 8.0, 7.0)
    assert tally.seconds_left(100.0) == 0.0
    assert Tally(None, 10, {}, 0.0, 1.0).seconds_left(1.0) is None


def test_what_a_bar_says() -> None:
    running = plain_text(draw(_tally(EVENTS[:-4]), 4.0, "simulate"), 100)
    assert re.fullmatch(r"simulate  [━╸╺ ]+  80/100 rows  20 rows/s  1\.0 s left\nGPU:0 50%  GPU:1 50%", running), (
        running
    )
    assert "100/100 rows  20 rows/s  in 5.0 s" in plain_text(draw(_tally(EVENTS), 9.0), 100)
    failed = _tally([*EVENTS[:-1], CallFinished(5.0, ValueError())])
    assert "stopped after 5.0 s" in plain_text(draw(failed, 9.0), 100)


def test_what_a_bar_says_where_nobody_knows_how_many_rows_there_are() -> None:
    events = history([(10, 0.05)] * 3, devices=1, known=False)
    running = plain_text(draw(_tally(events[:-2]), 61.0), 100)
    assert "20/? rows  200 rows/s  for 0:01:01" in running
    assert "GPU" not in running  # one device has all of it
    assert "30/30 rows" in plain_text(draw(_tally(events), 61.0), 100)


def test_a_bar_without_rows() -> None:
    assert "0/0 rows" in plain_text(draw(_tally(history([])), 0.0), 100)


def test_it_draws_the_end_of_a_call_on_a_terminal() -> None:
    console = _terminal()
    bar = ProgressBar("simulate", console)
    for event in EVENTS:
        bar(event)
    assert "0/100 rows" in _drawn(console)
    assert "100/100 rows  20 rows/s  in 5.0 s" in _drawn(console).splitlines()[-2]
    assert _drawn(console).splitlines()[-1].rstrip() == "GPU:0 50%  GPU:1 50%"
    assert console.file.getvalue().endswith("\x1b[?25h")  # type: ignore[attr-defined]  # the cursor is back


@pytest.mark.parametrize("error", [ValueError("odd"), KeyboardInterrupt()], ids=["error", "ctrl-c"])
def test_it_leaves_the_terminal_when_a_call_fails(error: BaseException) -> None:
    console = _terminal()
    bar = ProgressBar(console=console)
    for event in [*EVENTS[:6], CallFinished(3.0, error)]:
        bar(event)
    assert "stopped after 3.0 s" in _drawn(console)
    assert console.file.getvalue().endswith("\x1b[?25h")  # type: ignore[attr-defined]


def test_it_draws_while_nothing_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = threading.Semaphore(0)
    closed: list[bool] = []
    screen = types.SimpleNamespace(show=lambda _: drawn.release(), close=lambda: closed.append(True))
    monkeypatch.setattr(progress, "_REFRESH_SECONDS", 0.001)
    monkeypatch.setattr(progress, "screen_of", lambda _: screen)
    bar = ProgressBar(console=_terminal())
    bar(EVENTS[0])
    assert all(drawn.acquire(timeout=10) for _ in range(5))
    bar(EVENTS[-1])
    assert closed == [True]


@pytest.mark.parametrize(
    "console",
    [_terminal(force_terminal=False), _terminal(_environ={"TERM": "dumb"})],
    ids=["a file", "a terminal that cannot go back"],
)
def test_it_is_quiet_without_a_terminal(console: Console) -> None:
    before = threading.active_count()
    bar = ProgressBar(console=console)
    for event in EVENTS[:-1]:
        bar(event)
    assert threading.active_count() == before
    bar(EVENTS[-1])
    assert _drawn(console) == ""


def test_the_bar_of_a_second_call_at_once_stays_quiet() -> None:
    first, second, third = _terminal(), _terminal(), _terminal()
    bar, other = ProgressBar(console=first), ProgressBar(console=second)
    bar(EVENTS[0])
    other(EVENTS[0])
    for event in EVENTS[1:]:
        other(event)
    assert _drawn(second) == ""
    for event in EVENTS[1:]:
        bar(event)
    assert "100/100 rows" in _drawn(first)
    later = ProgressBar(console=third)
    for event in EVENTS:
        later(event)
    assert "100/100 rows" in _drawn(third)


def test_it_goes_along_with_what_the_user_draws() -> None:
    console = _terminal()
    with Live("mine", console=console, auto_refresh=False):
        bar = ProgressBar(console=console)
        for event in EVENTS:
            bar(event)
    assert "mine" in _drawn(console)


class _Gone(io.StringIO):
    """A terminal that was closed."""

    def write(self, text: str) -> int:
        raise OSError(errno.EIO, "Input/output error")


@pytest.mark.parametrize("console", [_terminal(_Gone()), _terminal(force_jupyter=True)], ids=["gone", "no IPython"])
def test_what_cannot_be_drawn_does_not_stop_the_call(console: Console, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "IPython.display", None)
    bar = ProgressBar(console=console)
    for event in EVENTS:
        bar(event)
    after = _terminal()
    bar = ProgressBar(console=after)  # the next one finds everything given back
    for event in EVENTS:
        bar(event)
    assert "rows" in _drawn(after)
    assert "devicemap progress" not in {thread.name for thread in threading.enumerate()}


@pytest.mark.parametrize("good", [0, 1, 2])
def test_trouble_at_any_time_does_not_stop_the_call(good: int, monkeypatch: pytest.MonkeyPatch) -> None:
    left = iter(range(good))
    gave_up, closed = threading.Event(), []

    def show(_: Any) -> None:
        if next(left, None) is None:
            gave_up.set()
            raise SystemExit(1)

    screen = types.SimpleNamespace(show=show, close=lambda: closed.append(True))
    monkeypatch.setattr(progress, "_REFRESH_SECONDS", 0.001)
    monkeypatch.setattr(progress, "screen_of", lambda _: screen)
    bar = ProgressBar(console=_terminal())
    bar(EVENTS[0])
    assert gave_up.wait(10)
    bar(EVENTS[-1])
    assert closed == [True]


def test_ctrl_c_while_it_opens_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(progress, "screen_of", interrupted)
    bar = ProgressBar(console=_terminal())
    with pytest.raises(KeyboardInterrupt):
        bar(EVENTS[0])
    bar(CallFinished(0.1, KeyboardInterrupt()))


def test_the_end_of_a_call_that_never_began_is_no_trouble() -> None:
    console = _terminal()
    ProgressBar(console=console)(CallFinished(0.0, None))
    assert _drawn(console) == ""


def test_a_notebook_has_one_output_that_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[tuple[str, dict[str, str]]] = []

    def bundle(drawing: Any) -> dict[str, str]:
        return drawing._repr_mimebundle_(include=None, exclude=None)

    def display(drawing: Any, *, display_id: bool) -> Any:
        assert display_id
        shown.append(("new", bundle(drawing)))
        return types.SimpleNamespace(update=lambda changed: shown.append(("changed", bundle(changed))))

    fake: Any = types.ModuleType("IPython.display")
    fake.display = display
    monkeypatch.setitem(sys.modules, "IPython.display", fake)
    bar = ProgressBar(console=_terminal(force_terminal=None, force_jupyter=True))
    for event in one_graph([5, 5], 1.0):
        bar(event)
    assert [kind for kind, _ in shown][:2] == ["new", "changed"]
    assert "0/10 rows" in shown[0][1]["text/plain"]
    assert "10/10 rows" in shown[-1][1]["text/html"]


def test_without_rich_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "rich", None)
    with pytest.raises(ImportError, match="progress=True takes rich, which is not installed: pip install rich"):
        ProgressBar()
