"""What happened in one call: its events -> a `Report` to print, plot, or hand on as a dict."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from devicemap.errors import DataError, brief
from devicemap.events import CallFinished, CallStarted, Event
from devicemap.inspect.accounts import DeviceReport, account
from devicemap.inspect.gpu_usage import GpuUsage
from devicemap.inspect.render import Result, counted, page, seconds_text, short_names, size_text, table
from devicemap.inspect.report_advice import advise, slow_devices, tail_seconds
from devicemap.inspect.timeline import Span, ran_in_turn, save_timeline, spans_of


@dataclass(frozen=True, repr=False)
class Report(Result):
    """What happened in one call. `print` it for a table; `rich` prints it in colour, and notebooks show it.

    Examples:
        >>> from devicemap.types import ChunkFinished, ChunkStarted, Shard
        >>> shard = Shard("/device:GPU:0", 0, 10)
        >>> report = Report.of([
        ...     CallStarted(0.0, 10, ("/device:GPU:0",)),
        ...     ChunkStarted(0.5, shard, waited_seconds=0.5),
        ...     ChunkFinished(2.0, shard, started_seconds=0.5),
        ...     CallFinished(2.0, None),
        ... ])
        >>> report.rows, report.devices[0].busy_seconds, report.devices[0].waiting_seconds
        (10, 1.5, 0.5)
    """

    _derived = (
        "rows_per_second", "retries", "back_offs", "tail_seconds", "lost_devices", "slow_devices", "advice",
    )  # fmt: skip

    engine: Literal["one graph", "chunks"]
    """How the rows ran: all devices in one graph, or chunks to idle devices."""

    rows: int
    """Rows that were mapped."""

    expected_rows: int | None
    """Rows that there were to map; `None` where nobody knew."""

    wall_seconds: float
    """How long the call took."""

    traces: int | None
    """How often `fn` was traced in it; `None` where nobody counted."""

    error: str | None
    """What ended the call early; `None` where all rows were mapped."""

    devices: tuple[DeviceReport, ...]
    """A report for each device."""

    spans: tuple[Span, ...]
    """Each attempt to compute a chunk, in the order in which they ended."""

    row_by_row: str | None = None
    """Why a `fn` of one row ran row by row; `None` if it did not, or with `vectorize=False`."""

    @classmethod
    def of(
        cls,
        events: Iterable[Event],
        *,
        engine: Literal["one graph", "chunks"] = "chunks",
        traces: int | None = None,
        usage: Iterable[GpuUsage] = (),
        row_by_row: str | None = None,
    ) -> Report:
        """The report of one finished call.

        It holds no event, so that none of their errors, and nothing that those refer to, is kept alive.

        Args:
            events: all events of the call, in order.
            engine: `"one graph"` where one graph held all devices.
            traces: how often `fn` was traced in this call.
            usage: what a `GpuMeter` sampled.
            row_by_row: why `fn` ran row by row, if it did.

        Raises:
            DataError: the events are not those of one call that has finished.
        """
        events = tuple(events)
        started, finished = _ends_of(events)
        spans = spans_of(events)
        devices = account(events, spans, end_seconds=finished.seconds, usage=usage)
        return cls(
            engine=engine,
            rows=sum(device.rows for device in devices),
            expected_rows=started.rows,
            wall_seconds=finished.seconds - started.seconds,
            traces=traces,
            error=None if finished.error is None else f"{type(finished.error).__name__}: {brief(finished.error)}",
            devices=devices,
            spans=spans,
            row_by_row=row_by_row,
        )

    @property
    def rows_per_second(self) -> float:
        """Rows mapped per second of the whole call."""
        return self.rows / self.wall_seconds if self.wall_seconds else 0.0

    @property
    def retries(self) -> int:
        """How often rows went to a device again after they had failed."""
        return sum(device.retries for device in self.devices)

    @property
    def back_offs(self) -> int:
        """How many of the retries came after a device ran out of memory."""
        return sum(device.back_offs for device in self.devices)

    @property
    def lost_devices(self) -> tuple[str, ...]:
        """Full names of the devices that kept failing and got no more chunks."""
        return tuple(device.device for device in self.devices if device.lost)

    @property
    def slow_devices(self) -> tuple[str, ...]:
        """Stragglers: full names of devices with less than half of the others' rows per busy second."""
        return slow_devices(self.devices)

    @property
    def tail_seconds(self) -> float | None:
        """Seconds from the moment when the first device ran out of work to the end of the last chunk; `None` if the devices of
        one graph worked one after another."""
        in_turn = self.engine == "one graph" and ran_in_turn(self.spans)
        return None if in_turn else tail_seconds(self.spans, self.lost_devices)

    @property
    def advice(self) -> tuple[str, ...]:
        """What held the call up and what to do about it, in plain words; empty where nothing is worth saying."""
        return advise(self)

    def to_dict(self) -> dict[str, Any]:
        """All of it but the spans, as JSON has it: text, numbers, lists, dicts and `None`. Units are in the names."""
        values = super().to_dict()
        del values["spans"]
        for device in values["devices"]:
            device["share"] = device["rows"] / self.rows if self.rows else 0.0
        return values

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Draw the timeline, a bar per chunk and device, into a `.png`, `.svg` or `.pdf`; needs matplotlib."""
        save_timeline(self.spans, [device.device for device in self.devices], self.summary, path)

    @property
    def summary(self) -> str:
        """The call in one line."""
        all_of = "" if self.expected_rows in (None, self.rows) else f" of {self.expected_rows}"
        calls = sum(device.calls for device in self.devices)
        way = "in one graph" if self.engine == "one graph" else f"in {counted(calls, 'chunk')}"
        speed = f"{self.rows_per_second:.3g} rows/s"
        traced = "" if self.traces is None else f", {counted(self.traces, 'trace')}"
        return (
            f"{self.rows}{all_of} rows in {self.wall_seconds:.3g} s ({speed}) {way} on "
            f"{counted(len(self.devices), 'device')}{traced}"
        )

    def __rich__(self) -> Any:
        names = short_names(device.device for device in self.devices)
        cells = [{"device": names[d.device] + " (lost)" * d.lost, **_cells_of(d, self.rows)} for d in self.devices]
        notes = [*([f"stopped by {self.error}"] if self.error else []), *(f"* {line}" for line in self.advice)]
        return page(self.summary, table(cells, nothing="-"), notes=notes)


def _ends_of(events: Sequence[Event]) -> tuple[CallStarted, CallFinished]:
    """The first and the last event, checked to be those of one call."""
    ends = [type(event).__name__ for event in events if isinstance(event, (CallStarted, CallFinished))]
    if len(ends) == 2 and isinstance(events[0], CallStarted) and isinstance(events[-1], CallFinished):
        return events[0], events[-1]
    raise DataError(
        f"these {len(events)} events hold {ends}; a report takes all events of one finished call, from its CallStarted "
        "to its CallFinished"
    )


def _cells_of(device: DeviceReport, rows: int) -> dict[str, str]:
    """What stands in each column; empty where there is nothing to say."""
    busy, idle, waiting = device.busy_seconds, device.idle_seconds, device.waiting_seconds
    return {
        "rows": str(device.rows),
        "share": f"{device.rows / rows:.0%}" if rows else "",
        "calls": str(device.calls),
        "busy": seconds_text(busy),
        "idle": seconds_text(idle),
        "waiting": seconds_text(waiting) if waiting else "",
        "retries": str(device.retries or ""),
        "back-offs": str(device.back_offs or ""),
        "in use": "" if device.utilisation_percent is None else f"{device.utilisation_percent:.0f}%",
        "memory": "" if device.memory_bytes is None else size_text(device.memory_bytes),
    }
