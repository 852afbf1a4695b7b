"""Interleaved rounds, deadlines and the search for the largest batch, without TensorFlow's clocks and devices."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from devicemap.bench.measurements import BenchmarkResult, Measurement, next_batch
from devicemap.bench.timing import median_seconds
from devicemap.errors import OptionError
from devicemap.types import Device


class _World:
    """A clock that only calls advance, and a record of the calls."""

    def __init__(self) -> None:
        self.now = 0.0
        self.called: list[str] = []

    def clock(self) -> float:
        return self.now

    def call(self, name: str, *seconds: float) -> Callable[[], None]:
        def run() -> None:
            self.now += seconds[self.called.count(name) % len(seconds)]
            self.called.append(name)

        return run


def test_every_round_times_every_call_in_changing_order() -> None:
    world = _World()
    calls = [world.call("a", 1.0), world.call("b", 2.0, 9.0, 3.0), world.call("c", 4.0)]
    assert median_seconds(calls, 30, 1000, world.clock) == [1.0, 3.0, 4.0]
    rounds = ["".join(world.called[i : i + 3]) for i in range(0, 90, 3)]
    assert all(sorted(turn) == ["a", "b", "c"] for turn in rounds)
    assert len(set(rounds)) > 3


@pytest.mark.parametrize(("deadline", "rounds"), [(3.5, 3), (0.0, 1)])
def test_no_round_starts_that_would_exceed_the_deadline(deadline: float, rounds: int) -> None:
    world = _World()
    assert median_seconds([world.call("a", 1.0)], 10, deadline, world.clock) == [1.0]
    assert len(world.called) == rounds


def _result(memory: int | None, *batches: Measurement, devices: int = 2) -> BenchmarkResult:
    names = [f"/job:localhost/replica:0/task:0/device:GPU:{i}" for i in range(devices)]
    return BenchmarkResult("fn", tuple(Device(name, "GPU", memory, "") for name in names), batches)


def _batch(rows: int, *peaks: int) -> Measurement:
    return Measurement("batch", rows, peak_memory_bytes=peaks)


def _search(memory: int, needed: Callable[[int], int]) -> BenchmarkResult:
    """Search on a device that needs so many bytes for so many rows."""
    result, planned = _result(memory, devices=1), [1, 16]
    while rows := next_batch(result, planned, True, 10**9):
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


def test_the_limit_is_a_point_of_the_line() -> None:
    full = Measurement("batch", 22, error="out of memory")
    result = _result(1000, _batch(2, 100, 20), _batch(20, 200, 220), full)
    assert result.lines == ((10.0, 45.0), (-78.0, 49.0))
    assert result.largest_batch(margin=0) == 20  # no more than what ran
    assert result.largest_batch(4 * 1000, 0) == 82
    assert _result(1000, Measurement("batch", 2, error="out of memory")).largest_batch() == 0


def test_bad_arguments_of_largest_batch() -> None:
    result = _result(None, _batch(2, 100, 20), _batch(12, 200, 220))
    with pytest.raises(OptionError, match="the memory of GPU:0 is unknown; give memory_bytes"):
        result.largest_batch()
    with pytest.raises(OptionError, match="margin=1; expected a share"):
        result.largest_batch(1000, 1)
    with pytest.raises(OptionError, match="memory_bytes=0; expected the memory"):
        result.largest_batch(0)
