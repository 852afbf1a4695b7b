"""The order in which the devices of a pipeline call their stages. Pure functions of numbers."""

from __future__ import annotations

from typing import NamedTuple

KINDS = ("1f1b", "gpipe", "interleaved")


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
        kind: one of `KINDS`.
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


def source_of(step: Step, stages: int) -> Step | None:
    """Return the call whose results a call takes; `None` if it takes the rows of the batch."""
    if step.backward:
        return step._replace(stage=step.stage + 1) if step.stage < stages - 1 else step._replace(backward=False)
    return step._replace(stage=step.stage - 1) if step.stage else None


def duration_of(
    kind: str,
    stages: int,
    devices: int,
    microbatches: int,
    forward: float = 1.0,
    backward: float | None = 1.0,
    sending: float = 0.0,
) -> float:
    """Return the duration of a schedule, if devices compute while they send and receive.

    Args:
        kind: one of `KINDS`, as for `schedule_of`.
        stages: number of stages.
        devices: number of devices.
        microbatches: number of microbatches.
        forward: the duration of a forward call.
        backward: the duration of a backward call; `None` without backward calls.
        sending: the time to send the results of a call to another device.

    >>> duration_of("1f1b", 4, 4, 8), duration_of("interleaved", 8, 4, 8, 0.5, 0.5)
    (22.0, 19.0)
    """
    orders = [schedule_of(kind, stages, devices, microbatches, device) for device in range(devices)]
    left = [[step for step in reversed(order) if not step.backward or backward is not None] for order in orders]
    arrivals: dict[Step | None, float] = {None: 0.0}
    free, links = [0.0] * devices, dict[tuple[int, int], float]()
    while any(left):
        steps = {device: order[-1] for device, order in enumerate(left) if order}
        ready = [device for device, step in steps.items() if source_of(step, stages) in arrivals]
        device = min(ready, key=lambda device: max(free[device], arrivals[source_of(steps[device], stages)]))
        step = left[device].pop()
        start = max(free[device], arrivals[source_of(step, stages)])
        free[device] = arrivals[step] = start + ((backward or 0.0) if step.backward else forward)
        following = step.stage + (-1 if step.backward else 1)
        link = device, following % devices
        if 0 <= following < stages and link[0] != link[1]:
            arrivals[step] = links[link] = max(links.get(link, 0.0), free[device]) + sending
    return max(free)
