"""Interleaved rounds and deadlines, on a scripted clock and without TensorFlow."""

from __future__ import annotations

from collections.abc import Callable

from devicemap.bench.timing import time_rounds


class _World:
    """A clock that only calls advance, and a record of the calls."""

    def __init__(self) -> None:
        self.now = 0.0
        self.called: list[str] = []

    def clock(self) -> float:
        return self.now

    def call(self, name: str, seconds: float) -> Callable[[], None]:
        def run() -> None:
            self.now += seconds
            self.called.append(name)

        return run


def test_every_round_times_every_call_in_changing_order() -> None:
    world = _World()
    calls = [world.call(name, seconds) for name, seconds in (("a", 1.0), ("b", 2.0), ("c", 4.0))]
    seconds = time_rounds(calls, [1.0, 2.0, 4.0], 20, 1000, world.clock)
    assert seconds == [(1.0,) * 20, (2.0,) * 20, (4.0,) * 20]
    rounds = ["".join(world.called[i : i + 3]) for i in range(0, 60, 3)]
    assert all(sorted(turn) == ["a", "b", "c"] for turn in rounds)
    assert len(set(rounds)) > 3


def test_short_calls_are_repeated_within_a_reading() -> None:
    world = _World()
    calls = [world.call("short", 0.004), world.call("tiny", 1e-9), world.call("long", 1.0)]
    time_rounds(calls, [0.004, 1e-9, 1.0], 1, 1000, world.clock)
    assert [world.called.count(name) for name in ("short", "tiny", "long")] == [3, 100, 1]


def test_no_round_starts_that_would_exceed_the_deadline() -> None:
    world = _World()
    assert time_rounds([world.call("a", 1.0)], [1.0], 10, 3.5, world.clock) == [(1.0,) * 3]
    assert time_rounds([world.call("a", 1.0)], [1.0], 10, 0.0, world.clock) == [(1.0,)]
