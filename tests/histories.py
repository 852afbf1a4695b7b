"""Events of calls that could have been: chunks go to the first idle lane of a device, some fail, on a simulated clock."""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterable, Sequence
from typing import Any

from devicemap.inspect.recorder import Recorder
from devicemap.types import (
    CallFinished,
    CallStarted,
    ChunkFailed,
    ChunkFinished,
    ChunkRetried,
    ChunkStarted,
    DeviceLost,
    Event,
    Report,
    Shard,
)

HOST = "/job:localhost/replica:0/task:0/device:"


def device(index: int, kind: str = "GPU") -> str:
    """A full name."""
    return f"{HOST}{kind}:{index}"


def history(
    chunks: Sequence[tuple[int, float]],
    *,
    devices: int = 2,
    in_flight: int = 1,
    input_seconds: float = 0.0,
    failing: Collection[int] = (),
    too_large: Collection[int] = (),
    lost: int | None = None,
    slowness: Sequence[float] = (),
    known: bool = True,
    after_seconds: float = 0.0,
) -> list[Event]:
    """The events of one call, in order.

    Args:
        chunks: rows and seconds of each.
        in_flight: how many chunks may run on one device.
        failing: chunks, by index, that fail once and run again.
        too_large: chunks that run out of memory once, and run again in two parts if they have two rows.
        lost: a device that gets no chunk, and is lost at once.
        slowness: factors on the time that chunks take, by device.
        after_seconds: how long the call goes on after the last chunk.
    """
    names = [device(index) for index in range(devices)]
    factor = dict(zip(names, [*slowness, *[1.0] * devices]))
    idle = [
        (0.0, lane, name) for lane in range(in_flight) for name in names if name != device(lost or 0) or lost is None
    ]
    heapq.heapify(idle)
    events: list[Event] = [DeviceLost(0.0, device(lost), RuntimeError("broken"))] if lost is not None else []
    # what waits: index, first row, rows, seconds, attempt, when it may start
    waiting: list[tuple[int, int, int, float, int, float]] = []
    first_row = 0
    for index, (rows, seconds) in enumerate(chunks):
        waiting.append((index, first_row, rows, seconds, 1, (index + 1) * input_seconds))
        first_row += rows
    end = 0.0
    while waiting:
        index, start_row, rows, seconds, attempt, ready = waiting.pop(0)
        free, lane, name = heapq.heappop(idle)
        start, stop = max(free, ready), max(free, ready) + seconds * factor[name]
        shard = Shard(name, start_row, start_row + rows)
        end = max(end, stop)
        heapq.heappush(idle, (stop, lane, name))
        events.append(ChunkStarted(start, shard, waited_seconds=start - free))
        if attempt == 1 and index >= 0 and index in {*failing, *too_large}:
            events.append(ChunkFailed(stop, shard, start, RuntimeError("no luck")))
            half = rows // 2 if index in too_large else 0
            for part, first in ((half, start_row), (rows - half, start_row + half)):
                if part:
                    tried = 1 if half else 2
                    events.append(ChunkRetried(stop, Shard(name, first, first + part), tried, out_of_memory=bool(half)))
                    waiting.append((-1, first, part, seconds * part / rows, tried, stop))
        else:
            events.append(ChunkFinished(stop, shard, start))
    events.sort(key=lambda event: event.seconds)
    total = first_row if known else None
    return [CallStarted(0.0, total, tuple(names)), *events, CallFinished(end + after_seconds, None)]


def one_graph(rows: Sequence[int], seconds: float) -> list[Event]:
    """The events of a call in one graph: a shard per device, all of which end with the call, as without a clock per device."""
    names = [device(index) for index in range(len(rows))]
    starts = [sum(rows[:index]) for index in range(len(rows))]
    shards = [Shard(*shard) for shard in zip(names, starts, map(sum, zip(starts, rows)))]
    return [
        CallStarted(0.0, sum(rows), tuple(names)),
        *(ChunkStarted(0.0, shard, 0.0) for shard in shards),
        *(ChunkFinished(seconds, shard, 0.0) for shard in shards),
        CallFinished(seconds, None),
    ]


def report_of(events: Iterable[Event], engine: str = "chunks", gpus: Any = (), **facts: Any) -> Report:
    """The report of a call with these events; `facts` are those of a `Recorder`."""
    recorder = Recorder(dict(gpus), engine=engine, **{"traces": 1, **facts})
    for event in events:
        recorder(event)
    return recorder.report()
