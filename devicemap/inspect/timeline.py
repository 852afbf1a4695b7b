"""The timeline of a call: its spans, as a picture or a Chrome trace."""

from __future__ import annotations

import itertools
import json
import os
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from devicemap.events import Shard, short_name
from devicemap.inspect.render import BLUE, ORANGE, drawing

_COLOURS = {"finished": BLUE, "failed": ORANGE, "unfinished": "tab:grey"}
_INCHES_PER_LANE = 0.4


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


def lanes_of(spans: Sequence[Span]) -> list[int]:
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


def save_trace(spans: Sequence[Span], devices: Sequence[str], path: str | os.PathLike[str]) -> None:
    """Write spans in Chrome's trace event format, for chrome://tracing and https://ui.perfetto.dev. Devices are processes."""
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
        for span, lane in zip(spans, lanes_of(spans))
    ]
    Path(path).write_text(json.dumps({"traceEvents": [*names, *chunks]}), encoding="utf-8")


def save_plot(spans: Sequence[Span], devices: Sequence[str], title: str, path: str | os.PathLike[str]) -> None:
    """Draw a bar per span over the seconds of the call, and a band per device, from the top."""
    lanes = lanes_of(spans)
    depths = [1 + max((lane for s, lane in zip(spans, lanes) if s.shard.device == d), default=0) for d in devices]
    tops = dict(zip(devices, itertools.accumulate(depths, initial=0)))
    bars: dict[tuple[int, str], list[tuple[float, float]]] = defaultdict(list)
    for span, lane in zip(spans, lanes):
        bars[tops[span.shard.device] + lane, _COLOURS[span.outcome]].append((span.started_seconds, span.seconds))
    with drawing(path, 9.0, 1.4 + _INCHES_PER_LANE * max(sum(depths), 3)) as figure:
        axes = figure.add_subplot()
        for (row, colour), times in bars.items():  # a call of `barh` takes seconds for thousands of spans
            axes.broken_barh(times, (row + 0.1, 0.8), facecolors=colour, edgecolors="white", linewidth=0.2)
        axes.hlines([*tops.values()], 0, 1, transform=axes.get_yaxis_transform(), color="lightgrey", linewidth=0.5)
        axes.set_yticks([tops[d] + depth / 2 for d, depth in zip(devices, depths)], [*map(short_name, devices)])
        axes.set(
            ylim=(max(sum(depths), 1), 0), xlabel="seconds since the call began (orange: failed, grey: unfinished)"
        )
        axes.set_xlim(left=0.0)
        axes.set_title(title)
