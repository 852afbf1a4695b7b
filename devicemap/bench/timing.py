"""Interleaved timing of several calls. Free of TensorFlow.

A timed call has to wait for its own result. The clock is an argument, so that tests can script it.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

_READING_SECONDS = 0.01
"""The shortest reading of the clock. Shorter calls are repeated within one reading."""

_MOST_REPEATS = 100


def time_rounds(
    calls: Sequence[Callable[[], Any]],
    call_seconds: Sequence[float],
    rounds: int,
    deadline: float,
    clock: Callable[[], float] = time.perf_counter,
) -> list[tuple[float, ...]]:
    """Return the seconds per call of each of `calls`, one number per round.

    Each round times every call, in random order, so that noise affects all calls alike. The last round is the one after
    which another round would exceed `deadline`. There is at least one round.

    Args:
        calls: the calls to time.
        call_seconds: rough estimates, which choose how often one reading repeats a call.
        rounds: the largest number of rounds.
        deadline: a time of `clock`.
        clock: returns seconds.
    """
    seconds: list[list[float]] = [[] for _ in calls]
    order = random.Random(0)
    for _ in range(rounds):
        round_start = clock()
        for i in order.sample(range(len(calls)), len(calls)):
            repeats = max(1, min(_MOST_REPEATS, math.ceil(_READING_SECONDS / max(call_seconds[i], 1e-9))))
            start = clock()
            for _ in range(repeats):
                calls[i]()
            seconds[i].append((clock() - start) / repeats)
        if 2 * clock() - round_start > deadline:
            break
    return [*map(tuple, seconds)]


def median_ratio(numerators: Sequence[float], denominators: Sequence[float]) -> float:
    """Return the median of the ratios of each round. Noise that slows down a whole round cancels out.

    >>> median_ratio([2.0, 6.0, 4.0], [1.0, 3.0, 2.0])
    2.0
    """
    return median(a / b for a, b in zip(numerators, denominators))
