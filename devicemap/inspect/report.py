"""The result of `DeviceMap.report`: the work of each device in a call."""

from __future__ import annotations

import itertools
import json
import os
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from devicemap.events import FailedRow, Shard, short_name
from devicemap.inspect.render import BLUE, ORANGE, Result, counted, drawing, listed, page, seconds_text, table

_COLOURS = {"finished": BLUE, "failed": ORANGE, "unfinished": "tab:grey"}
_INCHES_PER_LANE = 0.4

_LONG_SECONDS = 1.0
"""Shorter calls get no advice about time. A judgement; no benchmark chose it."""

_LOST_SHARE = 0.1
"""The least share of the time of the call for advice about lost time. A judgement, too."""


@dataclass(frozen=True)
class Span:
    """One attempt to compute the rows of a chunk on a device."""

    shard: Shard
    """Its rows and its device."""

    started_seconds: float
    """When it started, in seconds since the call began."""

    finished_seconds: float
    """When it finished or failed, or the call ended, in seconds since the call began."""

    outcome: Literal["finished", "failed", "unfinished"]
    """`"unfinished"`: the call ended first."""

    @property
    def seconds(self) -> float:
        """Duration."""
        return self.finished_seconds - self.started_seconds


@dataclass
class DeviceReport:
    """The work of one device in one call."""

    device: str
    """Full name."""

    rows: int = 0
    """Rows that it computed."""

    share: float = 0.0
    """These rows, divided by the rows of all devices."""

    calls: int = 0
    """Chunks, or shards of one graph, that finished or failed."""

    busy_seconds: float = 0.0
    """Time with at least one chunk in flight. In one graph, it is the duration of the call after
    `tf.config.experimental.enable_op_determinism()`, which forbids clocks in graphs."""

    idle_seconds: float = 0.0
    """The rest of the duration of the call."""

    waiting_seconds: float = 0.0
    """The part of the idle time in which rows were being read."""

    retries: int = 0
    """Chunks that it started after they had failed, here or on another device."""

    back_offs: int = 0
    """The retries with fewer rows, after it ran out of memory."""

    lost: bool = False
    """Whether it failed repeatedly and got no more chunks."""

    utilisation_percent: float | None = None
    """Mean share of time in which the GPU ran a kernel of any program, 0 to 100. `None` without `nvidia-ml-py`, in one graph,
    on other devices, and for calls of less than 0.5 s."""


@dataclass(frozen=True, repr=False)
class Report(Result):
    """The report of one call. `print(report)` shows a table.

    Examples:
        >>> import tensorflow as tf
        >>> from devicemap import DeviceMap
        >>> mapper = DeviceMap(lambda n: n * n, devices=["CPU:0"], batch_size=5)
        >>> _ = mapper(tf.range(10))
        >>> report = mapper.report
        >>> report.engine, report.rows, report.devices[0].calls, report.retries
        ('chunks', 10, 2, 0)
    """

    engine: Literal["one graph", "chunks"]
    """`"one graph"`: all devices in one graph. `"chunks"`: chunks to idle devices."""

    rows: int
    """Number of rows that were mapped."""

    expected_rows: int | None
    """Number of rows to map, `None` if unknown."""

    wall_seconds: float
    """Duration."""

    traces: int
    """Number of times that `fn` was traced since the previous call."""

    error: str | None
    """The error that ended the call, `None` if all rows were mapped."""

    devices: tuple[DeviceReport, ...]
    """A report for each device."""

    spans: tuple[Span, ...]
    """The last 10,000 attempts to compute a chunk, in the order in which they ended."""

    failed_rows: tuple[FailedRow, ...] = ()
    """The rows that were left out because of `on_error="skip"`, in their order."""

    row_by_row: str | None = None
    """Why `fn` ran row by row, and what to try; `None` if it did not, or with `vectorize=False`."""

    in_turn: bool = False
    """Whether the devices worked one after another, because `fn` depends on the order of rows."""

    @property
    def rows_per_second(self) -> float:
        """Number of rows, divided by the duration."""
        return self.rows / self.wall_seconds if self.wall_seconds else 0.0

    @property
    def retries(self) -> int:
        """Number of chunks that were started after they had failed."""
        return sum(device.retries for device in self.devices)

    @property
    def advice(self) -> tuple[str, ...]:
        """Reasons for lost time in the call, with remedies, the most expensive first."""
        if self.in_turn:
            return ("the devices worked one after another, because fn depends on the order of rows: see explain",)
        lost_time = _about_time(self) if self.wall_seconds > _LONG_SECONDS else ()
        full = [short_name(device.device) for device in self.devices if device.back_offs]
        memory = f"{listed(full)} ran out of memory and continued with fewer rows at a time: use a smaller batch_size"
        return *lost_time, *([memory] if full else [])

    @property
    def summary(self) -> str:
        """The call in one line."""
        rows = counted(self.rows, "row")
        if self.expected_rows not in (None, self.rows):
            rows = f"{self.rows} of {self.expected_rows} rows"
        calls = sum(device.calls for device in self.devices)
        engine = "in one graph" if self.engine == "one graph" else f"in {counted(calls, 'chunk')}"
        return (
            f"{rows} in {self.wall_seconds:.3g} s ({self.rows_per_second:.3g} rows/s) {engine} on "
            f"{counted(len(self.devices), 'device')}, {counted(self.traces, 'trace')}"
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the report without its spans as JSON values. Names contain units."""
        values = super().to_dict()
        del values["spans"]
        return values

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Draw the timeline, a bar per chunk and device. The suffix of `path` selects the file format.

        Raises:
            ImportError: matplotlib is not installed.
        """
        lanes, names = _lanes_of(self.spans), [device.device for device in self.devices]
        depths = [
            1 + max((lane for s, lane in zip(self.spans, lanes) if s.shard.device == d), default=0) for d in names
        ]
        tops = dict(zip(names, itertools.accumulate(depths, initial=0)))
        bars: dict[tuple[int, str], list[tuple[float, float]]] = defaultdict(list)
        for span, lane in zip(self.spans, lanes):
            bars[tops[span.shard.device] + lane, _COLOURS[span.outcome]].append((span.started_seconds, span.seconds))
        with drawing(path, 9.0, 1.4 + _INCHES_PER_LANE * max(sum(depths), 3)) as figure:
            axes = figure.add_subplot()
            for (row, colour), times in bars.items():  # a call of `barh` takes seconds for thousands of spans
                axes.broken_barh(times, (row + 0.1, 0.8), facecolors=colour, edgecolors="white", linewidth=0.2)
            axes.hlines([*tops.values()], 0, 1, transform=axes.get_yaxis_transform(), color="lightgrey", linewidth=0.5)
            axes.set_yticks([tops[d] + depth / 2 for d, depth in zip(names, depths)], [*map(short_name, names)])
            xlabel = "seconds since the call began (orange: failed, grey: unfinished)"
            axes.set(xlim=(0, None), ylim=(max(sum(depths), 1), 0), xlabel=xlabel, title=self.summary)

    def save_trace(self, path: str | os.PathLike[str]) -> None:
        """Write the timeline as a JSON file for chrome://tracing or https://ui.perfetto.dev. Devices are processes."""
        devices = [device.device for device in self.devices]
        names = [
            {"name": "process_name", "ph": "M", "pid": pid, "args": {"name": short_name(device)}}
            for pid, device in enumerate(devices)
        ]
        chunks = [
            {
                "name": f"rows {span.shard.start} to {span.shard.stop - 1}",
                "cat": span.outcome,
                "ph": "X",
                "pid": devices.index(span.shard.device),
                "tid": lane,
                "ts": 1e6 * span.started_seconds,
                "dur": 1e6 * span.seconds,
            }
            for span, lane in zip(self.spans, _lanes_of(self.spans))
        ]
        Path(path).write_text(json.dumps({"traceEvents": [*names, *chunks]}), encoding="utf-8")

    def __rich__(self) -> Any:
        notes = [f"stopped by {self.error}"] if self.error else []
        if self.failed_rows:
            first = self.failed_rows[0]
            failed = f"left out {counted(len(self.failed_rows), 'row')} that failed"
            notes.append(f"{failed}; the first: row {first.row} on {short_name(first.device)}: {first.error}")
        notes += [f"* {line}" for line in self.advice]
        return page(self.summary, table([*map(_cells_of, self.devices)], nothing="-"), notes=notes)


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


def _lanes_of(spans: Sequence[Span]) -> list[int]:
    """Return a lane for each span, from 0 on each device, so that no two spans overlap in one lane."""
    ends: dict[str, list[float]] = defaultdict(list)
    lanes = [0] * len(spans)
    for index in sorted(range(len(spans)), key=lambda i: spans[i].started_seconds):
        span = spans[index]
        own = ends[span.shard.device]
        lane = next((lane for lane, end in enumerate(own) if end <= span.started_seconds), len(own))
        own[lane : lane + 1] = [span.finished_seconds]
        lanes[index] = lane
    return lanes


def _cells_of(device: DeviceReport) -> dict[str, str]:
    return {
        "device": short_name(device.device) + " (lost)" * device.lost,
        "rows": str(device.rows),
        "share": f"{device.share:.0%}",
        "calls": str(device.calls),
        "busy": seconds_text(device.busy_seconds),
        "idle": seconds_text(device.idle_seconds),
        "waiting": seconds_text(device.waiting_seconds) if device.waiting_seconds else "",
        "retries": str(device.retries or ""),
        "back-offs": str(device.back_offs or ""),
        "GPU in use": "" if device.utilisation_percent is None else f"{device.utilisation_percent:.0f}%",
    }
