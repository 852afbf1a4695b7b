"""The results of `Pipeline.explain` and `Pipeline.report`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from devicemap.events import short_name
from devicemap.inspect.render import BLUE, ORANGE, Result, counted, drawing, page, seconds_text, size_text, table

_COLOURS = {False: BLUE, True: ORANGE}
_MOST_LABELS = 200
"""The most calls with which bars have numbers."""


@dataclass(frozen=True)
class StageCall:
    """A call of a stage on a microbatch."""

    device: str
    """Full name of its device."""

    stage: int
    """Index of the stage."""

    microbatch: int
    """Index of the microbatch in the batch."""

    backward: bool
    """Whether it is the backward pass."""

    started_seconds: float
    """The time at which its inputs were on the device and the previous call was done, in seconds since the first call."""

    finished_seconds: float
    """The time at which its results were computed, in seconds since the first call."""


@dataclass(frozen=True, repr=False)
class PipelineReport(Result):
    """The schedule that a pipeline executed."""

    devices: tuple[str, ...]
    """Full names of the devices, in the order of the pipeline."""

    calls: tuple[StageCall, ...]
    """Each call of a stage, in the order of their starts."""

    @property
    def seconds(self) -> float:
        """Seconds from the start of the first call to the end of the last."""
        return max(call.finished_seconds for call in self.calls)

    @property
    def idle(self) -> float:
        """The share of time in which devices ran no call."""
        busy = sum(call.finished_seconds - call.started_seconds for call in self.calls)
        return 1 - busy / (self.seconds * len(self.devices))

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Draw a bar for each call, with the number of its microbatch. The suffix of `path` selects the file format.

        Raises:
            ImportError: matplotlib is not installed.
            OptionError: matplotlib cannot write files with this suffix.
        """
        with drawing(path, 10.0, 1.4 + 0.5 * len(self.devices)) as figure:
            axes = figure.add_subplot()
            for call in self.calls:
                row, width = self.devices.index(call.device), call.finished_seconds - call.started_seconds
                bar = axes.barh(row, width, 0.8, call.started_seconds, color=_COLOURS[call.backward], edgecolor="white")
                if len(self.calls) <= _MOST_LABELS:
                    axes.bar_label(bar, [str(call.microbatch)], label_type="center", fontsize="small", color="white")
            axes.set_yticks(range(len(self.devices)), [*map(short_name, self.devices)])
            axes.invert_yaxis()
            axes.set(xlabel="seconds (blue: forward, orange: backward; numbers: microbatches)", title=self._title)

    @property
    def _title(self) -> str:
        return f"{len(self.calls)} calls in {seconds_text(self.seconds)}, {self.idle:.0%} idle"

    def __rich__(self) -> Any:
        return page(self._title, table([_cells_of(device, self.calls) for device in self.devices], left=("order",)))


def _cells_of(device: str, calls: Sequence[StageCall]) -> dict[str, str]:
    own = [call for call in calls if call.device == device]
    several = len({call.stage for call in own}) > 1
    return {
        "device": short_name(device),
        "busy": seconds_text(sum(call.finished_seconds - call.started_seconds for call in own)),
        "order": " ".join(f"{call.stage if several else ''}{'FB'[call.backward]}{call.microbatch}" for call in own),
    }


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

    fetched_bytes: int = 0
    """Bytes of the variables that it reads on other devices than `device`."""

    @property
    def held_microbatches(self) -> int:
        """The largest number of microbatches whose activations the stage holds at once, in this order of calls."""
        return max(accumulate(1 if step.startswith("F") else -1 for step in self.schedule))


@dataclass(frozen=True, repr=False)
class PipelinePlan(Result):
    """The plan of a call of a pipeline."""

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
        held = "Under a tape, calls hold the activations of all microbatches"
        if self.has_loss:
            held += "; value_and_gradients holds those of as many as shown"
        if self.forward_first:
            held += ". All forward calls come first, because a stage calls Python, or writes a variable that another one uses"
        if fetched := sum(stage.fetched_bytes for stage in self.stages):
            held += (
                f". {size_text(fetched)} of variables are on other devices than their stage. A call sends each value once, or "
                "the rows that it looks up; create variables on the device of their stage with tf.device, or use split"
            )
        parts = f"{counted(len(self.stages), 'stage')}, {counted(self.microbatches, 'microbatch')}"
        title = f"{parts}, {self.schedule}: {self.bubble:.0%} idle"
        return page(title, table(rows, left=("order",)), held)
