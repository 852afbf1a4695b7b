"""The result of `Pipeline.explain`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from devicemap.events import short_name
from devicemap.inspect.render import Result, page, size_text, table


@dataclass(frozen=True)
class StagePlan:
    """The part of one stage."""

    device: str
    """Full name of its device."""

    variable_bytes: int
    """Bytes of the variables that it uses."""

    output_bytes_per_row: int
    """Bytes that it sends to the next stage for each row; outputs of unknown shape are not counted."""

    schedule: tuple[str, ...]
    """Its calls in order. "F0" is the forward pass of the first microbatch, "B0" the backward pass, if there are gradients."""


@dataclass(frozen=True, repr=False)
class PipelinePlan(Result):
    """What a call of a pipeline will do."""

    _derived = ("bubble", "speedup")

    rows: int | None
    """Number of rows, `None` if unknown."""

    microbatches: int
    """Number of microbatches."""

    schedule: str
    """"1f1b" or "gpipe"."""

    stages: tuple[StagePlan, ...]
    """The part of each stage."""

    @property
    def bubble(self) -> float:
        """The share of idle time, if all stages take the same time: (K - 1) / (M + K - 1)."""
        return (len(self.stages) - 1) / (self.microbatches + len(self.stages) - 1)

    @property
    def speedup(self) -> float:
        """The speed-up over one device, if all stages take the same time: K M / (M + K - 1)."""
        return len(self.stages) * (1 - self.bubble)

    def __rich__(self) -> Any:
        rows = [
            {
                "device": short_name(stage.device),
                "variables": size_text(stage.variable_bytes),
                "output per row": size_text(stage.output_bytes_per_row),
                "order": " ".join(stage.schedule),
            }
            for stage in self.stages
        ]
        title = f"{len(self.stages)} stages, {self.microbatches} microbatches, {self.schedule}: {self.bubble:.0%} idle"
        return page(title, table(rows, left=("order",)))
