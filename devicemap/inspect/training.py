"""The result of `report()` of a parallelized model: the work of each device in training."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from devicemap.events import short_name
from devicemap.inspect.render import Result, counted, page, table


@dataclass(frozen=True)
class DeviceShare:
    """The part of one device in training."""

    device: str
    """Full name."""

    rows: int
    """Number of rows that it computed."""


@dataclass(frozen=True, repr=False)
class TrainingReport(Result):
    """The work of the devices since the last call of `fit`."""

    name: str
    """Name of the model."""

    steps: int
    """Number of training steps."""

    devices: tuple[DeviceShare, ...]
    """The part of each device."""

    microbatches: int
    """Number of microbatches of each device in a step."""

    def __rich__(self) -> Any:
        total = sum(device.rows for device in self.devices)
        rows = [
            {"device": short_name(each.device), "rows": str(each.rows), "share": f"{each.rows / max(total, 1):.0%}"}
            for each in self.devices
        ]
        parts = f", in {self.microbatches} microbatches on each device" if self.microbatches > 1 else ""
        steps = counted(self.steps, "training step")
        return page(f"{self.name}: {counted(total, 'row')} in {steps}{parts}", table(rows))
