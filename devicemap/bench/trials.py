"""The ways of a benchmark, tried out and timed.

ways ── first call, check, warm-up ──> trials that time suffices for ── interleaved rounds ──> timings
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import tensorflow as tf

from devicemap.api import DeviceMap
from devicemap.base.options import Options
from devicemap.base.structure import map_nest
from devicemap.bench.gauges import busy_shares, read_peak_memory, reset_peak_memory
from devicemap.bench.measurements import Timing
from devicemap.bench.sweep import Skipped, Way
from devicemap.bench.timing import Budget, count_affordable, time_call, time_rounds
from devicemap.data.rows import Rows, take_rows
from devicemap.data.sample import first_rows
from devicemap.errors import brief, failure
from devicemap.run.eager import EagerMap
from devicemap.tell.verify.comparison import find_difference

_CALLS_TO_COME = 3
"""A way that is tried is called at least so often: first call, warm-up, one round."""

_SHARE_OF_EAGER_CALL = 1 / 60
"""One call of eager code takes about this share of the budget at most, on fewer rows where need be: it can be a thousand
times slower than a graph, and should not leave the rest without time."""


@dataclass(frozen=True)
class _Candidate:
    """A way of mapping `rows`, ready to be called."""

    way: Way
    mapper: DeviceMap | EagerMap
    rows: Rows

    @property
    def count(self) -> int:
        """How many rows a call maps."""
        return self.rows.count or 0  # eager code knows

    def call(self) -> Any:
        """Map the rows; the results are there when this returns: their numbers are on the host."""
        results = self.mapper(self.rows) if isinstance(self.mapper, EagerMap) else self.mapper(self.rows.structure)
        for tensor in tf.nest.flatten(results, expand_composites=True):
            tensor.numpy()
        return results

    def skipped(self, reason: object) -> Skipped:
        """That it is."""
        return Skipped(**vars(self.way), reason=str(reason))


_Trial = tuple[_Candidate, Timing]
"""A candidate that was called, checked and warmed up, and what was read of it."""


class _NotMeasured(Exception):
    """Why a candidate is skipped."""


def candidate_for(way: Way, fn: Callable[..., Any], rows: Rows, given: dict[str, Any], checked: Options) -> _Candidate:
    """What maps `rows` in this way; `given` are the user's options, `checked` the same with their defaults."""
    if way.mode == "eager":
        size = way.batch_size if isinstance(way.batch_size, int) else None
        return _Candidate(way, EagerMap(fn, way.devices, size, checked), rows)
    options = {**given, "devices": list(way.devices), "batch_size": way.batch_size}
    if way.vectorize is not None:
        options["vectorize"] = way.vectorize
    return _Candidate(way, DeviceMap(fn, **options), rows)


def try_out(
    candidates: Sequence[_Candidate], essential: int, tolerance: float | None, budget: Budget
) -> tuple[list[_Trial], list[Skipped]]:
    """Call each candidate for the first time, check its results, and warm it up, as long as half of the budget lasts.

    The second call, which warms it up, is the reading of its `Timing`.
    The first `essential` ones are tried whatever the budget. Results are compared with those of the first, unless `tolerance`
    is `None`.

    Raises:
        FunctionError: `fn` failed, results differ, or every candidate ran out of memory.
    """
    trials: list[_Trial] = []
    skipped: list[Skipped] = []
    reference: tuple[_Candidate, Any] | None = None
    for candidate in candidates:
        spare = len(trials) >= essential
        try:
            if spare and budget.left_seconds < budget.seconds / 2:
                raise _NotMeasured(f"half of the time went to ways that tell more; {_more_seconds(budget)}")
            if isinstance(candidate.mapper, EagerMap):
                candidate = _fit(candidate, candidate.mapper, spare, budget)
            results, first_call_seconds = time_call(candidate.call, budget.clock)
            if reference is None:
                reference = candidate, results
            elif tolerance is not None:
                _check_same(candidate, results, *reference, tolerance)
            if spare and first_call_seconds > budget.left_seconds:
                raise _NotMeasured(f"its first call took {first_call_seconds:.1f} s; {_more_seconds(budget)}")
            del results
            reset_peak_memory(candidate.way.devices)
            _, call_seconds = time_call(candidate.call, budget.clock)
        except _NotMeasured as reason:
            skipped.append(candidate.skipped(reason))
        except tf.errors.ResourceExhaustedError as error:
            skipped.append(candidate.skipped(f"out of memory: {brief(error)}"))
        else:
            timing = Timing(
                **vars(candidate.way),
                rows=candidate.count,
                first_call_seconds=first_call_seconds,
                round_seconds=(call_seconds,),
                busy_shares=busy_shares(candidate.mapper),
                peak_memory_bytes=read_peak_memory(candidate.way.devices),
            )
            trials.append((candidate, timing))
    if not trials:
        raise failure(f"nothing could be measured: {'; '.join(f'{way}: {way.reason}' for way in skipped)}")
    return trials, skipped


def _fit(candidate: _Candidate, eager: EagerMap, spare: bool, budget: Budget) -> _Candidate:
    """Eager code on as many rows as its share of the budget allows; each row or chunk costs a call of `fn`."""
    eager.prepare(candidate.rows)
    few = _Candidate(candidate.way, eager, eager.few_rows(candidate.rows))
    least = few.count * len(candidate.way.devices)
    if least >= candidate.count:
        return candidate
    few.call()  # eager ops are slower when they run for the first time
    _, seconds = time_call(few.call, budget.clock)
    expected = seconds * len(candidate.way.devices)
    if spare and _CALLS_TO_COME * expected > budget.left_seconds:
        raise _NotMeasured(f"{least} row(s) would take about {expected:.1f} s; {_more_seconds(budget)}")
    affordable = int(_SHARE_OF_EAGER_CALL * budget.seconds / seconds) * few.count
    return replace(candidate, rows=first_rows(candidate.rows, max(least, affordable)))


def _check_same(candidate: _Candidate, results: Any, reference: _Candidate, wanted: Any, tolerance: float) -> None:
    count = min(candidate.count, reference.count)
    results, wanted = (map_nest(lambda leaf, _: take_rows(leaf, 0, count), nest) for nest in (results, wanted))
    found = find_difference(results, wanted, tolerance)
    if found:
        raise failure(
            f"two ways give different results, {candidate.way} and {reference.way}: {found}. They must agree to "
            f"tolerance={tolerance}. If fn draws random numbers, draw them with tf.random.stateless_* and the option "
            "seed=..., or set tolerance=None; if this is rounding, as 16-bit floats do, set a larger tolerance; if fn writes "
            "state, benchmark it without"
        )


def time_trials(
    trials: Sequence[_Trial], essential: int, rounds: int, budget: Budget
) -> tuple[list[Timing], list[Skipped]]:
    """Time the trials that there is time for, at least the first `essential` ones: those, and the others."""
    seconds = [timing.round_seconds[0] for _, timing in trials]
    count = count_affordable(seconds, budget.left_seconds, essential)
    calls = [candidate.call for candidate, _ in trials[:count]]
    readings = time_rounds(calls, seconds[:count], rounds, budget)
    timings = [replace(timing, round_seconds=tuple(found)) for (_, timing), found in zip(trials, readings)]
    reason = f"no time was left to measure it beside the others; {_more_seconds(budget)}"
    return timings, [candidate.skipped(reason) for candidate, _ in trials[count:]]


def _more_seconds(budget: Budget) -> str:
    return f"the budget is seconds={budget.seconds:g}, give more"
