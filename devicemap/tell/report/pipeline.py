"""What happened in a call of a pipeline."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from devicemap.events import short_name
from devicemap.tell.render import Result, page, seconds_text, table


@dataclass(frozen=True)
class StageCall:
    """A call of a stage on a microbatch."""

    stage: int

    call: str
    """"F0" is the first microbatch forward, "B0" backward."""

    started_seconds: float
    """When what it takes was there, and its device free, in seconds since the call of the pipeline began."""

    finished_seconds: float
    """When its results were there."""


@dataclass(frozen=True, repr=False)
class PipelineReport(Result):
    """What happened in the last call of a pipeline, as `Pipeline.report` tells it."""

    _derived = ("wall_seconds", "busy_seconds")

    devices: tuple[str, ...]
    """Full names, by stage."""

    calls: tuple[StageCall, ...]
    """Of each stage, in their order."""

    @property
    def wall_seconds(self) -> float:
        """From the first row to the last result, or gradient."""
        return max((call.finished_seconds for call in self.calls), default=0.0)

    @property
    def busy_seconds(self) -> tuple[float, ...]:
        """Of each stage."""
        own = [[call for call in self.calls if call.stage == stage] for stage in range(len(self.devices))]
        return tuple(sum(call.finished_seconds - call.started_seconds for call in calls) for calls in own)

    def __rich__(self) -> Any:
        rows = [
            {
                "device": short_name(device),
                "busy": seconds_text(busy),
                "idle": f"{1 - busy / (self.wall_seconds or 1):.0%}",
                "calls": str(sum(call.stage == stage for call in self.calls)),
            }
            for stage, (device, busy) in enumerate(zip(self.devices, self.busy_seconds))
        ]
        return page(f"{len(self.devices)} stages, {seconds_text(self.wall_seconds)}", table(rows))


def calls_of(ends: Mapping[tuple[int, str], float]) -> tuple[StageCall, ...]:
    """The calls of all stages, of when each ended: stage and call -> seconds.

    >>> [call.started_seconds for call in calls_of({(0, "F0"): 1.0, (0, "F1"): 2.0, (1, "F0"): 4.0, (1, "F1"): 5.0})]
    [0.0, 1.0, 1.0, 4.0]
    """
    known = {key: end for key, end in ends.items() if not math.isnan(end)}
    calls, free = [], {stage: 0.0 for stage, _ in known}
    for (stage, call), end in sorted(known.items(), key=lambda each: (each[0][0], each[1])):
        source = known.get((stage + (1 if call[0] == "B" else -1), call), 0.0)
        calls.append(StageCall(stage, call, min(max(free[stage], source), end), end))
        free[stage] = end
    return tuple(calls)
