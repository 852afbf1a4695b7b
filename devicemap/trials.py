"""The ways of a benchmark, tried out and timed.

ways ── first call, check, warm-up ──> trials that time suffices for ── interleaved rounds ──> timings
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from devicemap.comparing import find_difference
from devicemap.eager import EagerMap
from devicemap.errors import brief, failure
from devicemap.gauges import busy_shares, read_peak_memory, reset_peak_memory
from devicemap.mapping import DeviceMap
from devicemap.measurements import Timing
from devicemap.options import Options
from devicemap.rows import Rows
from devicemap.sweeping import Skipped, Way
from devicemap.timing import Budget, count_affordable, half_quartile_range, median, time_call, time_rounds

_CALLS_TO_COME = 3
"""A way that is tried is called at least so often: first call, warm-up, one round."""


@dataclass(frozen=True)
class Candidate:
    """A way of mapping, ready to be called."""

    way: Way
    """Which way."""

    call: Callable[[], Any]
    """Maps the rows; the results are there when it returns."""

    mapper: DeviceMap | EagerMap
    """What does it."""


@dataclass(frozen=True)
class Trial:
    """A candidate that was called, checked and warmed up."""

    candidate: Candidate
    """Which one."""

    first_call_seconds: float
    """The first call."""

    call_seconds: float
    """The second one."""

    busy_shares: dict[str, float] | None
    """Of the second call."""

    peak_memory_bytes: dict[str, int] | None
    """Of the second call."""


class _NotMeasured(Exception):
    """Why a candidate is skipped."""


def candidate_for(way: Way, fn: Callable[..., Any], rows: Rows, given: dict[str, Any], checked: Options) -> Candidate:
    if way.mode == "eager":
        eager = EagerMap(fn, way.devices, way.batch_size, checked)
        return Candidate(way, lambda: _wait(eager(rows)), eager)
    options = {**given, "devices": list(way.devices), "batch_size": way.batch_size}
    if way.vectorize is not None:
        options["vectorize"] = way.vectorize
    mapper = DeviceMap(fn, **options)
    return Candidate(way, lambda: _wait(mapper(rows.structure)), mapper)


def _wait(results: Any) -> Any:
    """The results, once they are computed: when their numbers are on the host."""
    for tensor in tf.nest.flatten(results, expand_composites=True):
        tensor.numpy()
    return results


def try_out(
    candidates: Sequence[Candidate], essential: int, rows: Rows, tolerance: float | None, budget: Budget
) -> tuple[list[Trial], list[Skipped]]:
    """Call each candidate for the first time, check its results, and warm it up, as long as half of the budget lasts."""
    trials: list[Trial] = []
    skipped: list[Skipped] = []
    reference: tuple[Way, Any] | None = None
    for candidate in candidates:
        way = candidate.way
        try:
            if len(trials) >= essential:
                _check_time(candidate, rows, budget)
            elif isinstance(candidate.mapper, EagerMap):
                candidate.mapper.prepare(rows)
            results, first_call_seconds = time_call(candidate.call, budget.clock)
            if reference is None:
                reference = way, results
            elif tolerance is not None:
                _check_same(way, results, *reference, tolerance)
            if len(trials) >= essential and first_call_seconds > budget.left_seconds:
                raise _NotMeasured(f"its first call took {first_call_seconds:.1f} s; {_more_seconds(budget)}")
            reset_peak_memory(way.devices)
            _, call_seconds = time_call(candidate.call, budget.clock)
        except _NotMeasured as reason:
            skipped.append(Skipped(**vars(way), reason=str(reason)))
        except tf.errors.ResourceExhaustedError as error:
            skipped.append(Skipped(**vars(way), reason=f"out of memory: {brief(error)}"))
        else:
            shares, peaks = busy_shares(candidate.mapper), read_peak_memory(way.devices)
            trials.append(Trial(candidate, first_call_seconds, call_seconds, shares, peaks))
    if not trials:
        raise failure(f"nothing could be measured: {'; '.join(f'{way}: {way.reason}' for way in skipped)}")
    return trials, skipped


def _check_time(candidate: Candidate, rows: Rows, budget: Budget) -> None:
    """Raise `_NotMeasured` for a candidate that there is no time for."""
    if budget.left_seconds < budget.seconds / 2:
        raise _NotMeasured(f"half of the time went to ways that tell more; {_more_seconds(budget)}")
    eager = candidate.mapper
    if not isinstance(eager, EagerMap):
        return
    eager.prepare(rows)
    few = eager.few_rows(rows)
    if (rows.count or 0) < 2 * (few.count or 0):
        return
    _wait(eager(few))  # eager ops are slower when they run for the first time
    _, seconds = time_call(lambda: _wait(eager(few)), budget.clock)
    expected = seconds * (rows.count or 0) / (few.count or 0)
    if _CALLS_TO_COME * expected > budget.left_seconds:
        raise _NotMeasured(f"a call would take about {expected:.1f} s; {_more_seconds(budget)}, or fewer rows")


def _check_same(way: Way, results: Any, other: Way, wanted: Any, tolerance: float) -> None:
    found = find_difference(results, wanted, tolerance)
    if found:
        raise failure(
            f"two ways give different results, {way} and {other}: {found}. They must agree to tolerance={tolerance}. If fn "
            "draws random numbers, draw them with tf.random.stateless_* and the option seed=..., or set tolerance=None; if "
            "this is rounding, as 16-bit floats do, set a larger tolerance; if fn writes state, benchmark it without"
        )


def time_trials(
    trials: Sequence[Trial], essential: int, rounds: int, budget: Budget
) -> tuple[list[Timing], list[Skipped], int]:
    """Time the trials that there is time for; those that were, the others, and the number of rounds."""
    count = count_affordable([trial.call_seconds for trial in trials], budget.left_seconds, essential)
    timed, left_out = trials[:count], trials[count:]
    calls = [trial.candidate.call for trial in timed]
    readings = time_rounds(calls, [trial.call_seconds for trial in timed], rounds, budget)
    timings = [
        Timing(
            **vars(trial.candidate.way),
            first_call_seconds=trial.first_call_seconds,
            call_seconds=median(seconds),
            spread_seconds=half_quartile_range(seconds),
            busy_shares=trial.busy_shares,
            peak_memory_bytes=trial.peak_memory_bytes,
        )
        for trial, seconds in zip(timed, readings)
    ]
    reason = f"no time was left to measure it beside the others; {_more_seconds(budget)}"
    return timings, [Skipped(**vars(trial.candidate.way), reason=reason) for trial in left_out], len(readings[0])


def _more_seconds(budget: Budget) -> str:
    return f"the budget is seconds={budget.seconds:g}, give more"
