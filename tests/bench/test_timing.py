"""Interleaved rounds and budgets, on a scripted clock and without TensorFlow."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from devicemap.bench.timing import Budget, count_affordable, ratio_of, time_call, time_rounds


class _World:
    """A clock that only calls move on, and a record of them."""

    def __init__(self) -> None:
        self.now = 0.0
        self.called: list[str] = []

    def clock(self) -> float:
        return self.now

    def call(self, name: str, seconds: float) -> Callable[[], str]:
        def run() -> str:
            self.now += seconds
            self.called.append(name)
            return name

        return run


def test_a_call_is_timed() -> None:
    world = _World()
    assert time_call(world.call("a", 1.5), world.clock) == ("a", 1.5)


def test_every_round_has_every_call_in_changing_order() -> None:
    world = _World()
    calls = [world.call(name, seconds) for name, seconds in (("a", 1.0), ("b", 2.0), ("c", 4.0))]
    seconds = time_rounds(calls, [1.0, 2.0, 4.0], 20, Budget(1000, world.clock))
    assert seconds == [[1.0] * 20, [2.0] * 20, [4.0] * 20]
    rounds = ["".join(world.called[i : i + 3]) for i in range(0, 60, 3)]
    assert all(sorted(turn) == ["a", "b", "c"] for turn in rounds)
    assert len(set(rounds)) > 3


def test_short_calls_are_repeated_within_a_reading() -> None:
    world = _World()
    calls = [world.call("short", 0.004), world.call("tiny", 1e-9), world.call("long", 1.0)]
    seconds = time_rounds(calls, [0.004, 1e-9, 1.0], 1, Budget(1000, world.clock))
    assert [world.called.count(name) for name in ("short", "tiny", "long")] == [3, 100, 1]
    assert [s[0] for s in seconds] == pytest.approx([0.004, 1e-9, 1.0])


@pytest.mark.parametrize(("budget", "rounds"), [(0.5, 1), (1.9, 1), (2.0, 2), (3.5, 3), (100, 5)])
def test_rounds_end_where_the_budget_has_no_time_for_another(budget: float, rounds: int) -> None:
    world = _World()
    (seconds,) = time_rounds([world.call("a", 1.0)], [1.0], 5, Budget(budget, world.clock))
    assert len(seconds) == rounds


def test_a_budget_may_be_overdrawn() -> None:
    world = _World()
    world.now = 10.0
    budget = Budget(2.0, world.clock)
    world.now += 3.0
    assert budget.left_seconds == -1.0


@pytest.mark.parametrize(
    ("seconds", "left", "essential", "count"),
    [([1, 1, 1], 10, 1, 3), ([1, 1, 1], 2, 1, 2), ([9, 1, 1], 2, 1, 1), ([9, 9, 1], 2, 2, 2), ([1e-6, 1], 0.001, 0, 1)],
)
def test_how_many_calls_a_round_has_time_for(seconds: list[float], left: float, essential: int, count: int) -> None:
    assert count_affordable(seconds, left, essential) == count


def test_ratios_are_of_rounds() -> None:
    assert ratio_of([3.0], [2.0]) == (1.5, 1.5, 1.5)
    ratio = ratio_of([1.0, 2.0, 3.0, 4.0, 100.0], [1.0] * 5)
    assert ratio.median == 3.0
    assert 1.0 <= ratio.low < 3.0 < ratio.high <= 100.0
    many = ratio_of([1.0, 2.0, 3.0, 4.0, 100.0] * 20, [1.0] * 100)
    assert 2.0 <= many.low <= 3.0 <= many.high <= 4.0  # more rounds tell more
