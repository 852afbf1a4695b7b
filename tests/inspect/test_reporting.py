"""What a report says of a call, in both ways of running."""

from __future__ import annotations

import gc
import json
import pathlib
import sys
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import rich.console
import tensorflow as tf
from graphs import partitions, placements
from histories import device, history, one_graph
from hypothesis import given, settings
from hypothesis import strategies as st

import devicemap
from devicemap.errors import DataError
from devicemap.inspect import recorder
from devicemap.inspect.gpu_usage import GpuUsage
from devicemap.inspect.recorder import GraphCall, Recorder
from devicemap.inspect.render import text_of
from devicemap.inspect.report import Report
from devicemap.run.graph_engine import GraphRun
from devicemap.types import (
    CallFinished,
    CallStarted,
    ChunkFailed,
    ChunkFinished,
    ChunkRetried,
    ChunkStarted,
    DeviceLost,
    Event,
    Shard,
)

MANY = history(
    [(10, 1.0)] * 12, devices=3, in_flight=2, input_seconds=0.1, failing={3}, too_large={5}, after_seconds=0.5
)

CALLS = st.builds(
    history,
    st.lists(st.tuples(st.integers(1, 20), st.floats(0.0, 3.0)), max_size=12),
    devices=st.integers(1, 4),
    in_flight=st.integers(1, 3),
    input_seconds=st.floats(0.0, 1.0),
    failing=st.sets(st.integers(0, 11)),
    too_large=st.sets(st.integers(0, 11)),
    slowness=st.lists(st.floats(0.5, 5.0), max_size=4),
    after_seconds=st.floats(0.0, 1.0),
)


@settings(deadline=None)
@given(CALLS)
def test_times_and_rows_add_up(events: list[Event]) -> None:
    report = Report.of(events)
    assert report.rows == report.expected_rows == sum(device.rows for device in report.devices)
    for device_report in report.devices:
        own = [span for span in report.spans if span.shard.device == device_report.device]
        busy, idle = device_report.busy_seconds, device_report.idle_seconds
        assert busy is not None
        assert idle is not None
        assert busy + idle == pytest.approx(report.wall_seconds)
        assert 0.0 <= busy <= report.wall_seconds
        assert busy <= sum(span.seconds for span in own) + 1e-9
        assert 0.0 <= device_report.waiting_seconds <= idle
    assert 0.0 <= (report.tail_seconds or 0.0) <= report.wall_seconds
    assert json.loads(json.dumps(report.to_dict())) == report.to_dict()
    assert str(report)


def test_a_report_counts_what_happened() -> None:
    report = Report.of(MANY, traces=1)
    assert (report.engine, report.rows, report.expected_rows, report.traces, report.error) == (
        "chunks",
        120,
        120,
        1,
        None,
    )
    assert (report.retries, report.back_offs, report.lost_devices) == (3, 2, ())  # one whole chunk, two halves of one
    assert sum(each.calls for each in report.devices) == 12 + 3
    assert [each.device for each in report.devices] == [device(0), device(1), device(2)]
    assert report.wall_seconds == MANY[-1].seconds
    assert report.rows_per_second == pytest.approx(120 / report.wall_seconds)


def test_time_of_chunks_in_flight_together_counts_once() -> None:
    (only,) = Report.of(history([(1, 2.0), (1, 2.0), (1, 2.0)], devices=1, in_flight=2, after_seconds=1.0)).devices
    assert (only.rows, only.calls, only.busy_seconds, only.idle_seconds) == (3, 3, 4.0, 1.0)


def test_a_device_does_not_wait_for_input_while_it_has_a_chunk() -> None:
    shards = [Shard(device(0), row, row + 1) for row in range(3)]
    events = [
        CallStarted(0.0, 3, (device(0),)),
        ChunkStarted(1.0, shards[0], waited_seconds=1.0),
        ChunkStarted(2.0, shards[1], waited_seconds=2.0),  # its place waited, the device did not from 1 s on
        ChunkFinished(3.0, shards[0], 1.0),
        ChunkFinished(4.0, shards[1], 2.0),
        ChunkStarted(4.5, shards[2], waited_seconds=1.5),
        ChunkFinished(6.0, shards[2], 4.5),
        CallFinished(6.0, None),
    ]
    (only,) = Report.of(events).devices
    assert (only.busy_seconds, only.idle_seconds, only.waiting_seconds) == (4.5, 1.5, 1.5)


def test_a_call_that_failed_says_why_and_keeps_no_error() -> None:
    error = ValueError("row 3 is odd")
    report = Report.of([*history([(4, 1.0)])[:-1], CallFinished(1.5, error)])
    assert report.error == "ValueError: row 3 is odd"
    assert "stopped by ValueError: row 3 is odd" in str(report)
    assert not any(value is error for value in vars(report).values())


def test_a_call_without_rows() -> None:
    report = Report.of(history([]))
    assert (report.rows, report.rows_per_second, report.wall_seconds, report.advice) == (0, 0.0, 0.0, ())
    assert "0 rows in 0 s" in str(report)


@pytest.mark.parametrize(
    ("events", "named"),
    [
        ([], "these 0 events hold []"),
        (MANY[:-1], "hold ['CallStarted']"),
        (MANY[1:], "hold ['CallFinished']"),
        (MANY + MANY, "hold ['CallStarted', 'CallFinished', 'CallStarted', 'CallFinished']"),
    ],
    ids=["none", "not finished", "not started", "two calls"],
)
def test_other_than_all_events_of_a_call_are_refused(events: list[Event], named: str) -> None:
    with pytest.raises(DataError, match="a report takes all events of one finished call") as caught:
        Report.of(events)
    assert named in str(caught.value)


def test_retries_after_running_out_of_memory_are_back_offs() -> None:
    def failed(at: float, start: int, stop: int) -> ChunkFailed:
        return ChunkFailed(at, Shard(device(0), start, stop), at - 1.0, MemoryError())

    def again(at: float, start: int, stop: int, attempt: int) -> ChunkRetried:
        return ChunkRetried(at, Shard(device(1), start, stop), attempt)

    report = Report.of(
        [
            CallStarted(0.0, 8, (device(0), device(1))),
            failed(1.0, 0, 8),
            again(1.0, 0, 8, 2),  # all of it once more, after another error
            failed(2.0, 0, 8),
            again(2.0, 0, 4, 1),
            again(2.0, 4, 8, 1),
            failed(3.0, 0, 4),
            again(3.0, 0, 2, 1),
            again(3.0, 2, 4, 1),
            CallFinished(4.0, MemoryError()),
        ]
    )
    assert [each.back_offs for each in report.devices] == [0, 4]
    assert [each.retries for each in report.devices] == [0, 5]
    assert [each.calls for each in report.devices] == [3, 0]


def test_to_dict_has_units_in_its_names() -> None:
    found = Report.of(MANY, usage=[GpuUsage(device(0), 45.0, 2**30)]).to_dict()
    assert set(found) == {
        "engine", "rows", "expected_rows", "wall_seconds", "rows_per_second", "traces", "retries", "back_offs",
        "tail_seconds", "lost_devices", "slow_devices", "row_by_row", "error", "advice", "devices",
    }  # fmt: skip
    assert set(found["devices"][0]) == {
        "device", "rows", "share", "calls", "busy_seconds", "idle_seconds", "waiting_seconds",
        "retries", "back_offs", "lost", "utilisation_percent", "memory_bytes",
    }  # fmt: skip
    assert (found["devices"][0]["utilisation_percent"], found["devices"][0]["memory_bytes"]) == (45.0, 2**30)
    assert sum(each["share"] for each in found["devices"]) == pytest.approx(1.0)


def test_it_prints_as_a_plain_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "90")
    text = str(Report.of(history([(10, 1.0)] * 4 + [(3, 0.5)], devices=2), traces=1))
    assert text == (
        "43 rows in 2.5 s (17.2 rows/s) in 5 chunks on 2 devices, 1 trace\n"
        "\n"
        "device  rows  share  calls   busy   idle\n"
        "GPU:0     23    53%      3  2.5 s    0 s\n"
        "GPU:1     20    47%      2    2 s  0.5 s\n"
        "\n"
        "* the first device ran out of work 0.5 s before the end: use a smaller batch_size"
    )


@pytest.mark.parametrize("width", [20, 40, 80, 200])
def test_it_keeps_to_the_width_of_the_terminal(width: int) -> None:
    report = Report.of(MANY, traces=1, usage=[GpuUsage(device(0), 45.0, 2**30)])
    assert max(map(len, text_of(report, width).splitlines())) <= width


def test_rich_prints_it_in_colour_and_notebooks_and_the_repl_show_it() -> None:
    report = Report.of(MANY)
    console = rich.console.Console(force_terminal=True, width=100, _environ={"TERM": "xterm"})
    with console.capture() as capture:
        console.print(report)
    assert "\x1b[1m" in capture.get()
    assert report._repr_html_().startswith("<pre>120 rows in ")
    assert repr(report) == str(report)


@pytest.mark.parametrize("suffix", ["png", "svg"])
@pytest.mark.parametrize("events", [MANY, history([]), one_graph([5, 5], 1.0)], ids=["many", "none", "one graph"])
def test_it_plots_a_timeline(events: list[Event], suffix: str, tmp_path: pathlib.Path) -> None:
    had_pyplot = "matplotlib.pyplot" in sys.modules
    path = tmp_path / f"timeline.{suffix}"
    Report.of(events).plot(path)
    assert path.read_bytes()[:4] == (b"\x89PNG" if suffix == "png" else b"<?xm")
    assert ("matplotlib.pyplot" in sys.modules) == had_pyplot


def test_without_the_extras_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match="a plot needs matplotlib, which is not installed: pip install matplotlib"):
        Report.of(MANY).plot(tmp_path / "timeline.png")


@pytest.mark.in_ci(1)
@pytest.mark.parametrize("batch_size", [None, 1])
def test_threads_may_ask_for_one_report(batch_size: int | None) -> None:
    mapper = devicemap.DeviceMap(lambda row: row + 1, devices=["CPU:0", "CPU:1", "CPU:2"], batch_size=batch_size)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(6) as pool:
            for _ in range(50):
                mapper(tf.range(10))
                assert {report.rows for report in pool.map(lambda _: mapper.report, range(6))} == {10}
    finally:
        sys.setswitchinterval(interval)


@pytest.mark.parametrize("kind", ["failed", "lost"])
def test_a_call_that_was_saved_keeps_no_error(kind: str) -> None:
    error = tf.errors.UnavailableError(None, None, "gone")
    kept = weakref.ref(error)
    recorder = Recorder("chunks", 0, {})
    recorder(CallStarted(0.0, 1, ("CPU:0",)))
    failed = ChunkFailed(1.0, Shard("CPU:0", 0, 1), 0.0, error)
    recorder(failed if kind == "failed" else DeviceLost(1.0, "CPU:0", error))
    recorder(CallFinished(2.0, None))
    del error, failed
    gc.collect()
    assert kept() is None


class Clock:
    """In place of the module `time`: the clock of the day, and one that began with the call."""

    def __init__(self, *times: float):
        self.times = list(times)
        self.time = lambda: 1000.0 + self.times[0]
        self.perf_counter = lambda: self.times.pop(0)


ARRIVALS = [
    # in turn, when each was there, when each began and was done, the tail
    (False, [1.0, 3.0, 2.0], [(0.0, 1.0), (0.0, 3.0), (0.0, 2.0)], 2.0),
    (True, [1.0, 3.0, 3.5], [(0.0, 1.0), (1.0, 3.0), (3.0, 3.5)], None),
    (False, [-1.0, 9.0, 2.0], [(0.0, 0.0), (0.0, 4.0), (0.0, 2.0)], 4.0),  # somebody set the clock of the day
    (True, [2.0, 1.0, 3.0], [(0.0, 2.0), (2.0, 2.0), (2.0, 3.0)], None),
]


@pytest.mark.parametrize(("in_turn", "at", "spans", "tail"), ARRIVALS)
def test_a_graph_with_clocks_tells_when_each_device_was_done(
    monkeypatch: pytest.MonkeyPatch,
    in_turn: bool,
    at: list[float],
    spans: list[tuple[float, float]],
    tail: float | None,
) -> None:
    monkeypatch.setattr(recorder, "time", Clock(0.0, 4.0))
    heard: list[Event] = []
    kept: list[GraphCall] = []
    shards = [Shard(device(i), 2 * i, 2 * i + 2) for i in range(3)]
    with GraphCall(6, [shard.device for shard in shards], 0, {}, [heard.append], kept.append) as call:
        arrivals = tf.constant([1000.0 + second for second in at] + [0.0], tf.float64)  # of one device more
        call.runs.append(GraphRun(shards, 1000.0, 4.0, in_turn, arrivals))
    report = kept[0].report()
    assert {span.shard: (span.started_seconds, span.finished_seconds) for span in report.spans} == dict(
        zip(shards, spans)
    )
    assert [(each.busy_seconds, each.idle_seconds) for each in report.devices] == [
        (stop - start, 4.0 - (stop - start)) for start, stop in spans
    ]
    assert report.tail_seconds == tail
    assert [event.seconds for event in heard] == sorted(event.seconds for event in heard)
    assert Report.of(heard, engine="one graph", traces=0) == report
    assert ("one after another" in str(report)) == in_turn


def test_one_graph_reports_how_long_each_device_was_busy() -> None:
    mapper = devicemap.DeviceMap(tf.sin, devices=["CPU:1", "CPU:2"])
    mapper(tf.range(4.0))
    report = mapper.report
    assert report.engine == "one graph"
    assert all(0.0 < each.busy_seconds <= report.wall_seconds for each in report.devices)
    assert [each.busy_seconds + each.idle_seconds for each in report.devices] == [report.wall_seconds] * 2


def test_a_graph_has_a_clock_for_each_device() -> None:
    x = tf.range(7.0)

    def mapper(*devices: str) -> devicemap.DeviceMap:
        return devicemap.DeviceMap(lambda n: n * n, devices=devices)

    def timestamps(function: Callable[..., Any]) -> int:
        return sum(placements(partitions(function, x), "Timestamp").values())

    workers = "CPU:1", "CPU:2", "CPU:3"  # in eager code, one more checks that graphs may read the clock
    assert timestamps(mapper(*workers)) in (3, 4)
    assert timestamps(tf.function(mapper(*workers))) in (0, 1)  # a stateful op would wait for those of the caller
    assert timestamps(mapper("CPU:1")) in (0, 1)
