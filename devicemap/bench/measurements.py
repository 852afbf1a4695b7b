"""The result of a benchmark: values to print, save and plot."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from numbers import Real
from typing import Any

from devicemap.devices import Device
from devicemap.errors import OptionError
from devicemap.events import short_name
from devicemap.inspect.render import BLUE, ORANGE, Result, counted, drawing, page, seconds_text, size_text, table

_START_SECONDS = 0.015
"""The most that the start of chunks takes: 4 to 15 ms on 3 to 8 devices, whatever the rows."""


@dataclass(frozen=True)
class Measurement:
    """Time and memory of a call in one mode."""

    mode: str
    """`"eager"`: `fn` in eager code on the first device. `"one device"`, `"all devices"`: a `DeviceMap` on all rows, or on
    fewer if `fn` is slow. `"batch"`: a `DeviceMap` with one chunk for each device, of which the start takes up to 15 ms; for a
    model, a training step."""

    rows: int
    """Rows of the call: in mode `"batch"` the batch size."""

    first_call_seconds: float = math.nan
    """Seconds of the first call, which traces and compiles."""

    seconds: float = math.nan
    """Median seconds of later calls."""

    peak_memory_bytes: tuple[int, ...] | None = None
    """Peak memory of each device of the benchmark, in mode `"batch"`. `None` if a device does not report it."""

    error: str | None = None
    """The reason why there are no times, or `None`."""

    @property
    def rows_per_second(self) -> float:
        """`rows` divided by `seconds`."""
        return self.rows / self.seconds


@dataclass(frozen=True, repr=False)
class BenchmarkResult(Result):
    """The result of `devicemap.benchmark`. `print(result)` shows all measurements."""

    name: str
    """Name of the function."""

    devices: tuple[Device, ...]
    """The devices."""

    measurements: tuple[Measurement, ...] = ()
    """In the order in which they were made."""

    no_memory: str | None = None
    """The reason why the memory was not measured; `None` if it was."""

    def largest_batch(self, memory_bytes: int | None = None, margin: float = 0.1) -> int | None:
        """Return the rows of the largest batch that fits into the memory of the devices.

        That is `1 - margin` times the rows at which `lines` reach the memory of the device with the least room. If a batch ran
        out of memory, it is at most the largest batch that ran.

        With a `DeviceMap`, the batch is a call with `batch_size=rows // len(devices)` and `prefetch=1`. For a model, it is
        the global batch of a training step.

        Args:
            memory_bytes: memory of each device; `None` for that of the devices that were measured.
            margin: the share of the rows to leave out, because allocators fragment memory.

        Returns:
            A multiple of the number of devices; 0 if nothing fits. `None` for devices that do not report their memory,
            such as CPUs: `no_memory` is the reason.

        Raises:
            OptionError: an argument is out of range, or the memory of a device is unknown.
        """
        if not (isinstance(margin, Real) and 0 <= margin < 1):
            raise OptionError(f"margin={margin!r}; expected a share of the rows, at least 0 and below 1")
        if memory_bytes is not None and not (isinstance(memory_bytes, Real) and memory_bytes > 0):
            raise OptionError(f"memory_bytes={memory_bytes!r}; expected the memory of each device in bytes")
        if self.no_memory:
            return None
        largest, failed = self._bounds()
        rows = (1 - margin) * self._room(memory_bytes)
        if rows == math.inf or (failed and memory_bytes is None):
            rows = min(rows, largest)
        return max(0, int(rows // len(self.devices) * len(self.devices)))

    @property
    def lines(self) -> tuple[tuple[float, float], ...]:
        """Peak memory of each device: fixed bytes, and bytes per row of the batch.

        Each is a line through two batches: the smallest, and the largest or the smallest that ran out of memory. The latter
        counts as the whole memory. Empty if the memory was not measured.
        """
        batches = sorted((m.rows, m.peak_memory_bytes) for m in self.measurements if m.peak_memory_bytes)
        if not batches:
            return ()
        (x, lows), (y, highs) = batches[0], batches[-1]
        failed, lines = self._bounds()[1], []
        for device, low, high in zip(self.devices, lows, highs):
            stop, top = (failed, device.memory) if failed and device.memory else (y, high)
            per_row = (top - low) / max(1, stop - x)
            lines.append((low - x * per_row, per_row))
        return tuple(lines)

    def _bounds(self) -> tuple[int, int | None]:
        """Return the rows of the largest batch that ran, 0 without one, and of the smallest that ran out of memory."""
        batches = [m for m in self.measurements if m.mode == "batch"]
        ran = max((m.rows for m in batches if not m.error), default=0)
        return ran, min((m.rows for m in batches if m.error), default=None)

    def _room(self, memory_bytes: int | None = None) -> float:
        """Return the rows that fit according to `lines`, without a margin; infinity if the lines are flat."""
        room = math.inf
        for device, (fixed, per_row) in zip(self.devices, self.lines):
            memory = memory_bytes or device.memory
            if memory is None:
                raise OptionError(f"the memory of {short_name(device.name)} is unknown; give memory_bytes")
            flat = math.inf if fixed <= memory else 0.0
            room = min(room, (memory - fixed) / per_row if per_row > 0 else flat)
        return room

    def __rich__(self) -> Any:
        alone = next((m.rows_per_second for m in self.measurements if m.mode == "one device" and not m.error), math.nan)
        rows = [
            {
                "mode": m.mode,
                "rows": str(m.rows),
                "rows/s": f"{m.rows_per_second:.4g}",
                "call": seconds_text(m.seconds),
                "first call": seconds_text(m.first_call_seconds),
                "speed-up": "" if math.isnan(alone) or m.mode == "batch" else f"{m.rows_per_second / alone:.3g}",
                "peak memory": size_text(max(m.peak_memory_bytes)) if m.peak_memory_bytes else "",
            }
            for m in self.measurements
            if not m.error
        ]
        notes = [f"{m.mode}, {m.rows} rows: {m.error}" for m in self.measurements if m.error]
        for device, (fixed, per_row) in zip(self.devices, self.lines):
            notes.append(f"{short_name(device.name)}: {size_text(int(fixed))} and {size_text(int(per_row))} per row")
        if self.no_memory or all(device.memory for device in self.devices):
            notes.append(self.no_memory or f"largest batch: {self.largest_batch()} rows, with a margin of 10 %")
        return page(f"{self.name} on {counted(len(self.devices), 'device')}", table(rows), notes=notes)

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Draw time per row and peak memory against the batch size. The suffix of `path` selects the file format.

        Raises:
            ImportError: matplotlib is not installed.
        """
        batches = sorted((m for m in self.measurements if m.mode == "batch" and not m.error), key=lambda m: m.rows)
        sizes = [m.rows for m in batches]
        failed = self._bounds()[1]
        with drawing(path, 9.0, 5.0) as figure:
            axes = figure.subplots()
            axes.plot(sizes, [1e3 / m.rows_per_second for m in batches], "o-", lw=2, color=BLUE, label="time per row")
            if failed:
                axes.axvspan(failed, 1.5 * failed, color="lightgrey", label="out of memory")
            axes.set(title=self.name, xlabel="batch size", ylabel="milliseconds per row", xscale="log", yscale="log")
            peaks = [max(m.peak_memory_bytes) / 2**20 for m in batches if m.peak_memory_bytes]
            if peaks:
                right = axes.twinx()
                right.plot(sizes, peaks, "s--", lw=2, color=ORANGE, label="peak memory")
                for memory in {device.memory for device in self.devices if device.memory}:
                    right.axhline(memory / 2**20, lw=2, color="black", linestyle=":", label="memory of a device")
                right.set(ylabel="MiB on the fullest device", ylim=(0, None))
            figure.legend(loc="outside lower center", ncols=2, frameon=False)


def rows_within(result: BenchmarkResult, seconds: float) -> float:
    """Return how many rows one device maps in `seconds`, estimated from the largest batch; infinity if it took no time."""
    batches = [m for m in result.measurements if m.mode == "batch" and not m.error]
    if not batches:
        return math.inf
    largest = max(batches, key=lambda m: m.rows)
    of_rows = largest.seconds - _START_SECONDS
    return seconds * largest.rows / len(result.devices) / of_rows if of_rows > 0 else math.inf


def next_batch(result: BenchmarkResult) -> int | None:
    """Return the rows of the next batch of the search for the largest one; `None` at the end.

    The search multiplies the batch by up to four, tries a batch just below the expected limit, and narrows it down to a tenth.
    """
    largest, failed = result._bounds()
    step = len(result.devices)
    if not largest or (failed and failed - largest <= max(step, 0.1 * largest)):
        return None
    rows = math.sqrt(largest * failed) if failed else min(4 * largest, max(0.93 * result._room(), 1.1 * largest))
    return math.ceil(rows / step) * step
