"""Pipelines on four emulated GPUs whose stages compute as long as they send: share of the least time of a schedule."""

from __future__ import annotations

from typing import Any

import pytest
import tensorflow as tf

from benchmarks import simulator, softgpu
from benchmarks.conftest import Scale
from benchmarks.measuring import Compare
from benchmarks.schedules import duration_of
from benchmarks.test_pipeline import BACKWARD, STAGES, stage_of
from devicemap import Pipeline

ROWS, WIDTH = 8, 1024
"""Of a microbatch, as large as its activations."""

LEAST = 0.9


@pytest.mark.parametrize(("work", "schedule"), [("forward", "gpipe"), ("with loss=", "gpipe"), ("with loss=", "1f1b")])
@pytest.mark.parametrize("microbatches", [8, 32])
def test_transfers_overlap(
    compare: Compare, emulated_gpus: softgpu.SoftGPUs, scale: Scale, microbatches: int, work: str, schedule: Any
) -> None:
    backward = None if work == "forward" else float(BACKWARD)
    steps = duration_of(schedule, STAGES, STAGES, microbatches, 1.0, backward, 1.0)
    seconds = scale.job_seconds / steps
    for device in range(scale.devices):
        emulated_gpus.configure(device, bytes_per_second=ROWS * WIDTH * 4 / seconds)
    stage = stage_of(simulator.load(), seconds / ROWS)
    scales = []
    for number in range(STAGES):
        with tf.device(f"GPU:{number}"):
            scales.append(tf.Variable(1.0))
    with tf.device("CPU:0"):
        x = tf.random.normal([ROWS * microbatches, WIDTH])
    stages = [lambda rows, scale=scale: tf.tanh(stage(rows * scale)) for scale in scales]
    last = f"GPU:{STAGES - 1}"
    pipe = Pipeline(stages, "GPU", microbatches, schedule, output_device=last, loss="mse")

    @tf.function
    def run() -> Any:
        if backward is not None:
            return pipe.value_and_gradients(x, x)
        with tf.device(last):
            return tf.reduce_sum(pipe(x))

    way = f"devicemap, {schedule}"
    case, targets = f"{microbatches} microbatches, {work}, {schedule}", {"least share": {way: LEAST}}
    compare({way: run}, case, devices=STAGES, ideal_seconds=scale.job_seconds, targets=targets)
