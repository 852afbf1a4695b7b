"""What a benchmark measured, as values: to print, to save, to draw."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from devicemap.base.devices import Device
from devicemap.bench.sweep import Skipped, Way, name_devices
from devicemap.bench.timing import Ratio, ratio_of
from devicemap.tell.render import Result, counted, page, seconds_text, size_text, table


@dataclass(frozen=True)
class Timing(Way):
    """What was read for one way of mapping, before it is compared with others."""

    rows: int
    """How many rows a call mapped: all, or fewer where eager code is too slow for all of them."""

    first_call_seconds: float
    """The first call, which traces and compiles."""

    round_seconds: tuple[float, ...]
    """A later call, from handing over the data to having the results: one reading per round."""

    busy_shares: dict[str, float] | None
    """Per device, the share of a call's time that it was busy, from 0 to 1; `None` where nobody tells."""

    peak_memory_bytes: dict[str, int] | None
    """Per device, the most memory that TensorFlow held there during a call; `None` where no device tells, as for CPUs."""

    def gain_over(self, other: Timing) -> Ratio:
        """How many times as many rows per second as the other it maps."""
        seconds_per_row = [[seconds / timing.rows for seconds in timing.round_seconds] for timing in (other, self)]
        return ratio_of(*seconds_per_row)


@dataclass(frozen=True)
class Measurement(Timing):
    """One way of mapping, measured."""

    call_seconds: float
    """The median of `round_seconds`."""

    rows_per_second: float
    """`rows` over `call_seconds`."""

    speedup: float | None
    """How many times the rows per second of one device, of the fastest measurement of one, in any mode: the median of this
    ratio over rounds. `None` where one device was not measured."""

    speedup_interval: tuple[float, float] | None
    """Where the speed-up lies: a 95 % percentile interval of its bootstrap over rounds. `None` where there was one round."""

    efficiency: float | None
    """`speedup` over the number of devices: 1 where none is wasted."""


def compare_timings(timings: Sequence[Timing]) -> tuple[Measurement, ...]:
    """Rows per second, speed-up and efficiency of each timing among all."""
    rates = [timing.rows / median(timing.round_seconds) for timing in timings]
    of_one = [(rate, i) for i, (timing, rate) in enumerate(zip(timings, rates)) if len(timing.devices) == 1]
    fastest = timings[max(of_one)[1]] if of_one else None
    measurements = []
    for timing, rate in zip(timings, rates):
        gain = timing.gain_over(fastest) if fastest else None
        measurements.append(
            Measurement(
                **vars(timing),
                call_seconds=median(timing.round_seconds),
                rows_per_second=rate,
                speedup=gain.median if gain else None,
                speedup_interval=(gain.low, gain.high) if gain and len(timing.round_seconds) > 1 else None,
                efficiency=gain.median / len(timing.devices) if gain else None,
            )
        )
    return tuple(measurements)


@dataclass(frozen=True, repr=False)
class BenchmarkResult(Result):
    """What `devicemap.benchmark` found out. `print(result)` shows all of it."""

    _least_width = 160

    name: str
    """Name of the function."""

    rows: int
    """How many rows there were to map."""

    devices: tuple[Device, ...]
    """The devices that could be used, in the order given: one device means the first."""

    rounds: int
    """How many rounds the medians are over; fewer than asked for where the time budget was used up."""

    measurements: tuple[Measurement, ...]
    """What was measured, the most telling ways first."""

    skipped: tuple[Skipped, ...]
    """What was not measured, and why."""

    recommendation: str
    """What to use, in one sentence."""

    machine: str
    """Processor and cores."""

    versions: dict[str, str]
    """Versions of Python, TensorFlow and devicemap."""

    def __rich__(self) -> Any:
        devices = name_devices([device.name for device in self.devices])
        title = f"{self.name} over {self.rows} rows, up to {devices}, medians of {counted(self.rounds, 'round')}"
        ways: dict[str, list[str]] = {}
        for way in self.skipped:
            ways.setdefault(way.reason, []).append(str(way))
        skipped = [f"skipped, as {reason}: {'; '.join(skipped)}" for reason, skipped in ways.items()]
        versions = ", ".join(f"{name} {version}" for name, version in self.versions.items())
        measured = table([_cells_of(measurement) for measurement in self.measurements])
        return page(title, measured, notes=[*skipped, f"{self.machine}; {versions}", "", self.recommendation])

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Draw rows per second against `batch_size`, and speed-ups; the suffix of `path` says as which kind of file.

        Raises:
            ImportError: matplotlib is not installed.
        """
        from devicemap.bench.charts import draw_benchmark

        draw_benchmark(self, path)


def _cells_of(m: Measurement) -> dict[str, str]:
    low, high = m.speedup_interval or (0.0, 0.0)
    interval = f" ({low:.3g} to {high:.3g})" if m.speedup_interval else ""
    return {
        "mode": m.mode,
        "devices": name_devices(m.devices),
        "batch_size": str(m.batch_size),
        "vectorize": "" if m.vectorize is None else str(m.vectorize),
        "rows": str(m.rows),
        "rows/s": f"{m.rows_per_second:.4g}",
        "call": seconds_text(m.call_seconds),
        "first call": seconds_text(m.first_call_seconds),
        "speed-up": "" if m.speedup is None else f"{m.speedup:.3g}{interval}",
        "efficiency": "" if m.efficiency is None else f"{m.efficiency:.0%}",
        "busy": "" if m.busy_shares is None else f"{min(m.busy_shares.values(), default=0):.0%}",
        "peak memory": "" if m.peak_memory_bytes is None else size_text(max(m.peak_memory_bytes.values(), default=0)),
    }
