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

    forward_seconds: float
    """From the beginning of steps until the results of its forward passes were there."""


@dataclass(frozen=True, repr=False)
class TrainingReport(Result):
    """What the devices did since `fit` was called last."""

    name: str
    """That of the model."""

    devices: tuple[DeviceShare, ...]

    def __rich__(self) -> Any:
        total = sum(device.rows for device in self.devices)
        rows = [
            {
                "device": short_name(device.device),
                "rows": str(device.rows),
                "share": f"{device.rows / max(total, 1):.0%}",
                "forward": seconds_text(device.forward_seconds),
            }
            for device in self.devices
        ]
        return page(f"{self.name}: {total} rows in training steps", table(rows))
