"""Advice before a call, from a plan, and after it, from a report. Pure functions.

The thresholds are judgements; no benchmark chose them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from devicemap.events import short_name
from devicemap.inspect.render import counted, listed, size_text

if TYPE_CHECKING:
    from devicemap.inspect.plan import Plan
    from devicemap.inspect.report import Report

_LARGE_BYTES = 2**20
"""Copies of fewer bytes take less time than a call."""

_LONG_SECONDS = 1.0
"""Shorter calls get no advice about time."""

_LOST_SHARE = 0.1
"""The least share of the time of the call for advice about lost time."""


def advise_before(plan: Plan) -> tuple[str, ...]:
    """Return one sentence for each finding about a plan, the most expensive first."""
    return *_about_order(plan), *_about_devices(plan), *_about_rows(plan)


def quoted(names: Sequence[str]) -> str:
    """Return the first two of some names, and the number of the others."""
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
        # Each running call of Python holds one of TensorFlow's threads, so that there may be fewer slots than devices.
        used, count = _count_used(plan), len(plan.devices)
        few = used < (count if plan.rows is None else min(count, plan.rows))
        threads = (
            f" ({counted(used, 'device')}: see tf.config.threading.set_inter_op_parallelism_threads)" if few else ""
        )
        yield f"{listed(plan.python_ops)} calls Python, one call at a time for all devices{threads}: use TensorFlow ops instead"


def _about_devices(plan: Plan) -> Iterator[str]:
    count, rows, size = _count_used(plan), plan.rows, plan.batch_size
    if isinstance(size, int) and rows and min(rows, size) > 1 and rows <= size * (count - 1):
        chunks = -(-rows // size)
        yield f"{counted(rows, 'row')} make {counted(chunks, 'chunk')} for {count} devices: use a smaller batch_size"
    parts = defaultdict(list)
    for device in plan.devices:
        parts[device.gpu].append(short_name(device.device))
    for gpu, names in parts.items():
        if gpu is not None and len(names) > 1:
            yield f"{listed(names)} are parts of one GPU, where large kernels take turns: they may be no faster than one"


def _count_used(plan: Plan) -> int:
    """Return the number of devices that the call may use: some functions cannot use all of them."""
    return sum(0 not in (device.rows, device.shards, device.chunks_in_flight) for device in plan.devices)


def _about_rows(plan: Plan) -> Iterator[str]:
    if plan.remedy and not plan.ordered:
        yield f"rows run one by one because {plan.reason}: {plan.remedy}"
    copied = sum(each.size_bytes or 0 for each in plan.captured if each.handling.name == "COPIED")
    sizes = (plan.rows or 0) * ((plan.bytes_per_row or 0) + (plan.result_bytes_per_row or 0))
    if plan.engine == "one graph" and plan.rows and copied > max(_LARGE_BYTES, sizes):
        yield (
            f"each call copies {size_text(copied)} of variables to each other device, more than the {size_text(sizes)} of its "
            "rows and results: pass more rows per call"
        )


def advise_after(report: Report) -> tuple[str, ...]:
    """Return one sentence for each finding about a report, the most expensive first."""
    if report.in_turn:
        return ("the devices worked one after another, because fn depends on the order of rows: see explain",)
    lost_time = _about_time(report) if report.wall_seconds > _LONG_SECONDS else ()
    full = [short_name(device.device) for device in report.devices if device.back_offs]
    memory = f"{listed(full)} ran out of memory and continued with fewer rows at a time: use a smaller batch_size"
    return *lost_time, *([memory] if full else [])


def _about_time(report: Report) -> Iterator[str]:
    seconds, devices = report.wall_seconds, report.devices
    if report.row_by_row is not None:
        yield f"rows run one by one because {report.row_by_row}"
    waiting = sum(device.waiting_seconds for device in devices) / (max(1, len(devices)) * seconds)
    if waiting > _LOST_SHARE:
        yield f"the devices waited {waiting:.0%} of the time for input: use prefetch, cache or more parallel calls of tf.data"
    ends = {device.device: 0.0 for device in devices if not device.lost}
    ends |= {span.shard.device: span.finished_seconds for span in report.spans if span.shard.device in ends}
    tail = max(ends.values(), default=0.0) - min(ends.values(), default=0.0)
    if tail > _LOST_SHARE * seconds and report.rows >= len(ends):
        remedy = "use a smaller batch_size"
        if report.engine == "one graph":
            remedy = "pass batch_size, so that idle devices get chunks"
        if all(len(span.shard) == 1 for span in report.spans):
            remedy = "put the rows that take longest first"
        yield f"the first device ran out of work {tail:.2g} s before the end: {remedy}"
