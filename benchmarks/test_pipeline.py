"""Pipelines of four stages that take as long, on simulated accelerators: share of the time that the schedule takes at least."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import tensorflow as tf

from benchmarks.conftest import Scale
from benchmarks.measuring import Way, compare
from benchmarks.simulator import Simulator
from devicemap import Pipeline

STAGES = 4

ROWS = 64

BACKWARD = 2
"""How much longer a stage takes backward than forward."""

LEAST = 0.95


@pytest.mark.parametrize("gradients", [False, True], ids=["forward", "with gradients"])
@pytest.mark.parametrize("microbatches", [8, 32])
def test_pipeline(
    benchmark: Any, sim: Simulator, accelerators: list[str], scale: Scale, microbatches: int, gradients: bool
) -> None:
    sim.reset()
    steps = microbatches + STAGES - 1
    of_a_call = scale.job_seconds / steps / (1 + BACKWARD * gradients)  # seconds of a stage on a microbatch, forward
    stage = stage_of(sim, of_a_call * microbatches / ROWS)
    x = tf.random.normal([ROWS, 4])

    def on(call: Callable[[Any], Any]) -> Way:
        if not gradients:
            return lambda: call(x)

        @tf.function
        def loss_and_gradient() -> Any:
            with tf.GradientTape() as tape:
                tape.watch(x)
                loss = tf.reduce_mean(call(x))
            return loss, tape.gradient(loss, x)

        return loss_and_gradient

    def last(rows: Any) -> Any:
        return tf.tanh(stage(rows))  # a loss for each row, whose gradient is known when it runs, not before

    def pipe(schedule: Any) -> Pipeline:
        return Pipeline([*[stage] * (STAGES - 1), last], accelerators[:STAGES], microbatches, schedule)

    @tf.function
    def in_turn(rows: Any) -> Any:
        for device in accelerators[:STAGES]:
            with tf.device(device):
                rows = stage(rows) if device != accelerators[STAGES - 1] else last(rows)
        return rows

    ways = {f"devicemap, {schedule}": on(pipe(schedule)) for schedule in ("1f1b", "gpipe")}
    compare(
        benchmark, ways | {"a stage after the other": on(in_turn)}, topic="pipeline",
        case=f"{microbatches} microbatches, {'with gradients' if gradients else 'forward'}", rounds=scale.rounds,
        devices=STAGES, ideal_seconds=scale.job_seconds,
        targets={"least share": dict.fromkeys(ways, LEAST)},
    )  # fmt: skip


def stage_of(sim: Simulator, row_seconds: float) -> Callable[[Any], Any]:
    """A stage of `2 * rows + 1` that takes its time in both directions."""

    @tf.custom_gradient
    def stage(rows: Any) -> Any:
        def gradient(upstream: Any) -> Any:
            return sim.work(upstream, tf.fill([tf.shape(upstream)[0]], BACKWARD * row_seconds)) - 1

        return sim.work(rows, tf.fill([tf.shape(rows)[0]], row_seconds)), gradient

    return stage
