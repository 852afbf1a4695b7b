"""Drawing what a benchmark measured, with matplotlib: figures only, no state of pyplot."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from typing import Any

from devicemap.bench.measurements import BenchmarkResult, Measurement
from devicemap.bench.sweep import name_devices
from devicemap.tell.render import figure_class


def draw_benchmark(result: BenchmarkResult, path: str | os.PathLike[str]) -> None:
    """Rows per second against `batch_size`, a line per mode and set of devices; and the speed-up of each, as bars.

    Raises:
        ImportError: matplotlib is not installed.
    """
    figure = figure_class()(figsize=(11, 4.5), layout="constrained")
    rates, speedups = figure.subplots(1, 2)
    series: dict[str, list[Measurement]] = {}  # what differs in batch_size only, by what it has in common
    for m in sorted(result.measurements, key=_position):
        vectorize = ", vectorize=False" if m.vectorize is False else ""
        series.setdefault(f"{m.mode}, {name_devices(m.devices)}{vectorize}", []).append(m)
    _draw_rates(rates, series)
    _draw_speedups(speedups, [(label, max(found, key=_rate)) for label, found in series.items()])
    figure.suptitle(f"{result.name}, {result.rows} rows")
    figure.savefig(path, dpi=150)


def _position(m: Measurement) -> float:
    """Ascending batch sizes; `None` means the largest there are, and `"auto"` stands before all."""
    return m.batch_size if isinstance(m.batch_size, int) else 0 if m.batch_size == "auto" else math.inf


def _rate(m: Measurement) -> float:
    return m.rows_per_second


def _draw_rates(axes: Any, series: dict[str, list[Measurement]]) -> None:
    positions = sorted({_position(m) for found in series.values() for m in found})
    for label, found in series.items():
        axes.plot([positions.index(_position(m)) for m in found], [*map(_rate, found)], marker="o", label=label)
    names = {0: "auto", math.inf: "a shard\nper device"}
    axes.set_xticks(range(len(positions)), [names.get(p, f"{p:.0f}") for p in positions])
    axes.set_yscale("log")
    axes.set(xlabel="batch_size, rows per device call", ylabel="rows per second")
    axes.grid(alpha=0.3, which="both")
    axes.legend(fontsize="small")


def _draw_speedups(axes: Any, best: Sequence[tuple[str, Measurement]]) -> None:
    for label, m in best:
        if m.speedup is not None:
            low, high = m.speedup_interval or (m.speedup, m.speedup)
            axes.barh(label, m.speedup, xerr=[[m.speedup - low], [high - m.speedup]], color="tab:blue")
    ideal = max((len(m.devices) for _, m in best), default=1)
    axes.axvline(ideal, color="black", linestyle="--", linewidth=1, label=f"ideal on {ideal} devices")
    axes.invert_yaxis()
    axes.set(xlabel="speed-up, times the fastest on one device", xlim=(0, None))
    axes.legend(fontsize="small")
