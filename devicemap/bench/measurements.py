"""The result of a benchmark: values to print, save and plot."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from statistics import median
from typing import Any

from devicemap.devices import Device
from devicemap.events import short_name
from devicemap.inspect.render import Result, figure_class, page, seconds_text, size_text, table


@dataclass(frozen=True)
class Measurement:
    """The times of one mode, batch size and set of devices."""

    _derived = ("call_seconds", "rows_per_second")

    mode: str
    """`"eager"`: `fn` in eager code. `"graph"`: a `DeviceMap`."""

    devices: tuple[str, ...]
    """Full names of the devices."""

    batch_size: int | str | None
    """Rows per device call; `None` for one shard per device."""

    rows: int
    """Rows that a call maps. Eager code maps one batch, or a few single rows."""

    first_call_seconds: float = math.nan
    """Seconds of the first call, which traces and compiles."""

    round_seconds: tuple[float, ...] = ()
    """Seconds of a later call, one number per round. Empty if there is an `error`."""

    speedup: float | None = None
    """Rows per second, relative to the fastest measurement on one device: the median of the ratios of each round."""

    peak_memory_bytes: dict[str, int] | None = None
    """Peak memory per device during a call. `None` on devices without a counter, such as CPUs."""

    error: str | None = None
    """Why there are no times."""

    @property
    def call_seconds(self) -> float:
        """The median of `round_seconds`."""
        return median(self.round_seconds or [math.nan])

    @property
    def rows_per_second(self) -> float:
        """`rows` divided by `call_seconds`."""
        return self.rows / self.call_seconds


@dataclass(frozen=True, repr=False)
class BenchmarkResult(Result):
    """What `devicemap.benchmark` measured. `print(result)` shows all of it."""

    _least_width = 120

    name: str
    """Name of the function."""

    rows: int
    """Number of rows."""

    devices: tuple[Device, ...]
    """All devices, in the order given. Measurements on one device use the first."""

    measurements: tuple[Measurement, ...]
    """One per mode, batch size and set of devices."""

    def __rich__(self) -> Any:
        measured = [m for m in self.measurements if m.error is None]
        failed = [f"{_label(m)}, batch_size={m.batch_size}: {m.error}" for m in self.measurements if m.error]
        title = f"{self.name}: {self.rows} row(s) on up to {len(self.devices)} device(s)"
        return page(title, table([*map(_cells_of, measured)]), notes=failed)

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Draw the time per row against `batch_size`. The suffix of `path` selects the file format.

        Raises:
            ImportError: matplotlib is not installed.
        """
        figure = figure_class()(layout="constrained")
        axes = figure.subplots()
        measured = sorted((m for m in self.measurements if m.error is None), key=_position)
        sizes = [*dict.fromkeys(m.batch_size for m in measured)]
        for label in dict.fromkeys(map(_label, measured)):
            line = [m for m in measured if _label(m) == label]
            places = [sizes.index(m.batch_size) for m in line]
            axes.plot(places, [1e3 / m.rows_per_second for m in line], marker="o", label=label)
        axes.set_xticks(range(len(sizes)), [str(size) for size in sizes])
        axes.set(title=self.name, xlabel="batch_size", ylabel="milliseconds per row", yscale="log")
        axes.legend()
        figure.savefig(path, dpi=150)


def _label(m: Measurement) -> str:
    return f"{m.mode}, {short_name(m.devices[0]) if len(m.devices) == 1 else f'{len(m.devices)} devices'}"


def _position(m: Measurement) -> float:
    """Sort `"auto"` before all numbers and `None`, the largest batches, after them."""
    return m.batch_size if isinstance(m.batch_size, int) else -math.inf if m.batch_size == "auto" else math.inf


def _cells_of(m: Measurement) -> dict[str, str]:
    return {
        "mode": _label(m),
        "batch_size": str(m.batch_size),
        "rows": str(m.rows),
        "rows/s": f"{m.rows_per_second:.4g}",
        "call": seconds_text(m.call_seconds),
        "first call": seconds_text(m.first_call_seconds),
        "speed-up": "" if m.speedup is None else f"{m.speedup:.3g}",
        "peak memory": "" if m.peak_memory_bytes is None else size_text(max(m.peak_memory_bytes.values())),
    }
