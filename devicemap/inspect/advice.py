"""Advice before a call, from a plan, and after it, from a report: what prevents parallelism, and what to do. Pure functions.

The thresholds are judgements; no benchmark chose them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from statistics import median
from typing import TYPE_CHECKING

from devicemap.compile.vectorize import may_be_forced
from devicemap.events import short_name
from devicemap.inspect.render import counted, listed, size_text

if TYPE_CHECKING:
    from devicemap.inspect.plan import Plan
    from devicemap.inspect.report import Report

_LARGE_BYTES = 2**20
"""Copies of fewer bytes take less time than a call."""

_SLOW = 0.5
"""A device is slow if it computes fewer rows per busy second than this share of the median of the others."""

_LONG_SECONDS = 1.0
"""Shorter calls get advice about faults only."""

_LOST_SHARE = 0.1
"""The least share of the time of the call for advice about lost time."""


def advise_before(plan: Plan) -> tuple[str, ...]:
    """Return one sentence for each finding, the most expensive first."""
    findings = _about_order(plan), _about_devices(plan), _about_rows(plan), _about_captured(plan)
    return tuple(sentence for finding in findings for sentence in finding)


def reason_for_loop(batched: bool, vectorized: bool, ordered: bool, reason: str) -> str | None:
    """Return why rows run one by one; `None` if they do not, or if the user asked for it."""
    return None if batched or vectorized or ordered or reason == "vectorize=False" else reason


def remedies_for_loop(reason: str) -> str:
    """Return the advice for rows that run one by one, with the remedies in the order in which to try them."""
    remedies = ["use another op there, or pass batched=True and a fn of a whole batch"]
    if may_be_forced(reason):
        remedies.insert(0, "pass vectorize=True, and compare the results with DeviceMap.verify")
    return f"rows run one by one because {reason}: {'; or else '.join(remedies)}"


def quoted(names: Sequence[str]) -> str:
    """Return the first two of some names."""
    others = [f"{len(names) - 2} more"] if len(names) > 2 else []
    return listed([*(f"`{name}`" for name in names[:2]), *others])


def _about_order(plan: Plan) -> Iterator[str]:
    if len(plan.devices) < 2:
        return
    if plan.ordered:
        keras = any(name.rpartition("/")[2].startswith("moving_") for name in plan.ordered)
        remedy = "call batch normalization with training=False" if keras else "use assign_add, or return the new value"
        yield f"the devices work one after another, because fn writes {quoted(plan.ordered)} in row order: {remedy}"
    if plan.fixed_seeds:
        yield (
            f"one device computes all rows, because the seeds of {listed(plan.fixed_seeds)} are the same in every trace: use "
            "the option seed= with tf.random.stateless_* ops"
        )
    if plan.python_ops:
        yield f"{listed(plan.python_ops)} calls Python, one call at a time for all devices: use TensorFlow ops instead"


def _about_devices(plan: Plan) -> Iterator[str]:
    count, rows = len(plan.devices), plan.rows
    idle = sum(device.rows == 0 for device in plan.devices)
    if plan.engine == "one graph" and idle and rows is not None:
        why = ""
        if plan.python_ops and rows > count - idle:
            why = ": each call of Python holds a thread, see tf.config.threading.set_inter_op_parallelism_threads"
        yield f"{counted(idle, 'device')} of {count} get no rows, of {rows}{why}"
    elif isinstance(plan.batch_size, int) and rows and not plan.ordered and rows <= plan.batch_size * (count - 1):
        chunks = -(-rows // plan.batch_size)
        yield f"{counted(rows, 'row')} make {counted(chunks, 'chunk')} for {count} devices: use a smaller batch_size"
    parts = defaultdict(list)
    for device in plan.devices:
        parts[device.gpu].append(short_name(device.device))
    for gpu, names in parts.items():
        if gpu is not None and len(names) > 1:
            yield f"{listed(names)} are parts of one GPU, where large kernels take turns: they may be no faster than one"


def _about_rows(plan: Plan) -> Iterator[str]:
    reason = reason_for_loop(plan.batched, plan.vectorized, bool(plan.ordered), plan.reason)
    if reason is not None:
        yield remedies_for_loop(reason)


def _about_captured(plan: Plan) -> Iterator[str]:
    copied = 0
    for each in plan.captured:
        if each.handling.name == "COPIED":
            copied += each.size_bytes or 0
        elif each.handling.name in ("ATOMIC", "LOOKED_UP") and {each.device} != {d.device for d in plan.devices}:
            often = "batch" if plan.batched else "row"
            yield f"all devices use `{each.name}` on {short_name(each.device)} for each {often}: fn should be expensive"
    rows = (plan.rows or 0) * ((plan.bytes_per_row or 0) + (plan.result_bytes_per_row or 0))
    if plan.engine == "one graph" and plan.rows and copied > max(_LARGE_BYTES, rows):
        yield (
            f"each call copies {size_text(copied)} of variables to each other device, more than the {size_text(rows)} of its "
            "rows and results: pass more rows per call"
        )


def advise_after(report: Report) -> tuple[str, ...]:
    """Return one sentence for each finding, the most expensive first."""
    if report.in_turn:
        return ("the devices worked one after another, because fn depends on the order of rows: see explain",)
    return *(_about_time(report) if report.wall_seconds > _LONG_SECONDS else ()), *_about_faults(report)


def _about_time(report: Report) -> Iterator[str]:
    seconds, devices = report.wall_seconds, report.devices
    if report.row_by_row is not None:
        yield remedies_for_loop(report.row_by_row)
    waiting = sum(device.waiting_seconds for device in devices) / (len(devices) * seconds)
    if waiting > _LOST_SHARE:
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
    speeds = {
        device.device: device.rows / device.busy_seconds for device in devices if device.rows and device.busy_seconds
    }
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
