"""Interleaved rounds and the search for the largest batch, without devices."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import pytest

from devicemap.bench.measurements import BenchmarkResult, Measurement, next_batch, rows_within
from devicemap.bench.runner import median_seconds
from devicemap.types import Device


def test_every_round_times_every_call_in_changing_order() -> None:
    called: list[str] = []
    medians = median_seconds([partial(called.append, name) for name in "abc"], 30)
    assert len(medians) == 3
    rounds = [tuple(called[i : i + 3]) for i in range(0, 90, 3)]
    assert all(sorted(turn) == ["a", "b", "c"] for turn in rounds)
    assert len({*rounds}) > 3


def _result(memory: int | None, *batches: Measurement, devices: int = 2) -> BenchmarkResult:
    names = [f"/job:localhost/replica:0/task:0/device:GPU:{i}" for i in range(devices)]
    return BenchmarkResult("fn", tuple(Device(name, "GPU", memory, "") for name in names), batches)


def _batch(rows: int, *peaks: int) -> Measurement:
    return Measurement("batch", rows, peak_memory_bytes=peaks)


def _search(memory: int, needed: Callable[[int], int]) -> BenchmarkResult:
    """Search on a device that needs so many bytes for so many rows."""
    result, planned = _result(memory, devices=1), [1, 16]
    while rows := planned.pop(0) if planned else next_batch(result):
        if rows > 10**9:
            break
        fits = needed(rows) <= memory
        m = _batch(rows, needed(rows)) if fits else Measurement("batch", rows, error="out of memory")
        result = _result(memory, *result.measurements, m, devices=1)
    return result


@pytest.mark.parametrize("memory", [1000, 10**6, 10**9])
@pytest.mark.parametrize(
    "needed",
    [
        lambda rows: 100 + 7 * rows,
        lambda rows: 256 * -(-7 * rows // 256),  # in steps
        lambda rows: 2 ** (7 * rows - 1).bit_length(),  # in powers of two
        lambda rows: 100 + 7 * rows + rows**2 // 100,
        lambda rows: 100,
    ],
)
def test_the_search_brackets_the_largest_batch(needed: Callable[[int], int], memory: int) -> None:
    result = _search(memory, needed)
    largest = result.largest_batch()
    assert largest is not None
    assert needed(largest) <= memory
    if needed(10**9) > memory:
        assert needed(int(1.15 * largest) + 1) > memory
        assert len(result.measurements) < 40


def test_the_device_with_the_least_room_decides() -> None:
    result = _result(1000, _batch(2, 100, 20), _batch(12, 200, 220))
    assert result.lines == ((80.0, 10.0), (-20.0, 20.0))
    assert result.largest_batch(margin=0) == 50  # 1020 / 20 = 51, of which each of two devices gets half
    assert result.largest_batch() == 44
    assert result.largest_batch(2020, margin=0.5) == 50
    assert result.largest_batch(10) == 0


FULL = Measurement("batch", 22, error="out of memory")


def test_the_limit_is_a_point_of_the_line() -> None:
    result = _result(1000, _batch(2, 100, 20), _batch(20, 200, 220), FULL)
    assert result.lines == ((10.0, 45.0), (-78.0, 49.0))
    assert result.largest_batch(margin=0) == 20  # no more than what ran
    assert result.largest_batch(4 * 1000, 0) == 82
    assert _result(1000, FULL).largest_batch() == 0


@pytest.mark.parametrize(
    ("seconds", "rows"),
    [
        ([1.015], 5.0),  # 20 rows per second on two devices, and 15 ms for the start
        ([10.0, 0.015], math.inf),  # the largest batch took no time
        ([0.015, 2.015], 5.0),
        ([], math.inf),
    ],
)
def test_the_rows_for_which_there_is_time(seconds: list[float], rows: float) -> None:
    batches = [Measurement("batch", 20 * (i + 1), seconds=each) for i, each in enumerate(seconds)]
    result = _result(None, *batches, FULL, Measurement("eager", 99, seconds=99.0))
    assert rows_within(result, 0.5) == pytest.approx(rows)
