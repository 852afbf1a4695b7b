"""Interleaved timing of several calls."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from statistics import median
from timeit import timeit


def median_seconds(calls: Sequence[Callable[[], object]], rounds: int, seconds: float = float("inf")) -> list[float]:
    """Return the median seconds of each of `calls`, which wait for their results.

    Each round times every call, in random order, so that noise affects all calls alike. No round but the first starts after
    `seconds`.
    """
    times: list[list[float]] = [[] for _ in calls]
    order, deadline = random.Random(0), time.perf_counter() + seconds
    for _ in range(rounds):
        for i in order.sample(range(len(calls)), len(calls)):
            times[i].append(timeit(calls[i], number=1))
        if time.perf_counter() > deadline:
            break
    return [*map(median, times)]
