"""What a call of a pipeline will do."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from devicemap.events import short_name
from devicemap.tell.render import Result, figure_class, page, size_text, table


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

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Draw the schedule into a `.png`, `.svg` or `.pdf`, as if each call took as long; needs matplotlib."""
        starts = starts_of([stage.schedule for stage in self.stages])
        bars = {key: (begin, begin + 1) for key, begin in starts.items()}
        draw_calls(bars, [stage.device for stage in self.stages], "steps; forward blue, backward orange", path)

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


def draw_calls(
    bars: Mapping[tuple[int, str], tuple[float, float]], devices: Sequence[str], unit: str, path: str | os.PathLike[str]
) -> None:
    """Draw when each call of each stage, from the top down, begins and ends."""
    figure = figure_class()(figsize=(10, 1 + 0.5 * len(devices)), layout="constrained")
    axes = figure.subplots()
    for (stage, call), (begin, end) in bars.items():
        colour = "C0" if call[0] == "F" else "C1"
        axes.barh(stage, end - begin, left=begin, color=colour, edgecolor="white")
        axes.text((begin + end) / 2, stage, call[1:], ha="center", va="center", fontsize=7)
    axes.set_yticks(range(len(devices)), [short_name(device) for device in devices])
    axes.invert_yaxis()
    axes.set_xlabel(unit)
    figure.savefig(path)


def starts_of(schedules: Sequence[tuple[str, ...]]) -> dict[tuple[int, str], int]:
    """When each call of each stage begins, if all take a step: after the one before it, and after what it takes.

    >>> starts_of([("F0", "B0"), ("F0", "B0")])
    {(0, 'F0'): 0, (1, 'F0'): 1, (1, 'B0'): 2, (0, 'B0'): 3}
    """
    left = [list(schedule) for schedule in schedules]
    ends: dict[tuple[int, str], int] = {}
    free = [0] * len(left)
    while any(left):
        for stage, calls in enumerate(left):
            while calls:
                call = calls[0]
                source = stage - 1 if call[0] == "F" else stage + 1
                inside = 0 <= source < len(left)
                needed = (source, call) if inside else (stage, "F" + call[1:]) if call[0] == "B" else None
                if needed is not None and needed not in ends:
                    break
                begin = max(free[stage], ends[needed] if needed is not None else 0)
                ends[stage, call] = free[stage] = begin + 1
                del calls[0]
    return {key: end - 1 for key, end in ends.items()}
