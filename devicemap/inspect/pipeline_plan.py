"""What a call of a pipeline will do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from devicemap.events import short_name
from devicemap.inspect.render import Result, page, size_text, table


@dataclass(frozen=True, repr=False)
class StagePlan:
    """A stage's part."""

    device: str
    """Full name."""

    variable_bytes: int
    """Of the variables that it uses."""

    output_bytes_per_row: int
    """What goes to the next stage, or is gathered, for each row; parts of unknown shape count nothing."""

    schedule: tuple[str, ...]
    """Its calls in order: "F0" is the first microbatch forward, "B0" backward, which calls without gradients leave out."""


@dataclass(frozen=True, repr=False)
class PipelinePlan(Result):
    """What a call of a pipeline will do, as `Pipeline.explain` tells it."""

    _derived = ("bubble", "speedup")

    rows: int | None
    """How many there are, `None` where nobody knows."""

    microbatches: int
    """Into how many parts they are cut."""

    schedule: str
    """"1f1b" or "gpipe"."""

    stages: tuple[StagePlan, ...]

    @property
    def bubble(self) -> float:
        """The share of time that a device is idle, if stages take as long as each other: (K - 1) / (M + K - 1)."""
        return (len(self.stages) - 1) / (self.microbatches + len(self.stages) - 1)

    @property
    def speedup(self) -> float:
        """How much faster it is than one device: K M / (M + K - 1)."""
        return len(self.stages) * (1 - self.bubble)

    def __rich__(self) -> Any:
        rows = [
            {
                "device": short_name(stage.device),
                "variables": size_text(stage.variable_bytes),
                "to the next, per row": size_text(stage.output_bytes_per_row),
                "order": " ".join(stage.schedule),
            }
            for stage in self.stages
        ]
        title = f"{len(self.stages)} stages, {self.microbatches} microbatches, {self.schedule}: {self.bubble:.0%} idle"
        return page(title, table(rows, left=("order",)))
