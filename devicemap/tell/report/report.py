"""What happened in one call: its events -> a `Report` to print, plot, trace, or hand on as a dict."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from devicemap.errors import DataError, brief
from devicemap.tell.render import Result, page, without_empty
from devicemap.tell.report.accounts import DeviceReport, account
from devicemap.tell.report.advice import advise, late_shards, slow_devices, tail_seconds
from devicemap.tell.report.meter import GpuUsage
from devicemap.tell.report.plots import save_timeline
from devicemap.tell.report.timeline import Span, chrome_trace, ran_in_turn, short_names, spans_of
from devicemap.types import CallFinished, CallStarted, Event, Shard


@dataclass(frozen=True, repr=False)
class Report(Result):
    """What happened in one call. `print` it for a table; `rich` prints it in colour, and notebooks show it.

    Examples:
        >>> from devicemap.types import ChunkFinished, ChunkStarted
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

    way: Literal["one graph", "chunks"]
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

    @classmethod
    def of(
        cls,
        events: Iterable[Event],
        *,
        way: Literal["one graph", "chunks"] = "chunks",
        traces: int | None = None,
        told_apart: bool = True,
        usage: Iterable[GpuUsage] = (),
    ) -> Report:
        """The report of one finished call.

        It holds no event, so that none of their errors, and nothing that those refer to, is kept alive.

        Args:
            events: all events of the call, in order.
            way: `"one graph"` where one graph held all devices.
            traces: how often `fn` was traced in this call.
            told_apart: whether the events tell when each device was done; otherwise its busy and idle times are `None`.
            usage: what a `GpuMeter` sampled.

        Raises:
            DataError: the events are not those of one call that has finished.
        """
        events = tuple(events)
        started, finished = _ends_of(events)
        spans = spans_of(events)
        devices = account(events, spans, end_seconds=finished.seconds, told_apart=told_apart, usage=usage)
        return cls(
            way=way,
            rows=sum(device.rows for device in devices),
            expected_rows=started.rows,
            wall_seconds=finished.seconds - started.seconds,
            traces=traces,
            error=None if finished.error is None else f"{type(finished.error).__name__}: {brief(finished.error)}",
            devices=devices,
            spans=spans,
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
        """How many chunks were cut into smaller parts, because a device ran out of memory."""
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
    def late_shards(self) -> tuple[Shard, ...]:
        """Stragglers: the chunks that ended long after the first device had nothing more to do."""
        return late_shards(self.spans, self.wall_seconds, self.lost_devices) if self.tail_seconds is not None else ()

    @property
    def tail_seconds(self) -> float | None:
        """How long before the last chunk ended the first device ran out of work; `None` where nobody can tell, and where
        the devices of one graph worked one after another."""
        told_apart = all(device.busy_seconds is not None for device in self.devices)
        in_turn = self.way == "one graph" and ran_in_turn(self.spans)
        return tail_seconds(self.spans, self.lost_devices) if told_apart and not in_turn else None

    @property
    def advice(self) -> tuple[str, ...]:
        """What held the call up and what to do about it, in plain words; empty where nothing is worth saying."""
        one_graph = self.way == "one graph"
        return advise(self.devices, self.spans, wall_seconds=self.wall_seconds, traces=self.traces, one_graph=one_graph)

    def to_dict(self) -> dict[str, Any]:
        """All of it but the spans, as JSON has it: text, numbers, lists, dicts and `None`. Units are in the names."""
        shares = {device.device: device.rows / self.rows if self.rows else 0.0 for device in self.devices}
        return {
            "way": self.way,
            "rows": self.rows,
            "expected_rows": self.expected_rows,
            "wall_seconds": self.wall_seconds,
            "rows_per_second": self.rows_per_second,
            "traces": self.traces,
            "retries": self.retries,
            "back_offs": self.back_offs,
            "tail_seconds": self.tail_seconds,
            "lost_devices": list(self.lost_devices),
            "slow_devices": list(self.slow_devices),
            "late_shards": [dataclasses.asdict(shard) for shard in self.late_shards],
            "error": self.error,
            "advice": list(self.advice),
            "devices": [{**dataclasses.asdict(device), "share": shares[device.device]} for device in self.devices],
        }

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Draw the timeline, a bar per chunk and device, into a `.png`, `.svg` or `.pdf`; needs matplotlib."""
        save_timeline(self.spans, [device.device for device in self.devices], self.summary, path)

    def save_trace(self, path: str | os.PathLike[str]) -> None:
        """Write the timeline in the "Trace Event Format" of Chrome's tracing: open it in Perfetto or `chrome://tracing`."""
        trace = chrome_trace(self.spans, [device.device for device in self.devices], "devicemap")
        with open(path, "w", encoding="utf-8") as file:
            json.dump(trace, file)

    @property
    def summary(self) -> str:
        """The call in one line."""
        all_of = "" if self.expected_rows in (None, self.rows) else f" of {self.expected_rows}"
        calls = sum(device.calls for device in self.devices)
        way = "in one graph" if self.way == "one graph" else f"in {_count(calls, 'chunk')}"
        speed = f"{self.rows_per_second:.3g} rows/s"
        traced = "" if self.traces is None else f", {_count(self.traces, 'trace')}"
        return (
            f"{self.rows}{all_of} rows in {self.wall_seconds:.3g} s ({speed}) {way} on "
            f"{_count(len(self.devices), 'device')}{traced}"
        )

    def __rich__(self) -> Any:
        names, columns = short_names(device.device for device in self.devices), _columns(self.devices)
        rows = [
            [names[d.device] + (" (lost)" if d.lost else ""), *(cell(d) for cell in columns.values())]
            for d in self.devices
        ]
        notes = [*([f"stopped by {self.error}"] if self.error else []), *(f"* {line}" for line in self.advice)]
        return page(self.summary, without_empty(["device", *columns], rows, "-"), notes=notes)


def _ends_of(events: Sequence[Event]) -> tuple[CallStarted, CallFinished]:
    """The first and the last event, checked to be those of one call."""
    ends = [type(event).__name__ for event in events if isinstance(event, (CallStarted, CallFinished))]
    if len(ends) == 2 and isinstance(events[0], CallStarted) and isinstance(events[-1], CallFinished):
        return events[0], events[-1]
    raise DataError(
        f"these {len(events)} events hold {ends}; a report takes all events of one finished call, from its CallStarted "
        "to its CallFinished"
    )


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" + "s" * (number != 1)


def _columns(devices: Sequence[DeviceReport]) -> dict[str, Callable[[DeviceReport], str]]:
    """What stands in each column; empty where there is nothing to say."""
    rows = sum(device.rows for device in devices)
    return {
        "rows": lambda device: f"{device.rows}",
        "share": lambda device: f"{device.rows / rows:.0%}" if rows else "",
        "calls": lambda device: f"{device.calls}",
        "busy": lambda device: _seconds(device.busy_seconds),
        "idle": lambda device: _seconds(device.idle_seconds),
        "waiting": lambda device: _seconds(device.waiting_seconds or None),
        "copying": lambda device: _seconds(device.copying_seconds or None),
        "retries": lambda device: f"{device.retries or ''}",
        "back-offs": lambda device: f"{device.back_offs or ''}",
        "in use": lambda device: "" if device.utilisation_percent is None else f"{device.utilisation_percent:.0f}%",
        "memory": lambda device: "" if device.memory_bytes is None else f"{device.memory_bytes / 2**30:.1f} GiB",
    }


def _seconds(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds:.3g} s"
