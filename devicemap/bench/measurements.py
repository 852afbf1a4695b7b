"""What a benchmark measured, as values: to print, to save, to draw."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from devicemap.bench.sweep import Skipped, Way, name_devices
from devicemap.tell.render import Result, page, without_empty
from devicemap.types import Device

_COLUMNS = ("mode", "devices", "batch_size", "vectorize", "rows", "rows/s", "call", "spread", "first call", "speed-up",
            "efficiency", "busy", "peak memory")  # fmt: skip


@dataclass(frozen=True)
class Timing(Way):
    """What was read for one way of mapping, before it is compared with others."""

    rows: int
    """How many rows a call mapped: all, or fewer where eager code is too slow for all of them."""

    first_call_seconds: float
    """The first call, which traces and compiles."""

    call_seconds: float
    """A later call, from handing over the data to having the results: the median over rounds."""

    spread_seconds: float | None
    """Half the distance between the quartiles of the rounds; `None` where there was one round only."""

    busy_shares: dict[str, float] | None
    """Per device, the share of a call's time that it was busy, from 0 to 1; `None` where nobody tells."""

    peak_memory_bytes: dict[str, int] | None
    """Per device, the most memory that TensorFlow held there during a call; `None` where no device tells, as for CPUs."""


@dataclass(frozen=True)
class Measurement(Timing):
    """One way of mapping, measured."""

    rows_per_second: float
    """`rows` over `call_seconds`."""

    speedup: float | None
    """How many times the rows per second of one device: of the fastest measurement of one, in any mode. `None` where one
    device was not measured."""

    efficiency: float | None
    """`speedup` over the number of devices: 1 where none is wasted."""


def compare_timings(timings: Sequence[Timing]) -> tuple[Measurement, ...]:
    """Rows per second, speed-up and efficiency of each timing among all."""
    rates = [timing.rows / timing.call_seconds for timing in timings]
    of_one = max((rate for timing, rate in zip(timings, rates) if len(timing.devices) == 1), default=None)
    measurements = []
    for timing, rate in zip(timings, rates):
        speedup = None if of_one is None else rate / of_one
        efficiency = None if speedup is None else speedup / len(timing.devices)
        measurements.append(Measurement(**vars(timing), rows_per_second=rate, speedup=speedup, efficiency=efficiency))
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
        rounds = "1 round" if self.rounds == 1 else f"{self.rounds} rounds"
        title = f"{self.name} over {self.rows} rows, up to {devices}, medians of {rounds}"
        reasons = dict.fromkeys(way.reason for way in self.skipped)
        skipped = [
            f"skipped, as {reason}: {'; '.join(str(way) for way in self.skipped if way.reason == reason)}"
            for reason in reasons
        ]
        versions = ", ".join(f"{name} {version}" for name, version in self.versions.items())
        measured = without_empty(_COLUMNS, [*map(_cells_of, self.measurements)])
        return page(title, measured, notes=[*skipped, f"{self.machine}; {versions}", "", self.recommendation])

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Draw rows per second against `batch_size`, and speed-ups; the suffix of `path` says as which kind of file.

        Raises:
            ImportError: matplotlib is not installed.
        """
        from devicemap.bench.charts import draw_benchmark

        draw_benchmark(self, path)


def _cells_of(m: Measurement) -> list[str]:
    busy = "" if m.busy_shares is None else f"{min(m.busy_shares.values(), default=0):.0%}"
    memory = "" if m.peak_memory_bytes is None else f"{max(m.peak_memory_bytes.values(), default=0) / 2**20:.0f} MiB"
    return [
        m.mode,
        name_devices(m.devices),
        str(m.batch_size),
        "" if m.vectorize is None else str(m.vectorize),
        str(m.rows),
        f"{m.rows_per_second:.4g}",
        _duration(m.call_seconds),
        "" if m.spread_seconds is None else f"±{m.spread_seconds / m.call_seconds:.0%}",
        _duration(m.first_call_seconds),
        "" if m.speedup is None else f"{m.speedup:.3g}",
        "" if m.efficiency is None else f"{m.efficiency:.0%}",
        busy,
        memory,
    ]


def _duration(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"
