"""When each device computed what: events of one call -> spans, their lanes, and a trace that browsers show. Pure."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from devicemap.types import CallFinished, ChunkFailed, ChunkFinished, ChunkStarted, Event, Shard


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
    return tuple(_spans_of(events))


def _spans_of(events: Iterable[Event]) -> Iterator[Span]:
    under_way: dict[Shard, list[float]] = defaultdict(list)
    for event in events:
        if isinstance(event, ChunkStarted):
            under_way[event.shard].append(event.seconds)
        elif isinstance(event, (ChunkFinished, ChunkFailed)):
            if under_way[event.shard]:
                under_way[event.shard].pop(0)
            outcome: Literal["finished", "failed"] = "finished" if isinstance(event, ChunkFinished) else "failed"
            yield Span(event.shard, event.started_seconds, event.seconds, outcome)
        elif isinstance(event, CallFinished):
            for shard, starts in under_way.items():
                for started in starts:
                    yield Span(shard, started, event.seconds, "unfinished")


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
    pairs = list(itertools.pairwise(in_order))
    return bool(pairs) and all(before.finished_seconds <= after.started_seconds for before, after in pairs)


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


def short_names(devices: Iterable[str]) -> dict[str, str]:
    """The name that people read for each full name: kind and index, or all of it where several hosts have such a device.

    >>> short_names(["/job:localhost/replica:0/task:0/device:GPU:1"])
    {'/job:localhost/replica:0/task:0/device:GPU:1': 'GPU:1'}
    """
    short = {device: device.rpartition("device:")[2] for device in devices}
    return short if len(set(short.values())) == len(short) else {device: device for device in short}


def chrome_trace(spans: Sequence[Span], devices: Sequence[str], title: str) -> dict[str, Any]:
    """The spans as a "Trace Event Format" JSON object, which `chrome://tracing`, Perfetto and TensorBoard show.

    One process stands for the call, and one thread for each lane of a device: `"X"` (complete) events of one thread may
    nest and must not overlap otherwise. Times in it are in microseconds, as the format asks.
    """
    lanes = lanes_of(spans)
    names = short_names(devices)
    rows = [(device, 0) for device in devices]
    rows += sorted({(span.shard.device, lane) for span, lane in zip(spans, lanes) if lane}, key=lambda row: row[1])
    rows.sort(key=lambda row: list(devices).index(row[0]))
    thread_ids = {row: thread_id for thread_id, row in enumerate(rows, start=1)}
    labels: list[dict[str, Any]] = [{"name": "process_name", "ph": "M", "pid": 1, "args": {"name": title}}]
    for (device, lane), thread_id in thread_ids.items():
        label = names[device] + (f" ({lane + 1})" if lane else "")
        labels.append({"name": "thread_name", "ph": "M", "pid": 1, "tid": thread_id, "args": {"name": label}})
        labels.append(
            {"name": "thread_sort_index", "ph": "M", "pid": 1, "tid": thread_id, "args": {"sort_index": thread_id}}
        )
    bars = [
        {
            "name": str(span.shard),
            "cat": span.outcome,
            "ph": "X",
            "ts": span.started_seconds * 1e6,
            "dur": span.seconds * 1e6,
            "pid": 1,
            "tid": thread_ids[span.shard.device, lane],
            "args": {"start": span.shard.start, "stop": span.shard.stop, "outcome": span.outcome},
        }
        for span, lane in zip(spans, lanes)
    ]
    return {"traceEvents": labels + bars, "displayTimeUnit": "ms"}
