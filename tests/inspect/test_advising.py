"""Stragglers and advice: numbers in, names and words out."""

from __future__ import annotations

import pytest
from histories import device, history

from devicemap.inspect.accounts import DeviceReport
from devicemap.inspect.report import Report
from devicemap.inspect.report_advice import slow_devices, tail_seconds
from devicemap.inspect.timeline import Span
from devicemap.types import Shard


def _worked(index: int, rows: int, busy_seconds: float | None) -> DeviceReport:
    return DeviceReport(device(index), rows, 1, busy_seconds, 0.0, 0.0, 0, 0, False, None, None)


def _spans(*ends: tuple[int, float, float]) -> list[Span]:
    return [Span(Shard(device(i), 10 * n, 10 * n + 10), *times, "finished") for n, (i, *times) in enumerate(ends)]


@pytest.mark.parametrize(
    ("rows_and_seconds", "slow"),
    [
        ([], []),
        ([(10, 1.0)], []),
        ([(10, 1.0), (10, 1.9)], []),
        ([(10, 1.0), (10, 2.1)], [1]),
        ([(10, 4.0), (10, 1.0), (10, 4.0), (10, 1.0)], [0, 2]),  # half of them
        ([(10, 1.0), (0, 1.0), (10, 0.0)], []),  # no speed to tell
        ([(10, 1.0), (1, None)], []),
    ],
)
def test_slow_devices_map_less_than_half_of_what_the_others_do(
    rows_and_seconds: list[tuple[int, float | None]], slow: list[int]
) -> None:
    reports = [_worked(index, *worked) for index, worked in enumerate(rows_and_seconds)]
    assert slow_devices(reports) == tuple(device(index) for index in slow)


def test_the_tail_is_from_the_first_idle_device_to_the_last_chunk() -> None:
    spans = _spans((0, 0.0, 1.0), (1, 0.0, 3.0), (0, 1.0, 2.0), (2, 0.0, 0.5))
    assert tail_seconds(spans) == 2.5
    assert tail_seconds(spans, lost=[device(2)]) == 1.0
    assert tail_seconds(spans[:1]) == tail_seconds([]) == 0.0


def test_an_even_call_gets_no_advice() -> None:
    assert Report.of(history([(10, 1.0)] * 8, devices=4), traces=1).advice == ()


@pytest.mark.parametrize(("seconds", "sentences"), [(0.9, 0), (1.1, 1)])
def test_advice_for_a_long_call_row_by_row(seconds: float, sentences: int) -> None:
    events = history([(10, seconds)] * 2, devices=2)
    advice = Report.of(events, row_by_row="Foo has no tested vectorised form (`foo(x)`, line 12 of ode.py)").advice
    assert len(advice) == sentences
    assert all("`foo(x)`, line 12 of ode.py): pass vectorize=True, and compare" in line for line in advice)
    assert Report.of(events).advice == ()


def test_advice_for_a_slow_input() -> None:
    (advice,) = Report.of(history([(10, 0.5)] * 10, devices=1, input_seconds=1.0)).advice
    assert advice == (
        "the devices waited 52% of the time for input: add .prefetch, .cache or more parallel calls to the input pipeline"
    )


def test_advice_for_a_long_last_chunk() -> None:
    (advice,) = Report.of(history([(10, 1.0), (10, 1.0), (10, 0.8)], devices=2)).advice
    assert advice == "the first device ran out of work 0.8 s before the end: use a smaller batch_size"
    (advice, *_) = Report.of(history([(1, 1.0), (1, 1.0), (1, 3.0)], devices=2)).advice
    assert advice.endswith("before the end: let rows that take long come first")


def test_advice_for_too_few_chunks() -> None:
    assert Report.of(history([(10, 1.0)] * 2, devices=4)).advice == (
        "GPU:2 and GPU:3 got no rows, as there were too few chunks: use a smaller batch_size",
    )
    assert Report.of(history([(1, 1.0)] * 2, devices=3)).advice == (
        "GPU:2 got no rows, as there were too few chunks: there were no more rows",
    )


def test_advice_for_a_slow_device() -> None:
    report = Report.of(history([(10, 1.0)] * 9, devices=3, slowness=[1, 1, 4]))
    assert report.slow_devices == (device(2),)
    assert report.advice == (
        "GPU:2 mapped 2.5 rows per busy second, the others 10: it is slower, shared with other programs, or its rows took "
        "more work",
    )


def test_advice_for_lost_devices_and_for_running_out_of_memory() -> None:
    report = Report.of(history([(2, 1.0)] * 4, devices=3, lost=2))
    assert report.advice == ("GPU:2 kept failing and got no more chunks: see the errors",)
    assert (report.lost_devices, report.devices[2].lost) == ((device(2),), True)
    assert "GPU:2 (lost)" in str(report)
    assert Report.of(history([(2, 1.0)] * 4, devices=1, too_large={0})).advice == (
        "GPU:0 ran out of memory and tried again with fewer rows at a time: use a smaller batch_size",
    )
