"""Pipelines of four stages that take as long, on simulated accelerators: share of the time that the schedule takes at least."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import tensorflow as tf

from benchmarks.conftest import Scale
from benchmarks.measuring import Compare, Way
from benchmarks.simulator import Simulator
from devicemap import Pipeline

STAGES = 4

ROWS = 64

BACKWARD = 2
"""How much longer a stage takes backward than forward."""

LEAST = 0.95


@pytest.mark.parametrize("work", ["forward", "with gradients", "with loss="])
@pytest.mark.parametrize("microbatches", [8, 32])
def test_pipeline(
    compare: Compare, sim: Simulator, accelerators: list[str], scale: Scale, microbatches: int, work: str
) -> None:
    sim.reset()
    steps = microbatches + STAGES - 1
    backward = 0 if work == "forward" else BACKWARD
    of_a_call = scale.job_seconds / steps / (1 + backward)  # seconds of a stage on a microbatch, forward
    stage = stage_of(sim, of_a_call * microbatches / ROWS)
    scales = [tf.Variable(1.0) for _ in range(STAGES)]
    x = tf.random.normal([ROWS, 4])

    def stages() -> list[Callable[[Any], Any]]:
        return [lambda rows, scale=scale: tf.tanh(stage(rows * scale)) for scale in scales]

    def with_tape(call: Callable[[Any], Any]) -> Way:
        if work == "forward":
            return lambda: call(x)

        @tf.function
        def loss_and_gradients() -> Any:
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(call(x) ** 2)
            return loss, tape.gradient(loss, scales)

        return loss_and_gradients

    def pipe(schedule: Any) -> Way:
        pipeline = Pipeline(stages(), accelerators[:STAGES], microbatches, schedule, loss="mse")
        if work != "with loss=":
            return with_tape(pipeline)
        step = tf.function(lambda: pipeline.value_and_gradients(x, tf.zeros_like(x)))
        return lambda: step()

    @tf.function
    def in_turn(rows: Any) -> Any:
        for device, call in zip(accelerators, stages()):
            with tf.device(device):
                rows = call(rows)
        return rows

    schedules = ("gpipe",) if work == "with gradients" else ("1f1b", "gpipe")
    ways = {f"devicemap, {schedule}": pipe(schedule) for schedule in schedules}
    targets = {"least share": dict.fromkeys(ways, LEAST)}
    ways["a stage after the other"] = with_tape(in_turn)
    case = f"{microbatches} microbatches, {work}"
    compare(ways, case, devices=STAGES, ideal_seconds=scale.job_seconds, targets=targets)


def stage_of(sim: Simulator, row_seconds: float) -> Callable[[Any], Any]:
    """A stage of `2 * rows + 1` that takes its time in both directions."""

    @tf.custom_gradient
    def stage(rows: Any) -> Any:
        def gradient(upstream: Any) -> Any:
            return sim.work(upstream, tf.fill([tf.shape(upstream)[0]], BACKWARD * row_seconds)) - 1

        return sim.work(rows, tf.fill([tf.shape(rows)[0]], row_seconds)), gradient

    return stage
