"""What to use, in one sentence: a decision over measurements alone."""

from __future__ import annotations

from collections.abc import Sequence

from devicemap.bench.measurements import Measurement
from devicemap.bench.sweep import name_devices

_WORTH_IT = 1.1
"""What is less simple is recommended where the interval of its gain begins above this; below, it may be noise, or not worth
it."""

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
        advice = _compare_device_counts(eager)
        return f"In eager code, {advice[0].lower()}{advice[1:]}"
    fastest = max(mapped, key=lambda m: m.rows_per_second)
    best_eager = _choose(eager)
    if best_eager and _is_faster(best_eager, fastest):
        return (
            f"Stay with eager code on {name_devices(best_eager.devices)}: it maps {best_eager.gain_over(fastest).median:.1f} "
            f"times the rows per second of DeviceMap at its best ({_settings(fastest)} on {name_devices(fastest.devices)})."
        )
    return _compare_device_counts(mapped)


def _compare_device_counts(measurements: Sequence[Measurement]) -> str:
    """The recommendation among measurements of one mode."""
    one = _choose([m for m in measurements if len(m.devices) == 1])
    many = _choose([m for m in measurements if len(m.devices) > 1])
    devices = name_devices(many.devices) if many else ""
    if one is None:
        assert many is not None
        return f"Use all {devices} with {_settings(many)}: one device alone could not be measured."
    gpus = [(share, name) for name, share in (one.busy_shares or {}).items() if "GPU" in name and share < _BUSY]
    if gpus:
        share, idle = gpus[0]
        more = f"; all {devices} give {many.gain_over(one).median:.1f} times its rows per second" if many else ""
        return (
            f"Use {name_devices([idle])} better before you use more devices, as it is busy only {share:.0%} of the time with "
            f"{_settings(one)}: larger batches, batched=True, or faster input{more}."
        )
    if many is None:
        return f"Use {name_devices(one.devices)} with {_settings(one)}: {one.rows_per_second:.4g} rows per second."
    gain = many.gain_over(one)
    if _is_faster(many, one):
        return f"Use all {devices} with {_settings(many)}: {gain.median:.1f} times the rows per second of one."
    if _is_faster(one, many):
        why = f"it is {one.gain_over(many).median:.1f} times as fast as all {devices} together"
    elif gain.high > _WORTH_IT:
        why = (
            f"all {devices} give {gain.low:.2g} to {gain.high:.2g} times its rows per second, which does not tell; give more "
            "seconds or rounds"
        )
    else:
        why = f"it is as fast as all {devices} together"
    return f"Use one device, devices={name_devices(one.devices)!r} with {_settings(one)}: {why}."


def _is_faster(one: Measurement, other: Measurement) -> bool:
    return one.gain_over(other).low > _WORTH_IT


def _choose(measurements: Sequence[Measurement]) -> Measurement | None:
    """The simplest settings that the fastest ones do not beat: defaults first, then large batches."""

    def complexity(m: Measurement) -> tuple[bool, bool, int, int]:
        rows = m.batch_size if isinstance(m.batch_size, int) else 0
        return m.vectorize is False, m.batch_size is not None, -rows, len(m.devices)

    fastest = max(measurements, key=lambda m: m.rows_per_second, default=None)
    return min((m for m in measurements if fastest and not _is_faster(fastest, m)), key=complexity, default=None)


def _settings(m: Measurement) -> str:
    vectorize = "" if m.vectorize is None else f" and vectorize={m.vectorize!r}"
    return f"batch_size={m.batch_size!r}{vectorize}"
