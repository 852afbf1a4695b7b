"""What to use, in one sentence: a decision over measurements alone."""

from __future__ import annotations

from collections.abc import Sequence

from devicemap.bench.measurements import Measurement
from devicemap.bench.sweep import name_devices

_WORTH_IT = 1.1
"""More devices, or another mode, are recommended from this many times the rows per second; below, it may be noise, and
what is simpler wins."""

_AS_GOOD = 1.05
"""The same for `batch_size` and `vectorize`, where nothing is lost by a wrong choice."""

_BUSY = 0.9
"""Other devices do not help a GPU that is busy for a smaller share of the time: it waits for something else."""


def recommend(measurements: Sequence[Measurement]) -> str:
    """Which devices, `batch_size` and `vectorize` to use, or what to do first.

    Args:
        measurements: at least one, of the same function over the same rows.
    """
    mapped = [m for m in measurements if m.mode == "graph"]
    eager = [m for m in measurements if m.mode == "eager"]
    if not mapped:
        return f"In eager code, {_lower(_compare_device_counts(eager))}"
    best_eager = _choose(eager)
    fastest = max(mapped, key=lambda m: m.rows_per_second)
    if best_eager and best_eager.rows_per_second >= _WORTH_IT * fastest.rows_per_second:
        times = best_eager.rows_per_second / fastest.rows_per_second
        return (
            f"Stay with eager code on {name_devices(best_eager.devices)}: it maps {times:.1f} times the rows per second of "
            f"DeviceMap at its best ({_settings(fastest)} on {name_devices(fastest.devices)})."
        )
    return _compare_device_counts(mapped)


def _compare_device_counts(measurements: Sequence[Measurement]) -> str:
    """The recommendation among measurements of one mode."""
    one = _choose([m for m in measurements if len(m.devices) == 1])
    many = _choose([m for m in measurements if len(m.devices) > 1])
    if one is None:
        assert many is not None
        return f"Use all {name_devices(many.devices)} with {_settings(many)}: one device alone could not be measured."
    gain = None if many is None else many.rows_per_second / one.rows_per_second
    idle = _idle_gpu(one)
    if idle is not None:
        share = (one.busy_shares or {})[idle]
        more = "" if many is None else f"; all {name_devices(many.devices)} give {gain:.1f} times its rows per second"
        return (
            f"Use {name_devices([idle])} better before you use more devices, as it is busy only {share:.0%} of the time with "
            f"{_settings(one)}: larger batches, batched=True, or faster input{more}."
        )
    if many is None or gain is None:
        return f"Use {name_devices(one.devices)} with {_settings(one)}: {one.rows_per_second:.4g} rows per second."
    if gain >= _WORTH_IT:
        return (
            f"Use all {name_devices(many.devices)} with {_settings(many)}: {gain:.1f} times the rows per second of one."
        )
    better = "as fast as" if gain > 1 / _WORTH_IT else f"{1 / gain:.1f} times as fast as"
    return (
        f"Use one device, devices={name_devices(one.devices)!r} with {_settings(one)}: it is {better} all "
        f"{name_devices(many.devices)} together."
    )


def _choose(measurements: Sequence[Measurement]) -> Measurement | None:
    """The simplest settings among those that are as good as the fastest: defaults first, then large batches."""
    if not measurements:
        return None
    fastest = max(m.rows_per_second for m in measurements)
    good = [m for m in measurements if m.rows_per_second * _AS_GOOD >= fastest]

    def complexity(m: Measurement) -> tuple[bool, bool, int, int]:
        rows = m.batch_size if isinstance(m.batch_size, int) else 0
        return m.vectorize is False, m.batch_size is not None, -rows, len(m.devices)

    return min(good, key=complexity)


def _idle_gpu(one: Measurement) -> str | None:
    """The GPU of this measurement, if it is known to be idle too often."""
    shares = one.busy_shares or {}
    return next((name for name, share in shares.items() if "GPU" in name and share < _BUSY), None)


def _settings(m: Measurement) -> str:
    vectorize = "" if m.vectorize is None else f" and vectorize={m.vectorize!r}"
    return f"batch_size={m.batch_size!r}{vectorize}"


def _lower(sentence: str) -> str:
    return sentence[0].lower() + sentence[1:]
