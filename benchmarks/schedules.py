"""The least time of a schedule of pipelines, by simulation."""

from __future__ import annotations

from devicemap.pipelines.schedule import Step, schedule_of


def source_of(step: Step, stages: int) -> Step:
    """Return the call whose results a call takes. Stage -1 stands for the host, which sends the rows of the batch."""
    if step.backward and step.stage == stages - 1:
        return step._replace(backward=False)
    return step._replace(stage=step.stage + (1 if step.backward else -1))


def duration_of(
    kind: str,
    stages: int,
    devices: int,
    microbatches: int,
    forward: float = 1.0,
    backward: float | None = 1.0,
    sending: float = 0.0,
) -> float:
    """Return the duration of a schedule, if devices compute while they send and receive, from when the host sends rows.

    Args:
        kind: one of `KINDS`, as for `schedule_of`.
        stages: number of stages.
        devices: number of devices.
        microbatches: number of microbatches.
        forward: the duration of a forward call.
        backward: the duration of a backward call; `None` without backward calls.
        sending: the time to send the rows of a microbatch, or the results of a call, to another device.
    """
    orders = [schedule_of(kind, stages, devices, microbatches, device) for device in range(devices)]
    left = [[step for step in reversed(order) if not step.backward or backward is not None] for order in orders]
    arrivals = {Step(-1, m, False): (m + 1) * sending for m in range(microbatches)}
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
