"""Advice after a call, from the numbers of its report. Pure functions.

The thresholds are judgements; no benchmark chose them.
"""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median
from typing import TYPE_CHECKING

from devicemap.events import short_name
from devicemap.inspect.plan_advice import remedies_for_loop
from devicemap.inspect.render import listed

if TYPE_CHECKING:
    from devicemap.inspect.report import Report

_SLOW = 0.5
"""A device is slow if it computes fewer rows per busy second than this share of the median of the others."""

_LONG_SECONDS = 0.5
"""Shorter calls get no advice about devices."""

_LONG_LOOP_SECONDS = 1.0
"""Shorter calls get no advice about rows that run one by one."""

_LOST_SHARE = 0.1
"""The least share of the time of the call for advice about lost time."""


def advise(report: Report) -> tuple[str, ...]:
    """Return one sentence for each finding, the most expensive first."""
    if report.in_turn:
        return ("the devices worked one after another, because fn depends on the order of rows: see explain",)
    return (
        *_about_loop(report),
        *(_about_balance(report) if report.wall_seconds > _LONG_SECONDS else ()),
        *_about_faults(report),
    )


def _about_loop(report: Report) -> Iterator[str]:
    if report.row_by_row is not None and report.wall_seconds > _LONG_LOOP_SECONDS:
        yield remedies_for_loop(report.row_by_row)


def _about_balance(report: Report) -> Iterator[str]:
    seconds, devices = report.wall_seconds, report.devices
    waiting = sum(device.waiting_seconds for device in devices) / (len(devices) * seconds)
    if waiting > _LOST_SHARE and waiting * seconds > _LONG_SECONDS:
        yield f"the devices waited {waiting:.0%} of the time for input: use prefetch, cache or more parallel calls of tf.data"
    unused = [short_name(device.device) for device in devices if not device.calls and not device.lost]
    smaller = any(len(span.shard) > 1 for span in report.spans)
    if 0 < len(unused) < len(devices):
        yield f"{listed(unused)} got no rows: {'use a smaller batch_size' if smaller else 'there were no more rows'}"
    ends = {span.shard.device: span.finished_seconds for span in report.spans}
    last = [ends[device.device] for device in devices if device.device in ends and not device.lost]
    if last and (tail := max(last) - min(last)) > _LOST_SHARE * seconds:
        remedy = "use a smaller batch_size" if smaller else "put the rows that take longest first"
        if smaller and report.engine == "one graph":
            remedy = "pass batch_size, so that idle devices get chunks"
        yield f"the first device ran out of work {tail:.2g} s before the end: {remedy}"
    speeds = {device.device: device.rows_per_busy_second for device in devices if device.rows_per_busy_second}
    for name, speed in speeds.items():
        others = median([each for other, each in speeds.items() if other != name] or [speed])
        if speed < _SLOW * others:
            yield (
                f"{short_name(name)} computed {speed:.3g} rows per busy second, the others {others:.3g}: it is slower, other "
                "programs use it, or its rows took longer"
            )


def _about_faults(report: Report) -> Iterator[str]:
    if report.lost_devices:
        yield f"{listed([*map(short_name, report.lost_devices)])} failed repeatedly and got no more chunks: see the errors"
    if names := [short_name(device.device) for device in report.devices if device.back_offs]:
        yield f"{listed(names)} ran out of memory and continued with fewer rows at a time: use a smaller batch_size"
