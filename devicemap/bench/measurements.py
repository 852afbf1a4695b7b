"""What a benchmark measured, as values: to print, to save, to draw."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from devicemap.bench.sweep import Skipped, Way, name_devices
from devicemap.tell.report.tables import Printed
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
class BenchmarkResult(Printed):
    """What `devicemap.benchmark` found out. `print(result)` shows all of it."""

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

    def table(self) -> Any:
        """The measurements as a `rich.table.Table`.

        Raises:
            ImportError: rich is not installed.
        """
        try:
            from rich.box import SIMPLE_HEAD
            from rich.table import Table
        except ImportError as error:
            raise ImportError("a table needs rich: pip install rich. print(result) does without") from error
        header, *lines = self._cells()
        table = Table(title=self._title(), caption=self.recommendation, box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
        for i, name in enumerate(header):
            table.add_column(name, justify="left" if i < 2 else "right")
        for line in lines:
            table.add_row(*line)
        return table

    def __str__(self) -> str:
        lines = self._cells()
        widths = [max(map(len, column)) for column in zip(*lines)]
        text = [
            "  ".join(
                f"{cell:{'<' if i < 2 else '>'}{width}}" for i, (cell, width) in enumerate(zip(line, widths))
            ).rstrip()
            for line in lines
        ]
        reasons = dict.fromkeys(way.reason for way in self.skipped)
        skipped = [
            f"skipped, as {reason}: {'; '.join(str(way) for way in self.skipped if way.reason == reason)}"
            for reason in reasons
        ]
        versions = ", ".join(f"{name} {version}" for name, version in self.versions.items())
        parts = [self._title(), "", *text, *skipped, f"{self.machine}; {versions}", "", self.recommendation]
        return "\n".join(parts)

    def to_dict(self) -> dict[str, Any]:
        """Everything as dicts, lists, strings and numbers, such as JSON has."""
        return _plain(asdict(self))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write `to_dict()` to a file, as JSON."""
        Path(path).write_text(json.dumps(self.to_dict(), indent=1) + "\n", encoding="utf-8")

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Draw rows per second against `batch_size`, and speed-ups; the suffix of `path` says as which kind of file.

        Raises:
            ImportError: matplotlib is not installed.
        """
        from devicemap.bench.charts import draw_benchmark

        draw_benchmark(self, path)

    def _title(self) -> str:
        devices = name_devices([device.name for device in self.devices])
        rounds = "1 round" if self.rounds == 1 else f"{self.rounds} rounds"
        return f"{self.name} over {self.rows} rows, up to {devices}, medians of {rounds}"

    def _cells(self) -> list[list[str]]:
        """The header and a line per measurement; columns that nothing is known for are left out."""
        lines = [[*_COLUMNS], *map(_cells_of, self.measurements)]
        known = [any(column[1:]) for column in zip(*lines)]
        return [[cell for cell, keep in zip(line, known) if keep] for line in lines]


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


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(entry) for key, entry in value.items()}
    if isinstance(value, tuple | list):
        return [_plain(entry) for entry in value]
    return value
