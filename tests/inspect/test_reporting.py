"""Reports of calls with both engines, and their timelines."""

from __future__ import annotations

import gc
import itertools
import json
import pathlib
import sys
import weakref
from typing import Any

import pytest
import rich.console
import tensorflow as tf
from histories import device, history, one_graph, report_of
from hypothesis import given, settings
from hypothesis import strategies as st

import devicemap
from devicemap.inspect.render import text_of
from devicemap.run.graph_engine import shard_events
from devicemap.run.retries import FAILURES_IN_A_ROW
from devicemap.types import CallFinished, CallStarted, ChunkFailed, ChunkStarted, DeviceLost, Event, Report, Shard

MANY = history(
    [(10, 1.0)] * 12, devices=3, in_flight=2, input_seconds=0.1, failing={3}, too_large={5}, after_seconds=0.5
)

CALLS = st.builds(
    history,
    st.lists(st.tuples(st.integers(1, 20), st.floats(0.0, 3.0)), max_size=12),
    devices=st.integers(1, 4),
    in_flight=st.integers(1, 3),
    input_seconds=st.floats(0.0, 1.0),
    failing=st.sets(st.integers(0, 11), max_size=FAILURES_IN_A_ROW - 1),
    too_large=st.sets(st.integers(0, 11)),
    slowness=st.lists(st.floats(0.5, 5.0), max_size=4),
    after_seconds=st.floats(0.0, 1.0),
)


@settings(deadline=None)
@given(CALLS)
def test_times_and_rows_add_up(tmp_path_factory: pytest.TempPathFactory, events: list[Event]) -> None:
    report = report_of(events)
    assert report.rows == report.expected_rows == sum(each.rows for each in report.devices)
    for each in report.devices:
        spans = [span for span in report.spans if span.shard.device == each.device]
        own = [(span.started_seconds, span.finished_seconds) for span in spans]
        points = sorted({*itertools.chain(*own)})
        covered = sum(b - a for a, b in itertools.pairwise(points) if any(s <= a and b <= e for s, e in own))
        assert each.busy_seconds == pytest.approx(covered)
        assert each.busy_seconds + each.idle_seconds == pytest.approx(report.wall_seconds)
        assert 0.0 <= each.waiting_seconds <= each.idle_seconds
    assert json.loads(json.dumps(report.to_dict())) == report.to_dict()
    assert str(report)
    path = tmp_path_factory.mktemp("trace") / "trace.json"
    report.save_trace(path)
    _check_trace(json.loads(path.read_text())["traceEvents"], report)


def _check_trace(found: list[dict[str, Any]], report: Report) -> None:
    """Spans of one track never overlap, and no track is wasted."""
    names = [each["args"]["name"] for each in found if each["ph"] == "M"]
    assert names == [f"GPU:{i}" for i in range(len(report.devices))]
    chunks = [each for each in found if each["ph"] == "X"]
    assert len(chunks) == len(report.spans)
    chunks.sort(key=lambda each: (each["pid"], each["tid"], each["ts"], each["dur"]))
    for a, b in itertools.pairwise(chunks):
        assert (a["pid"], a["tid"]) != (b["pid"], b["tid"]) or a["ts"] + a["dur"] <= b["ts"] + 1e-3  # microseconds
    for each in chunks:
        assert each["tid"] < sum(o["pid"] == each["pid"] and o["ts"] <= each["ts"] for o in chunks)


def test_a_report_counts_what_happened() -> None:
    report = report_of(MANY, traces=1)
    assert (report.engine, report.traces, report.error) == ("chunks", 1, None)
    assert report.rows == report.expected_rows == 120
    assert report.retries == 2
    assert sum(each.back_offs for each in report.devices) == 1
    assert sum(each.calls for each in report.devices) == len(report.spans) == 12 + 3  # one ran in halves
    assert sum(span.outcome == "failed" for span in report.spans) == 2
    assert [each.device for each in report.devices] == [device(0), device(1), device(2)]
    assert sum(each.share for each in report.devices) == pytest.approx(1.0)
    assert report.wall_seconds == MANY[-1].seconds
    assert report.rows_per_second == pytest.approx(120 / report.wall_seconds)
    empty = report_of(history([]))
    assert (empty.rows, empty.rows_per_second, empty.wall_seconds, empty.advice) == (0, 0.0, 0.0, ())
    assert "0 rows in 0 s" in str(empty)


def test_the_number_of_spans_is_bounded() -> None:
    report = report_of(history([(1, 0.5)] * 10_050, devices=1))
    assert (report.rows, report.devices[0].calls, len(report.spans)) == (10_050, 10_050, 10_000)
    assert report.devices[0].busy_seconds == report.spans[-1].finished_seconds == report.wall_seconds == 5025.0


@pytest.mark.parametrize("kind", [ChunkFailed, DeviceLost, CallFinished])
def test_a_call_that_failed_says_why_and_keeps_no_error(kind: Any) -> None:
    error, shard = tf.errors.UnavailableError(None, None, "gone"), Shard("CPU:0", 0, 1)
    kept = weakref.ref(error)
    given = {ChunkFailed: (shard, 0.0, error), DeviceLost: ("CPU:0", error), CallFinished: (error,)}[kind]
    report = report_of([CallStarted(0.0, 1, ("CPU:0",)), ChunkStarted(0.0, shard, 0.0), kind(1.0, *given)])
    assert report.error == ("UnavailableError: gone" if kind is CallFinished else None)
    assert ("stopped by UnavailableError: gone" in str(report)) == (kind is CallFinished)
    del error, given
    gc.collect()
    assert kept() is None


def test_calls_that_are_interrupted() -> None:
    events = [event for event in MANY if event.seconds < 1.0]
    report = report_of([*events, CallFinished(2.0, KeyboardInterrupt())])
    assert {span.outcome for span in report.spans} == {"unfinished"}
    assert {span.finished_seconds for span in report.spans} == {report.wall_seconds} == {2.0}
    assert [each.busy_seconds + each.idle_seconds for each in report.devices] == [2.0] * 3
    assert (report.rows, report.error) == (0, "KeyboardInterrupt: KeyboardInterrupt")
    assert "stopped by closing the stream before" in str(report_of([*events, CallFinished(2.0, GeneratorExit())]))
    assert report_of(events).rows == 0  # without an end: after a second Ctrl-C


def test_it_prints_as_a_plain_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "90")
    text = str(report_of(history([(10, 1.0)] * 4 + [(3, 0.5)], devices=2), traces=1))
    assert text == (
        "43 rows in 2.5 s (17.2 rows/s) in 5 chunks on 2 devices, 1 trace\n"
        "\n"
        "device  rows  share  calls   busy   idle\n"
        "GPU:0     23    53%      3  2.5 s    0 s\n"
        "GPU:1     20    47%      2    2 s  0.5 s\n"
        "\n"
        "* the first device ran out of work 0.5 s before the end: use a smaller batch_size"
    )


def test_terminals_notebooks_and_the_repl_show_it() -> None:
    report = report_of(MANY, traces=1)
    for width in (20, 40, 80, 200):
        assert max(map(len, text_of(report, width).splitlines())) <= width
    console = rich.console.Console(force_terminal=True, width=100, _environ={"TERM": "xterm"})
    with console.capture() as capture:
        console.print(report)
    assert "\x1b[1m" in capture.get()
    assert report._repr_html_().startswith("<pre>120 rows in ")
    assert repr(report) == str(report)


@pytest.mark.parametrize("events", [MANY, history([]), one_graph([5, 5], 1.0)], ids=["many", "none", "one graph"])
def test_it_plots_a_timeline(events: list[Event], tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    had_pyplot = "matplotlib.pyplot" in sys.modules
    for name, start in (("timeline.png", b"\x89PNG"), ("timeline.svg", b"<?xm")):
        report_of(events).plot(tmp_path / name)
        assert (tmp_path / name).read_bytes()[:4] == start
    assert ("matplotlib.pyplot" in sys.modules) == had_pyplot
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match="a plot needs matplotlib, which is not installed: pip install matplotlib"):
        report_of(events).plot(tmp_path / "none.png")


ARRIVALS = [
    # in turn, when the results of each shard arrived, when each began and was done
    (False, [1.0, 3.0, 2.0], [(0.0, 1.0), (0.0, 3.0), (0.0, 2.0)]),
    (True, [1.0, 3.0, 3.5], [(0.0, 1.0), (1.0, 3.0), (3.0, 3.5)]),
    (False, [-1.0, 9.0, 2.0], [(0.0, 0.0), (0.0, 4.0), (0.0, 2.0)]),  # the system clock was set
    (True, [2.0, 1.0, 3.0], [(0.0, 2.0), (2.0, 2.0), (2.0, 3.0)]),
]


@pytest.mark.parametrize(("in_turn", "at", "spans"), ARRIVALS)
def test_clocks_in_one_graph(in_turn: bool, at: list[float], spans: list[tuple[float, float]]) -> None:
    shards = [Shard(device(i), 2 * i, 2 * i + 2) for i in range(3)]
    arrivals = tf.constant([1000.0 + second for second in at] + [0.0], tf.float64)  # of one device more
    of_shards = shard_events(shards, 1000.0, 4.0, in_turn, arrivals)
    events = [CallStarted(0.0, 6, tuple(shard.device for shard in shards)), *of_shards, CallFinished(4.0, None)]
    report = report_of(events, "one graph", in_turn=in_turn)
    found = {span.shard: (span.started_seconds, span.finished_seconds) for span in report.spans}
    assert found == dict(zip(shards, spans))
    busy = [stop - start for start, stop in spans]
    assert [(each.busy_seconds, each.idle_seconds) for each in report.devices] == [(each, 4.0 - each) for each in busy]
    assert [event.seconds for event in events] == sorted(event.seconds for event in events)
    assert ("one after another" in str(report)) == in_turn


def test_one_graph_reports_how_long_each_device_was_busy() -> None:
    level = tf.Variable(0.0)
    ordered = lambda n: level.assign(0.5 * level + n)
    for fn, rows, in_turn in ((tf.sin, 4, False), (ordered, 6, True), (level.assign, 1, False)):
        mapper = devicemap.DeviceMap(fn, devices=["CPU:1", "CPU:2"])
        mapper(tf.range(float(rows)))
        report = mapper.report
        assert (report.engine, report.in_turn) == ("one graph", in_turn)
        busy = [each.busy_seconds for each in report.devices]
        assert 0.0 < (sum(busy) if in_turn else max(busy)) <= report.wall_seconds
