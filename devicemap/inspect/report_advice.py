"""What held a call up, and what to do about it: numbers of a report -> names and plain words. Pure.

The thresholds are judgements about what is worth a sentence; no benchmark chose them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import median
from typing import TYPE_CHECKING

from devicemap.inspect.accounts import DeviceReport
from devicemap.inspect.plan_advice import remedies_for_loop
from devicemap.inspect.render import listed, short_names
from devicemap.inspect.timeline import Span, ran_in_turn

if TYPE_CHECKING:
    from devicemap.inspect.report import Report

_SLOW = 0.5
"""A device is slow that maps fewer rows per busy second than this share of the others' median."""

_LONG_SECONDS = 0.5
"""Calls, and waits, that take less say nothing of the devices."""

_LONG_LOOP_SECONDS = 1.0
"""Calls that run rows one by one for longer than this get advice about it."""

_WORTH_SAYING = 0.1
"""Time that was lost is worth saying from this share of the call's time on."""


def slow_devices(devices: Sequence[DeviceReport]) -> tuple[str, ...]:
    """Full names of the devices that mapped fewer than half as many rows per busy second as the others' median."""
    speeds = {device.device: speed for device in devices if (speed := device.rows_per_busy_second) is not None}
    others = {name: [speed for other, speed in speeds.items() if other != name] for name in speeds}
    return tuple(name for name, speed in speeds.items() if others[name] and speed < _SLOW * median(others[name]))


def tail_seconds(spans: Sequence[Span], lost: Sequence[str] = ()) -> float:
    """How long before the last chunk ended the first device had nothing more to do, among those that worked.

    A device in `lost` is not counted: it had its own reason to stop.
    """
    last: dict[str, float] = {}
    for span in spans:
        if span.shard.device not in lost:
            last[span.shard.device] = max(span.finished_seconds, last.get(span.shard.device, 0.0))
    return max(last.values()) - min(last.values()) if last else 0.0


def advise(report: Report) -> tuple[str, ...]:
    """What to change, a sentence or two for each thing that is worth it; the most telling first."""
    if report.engine == "one graph" and ran_in_turn(report.spans):
        return ("the devices worked one after another, since fn depends on the order of rows: see explain",)
    return *_about_loop(report), *_about_balance(report)


def _about_loop(report: Report) -> Iterator[str]:
    if report.row_by_row is not None and report.wall_seconds > _LONG_LOOP_SECONDS:
        yield remedies_for_loop(report.row_by_row)


def _about_balance(report: Report) -> Iterator[str]:
    devices, wall_seconds, tail = report.devices, report.wall_seconds, report.tail_seconds or 0.0
    names = short_names(device.device for device in devices)
    long = wall_seconds > _LONG_SECONDS
    waiting = sum(device.waiting_seconds for device in devices) / (len(devices) * wall_seconds or 1.0)
    if waiting > _WORTH_SAYING and waiting * wall_seconds > _LONG_SECONDS:
        yield (
            f"the devices waited {waiting:.0%} of the time for input: add .prefetch, .cache or more parallel calls to "
            "the input pipeline"
        )
    out_of_work = [names[device.device] for device in devices if not device.calls and not device.lost]
    if long and out_of_work and len(out_of_work) < len(devices):
        cure = "use a smaller batch_size" if any(len(s.shard) > 1 for s in report.spans) else "there were no more rows"
        yield f"{listed(out_of_work)} got no rows, as there were too few chunks: {cure}"
    if long and tail > _WORTH_SAYING * wall_seconds:
        cure = "let rows that take long come first"
        if any(len(span.shard) > 1 for span in report.spans):
            in_graph = report.engine == "one graph"
            cure = "pass batch_size, for chunks that go to idle devices" if in_graph else "use a smaller batch_size"
        yield f"the first device ran out of work {tail:.2g} s before the end: {cure}"
    speeds = {device.device: device.rows_per_busy_second or 0.0 for device in devices}
    for slow in report.slow_devices if long else ():
        others = median(speed for name, speed in speeds.items() if name != slow and speed)
        yield (
            f"{names[slow]} mapped {speeds[slow]:.3g} rows per busy second, the others {others:.3g}: it is slower, "
            "shared with other programs, or its rows took more work"
        )
    if lost := [names[device] for device in report.lost_devices]:
        yield f"{listed(lost)} kept failing and got no more chunks: see the errors"
    if backed_off := [names[device.device] for device in devices if device.back_offs]:
        yield f"{listed(backed_off)} ran out of memory and tried again with fewer rows at a time: use a smaller batch_size"
