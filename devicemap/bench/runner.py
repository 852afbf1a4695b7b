"""`devicemap.benchmark`: what a map gains over eager code, and over one device."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from numbers import Real
from timeit import timeit
from typing import Any

import tensorflow as tf

from devicemap.api import DeviceMap
from devicemap.bench.measurements import BenchmarkResult, Measurement
from devicemap.bench.timing import median_ratio, time_rounds
from devicemap.compile.random import row_seeds
from devicemap.data.rows import Rows
from devicemap.data.sample import first_rows, rows_in_memory
from devicemap.data.structure import as_objects
from devicemap.devices import choose_devices, choose_output_device, is_out_of_memory, kind_of, list_devices
from devicemap.errors import DeviceMapError, OptionError, brief, failure
from devicemap.options import Options, check_count, check_options

_ROWS_OF_A_DATASET = 1024

_ROWS_IN_EAGER_CODE = 16
"""Eager code can be a thousand times slower than a graph, so it maps few single rows."""


def benchmark(
    fn: Callable[..., Any],
    data: Any,
    *,
    devices: Any = None,
    batch_sizes: Iterable[int | str | None] | None = None,
    rounds: int = 5,
    seconds: float = 30.0,
    max_rows: int | None = None,
    **options: Any,
) -> BenchmarkResult:
    """Measure `fn` in eager code, as a `DeviceMap` on one device, and on all devices, over batch sizes.

    Each measurement starts with two calls, which trace, compile and warm up. Then all calls take turns in rounds. A call
    ends when its results are on the host. `fn` runs many times, and so do its side effects. Results are not compared; use
    `DeviceMap.verify` for that.

    Args:
        fn: as in `DeviceMap`. Eager code runs it on the first device, on one batch, or row by row on 16 rows.
        data: as in `DeviceMap`. The first rows of a dataset are read into memory.
        devices: as in `DeviceMap`. Measurements on one device use the first.
        batch_sizes: values of `batch_size`. By default `None` and a few powers of two.
        rounds: the largest number of rounds.
        seconds: a time budget. If it is used up, there are fewer rounds, and the last batch sizes are left out. The first
            batch size is always measured.
        max_rows: the number of rows to use. By default all rows in memory, and 1024 of a dataset.
        **options: further options of `DeviceMap`, such as `batched`.

    Returns:
        A `BenchmarkResult`; print it.

    Raises:
        OptionError, DataError: invalid options or data, or data without rows. They are raised before anything runs.
        FunctionError: `fn` failed in a graph, for another reason than memory.

    Examples:
        >>> result = benchmark(lambda row: tf.reduce_sum(row), tf.ones([8, 2]), batch_sizes=[None], rounds=1)
        >>> {m.mode for m in result.measurements} == {"eager", "graph"}
        True
    """
    check_count("rounds", rounds)
    check_count("max_rows", 1 if max_rows is None else max_rows)
    if isinstance(seconds, bool) or not isinstance(seconds, Real) or not float(seconds) > 0:
        raise OptionError(f"seconds={seconds!r}; expected a time budget above 0, in seconds")
    if "batch_size" in options:
        size = options["batch_size"]
        raise OptionError(f"batch_size={size!r}: a benchmark varies it; give batch_sizes=[{size!r}]")
    checked = check_options(fn, {**options, "devices": devices})
    choose_output_device(checked.output_device)
    sizes = None if batch_sizes is None else _check_batch_sizes(fn, batch_sizes)
    names = choose_devices(devices)
    if not tf.executing_eagerly():
        raise DeviceMapError("benchmark was called inside a tf.function, which cannot be timed; call it outside")
    rows = rows_in_memory(data, checked, max_rows, _ROWS_OF_A_DATASET)
    planned, calls = [], []
    for size in sizes or _default_batch_sizes(rows.count or 0, len(names)):
        for used in dict.fromkeys([names[:1], names]):
            planned.append(Measurement("graph", used, size, rows.count or 0))
            mapper = DeviceMap(fn, **{**options, "devices": list(used), "batch_size": size})
            calls.append(partial(_run_and_wait, mapper, rows.structure))
        if checked.batched or size == planned[0].batch_size:  # single rows do not depend on the batch size
            most = _ROWS_IN_EAGER_CODE if not checked.batched else size if isinstance(size, int) else rows.count
            some = first_rows(rows, most or 0)
            planned.append(Measurement("eager", names[:1], size, some.count or 0))
            calls.append(partial(_run_and_wait, partial(_run_eagerly, fn, names[0], checked), some))
    described = {device.name: device for device in list_devices()}
    return BenchmarkResult(
        name=checked.name or str(getattr(fn, "__name__", type(fn).__name__)),
        rows=rows.count or 0,
        devices=tuple(described[name] for name in names),
        measurements=_measure(planned, calls, rounds, float(seconds)),
    )


def _measure(
    planned: list[Measurement], calls: list[Callable[[], Any]], rounds: int, seconds: float
) -> tuple[Measurement, ...]:
    start = time.perf_counter()
    results = [*planned]
    call_seconds = {}
    for i, (m, call) in enumerate(zip(planned, calls)):
        if m.batch_size != planned[0].batch_size and time.perf_counter() - start > seconds / 2:
            results[i] = replace(m, error=f"seconds={seconds:g} were used up; give more")
            continue
        try:
            first_call_seconds = timeit(call, number=1)
            _reset_peak_memory(m.devices)
            call_seconds[i] = timeit(call, number=1)
        except Exception as error:
            if m.mode == "graph" and not is_out_of_memory(error):
                raise
            results[i] = replace(m, error=f"{type(error).__name__}: {brief(error)}")
        else:
            results[i] = replace(m, first_call_seconds=first_call_seconds, peak_memory_bytes=_peak_memory(m.devices))
    if not call_seconds:
        raise failure("; ".join(f"batch_size={m.batch_size}: {m.error}" for m in results))
    readings = time_rounds([calls[i] for i in call_seconds], [*call_seconds.values()], rounds, start + seconds)
    for i, found in zip(call_seconds, readings):
        results[i] = replace(results[i], round_seconds=found)
    alone = [m for m in results if len(m.devices) == 1 and m.error is None]
    if alone:
        best = max(alone, key=lambda m: m.rows_per_second)
        for i in call_seconds:
            ratio = median_ratio(best.round_seconds, results[i].round_seconds)
            results[i] = replace(results[i], speedup=ratio * results[i].rows / best.rows)
    return tuple(results)


def _run_and_wait(call: Callable[[Any], Any], rows: Any) -> None:
    for tensor in tf.nest.flatten(call(rows), expand_composites=True):
        if isinstance(tensor, tf.Tensor):
            tensor.numpy()


def _run_eagerly(fn: Callable[..., Any], device: str, options: Options, rows: Rows) -> Any:
    """Run `fn` on a device in eager code: once if it takes a batch, else on each row."""

    def run(data: Any, *seeds: Any) -> Any:
        data = as_objects(data)
        keywords = {"seed": seeds[0]} if seeds else {}
        return fn(*data, **keywords) if type(data) is tuple else fn(data, **keywords)

    arguments = [rows.structure]
    if options.seed is not None:
        arguments.append(row_seeds(options.seed, 0, rows.count))
    results: list[Any] = []

    @tf.autograph.experimental.do_not_convert  # autograph would convert fn in eager code too, which is slower
    def run_row(row: Any) -> int:
        results.append(run(*row))
        return 0

    with tf.device(device):
        if options.batched:
            return run(*arguments)
        tf.map_fn(run_row, tuple(arguments), fn_output_signature=tf.int32)
    return results


def _reset_peak_memory(devices: Iterable[str]) -> None:
    for name in _peak_memory(devices) or ():
        tf.config.experimental.reset_memory_stats(name)


def _peak_memory(devices: Iterable[str]) -> dict[str, int] | None:
    """Return the peak bytes of each device that counts them, since the last reset. CPUs report 0 for everything."""
    peaks = {}
    for name in devices:
        if kind_of(name) != "CPU":
            try:
                peaks[name] = int(tf.config.experimental.get_memory_info(name)["peak"])
            except (ValueError, tf.errors.OpError):  # ValueError is the documented error of allocators without counters
                continue
    return peaks or None


def _default_batch_sizes(rows: int, devices: int) -> tuple[int | None, ...]:
    """One shard per device, then powers of two from one chunk per device downwards.

    >>> _default_batch_sizes(1000, 4)
    (None, 128, 32, 8, 2)
    >>> _default_batch_sizes(3, 8)
    (None, 1)
    """
    largest = 2 ** (max(1, rows // devices).bit_length() - 1)
    return (None, *(largest // 4**i for i in range(4) if largest // 4**i))


def _check_batch_sizes(fn: Callable[..., Any], batch_sizes: Iterable[int | str | None]) -> tuple[int | str | None, ...]:
    sizes = [] if isinstance(batch_sizes, str) or not isinstance(batch_sizes, Iterable) else list(batch_sizes)
    if not sizes:
        raise OptionError(
            f"batch_sizes={batch_sizes!r}; expected a list of None, 'auto' and ints, or None for a few that fit the rows"
        )
    return tuple(dict.fromkeys(check_options(fn, {"batch_size": size}).batch_size for size in sizes))
