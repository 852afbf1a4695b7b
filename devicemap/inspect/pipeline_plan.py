"""The result of `Pipeline.explain`."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from devicemap.events import short_name
from devicemap.inspect.render import Result, page, size_text, table


@dataclass(frozen=True)
class StagePlan:
    """The part of one stage."""

    device: str
    """Full name of its device."""

    variable_bytes: int
    """Bytes of the variables of the stage."""

    output_bytes_per_row: int
    """Bytes per row that the stage sends to the next stage. Outputs of unknown shape are not counted."""

    schedule: tuple[str, ...]
    """The calls in order. "F0" is the forward pass of the first microbatch, "B0" its backward pass, if there are gradients."""

    other_devices: tuple[str, ...] = ()
    """Full names of its devices in the other replicas."""

    @property
    def held_microbatches(self) -> int:
        """The largest number of microbatches whose activations the stage holds at once, in this order of calls."""
        return max(accumulate(1 if step.startswith("F") else -1 for step in self.schedule))


@dataclass(frozen=True, repr=False)
class PipelinePlan(Result):
    """The plan of a call of a pipeline."""

    _derived = ("bubble", "speedup")

    rows: int | None
    """Number of rows, `None` if unknown."""

    microbatches: int
    """Number of microbatches of each replica."""

    schedule: str
    """"1f1b", "gpipe" or "interleaved"."""

    stages: tuple[StagePlan, ...]
    """The part of each stage."""

    has_loss: bool = False
    """Whether the pipeline has a loss, for `value_and_gradients`."""

    forward_first: bool = False
    """Whether all forward calls come first, whatever the schedule: a stage calls Python, or writes a variable of another."""

    @property
    def bubble(self) -> float:
        """The share of idle time, if all stages take the same time.

        On K devices with V stages each, and M microbatches, it is (K - 1) / (V M + K - 1).
        """
        devices = len({stage.device for stage in self.stages})
        return (devices - 1) / (self.microbatches * len(self.stages) // devices + devices - 1)

    @property
    def speedup(self) -> float:
        """The speed-up over one device, if all stages take the same time: K (1 - bubble), times the number of replicas."""
        devices = {device for stage in self.stages for device in (stage.device, *stage.other_devices)}
        return len(devices) * (1 - self.bubble)

    def __rich__(self) -> Any:
        rows = [
            {
                "device": ", ".join(map(short_name, (stage.device, *stage.other_devices))),
                "variables": size_text(stage.variable_bytes),
                "output per row": size_text(stage.output_bytes_per_row),
                "held": str(stage.held_microbatches if self.has_loss else self.microbatches),
                "order": " ".join(stage.schedule),
            }
            for stage in self.stages
        ]
        held = f"Under a tape, calls hold the activations of all {self.microbatches} microbatches"
        if self.has_loss:
            held += "; value_and_gradients holds those of as many as shown"
        if self.forward_first:
            held += ". All forward calls come first, because a stage calls Python, or writes a variable that another one uses"
        title = f"{len(self.stages)} stages, {self.microbatches} microbatches, {self.schedule}: {self.bubble:.0%} idle"
        return page(title, table(rows, left=("order",)), held)
