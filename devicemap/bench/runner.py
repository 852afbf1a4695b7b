"""devicemap.benchmark: is it worth it to map this function over all devices, and with which settings?"""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Iterable
from dataclasses import replace
from numbers import Real
from typing import Any

import tensorflow as tf

from devicemap.base.devices import choose_devices, choose_output_device, list_devices
from devicemap.base.options import check_count, check_options, check_tolerance
from devicemap.bench.measurements import BenchmarkResult, compare_timings
from devicemap.bench.recommendation import recommend
from devicemap.bench.sweep import MODES, default_batch_sizes, ways_to_measure
from devicemap.bench.timing import Budget
from devicemap.bench.trials import candidate_for, time_trials, try_out
from devicemap.data.sample import rows_in_memory
from devicemap.errors import DeviceMapError, OptionError

_ROWS_OF_A_DATASET = 1024


def benchmark(
    fn: Callable[..., Any],
    data: Any,
    *,
    devices: Any = None,
    batch_sizes: Iterable[int | str | None] | None = None,
    modes: Iterable[str] = MODES,
    rounds: int = 5,
    seconds: float = 30.0,
    max_rows: int | None = None,
    tolerance: float | None = 1e-3,
    **options: Any,
) -> BenchmarkResult:
    """Measure `fn` over `data` in eager code and as a `DeviceMap`, on one device and on all, over batch sizes.

    Each way is called once apart, since the first call traces and compiles; its results are checked against those of the
    first way; then all ways take turns in rounds, waiting for the results before the clock is read. `fn` is called many
    times, so state that it writes is written as often. On devices that tell their peak memory, the peak is reset.

    Args:
        fn: as in `DeviceMap`. Eager code calls it in a `tf.device` block per device, one after another: with
            `batched=True` on the rows of a shard, else in an eager `tf.map_fn`.
        data: as in `DeviceMap`. The first rows of a dataset are read into memory before anything is timed.
        devices: as in `DeviceMap`. "One device" is the first of them.
        batch_sizes: what `batch_size` may be: `None` for one shard per device, ints for chunks of at most so many rows.
            By default `None` and a few powers of two.
        modes: `"eager"`, `"graph"` (a `DeviceMap`) or both.
        rounds: how many rounds the medians are over. A speed-up is the median of its ratios, one per round, with a 95 %
            percentile interval of their bootstrap, and more devices are recommended where that begins above 1.1.
        seconds: a budget. Ways that would exceed it are skipped, the least telling first, rounds may be fewer, and eager
            code maps fewer rows where it is slow; the result says so. The first way, on one device and on all, is
            measured whatever it takes.
        max_rows: use that many of the first rows at most; by default all in-memory rows, and 1024 of a dataset.
        tolerance: by how much numbers with a fraction may differ between ways, relative and absolute. `None` does not
            compare, for a `fn` that draws random numbers without the option `seed`.
        **options: further options of `DeviceMap`: `batched`, `vectorize`, `seed`, ... Where `vectorize` is not given, its
            default is compared with `False`.

    Returns:
        A `BenchmarkResult` with a recommendation; print it.

    Raises:
        OptionError, DataError: before anything runs, for options and data that are not valid, and for data without rows.
        FunctionError: `fn` failed, or two ways gave different results; the message says which and how.

    Examples:
        >>> result = benchmark(lambda row: tf.reduce_sum(row), tf.ones([8, 2]), batch_sizes=[None], rounds=1)
        >>> {m.mode for m in result.measurements} == {"eager", "graph"}
        True
    """
    chosen_modes = _check_modes(modes)
    check_count("rounds", rounds)
    check_count("max_rows", 1 if max_rows is None else max_rows)
    check_tolerance(tolerance)
    if isinstance(seconds, bool) or not isinstance(seconds, Real) or not float(seconds) > 0:
        raise OptionError(f"seconds={seconds!r}; expected a time budget above 0, in seconds")
    if "batch_size" in options:
        size = options["batch_size"]
        raise OptionError(f"batch_size={size!r} is what a benchmark varies; give batch_sizes=[{size!r}]")
    checked = check_options(fn, {**options, "devices": devices})
    checked = replace(checked, output_device=choose_output_device(checked.output_device))
    sizes = None if batch_sizes is None else _check_batch_sizes(fn, batch_sizes)
    names = choose_devices(devices)
    if not tf.executing_eagerly():
        raise DeviceMapError(
            "benchmark was called inside a tf.function, where there is no time to measure; call it outside"
        )
    rows = rows_in_memory(data, checked, max_rows, _ROWS_OF_A_DATASET)
    count = rows.count or 0
    sizes = sizes or default_batch_sizes(count, len(names))
    ways = ways_to_measure(chosen_modes, names, sizes, checked.batched, options.get("vectorize"))
    essential = min(2, len(names))  # the first way, on one device and on all
    budget = Budget(seconds)
    candidates = [candidate_for(way, fn, rows, options, checked) for way in ways]
    trials, skipped = try_out(candidates, essential, tolerance, budget)
    timings, late = time_trials(trials, essential, rounds, budget)
    measurements = compare_timings(timings)
    described = {device.name: device for device in list_devices()}
    return BenchmarkResult(
        name=checked.name or str(getattr(fn, "__name__", type(fn).__name__)),
        rows=count,
        devices=tuple(described[name] for name in names),
        rounds=len(timings[0].round_seconds),
        measurements=measurements,
        skipped=(*skipped, *late),
        recommendation=recommend(measurements),
        machine=f"{os.cpu_count()} cores {platform.machine()}",
        versions=_versions(),
    )


def _check_modes(modes: Iterable[str]) -> list[str]:
    chosen = [] if isinstance(modes, str) or not isinstance(modes, Iterable) else list(modes)
    if not chosen or not all(mode in MODES for mode in chosen):
        raise OptionError(f"modes={modes!r}; expected a list of one or both of {MODES}")
    return chosen


def _check_batch_sizes(fn: Callable[..., Any], batch_sizes: Iterable[int | str | None]) -> tuple[int | str | None, ...]:
    sizes = [] if isinstance(batch_sizes, str) or not isinstance(batch_sizes, Iterable) else list(batch_sizes)
    if not sizes:
        raise OptionError(
            f"batch_sizes={batch_sizes!r}; expected a list of None, 'auto' and ints, or None for a few that fit the rows"
        )
    for size in sizes:
        check_options(fn, {"batch_size": size})
    return tuple(dict.fromkeys(size if size in (None, "auto") else int(size) for size in sizes))


def _versions() -> dict[str, str]:
    import devicemap  # the package is complete only now

    return {"Python": platform.python_version(), "TensorFlow": tf.__version__, "devicemap": devicemap.__version__}
