"""Time ways of doing one thing side by side: check the answers, warm up, let the ways take turns; write down all seconds.

pytest-benchmark times one way, the subject. The others take their turns in its set-up, between its rounds, so that ratios are
of one run and noise affects all ways alike. The order of all ways, the subject included, changes from round to round.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, Protocol, runtime_checkable

import numpy as np
import tensorflow as tf

from benchmarks.records import OURS
from benchmarks.traffic import Meter

Way = Callable[[], Any]

Compare = Callable[..., "dict[str, list[float]]"]
"""`compare` as a fixture gives it: with the benchmark, the topic, the number of devices, and a usual number of rounds."""


@runtime_checkable
class Prepared(Protocol):
    """A way that gets ready for each turn before the clock is started."""

    def prepare(self) -> None:
        """Get ready, if that is still to be done."""


_LONG_SECONDS = 0.5
"""A way whose checked call took longer is warm: what a first call costs is little of it, or has been paid."""


_LEAST = 0.98
"""No way can take less than this part of the ideal time; an ideal that was measured may be off by as much."""


def compare(
    benchmark: Any,
    ways: Mapping[str, Way],
    *,
    topic: str,
    case: str,
    rounds: int,
    devices: int,
    calls: int = 1,
    answer: Any = None,
    tolerance: float = 1e-4,
    patience_seconds: float = 3.0,
    subject: str | None = None,
    meter: Meter | None = None,
    **facts: Any,
) -> dict[str, list[float]]:
    """Seconds per call of each way, one number per round, which are also put into the benchmark's `extra_info`.

    The ways take turns in an order that changes, so that what one leaves running in the background (a pipeline that reads
    ahead) does not always meet the same other.

    Args:
        benchmark: pytest-benchmark's fixture.
        ways: by name; every one has to give the `answer`. What is `Prepared` is not warmed up.
        topic: the table that the case belongs to.
        case: the row of that table.
        rounds: how often each way takes its turn.
        devices: how many devices the ways may use.
        calls: how often a way is called in one turn.
        answer: what every way must give, to a relative `tolerance`; `None`: what the first way gives.
        patience_seconds: a way that took so long in all its turns takes no more; the subject always takes all.
        subject: the way that pytest-benchmark times; `None`: the first of ours.
        meter: counts what the fourth call of each way sends between devices, for the report; `None`: not counted.
        facts: what else the report should know, as `ideal_seconds`, or `targets`, by way.

    Raises:
        AssertionError: a way gave another answer, and nothing was timed; or one took less than the ideal time, so that a
            share of it would mean nothing.
    """
    subject = subject or next(name for name in ways if name.startswith(OURS))
    first_seconds = {}
    for name, way in ways.items():
        _prepare(way)
        start = time.perf_counter()
        got = as_arrays(way())
        first_seconds[name] = time.perf_counter() - start
        answer = got if answer is None else answer
        _check(got, as_arrays(answer), tolerance, name)
    if meter is not None:
        for way in ways.values():  # maps find out how they run best, and compile that
            way()
            way()
        facts["traffic"] = {name: asdict(meter.measure(way)) for name, way in ways.items()}
    for name, way in ways.items():
        if not isinstance(way, Prepared) and (first_seconds[name] < _LONG_SECONDS or name == subject):
            _seconds_of(way, calls)
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    order = random.Random(0)
    left: list[str] = []

    def run(names: Sequence[str]) -> None:
        for name in names:
            if sum(seconds[name]) * calls < patience_seconds:
                seconds[name].append(_seconds_of(ways[name], calls))

    def others() -> None:
        """Run what is left of the previous round, and the ways that come before the subject in this round."""
        run(left)
        names = order.sample(list(ways), len(ways))
        place = names.index(subject)
        left[:] = names[place + 1 :]
        run(names[:place])
        _prepare(ways[subject])

    benchmark.group = topic
    benchmark.pedantic(lambda: _run(ways[subject], calls), setup=others, rounds=rounds)
    run(left)
    seconds[subject] = [total / calls for total in benchmark.stats.stats.data]
    if (ideal := facts.get("ideal_seconds")) is not None:
        fastest = min(seconds, key=lambda name: min(seconds[name], default=math.inf))
        assert min(seconds[fastest]) > _LEAST * ideal, (
            f"{fastest} took {min(seconds[fastest]):.3f} s, which is less than the ideal {ideal:.3f} s: that is no ideal"
        )
    facts |= {"topic": topic, "case": case, "devices": devices, "seconds": seconds, "first_seconds": first_seconds}
    benchmark.extra_info.update(facts)
    return seconds


def as_arrays(result: Any) -> list[np.ndarray]:
    """Wait for the devices: a result is on the host when its numbers are."""
    return [np.asarray(leaf) for leaf in tf.nest.flatten(result)]


def _prepare(way: Way) -> None:
    if isinstance(way, Prepared):
        way.prepare()


def _seconds_of(way: Way, calls: int) -> float:
    _prepare(way)
    start = time.perf_counter()
    _run(way, calls)
    return (time.perf_counter() - start) / calls


def _run(way: Way, calls: int) -> None:
    result = None
    for _ in range(calls):
        result = way()
    as_arrays(result)


def _check(got: Sequence[np.ndarray], answer: Sequence[np.ndarray], tolerance: float, name: str) -> None:
    assert len(got) == len(answer), f"{name} gives {len(got)} tensors, expected {len(answer)}"
    for leaf, expected in zip(got, answer):
        np.testing.assert_allclose(leaf, expected, rtol=tolerance, atol=tolerance, err_msg=name)
