"""Interleaved timing of several calls. Free of TensorFlow."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any


def median_seconds(
    calls: Sequence[Callable[[], Any]], rounds: int, deadline: float, clock: Callable[[], float] = time.perf_counter
) -> list[float]:
    """Return the median seconds of each of `calls`, which wait for their results.

    Each round times every call, in random order, so that noise affects all calls alike. There is at least one round. No
    other round starts that would probably end after `deadline`, a time of `clock`.
    """
    seconds: list[list[float]] = [[] for _ in calls]
    order = random.Random(0)
    for _ in range(rounds):
        began = clock()
        for i in order.sample(range(len(calls)), len(calls)):
            start = clock()
            calls[i]()
            seconds[i].append(clock() - start)
        if 2 * clock() - began > deadline:
            break
    return [*map(median, seconds)]
