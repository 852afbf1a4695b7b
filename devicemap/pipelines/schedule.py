"""The devices of a pipeline, and the order in which they call their stages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from devicemap.errors import OptionError
from devicemap.events import short_name


class Step(NamedTuple):
    """A call of a stage on a microbatch."""

    stage: int
    microbatch: int
    backward: bool


def schedule_of(kind: str, stages: int, devices: int, microbatches: int, device: int) -> list[Step]:
    """Return the order in which a device makes its calls, forward and backward.

    "gpipe": all forward calls, then all backward calls (Huang et al., 2019). "1f1b": after `devices - device` microbatches,
    each forward call waits for a backward call, so that activations of no more microbatches are held (Narayanan et al., 2019).
    "interleaved": as "1f1b" with several stages on each device, in turns of `devices` microbatches (Narayanan et al., 2021).
    If its number of microbatches is not a multiple of the number of devices, all forward calls come first to avoid deadlocks.

    Args:
        kind: "gpipe", "1f1b" or "interleaved".
        stages: number of stages, a multiple of `devices`; equal to it unless the schedule is interleaved.
        devices: number of devices.
        microbatches: number of microbatches.
        device: the index of the device.

    >>> [f"{'FB'[step.backward]}{step.microbatch}" for step in schedule_of("1f1b", 2, 2, 3, 0)]
    ['F0', 'F1', 'B0', 'F2', 'B1', 'B2']
    >>> [f"{'FB'[step.backward]}{step.microbatch}" for step in schedule_of("gpipe", 2, 2, 3, 0)]
    ['F0', 'F1', 'F2', 'B0', 'B1', 'B2']
    >>> [f"{step.stage}{'FB'[step.backward]}{step.microbatch}" for step in schedule_of("interleaved", 4, 2, 2, 1)]
    ['1F0', '1F1', '3F0', '3B0', '3F1', '3B1', '1B0', '1B1']
    """
    own = range(device, stages, devices)  # stages are assigned to the devices in turn
    turns = [range(first, min(first + devices, microbatches)) for first in range(0, microbatches, devices)]
    forward = [Step(stage, m, False) for turn in turns for stage in own for m in turn]
    backward = [Step(stage, m, True) for turn in turns for stage in reversed(own) for m in turn]
    if kind == "gpipe" or (kind == "interleaved" and microbatches % devices):
        held = len(forward)
    elif kind == "1f1b":
        held = devices - device
    else:
        held = 2 * (devices - device) - 1 + (len(own) - 1) * devices
    steps = forward[:held]
    for i, step in enumerate(backward):
        steps += [step, *forward[held + i : held + i + 1]]
    return steps


@dataclass(frozen=True)
class PipelineOptions:
    """The devices and options of a pipeline."""

    stages: int
    """Number of stages."""

    devices: tuple[tuple[str, ...], ...]
    """The devices of each replica of the pipeline."""

    schedule: str
    """The order of calls: "gpipe", "1f1b" or "interleaved"."""

    microbatches: int
    """Number of microbatches of each replica."""

    local: bool
    """Whether stages that write variables, as batch normalization does in training, see one microbatch at a time."""

    added_losses: str | None
    """Whether losses that depend on the rows are a "sum" or a "mean" over them."""

    clock: Any = None
    """A `Clock` that records the times of calls."""

    def orders(self, forward_first: bool, shares: Sequence[range]) -> list[list[Step]]:
        """Return the order of calls on each device, given the microbatches of each replica."""
        kind, devices = "gpipe" if forward_first else self.schedule, len(self.devices[0])
        return [
            [step._replace(microbatch=share[step.microbatch]) for step in steps]
            for share in shares
            for device in range(devices)
            for steps in [schedule_of(kind, self.stages, devices, len(share), device)]
        ]


def devices_of_replicas(
    stages: int, known: Sequence[str], replicas: int, schedule: str, microbatches: int
) -> tuple[tuple[str, ...], ...]:
    """Return the devices of each replica. Raise `OptionError` if they do not fit the stages."""
    names = ", ".join(map(short_name, known))
    each = min(stages, len(known) // replicas)
    there = f"{stages} stages, {replicas} replica(s) and {len(known)} device(s), {names}"
    if schedule == "interleaved" and (not each or stages % each or microbatches % each):
        raise OptionError(
            f"schedule='interleaved' with {there}: the number of stages ({stages}) and of microbatches ({microbatches}) must "
            f"be multiples of the number of devices of a replica ({each})"
        )
    if schedule != "interleaved" and each < stages:
        raise OptionError(
            f"{there}: each stage of a replica needs a device. Make fewer stages, or use schedule='interleaved'"
        )
    return tuple(tuple(known[r * each : (r + 1) * each]) for r in range(replicas))
