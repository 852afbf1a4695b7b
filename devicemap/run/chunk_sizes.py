"""The number of rows in the next chunk: pure functions over measurements.

A chunk is cut when a device can take one. Its size depends on the measured throughput of all devices, so that a slow device
does not finish last. Sizes grow as long as larger chunks are faster per row.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass, replace

# The constants were chosen with the jobs of `benchmarks/test_balance.py`, simulated in `tests/run/test_chunk_sizes.py`.

_FIRST_ROWS = 8
"""Rows of the first chunks."""

_SHARES = 3.0
"""A device has at most one part in this many of its expected share of the remaining rows in flight."""

_PROBES = 32
"""A device without a measurement takes at most one part in this many of an even share."""

_SHORTEST_SECONDS = 0.003
"""Chunks are not cut shorter than this for balance: the overhead of a chunk is a tenth of it."""

_AS_QUICK = 1.5
"""Chunks that take at most this factor longer than the quickest count as equally quick."""

_SHORT_SECONDS = 0.02
"""Shorter chunks grow even if larger chunks are not faster per row."""

_LONG_SECONDS = 1.0
"""Longer chunks do not grow."""

_GAIN = 1.1
"""Chunks grow if rows per second improve by this factor."""

_FREE_ROWS = 2.5
"""Rows are free if chunks take at most this many times as long as the quickest, as a mean weighted by their rows."""


@dataclass(frozen=True)
class Throughput:
    """Measurements of one device."""

    rows_per_second: float | None = None
    """Recent speed, `None` before the first chunk."""

    rows_in_flight: int = 0
    """Rows of chunks that were sent to the device and are not finished."""

    size: int = _FIRST_ROWS
    """Rows of chunks without a fixed size."""

    best_rows_per_second: float = 0.0
    """Best speed of chunks of a smaller size."""

    largest: int = 0
    """Rows of the largest chunk that the device finished in this call."""

    quickest_seconds: float = math.inf
    """Shortest time of a chunk in this call."""

    quick_rows: int = 0
    """Rows of the largest chunk that was about as quick; 0 after one that took longer for no more rows.

    Some functions take as long for few rows as for many.
    """

    finished_rows: int = 0
    """Rows that the device finished in this call."""

    chunk_seconds: float = 0.0
    """Sum over the chunks in this call of their time multiplied by their rows."""

    full: bool = False
    """Whether larger chunks may not fit into the memory of the device."""

    limit: int | None = None
    """The most rows that fit into the memory of the device, `None` if it never ran out of memory."""

    def taking(self, rows: int) -> Throughput:
        """Return the state after a chunk was sent to the device."""
        return replace(self, rows_in_flight=self.rows_in_flight + rows)

    def giving_up(self, rows: int) -> Throughput:
        """Return the state after a chunk failed."""
        return replace(self, rows_in_flight=self.rows_in_flight - rows)

    def finishing(
        self, rows: int, seconds: float, latency_seconds: float, peak_share: float | None = None
    ) -> Throughput:
        """Return the state after the device finished a chunk.

        Args:
            rows: rows of the chunk.
            seconds: time since the chunk started and the previous chunk had finished.
            latency_seconds: time since the chunk started.
            peak_share: peak memory use divided by the memory of the device; `None` if that is not of this call. Twice the rows
                may need twice the memory, so chunks stop growing before that exceeds the memory.
        """
        speed = rows / max(seconds, 1e-9)
        known = self.rows_per_second
        # The mean of seconds per row, so that an expensive row counts by its cost.
        smooth = speed if known is None else 2 / (1 / known + 1 / speed)
        size, best = self.size, self.best_rows_per_second
        pays = seconds < _SHORT_SECONDS or (speed > _GAIN * best and seconds < _LONG_SECONDS)
        full = self.full or (rows >= size and peak_share is not None and 2 * peak_share > 1)
        if rows >= size and pays and not full:
            size, best = 2 * size, max(best, speed)
        took = max(seconds, latency_seconds / 2)  # a CPU computes several chunks at once, other devices one by one
        quickest, quick = min(self.quickest_seconds, took), self.quick_rows
        if _AS_QUICK * took < self.quickest_seconds:
            quick = rows
        elif took <= _AS_QUICK * quickest:
            quick = max(quick, rows)
        elif rows <= quick:  # these rows are expensive
            quick = 0
        return replace(
            self,
            rows_in_flight=self.rows_in_flight - rows,
            rows_per_second=smooth,
            size=size,
            best_rows_per_second=best,
            largest=max(self.largest, rows),
            quickest_seconds=quickest,
            quick_rows=quick,
            finished_rows=self.finished_rows + rows,
            chunk_seconds=self.chunk_seconds + rows * took,
            full=full,
        )

    def after(self, seconds: float) -> Throughput:
        """Return the state if the device has finished nothing for some seconds: overdue chunks show that it is slower.

        >>> Throughput(rows_per_second=100.0, rows_in_flight=5).after(0.5).rows_per_second
        10.0
        """
        if self.rows_per_second is None or self.rows_per_second * seconds <= self.rows_in_flight:
            return self
        return replace(self, rows_per_second=self.rows_in_flight / seconds) if self.rows_in_flight else self

    def limited(self, rows: int | None) -> Throughput:
        """Return the state if no more rows than this fit into the memory of the device; `None` removes the limit."""
        if rows is None:
            return replace(self, limit=None)
        limit = rows if self.limit is None else min(self.limit, rows)
        return replace(self, limit=limit, size=min(self.size, limit))

    def between_calls(self) -> Throughput:
        """Return the measurements that the next call may use."""
        return replace(
            self,
            rows_in_flight=0,
            largest=0,
            quickest_seconds=math.inf,
            quick_rows=0,
            finished_rows=0,
            chunk_seconds=0.0,
        )


def next_chunk_size(
    device: Throughput, others: Collection[Throughput], rows_left: int | None, chunk_rows: int | None = None
) -> int:
    """Return how many rows a device takes next; 0 if the other devices will finish them sooner.

    At least one device, idle or not, takes rows while rows are left. Chunks without a fixed size have powers of two of rows,
    and shrink towards the end in proportion to the speed of the device. This follows guided self-scheduling (Polychronopoulos
    and Kuck, 1987) and factoring for uneven processors (Hummel et al., 1996).

    Args:
        device: the device that is to take the rows.
        others: the other devices.
        rows_left: rows that were not sent to a device, `None` if unknown.
        chunk_rows: rows of each chunk if fixed.

    >>> fast, slow = (Throughput(rows_per_second=speed, largest=64, size=64) for speed in (100.0, 10.0))
    >>> next_chunk_size(fast, [slow], 1100), next_chunk_size(slow, [fast], 1100), next_chunk_size(slow, [fast], 5)
    (64, 32, 0)
    """
    most = chunk_rows or _power_of_two(device.size if device.limit is None else min(device.size, device.limit))
    if rows_left is None:
        return most
    if rows_left < 1:
        return 0
    probe = max(1, rows_left // (_PROBES * (1 + len(others))))
    if chunk_rows is None:  # not too many rows on one device, in case that the first rows are the most expensive
        most = min(most, 2 * max(device.largest, probe))
    most = min(most, rows_left)
    if device.rows_per_second is None:
        if device.rows_in_flight:
            return 0  # its first chunk decides how large the next one is
        return most if chunk_rows else _power_of_two(min(most, probe))
    speed = device.rows_per_second
    known_speeds = [other.rows_per_second for other in others if other.rows_per_second is not None]
    usual = sum(known_speeds, speed) / (1 + len(known_speeds))
    loads = [(other.rows_per_second or usual, other.rows_in_flight) for other in others]
    speed_of_others = sum(s for s, _ in loads)
    work_of_others = rows_left + sum(rows for _, rows in loads)
    least = most if chunk_rows else 1
    if loads:
        without = max(work_of_others / speed_of_others, min((rows + least) / s for s, rows in loads))
        if (device.rows_in_flight + least) / speed > without:
            return 0
    seconds_left = (work_of_others + device.rows_in_flight) / (speed_of_others + speed)
    share = speed * seconds_left / _SHARES - device.rows_in_flight
    if share < least and device.rows_in_flight:  # it has enough for now
        return 0
    if chunk_rows:
        return most
    return _power_of_two(min(most, max(int(share), 1, device.quick_rows // 2, int(speed * _SHORTEST_SECONDS))))


def _power_of_two(rows: int) -> int:
    """Return the largest power of two that is at most `rows`.

    Chunks of few different sizes cost less: cuDNN searches for the best algorithm of a convolution, and XLA compiles, once for
    each shape. On an NVIDIA H100 divided into two logical GPUs, the second call of a convolution of 2,000 rows took 44 ms with
    these sizes, and 312 ms with any sizes.
    """
    return 1 << (rows.bit_length() - 1)


def rows_are_free(devices: Collection[Throughput]) -> bool:
    """Return whether almost all chunks took about as long as the quickest in the last call, whatever their rows.

    Devices that computed no chunk do not count.

    >>> sizes = (4, 16, 64)
    >>> free, even = Throughput(), Throughput()
    >>> for rows in sizes:
    ...     free, even = free.finishing(rows, 0.1, 0.1), even.finishing(rows, 0.1 * rows, 0.1 * rows)
    >>> rows_are_free([free, free]), rows_are_free([free, even]), rows_are_free([free, Throughput()])
    (True, False, True)
    """
    used = [device for device in devices if device.finished_rows]
    if max((device.largest for device in used), default=0) < 4:
        return False
    quick = sum(device.quickest_seconds * device.finished_rows for device in used)
    return sum(device.chunk_seconds for device in used) <= _FREE_ROWS * quick


def chunks_in_flight(kind: str) -> int:
    """Return the default number of chunks in flight on a device of a kind.

    A CPU uses tensors where they are in memory. For other devices, copies in and out should overlap with kernels, but
    TensorFlow starts a copy to a device after the kernels that were enqueued there before.
    `tests/simulators/softgpus/chunks.py` ran chunks that take 10 ms to copy each way and 10 ms to compute on two emulated
    GPUs. With 2, 3, 4, 5 and 8 in flight, they reached 0.53, 0.64, 0.76, 0.80 and 0.77 of the ideal throughput. Each chunk in
    flight needs memory.

    >>> chunks_in_flight("CPU"), chunks_in_flight("GPU")
    (2, 4)
    """
    return 2 if kind == "CPU" else 4
