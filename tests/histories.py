"""Events of calls on a simulated clock, of which some chunks fail."""

from __future__ import annotations

from bisect import bisect
from collections.abc import Collection, Iterable, Sequence
from functools import partial
from itertools import accumulate
from typing import Any

import tensorflow as tf
from indices import IndexSource
from simulation import SimulatedCall, SimulatedDevice

from devicemap.data.sources import Chunk
from devicemap.inspect.recorder import Recorder
from devicemap.types import CallFinished, CallStarted, ChunkFinished, ChunkStarted, Event, Report, Shard

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
        failing: chunks, by index, that fail once and run again. Three in a row on each device would end the call.
        too_large: chunks of several rows, by index, that run out of memory once. Their device then computes half as many rows.
        lost: a device on which all chunks fail at once.
        slowness: factors on the time that chunks take, by device.
        after_seconds: how long the call goes on after the last chunk.
    """
    starts = [0, *accumulate(rows for rows, _ in chunks)]
    faults: dict[int, type[Exception]] = {
        **dict.fromkeys(failing, tf.errors.AbortedError),
        **dict.fromkeys(too_large, tf.errors.ResourceExhaustedError),
    }

    def seconds(factor: float, chunk: Chunk) -> float:
        rows, seconds = chunks[bisect(starts, chunk.start) - 1]
        return factor * seconds * chunk.count / rows

    def fault(name: str, chunk: Chunk) -> BaseException | None:
        if lost is not None and name == device(lost):
            return tf.errors.UnavailableError(None, None, "broken")
        kind = faults.pop(bisect(starts, chunk.start) - 1, None)
        if kind is None or (chunk.count == 1 and kind is tf.errors.ResourceExhaustedError):
            return None
        return kind(None, None, "no luck")

    def read() -> None:
        call.time += input_seconds

    names = [device(index) for index in range(devices)]
    factors = [0.0 if index == lost else factor for index, factor in enumerate([*slowness, *[1.0] * devices])]
    simulated = {
        name: SimulatedDevice(partial(seconds, factor), in_flight, partial(fault, name))
        for name, factor in zip(names, factors)
    }
    source = IndexSource(starts[-1], starts[-1], known=False, before=dict.fromkeys(starts[:-1], read))
    events: list[Event] = []
    call = SimulatedCall(simulated, source, max_retries=9, observe=events.append)
    call.scheduler.run()
    ended = CallFinished(call.time + after_seconds, None)
    begun = CallStarted(0.0, starts[-1] if known else None, (*names,))
    return [begun, *sorted(events, key=lambda event: event.seconds), ended]


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
