"""The scheduler of the chunk engine, without threads and without real time (`simulation.py`).

In seeded calls, devices fail, run out of memory and are lost, and the consumer takes results, waits or leaves.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from functools import partial
from types import SimpleNamespace
from typing import Any

import tensorflow as tf
from indices import IndexSource
from simulation import SimulatedCall, SimulatedDevice

from devicemap.data.sources import Chunk
from devicemap.run.chunk_engine import joined
from devicemap.run.scheduler import DELIVERED, STOP
from devicemap.run.workers import ChunkResult, End
from devicemap.types import DeviceLost, Event

Transient, Broken, Full, Bad = (
    getattr(tf.errors, f"{name}Error") for name in ("Aborted", "Unavailable", "ResourceExhausted", "InvalidArgument")
)


class Shuffled(SimulatedCall):
    """A call whose consumer and scheduler take their time, and leave the call after some chunks."""

    expected = (Bad,)

    def __init__(self, draw: random.Random, devices: dict[str, SimulatedDevice], source: IndexSource, **options: Any):
        super().__init__(devices, source, **options, observe=self.note)
        self.to_consumer: Any = SimpleNamespace(put=self.consume_later)
        self.draw, self.source = draw, source
        self.steps = 0
        self.lost = set[str]()
        self.incomplete: dict[int, ChunkResult] = {}
        self.buffer: dict[int, ChunkResult] = {}
        self.delivered: list[ChunkResult] = []
        self.end: End | None = None
        self.leaves_after: int | None = None

    def note(self, event: Event) -> None:
        if isinstance(event, DeviceLost):
            self.lost.add(event.device)

    def happen(self) -> bool:
        self.steps += 1
        assert self.steps < 20_000, "the call does not end"
        assert self.window is None or self.source.taken - len(self.delivered) <= self.window
        return super().happen()

    def empty(self) -> bool:
        self.time += self.draw.choice([0.0, 0.0, 0.001, 0.1])
        return super().empty()

    def consume_later(self, message: ChunkResult | End) -> None:
        self.at(self.time + self.draw.choice([0.0, 0.001, 1.0]), lambda: self.consume(message))

    def consume(self, message: ChunkResult | End) -> None:
        """Take a message and deliver results, as the consumer does."""
        if isinstance(message, End):
            assert self.end is None or self.stopped
            self.end = message
        elif (whole := joined(self.incomplete, message)) is not None:
            assert whole.number not in self.buffer
            self.buffer[whole.number] = whole
        while (number := len(self.delivered) if self.deterministic else next(iter(self.buffer), -1)) in self.buffer:
            self.delivered.append(self.buffer.pop(number))
            self.put(DELIVERED)
            self.stopped |= len(self.delivered) == self.leaves_after
        if self.stopped:
            self.put(STOP)


class Faults:
    """The speed and the faults of a device. A `safe` one is never lost."""

    def __init__(self, draw: random.Random, safe: bool):
        self.draw, self.seconds_per_row = draw, 10 ** draw.uniform(-5, -1)
        self.memory_rows = draw.choice([1, 6, 1000])
        self.failure_rate = 0.0 if safe else draw.choice([0.0, 0.0, 0.3])
        self.breaks_at = math.inf if safe else draw.choice([0.0, 0.01, math.inf])

    def seconds(self, chunk: Chunk) -> float:
        return self.seconds_per_row * chunk.count * self.draw.random()

    def of(self, call: Shuffled, name: str, bad: set[int], chunk: Chunk) -> BaseException | None:
        running, lost = call.devices[name].running, call.lost
        (queued,) = [each for each in running if each.rows is chunk]
        tried = {shard.device for shard in queued.tried}
        assert len(running) == 1 or not queued.alone
        assert name not in tried or call.devices.keys() <= tried | lost
        if call.time > self.breaks_at:
            return Broken(None, None, "broken")
        if sum(each.rows.count for each in running) > self.memory_rows:
            return Full(None, None, "full")
        if self.draw.random() < self.failure_rate:
            return Transient(None, None, "again")
        return Bad(None, None, "bad") if bad & {*chunk.leaves[0]} else None


def _fail() -> None:
    raise OSError("the data")


def _simulate(seed: int) -> str:
    """Run a call that is drawn, check it, and return how it ended."""
    draw = random.Random(seed)
    rows, skips = draw.choice([0, 1, 5, 40, 200]), draw.random() < 0.4
    bad = {row for row in range(rows) if draw.random() < 0.05} if draw.random() < 0.4 else set()
    fails_at = draw.randrange(rows) if rows and draw.random() < 0.1 else None
    chunk_rows, reads = draw.choice([None, 1, 4]), draw.random() < 0.5
    source = IndexSource(rows, chunk_rows, reads, not reads, {} if fails_at is None else {fails_at: _fail})
    left_out: list[int] = []
    faults = {f"/device:CPU:{i}": Faults(draw, safe=i == 0) for i in range(draw.choice([1, 2, 3, 5]))}
    devices = {
        name: SimulatedDevice(each.seconds, draw.choice([1, 2, 4]), in_turn=False) for name, each in faults.items()
    }
    call = Shuffled(
        draw,
        devices,
        source,
        window=draw.choice([None, 1, 8]),
        deterministic=draw.random() < 0.7,
        max_retries=40,
        skips=skips,
        leave_out=lambda row, shard, error: left_out.append(row.start),
    )
    for name, device in devices.items():
        device.fault = partial(faults[name].of, call, name, bad)
    call.leaves_after = draw.randrange(1, 9) if draw.random() < 0.1 else None
    call.scheduler.run()
    while call.happen():
        pass
    found = [row for result in call.delivered for part in result.parts for row in part]
    assert len({*found}) == len(found)
    assert "/device:CPU:0" not in call.lost
    if call.deterministic:
        assert found == [row for row in range(rows) if row not in bad][: len(found)]
    if call.end is not None and isinstance(call.end.error, Bad):
        assert bad
        assert not skips
        return "failed"
    if call.stopped:
        return "left"
    assert isinstance(call.end, End)
    assert isinstance(call.end.error, OSError) == (fails_at is not None)
    assert call.end.chunks == source.taken
    read = range(rows if fails_at is None else fails_at)
    assert sorted([*found, *left_out]) == [*read]
    assert sorted(left_out) == [row for row in read if row in bad]
    return "lost a device" if call.lost else "finished"


def test_each_row_once_in_any_order_of_events() -> None:
    ends = Counter(map(_simulate, range(600)))
    assert min(ends[end] for end in ("finished", "failed", "left", "lost a device")) > 10


def test_failed_parts_of_chunks_run_before_the_rows_after_them() -> None:
    """As a function that writes variables in the order of rows needs it."""
    computed, again = list[int](), [Transient(None, None, "again")]

    def fault(chunk: Chunk) -> BaseException | None:
        if chunk.count > 2:
            return Full(None, None, "full")
        if chunk.start == 8 and again:
            return again.pop()
        computed.extend(chunk.leaves[0])
        return None

    call = SimulatedCall(
        {"/device:CPU:0": SimulatedDevice(lambda chunk: 1.0, 1, fault)}, IndexSource(24, 8), max_retries=2
    )
    call.scheduler.run()
    assert computed == [*range(24)]
    assert call.sizes == [8, 4] + [2] * 13
