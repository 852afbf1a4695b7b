"""How many rows a device takes next: numbers only.

Chunks are cut when a device asks for one. What has been measured of the devices decides how large it is: so that a slow
one is not left with the last large chunk, and, with `batch_size="auto"`, so that chunks are as large as pays.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Literal

# What follows was tuned on the jobs of `benchmarks/test_balance.py`, played through in `tests/run/test_scheduling.py`.

_FIRST_ROWS = 8
"""Where `batch_size="auto"` begins."""

_SHARES = 3.0
"""What a device has in flight is at most this part of what it is expected to compute of what is left."""

_PROBES = 32
"""A device that has not been measured yet takes at most this part of its even share."""

_SHORTEST_SECONDS = 0.003
"""Chunks are not cut shorter than this for balance: dispatching one takes a tenth of it."""

PATIENCE_SECONDS = 0.0005
"""Where all devices together would finish chunks at shorter intervals, workers wait until the consumer has waited for so long:
what Python does for a chunk takes a half of it, and more where threads wake each other (`benchmarks/test_streaming.py`)."""

_AS_QUICK = 1.5
"""Chunks that take no longer than this many times the quickest are as quick as it."""

WINDOW = 4
"""How many times what is in flight a stream may have read and not delivered, so that a slow chunk stops nobody soon."""

_SHORT_SECONDS = 0.02
"""Chunks that take less may grow whatever they gain."""

_LONG_SECONDS = 1.0
"""Chunks that take longer have nothing to gain from growing."""

_GAIN = 1.1
"""How much faster, in rows per second, a chunk must be than the best smaller one for the next to be larger."""


ROWS_PER_SLOT = 16
"""Calls on fewer rows always use the graph engine."""

_LONG_SECONDS_PER_CALL = 0.1
"""Shorter calls gain little from load balance."""

_TRIED_SECONDS = 0.3
"""A call that takes no longer in chunks is tried in one graph."""

_QUICK_SHARE = 0.4
"""Rows are free if, on each device, a chunk as quick as the quickest had at least this share of the rows of the largest."""


def choose_engine(
    rows: int,
    slots: int,
    differentiable: bool,
    seconds_per_row: float | None,
    graph_seconds_per_row: float | None = None,
    rows_are_free: bool = False,
) -> Literal["one graph", "chunks"]:
    """Return the engine for an eager call on rows in memory without `batch_size`.

    Args:
        rows: number of rows.
        slots: devices, or cores of a CPU, that take one shard each.
        differentiable: whether a tape records the call, or results depend on the shards.
        seconds_per_row: last measurement of this map in chunks; `None` before there is one.
        graph_seconds_per_row: the same in one graph.
        rows_are_free: whether large chunks took as long as small ones, as in a vectorised loop of many steps. One shard per
            device may then be much faster than several chunks.

    >>> choose_engine(1000, 8, False, None), choose_engine(1000, 8, False, 1e-5), choose_engine(1000, 8, False, 1e-2)
    ('chunks', 'one graph', 'chunks')
    """
    if differentiable or slots < 2 or rows < ROWS_PER_SLOT * slots:
        return "one graph"
    if seconds_per_row is None:
        return "chunks"
    if graph_seconds_per_row is None:
        return "one graph" if rows_are_free or rows * seconds_per_row < _TRIED_SECONDS else "chunks"
    return (
        "chunks" if rows * graph_seconds_per_row > max(_LONG_SECONDS_PER_CALL, rows * seconds_per_row) else "one graph"
    )


@dataclass(frozen=True)
class Pace:
    """What has been seen of one device so far."""

    rows_per_second: float | None = None
    """Its recent speed, `None` before its first chunk."""

    rows_in_flight: int = 0
    """Rows of chunks that it has been given and not finished."""

    size: int = _FIRST_ROWS
    """Rows per chunk that `batch_size="auto"` tries now."""

    best_rows_per_second: float = 0.0
    """The best speed that chunks of a smaller size had."""

    largest: int = 0
    """Rows of the largest chunk that it finished in this call."""

    quickest_seconds: float = math.inf
    """The shortest that a chunk took in this call."""

    quick_rows: int = 0
    """Rows of the largest chunk that was as quick: some functions take as long for fewer rows."""

    limit: int | None = None
    """The most rows of a chunk that fit into its memory, as far as known."""

    chunks_in_flight: int = 0
    """Chunks that it has been given and not finished."""

    at_once: int | None = None
    """The most chunks in flight that fit into it, whatever their rows, as far as known."""

    @property
    def may_take(self) -> bool:
        """Whether another chunk fits into its memory now, as far as known; a device without a chunk may take any."""
        return not self.chunks_in_flight or self.at_once is None or self.chunks_in_flight < self.at_once

    def taking(self, rows: int) -> Pace:
        """The device is given a chunk."""
        return replace(self, rows_in_flight=self.rows_in_flight + rows, chunks_in_flight=self.chunks_in_flight + 1)

    def giving_up(self, rows: int) -> Pace:
        """The device could not compute a chunk."""
        return replace(self, rows_in_flight=self.rows_in_flight - rows, chunks_in_flight=self.chunks_in_flight - 1)

    def finishing(self, rows: int, seconds: float, latency_seconds: float) -> Pace:
        """The device finished a chunk.

        Args:
            rows: of the chunk.
            seconds: since the chunk began and the one before had finished.
            latency_seconds: since the chunk began.
        """
        speed = rows / max(seconds, 1e-9)
        known = self.rows_per_second
        # the mean of the seconds per row, so that a row that is dearer counts for what it costs
        smooth = speed if known is None else 2 / (1 / known + 1 / speed)
        size, best = self.size, self.best_rows_per_second
        if rows >= size and (seconds < _SHORT_SECONDS or (speed > _GAIN * best and seconds < _LONG_SECONDS)):
            size, best = 2 * size, max(best, speed)
        took = max(seconds, latency_seconds / 2)  # a CPU works on its chunks at the same time, other devices in turn
        quickest, quick = min(self.quickest_seconds, took), self.quick_rows
        if _AS_QUICK * took < self.quickest_seconds:
            quick = rows
        elif took <= _AS_QUICK * quickest:
            quick = max(quick, rows)
        return replace(
            self.giving_up(rows),
            rows_per_second=smooth,
            size=size,
            best_rows_per_second=best,
            largest=max(self.largest, rows),
            quickest_seconds=quickest,
            quick_rows=quick,
        )

    def after(self, seconds: float) -> Pace:
        """What is known when the device has finished nothing for so long: chunks that are overdue tell of its speed, too.

        >>> Pace(rows_per_second=100.0, rows_in_flight=5).after(0.5).rows_per_second
        10.0
        """
        if self.rows_per_second is None or self.rows_per_second * seconds <= self.rows_in_flight:
            return self
        return replace(self, rows_per_second=self.rows_in_flight / seconds) if self.rows_in_flight else self

    def running_out_of_memory(self, rows: int, alone: bool) -> Pace:
        """A chunk of so many rows, which was given up, did not fit.

        If it was `alone`, the next ones have at most half of its rows. Else it may fit, and from now on one chunk less is in
        flight.
        """
        if not alone:
            return replace(self, at_once=_least(self.at_once, max(1, self.chunks_in_flight)))
        limit = _least(self.limit, max(1, rows // 2))
        return replace(self, limit=limit, size=min(self.size, limit))

    def between_calls(self) -> Pace:
        """Return what the next call may use."""
        return replace(self, rows_in_flight=0, chunks_in_flight=0, largest=0, quickest_seconds=math.inf, quick_rows=0)


def _least(known: int | None, new: int) -> int:
    return new if known is None else min(known, new)


def rows_to_take(pace: Pace, others: Collection[Pace], rows_left: int | None, batch_size: int | None) -> int:
    """How many rows a device takes next; 0: none now, the others will be faster.

    Args:
        pace: of the device that asks.
        others: of the other devices.
        rows_left: rows that no device has been given yet, `None` where nobody knows.
        batch_size: the most rows of a chunk; `None`: as many as pay.

    At least one device, idle or at work, is never told 0 while rows are left. Chunks shrink towards the end, as in guided
    self-scheduling (Polychronopoulos and Kuck, 1987), here in proportion to the speed of the device (as in factoring for
    uneven processors: Hummel et al., 1996).

    >>> fast, slow = (Pace(rows_per_second=speed, largest=64, quickest_seconds=0.01) for speed in (100.0, 10.0))
    >>> rows_to_take(fast, [slow], 1100, 64), rows_to_take(slow, [fast], 1100, 64), rows_to_take(slow, [fast], 5, 64)
    (64, 33, 0)
    """
    most = batch_size if batch_size is not None else pace.size
    if pace.limit is not None:
        most = min(most, pace.limit)
    if rows_left is None:
        return most
    if rows_left < 1:
        return 0
    probe = max(1, rows_left // (_PROBES * (1 + len(others))))
    # Should the first rows be the dearest, not too many of them may wait on one device.
    most = min(most, rows_left, 2 * max(pace.largest, probe))
    if pace.rows_per_second is None:
        known = any(other.rows_per_second is not None for other in others)
        return (
            0 if pace.rows_in_flight and known else min(most, probe)
        )  # its first chunk tells how large the next should be
    speed = pace.rows_per_second
    known_speeds = [other.rows_per_second for other in others if other.rows_per_second is not None]
    usual = sum(known_speeds, speed) / (1 + len(known_speeds))
    loads = [(other.rows_per_second or usual, other.rows_in_flight) for other in others]
    speed_of_others = sum(s for s, _ in loads)
    work_of_others = rows_left + sum(rows for _, rows in loads)
    if loads:
        without = max(work_of_others / speed_of_others, min((rows + 1) / s for s, rows in loads))
        if (pace.rows_in_flight + 1) / speed > without:
            return 0  # the others will have finished before it could
    seconds_left = (work_of_others + pace.rows_in_flight) / (speed_of_others + speed)
    share = speed * seconds_left / _SHARES - pace.rows_in_flight
    if share < 1 and pace.rows_in_flight:  # it has enough for now
        return 0
    least = max(1, pace.quick_rows // 6, int(speed * _SHORTEST_SECONDS))
    return min(most, max(int(share), least))


def are_quick(chunk_rows: int, paces: Collection[Pace]) -> bool:
    """Whether chunks take so little that one worker computes them as fast as all can be handed some.

    >>> are_quick(512, [Pace(rows_per_second=1e6)] * 8), are_quick(512, [Pace(rows_per_second=1e5)] * 8)
    (True, False)
    """
    speeds = [pace.rows_per_second for pace in paces if pace.rows_per_second is not None]
    return bool(speeds) and chunk_rows < PATIENCE_SECONDS * sum(speeds) / len(speeds) * len(paces)


def are_free(paces: Collection[Pace]) -> bool:
    """Return whether large chunks took as long as small ones in the last call.

    >>> are_free([Pace(largest=64, quick_rows=64)]), are_free([Pace(largest=64, quick_rows=8)])
    (True, False)
    """
    return all(pace.largest > 3 and pace.quick_rows >= _QUICK_SHARE * pace.largest for pace in paces)


def chunks_in_flight(kind: str) -> int:
    """How many chunks are under way on a device of a kind, where nobody says.

    A CPU is handed tensors as they lie in memory. To other devices they are copied, and back, which is to overlap with
    kernels; but TensorFlow lets a copy to a device wait for the kernels that were enqueued there before. On two GPUs in
    software (as in `tests/simulators/softgpus/chunks.py`), chunks that took 10 ms to copy each way and 10 ms to compute came at
    0.53, 0.64, 0.76, 0.80 and 0.77 of the ideal pace with 2, 3, 4, 5 and 8 under way, each of which takes memory.

    >>> chunks_in_flight("CPU"), chunks_in_flight("GPU")
    (2, 4)
    """
    return 2 if kind == "CPU" else 4
