"""In which order a stage of a pipeline makes its calls: numbers only."""

from __future__ import annotations

from typing import NamedTuple


class Step(NamedTuple):
    """One of the calls of a stage."""

    microbatch: int
    backward: bool


def schedule_of(kind: str, stages: int, microbatches: int, stage: int) -> list[Step]:
    """The order in which a stage makes its calls, forward and backward.

    "gpipe": all forward, then all backward (Huang et al., 2019). "1f1b": after `stages - stage` microbatches, each forward call
    waits for a backward one, so that no more microbatches' activations are held (Narayanan et al., 2019).

    >>> [f"{'FB'[step.backward]}{step.microbatch}" for step in schedule_of("1f1b", 2, 3, 0)]
    ['F0', 'F1', 'B0', 'F2', 'B1', 'B2']
    >>> [f"{'FB'[step.backward]}{step.microbatch}" for step in schedule_of("gpipe", 2, 3, 0)]
    ['F0', 'F1', 'F2', 'B0', 'B1', 'B2']
    """
    held = microbatches if kind == "gpipe" else min(microbatches, stages - stage)
    steps = [Step(m, False) for m in range(held)]
    for m in range(microbatches):
        steps.append(Step(m, True))
        if m + held < microbatches:
            steps.append(Step(m + held, False))
    return steps
