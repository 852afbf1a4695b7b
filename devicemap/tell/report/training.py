"""What the devices did in training."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from devicemap.events import short_name
from devicemap.tell.render import Result, page, seconds_text, table


@dataclass(frozen=True, repr=False)
class DeviceShare:
    """A device's part in training."""

    device: str
    """Full name."""

    rows: int
    """That it has computed."""

    busy_seconds: float
    """From the beginning of steps until the results of its forward passes were there."""

    idle_seconds: float
    """From then until those of all devices were, without which there is no loss; gradients wait alike, and are not timed."""


@dataclass(frozen=True, repr=False)
class TrainingReport(Result):
    """What the devices did since `fit` was called last."""

    name: str
    """That of the model."""

    devices: tuple[DeviceShare, ...]

    microbatches: int
    """That each device takes its rows of a step in: more than was asked for where a step ran out of memory."""

    def __rich__(self) -> Any:
        total = sum(device.rows for device in self.devices)
        rows = [
            {
                "device": short_name(device.device),
                "rows": str(device.rows),
                "share": f"{device.rows / max(total, 1):.0%}",
                "busy": seconds_text(device.busy_seconds),
                "idle": seconds_text(device.idle_seconds),
            }
            for device in self.devices
        ]
        parts = f", in {self.microbatches} microbatches on each device" if self.microbatches > 1 else ""
        return page(f"{self.name}: {total} rows in training steps{parts}", table(rows))
