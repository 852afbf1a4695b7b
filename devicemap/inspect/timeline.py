"""The timeline of one call: events -> spans, their lanes, and a picture."""

from __future__ import annotations

import itertools
import os
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from devicemap.events import CallFinished, ChunkFailed, ChunkFinished, ChunkStarted, Event, Shard
from devicemap.inspect.render import figure_class, short_names

_COLOURS = {"finished": "tab:blue", "failed": "tab:red", "unfinished": "tab:grey"}
_INCHES_PER_LANE = 0.3


@dataclass(frozen=True)
class Span:
    """One attempt to compute the rows of a chunk, on one device."""

    shard: Shard
    """Its rows and its device."""

    started_seconds: float
    """When it was handed to the device, in seconds since the call began."""

    finished_seconds: float
    """When its results were there, or it failed, or the call ended, in seconds since the call began."""

    outcome: Literal["finished", "failed", "unfinished"]
    """`"unfinished"`: the call ended first."""

    @property
    def seconds(self) -> float:
        """How long it took."""
        return self.finished_seconds - self.started_seconds


def spans_of(events: Iterable[Event]) -> tuple[Span, ...]:
    """The spans of one call, in the order in which they ended."""
    under_way: dict[Shard, list[float]] = defaultdict(list)
    spans = []
    for event in events:
        if isinstance(event, ChunkStarted):
            under_way[event.shard].append(event.seconds)
        elif isinstance(event, ChunkFinished | ChunkFailed):
            del under_way[event.shard][:1]
            outcome: Literal["finished", "failed"] = "finished" if isinstance(event, ChunkFinished) else "failed"
            spans.append(Span(event.shard, event.started_seconds, event.seconds, outcome))
        elif isinstance(event, CallFinished):
            left = [(shard, start) for shard, starts in under_way.items() for start in starts]
            spans += [Span(shard, start, event.seconds, "unfinished") for shard, start in left]
    return tuple(spans)


def union_seconds(intervals: Iterable[tuple[float, float]]) -> float:
    """How long at least one of the `(start, stop)` intervals lasted.

    >>> union_seconds([(0.0, 2.0), (1.0, 3.0), (5.0, 6.0)])
    4.0
    """
    total, reached = 0.0, float("-inf")
    for start, stop in sorted(intervals):
        total += max(0.0, stop - max(start, reached))
        reached = max(reached, stop)
    return total


def ran_in_turn(spans: Sequence[Span]) -> bool:
    """Whether there are several spans, and each began when the one before it had ended."""
    in_order = sorted(spans, key=lambda span: span.started_seconds)
    pairs = itertools.pairwise(in_order)
    return len(spans) > 1 and all(before.finished_seconds <= after.started_seconds for before, after in pairs)


def lanes_of(spans: Sequence[Span]) -> tuple[int, ...]:
    """A lane for each span, counted from 0 on each device, so that no two spans overlap in one lane."""
    free_from: dict[str, list[float]] = defaultdict(list)
    lanes = [0] * len(spans)
    for index in sorted(range(len(spans)), key=lambda i: (spans[i].started_seconds, spans[i].shard.start)):
        span = spans[index]
        ends = free_from[span.shard.device]
        lane = next((lane for lane, end in enumerate(ends) if end <= span.started_seconds), len(ends))
        ends[lane : lane + 1] = [span.finished_seconds]
        lanes[index] = lane
    return tuple(lanes)


def save_timeline(spans: Sequence[Span], devices: Sequence[str], title: str, path: str | os.PathLike[str]) -> None:
    """Draw a bar per chunk over the seconds of the call, a band per device from the top down, and write it to `path`.

    Raises:
        ImportError: without matplotlib.
        ValueError: for a suffix that is no format of matplotlib's.
    """
    lanes = lanes_of(spans)
    depths = [1 + max((lane for s, lane in zip(spans, lanes) if s.shard.device == d), default=0) for d in devices]
    tops = dict(zip(devices, itertools.accumulate([0, *depths])))
    figure = figure_class()(figsize=(9.0, 1.2 + _INCHES_PER_LANE * max(sum(depths), 3)), layout="constrained")
    axes = figure.add_subplot()
    bars: dict[tuple[str, int], list[tuple[float, float]]] = defaultdict(list)
    for span, lane in zip(spans, lanes):
        bars[span.outcome, tops[span.shard.device] + lane].append((span.started_seconds, span.seconds))
    for (outcome, row), times in bars.items():
        colour = _COLOURS[outcome]
        axes.broken_barh(times, (row + 0.1, 0.8), facecolors=colour, edgecolors="white", linewidth=0.2)
    for top in tops.values():
        axes.axhline(top, color="lightgrey", linewidth=0.5)
    axes.set_yticks([tops[d] + depth / 2 for d, depth in zip(devices, depths)], [*short_names(devices).values()])
    axes.set_ylim(max(sum(depths), 1), 0)
    axes.set_xlim(left=0.0)
    axes.set_xlabel("seconds since the call began")
    axes.set_title(title, fontsize="medium")
    outcomes = [outcome for outcome in _COLOURS if any(span.outcome == outcome for span in spans)]
    if outcomes not in ([], ["finished"]):
        keys = [axes.barh(0, 0, color=_COLOURS[outcome], label=outcome) for outcome in outcomes]
        figure.legend(handles=keys, loc="outside lower center", ncols=len(keys), frameon=False)
    figure.savefig(path)
