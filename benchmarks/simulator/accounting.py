"""What happened on simulated devices, as values, and what follows from it: nothing here knows of TensorFlow."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

Outcome: TypeAlias = Literal["finished", "refused", "cancelled"]

OUTCOMES: tuple[Outcome, ...] = get_args(Outcome)
"""In the order of `Outcome` in accelerator.cc."""


@dataclass(frozen=True)
class Call:
    """One call of a device that is over. Seconds are those of a steady clock, on Linux `time.monotonic()`'s."""

    device: str
    """`"CPU:3"`."""

    rows: int
    """How many rows it had."""

    arrived_seconds: float
    """When it came."""

    start_seconds: float
    """When the device began with it; the time before that it stood in the queue."""

    end_seconds: float
    """When it was over, by the device's schedule; a waiting thread is notified some microseconds later."""

    outcome: Outcome
    """`"refused"`: it failed as it came, for want of memory, a poisoned row or a breakdown, and took no time."""


@dataclass(frozen=True)
class Usage:
    """What a device did."""

    busy_seconds: float
    """How long calls were running, cancelled ones until they were."""

    calls: int
    """How many calls finished."""

    rows: int
    """How many rows those had."""

    refused: int
    """How many calls the device did not take."""

    cancelled: int
    """How many calls were cancelled, in the queue or running."""


def account(calls: Sequence[Call]) -> Usage:
    """What calls add up to."""
    finished = [call for call in calls if call.outcome == "finished"]
    return Usage(
        busy_seconds=sum(call.end_seconds - call.start_seconds for call in calls),
        calls=len(finished),
        rows=sum(call.rows for call in finished),
        refused=sum(call.outcome == "refused" for call in calls),
        cancelled=sum(call.outcome == "cancelled" for call in calls),
    )


def ideal_seconds(seconds: Iterable[float], speeds: Iterable[float]) -> float:
    """How long a job takes at least: all work by all speed, as if rows could be cut.

    Args:
        seconds: what each row takes at speed 1.
        speeds: of each device.

    >>> ideal_seconds([0.25] * 8, [1, 1, 0.25, 0.25])
    0.8
    """
    return float(sum(seconds) / sum(speeds))
