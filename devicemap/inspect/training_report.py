"""The report of a parallelized model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from devicemap.events import short_name
from devicemap.inspect.render import Result, page, table


@dataclass(frozen=True, repr=False)
class DeviceShare:
    """The part of one device in training."""

    device: str
    """Full name."""

    rows: int
    """How many rows it computed."""


@dataclass(frozen=True, repr=False)
class TrainingReport(Result):
    """What the devices did since `fit` was called last."""

    name: str
    """The name of the model."""

    steps: int
    """How many training steps there were."""

    devices: tuple[DeviceShare, ...]

    microbatches: int
    """How many microbatches each device cuts its rows of a step into."""

    def __rich__(self) -> Any:
        total = sum(device.rows for device in self.devices)
        rows = [
            {
                "device": short_name(device.device),
                "rows": str(device.rows),
                "share": f"{device.rows / max(total, 1):.0%}",
            }
            for device in self.devices
        ]
        parts = f", in {self.microbatches} microbatches on each device" if self.microbatches > 1 else ""
        return page(f"{self.name}: {total} rows in {self.steps} training steps{parts}", table(rows))
