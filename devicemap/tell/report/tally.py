"""How far a call is, told from its events one by one: what a progress bar shows. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from devicemap.tell.report.timeline import short_names
from devicemap.types import CallFinished, CallStarted, ChunkFinished, ChunkStarted, Event


@dataclass(frozen=True)
class Tally:
    """How far a call is."""

    rows: int | None = None
    """How many rows it has to map, `None` where nobody knows."""

    done: int = 0
    """How many it has mapped."""

    by_device: Mapping[str, int] = field(default_factory=dict)
    """How many of these each device mapped, by full name."""

    first_seconds: float | None = None
    """When the first chunk went out; tracing comes before, and says nothing about the speed."""

    last_seconds: float = 0.0
    """When the newest event happened that a speed can be told from."""

    ended_seconds: float | None = None
    """When the call ended, `None` while it lasts."""

    failed: bool = False
    """Whether it ended early."""

    def after(self, event: Event) -> Tally:
        """The tally when `event` has happened."""
        if isinstance(event, CallStarted):
            return Tally(event.rows, by_device=dict.fromkeys(event.devices, 0))
        if isinstance(event, ChunkStarted) and self.first_seconds is None:
            return replace(self, first_seconds=event.seconds)
        if isinstance(event, ChunkFinished):
            device, rows = event.shard.device, len(event.shard)
            counts = {**self.by_device, device: self.by_device.get(device, 0) + rows}
            return replace(self, done=self.done + rows, by_device=counts, last_seconds=event.seconds)
        if isinstance(event, CallFinished):
            return replace(self, ended_seconds=event.seconds, failed=event.error is not None)
        return self

    @property
    def rows_per_second(self) -> float | None:
        """The speed from the first chunk's start to the newest result; `None` before there is one."""
        took = self.last_seconds - (self.first_seconds or 0.0)
        return self.done / took if self.done and took > 0 else None

    def seconds_left(self, now_seconds: float) -> float | None:
        """How long the rest will take at this speed; `None` where nobody knows."""
        speed = self.rows_per_second
        if self.rows is None or speed is None:
            return None
        return max(0.0, (self.rows - self.done) / speed - (now_seconds - self.last_seconds))

    @property
    def shares(self) -> dict[str, float]:
        """Each device's part of the rows that are done, by the name that people read."""
        names = short_names(self.by_device)
        return {names[device]: rows / self.done if self.done else 0.0 for device, rows in self.by_device.items()}
