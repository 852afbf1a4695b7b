"""Drawing what a benchmark measured, with matplotlib: figures only, no state of pyplot."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from typing import Any

from devicemap.bench.measurements import BenchmarkResult, Measurement
from devicemap.bench.sweep import name_devices
from devicemap.tell.report.plots import figure_class


def draw_benchmark(result: BenchmarkResult, path: str | os.PathLike[str]) -> None:
    """Rows per second against `batch_size`, a line per mode and set of devices; and the speed-up of each, as bars.

    Raises:
        ImportError: matplotlib is not installed.
    """
    figure = figure_class()(figsize=(11, 4.5), layout="constrained")
    rates, speedups = figure.subplots(1, 2)
    series = _series(result.measurements)
    _draw_rates(rates, series)
    _draw_speedups(speedups, series)
    figure.suptitle(f"{result.name}, {result.rows} rows")
    figure.savefig(path, dpi=150)


def _series(measurements: Sequence[Measurement]) -> dict[str, list[Measurement]]:
    """Measurements that differ in `batch_size` only, by what they have in common, in ascending order."""
    series: dict[str, list[Measurement]] = {}
    for m in measurements:
        vectorize = ", vectorize=False" if m.vectorize is False else ""
        series.setdefault(f"{m.mode}, {name_devices(m.devices)}{vectorize}", []).append(m)
    return {label: sorted(found, key=_position) for label, found in series.items()}


def _position(m: Measurement) -> float:
    """Ascending batch sizes; `None` means the largest there are, and `"auto"` stands before all."""
    return m.batch_size if isinstance(m.batch_size, int) else 0 if m.batch_size == "auto" else math.inf


def _draw_rates(axes: Any, series: dict[str, list[Measurement]]) -> None:
    positions = sorted({_position(m) for found in series.values() for m in found})
    for label, found in series.items():
        at = [positions.index(_position(m)) for m in found]
        axes.plot(at, [m.rows_per_second for m in found], marker="o", label=label)
    names = {0: "auto", math.inf: "a shard\nper device"}
    axes.set_xticks(range(len(positions)), [names.get(p, f"{p:.0f}") for p in positions])
    axes.set_yscale("log")
    axes.set(xlabel="batch_size, rows per device call", ylabel="rows per second")
    axes.grid(alpha=0.3, which="both")
    axes.legend(fontsize="small")


def _draw_speedups(axes: Any, series: dict[str, list[Measurement]]) -> None:
    best = {label: max(found, key=lambda m: m.rows_per_second) for label, found in series.items()}
    known = {label: m for label, m in best.items() if m.speedup is not None}
    axes.barh(list(known), [m.speedup for m in known.values()], color="tab:blue")
    ideal = max((len(m.devices) for m in best.values()), default=1)
    axes.axvline(ideal, color="black", linestyle="--", linewidth=1, label=f"ideal on {ideal} devices")
    axes.invert_yaxis()
    axes.set(xlabel="speed-up, times the fastest on one device", xlim=(0, None))
    axes.legend(fontsize="small")
