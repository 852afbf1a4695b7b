"""Time several calls side by side, within a budget: what fits, interleaved rounds, ratios. Free of TensorFlow.

A call that is timed has to wait for its result by itself. The clock is an argument, so that tests can script it.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

_READING_SECONDS = 0.01
"""A reading of the clock covers at least about this long: shorter calls are repeated within it."""

_MOST_REPEATS = 100

_RESAMPLES = 2000
"""How often rounds are drawn anew for an interval: its ends move by less than a percent from there on."""

_PERCENTILES = (2.5, 97.5)

_Clock = Callable[[], float]


class Ratio(NamedTuple):
    """The median of ratios, one per round, with a 95 % interval: the percentiles of its bootstrap, which draws the rounds
    anew, with replacement (Efron, "Bootstrap Methods: Another Look at the Jackknife", 1979)."""

    median: float
    low: float
    high: float


class Budget:
    """Seconds that may be spent from now on."""

    def __init__(self, seconds: float, clock: _Clock = time.perf_counter):
        self.seconds = seconds
        self.clock = clock
        self._start = clock()

    @property
    def left_seconds(self) -> float:
        """What is left; below 0 where it was overdrawn."""
        return self.seconds - (self.clock() - self._start)


def time_call(call: Callable[[], Any], clock: _Clock) -> tuple[Any, float]:
    """The result of a call, and the seconds it took."""
    start = clock()
    result = call()
    return result, clock() - start


def time_rounds(
    calls: Sequence[Callable[[], Any]], call_seconds: Sequence[float], rounds: int, budget: Budget
) -> list[list[float]]:
    """Seconds per call of each, one number per round; `rounds` rounds, or as many as the budget has time for, at least one.

    In each round every call has its turn, in an order that changes, so that noise meets all of them and what one leaves
    running in the background not always the same other. `call_seconds`, roughly, choose how often a reading repeats a call.
    """
    seconds: list[list[float]] = [[] for _ in calls]
    order = random.Random(0)
    for _ in range(rounds):
        left = budget.left_seconds
        for i in order.sample(range(len(calls)), len(calls)):
            repeats = _repeats(call_seconds[i])
            start = budget.clock()
            for _ in range(repeats):
                calls[i]()
            seconds[i].append((budget.clock() - start) / repeats)
        round_seconds = left - budget.left_seconds
        if budget.left_seconds < round_seconds:
            break
    return seconds


def count_affordable(call_seconds: Sequence[float], left_seconds: float, essential: int) -> int:
    """How many of the first calls one round may time in `left_seconds`; at least the `essential` ones.

    >>> count_affordable([1.0, 1.0, 2.0, 5.0], 6.0, essential=1)
    3
    """
    total = 0.0
    for i, seconds in enumerate(call_seconds):
        total += seconds * _repeats(seconds)
        if total > left_seconds and i >= essential:
            return i
    return len(call_seconds)


def ratio_of(numerators: Sequence[float], denominators: Sequence[float]) -> Ratio:
    """How many times as large readings are as others of the same rounds: a round's noise meets both, and cancels.

    >>> ratio_of([2.0, 6.0, 4.0], [1.0, 3.0, 2.0])
    Ratio(median=2.0, low=2.0, high=2.0)
    """
    ratios = np.asarray(numerators, float) / np.asarray(denominators, float)
    resampled = np.random.default_rng(0).choice(ratios, (_RESAMPLES, len(ratios)))
    low, high = np.percentile(np.median(resampled, axis=1), _PERCENTILES)
    return Ratio(float(np.median(ratios)), float(low), float(high))


def _repeats(call_seconds: float) -> int:
    return max(1, min(_MOST_REPEATS, math.ceil(_READING_SECONDS / max(call_seconds, 1e-9))))
