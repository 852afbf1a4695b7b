"""What pipelines send, and how many microbatches a GPU holds, by the log of copies and TensorFlow's allocator."""

from __future__ import annotations

import time
from collections import Counter
from typing import Any

import pytest
import tensorflow as tf
from simulators.softgpus.training import COUNT, gpus

from devicemap import Pipeline

WIDTH, DEPTH, ROWS, MICROBATCHES = 64, 6, 4096, 16
HELD = ROWS // MICROBATCHES * WIDTH * DEPTH * 4
"""Activations of a microbatch in a stage."""

weights = []
for gpu in range(COUNT):
    with tf.device(f"GPU:{gpu}"):
        weights.append([tf.Variable(tf.random.stateless_normal([WIDTH, WIDTH], [gpu, i]) / 8) for i in range(DEPTH)])
with tf.device("CPU:0"):
    rows = tf.random.stateless_normal([ROWS, WIDTH], [9, 9])


def stage(number: int) -> Any:
    def run(rows: Any) -> Any:
        for weight in weights[number]:
            rows = tf.tanh(rows @ weight)
        return rows if number < COUNT - 1 else tf.reduce_sum(rows**2, 1)

    return run


def step_of(schedule: str) -> Any:
    pipe = Pipeline([stage(i) for i in range(COUNT)], "GPU", MICROBATCHES, schedule, output_device=f"GPU:{COUNT - 1}")

    @tf.function
    def step(rows: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(pipe(rows))
        gradients = tape.gradient(loss, weights)
        for own, of_stage in zip(weights, gradients):
            for weight, gradient in zip(own, of_stage):
                weight.assign_sub(0.0 * gradient)
        return loss

    step(rows)
    return step


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_activations_held(schedule: str) -> None:
    step = step_of(schedule)
    before = [tf.config.experimental.get_memory_info(f"GPU:{gpu}")["current"] for gpu in range(COUNT)]
    for gpu in range(COUNT):
        tf.config.experimental.reset_memory_stats(f"GPU:{gpu}")
    step(rows)
    time.sleep(0.3)
    for gpu, current in enumerate(before):
        peak = tf.config.experimental.get_memory_info(f"GPU:{gpu}")["peak"] - current
        microbatches = MICROBATCHES if schedule == "gpipe" else COUNT - gpu
        # besides: what one call works on, all inputs of the first stage, and sums of gradients
        assert 0.85 * (microbatches - 1) * HELD < peak < (microbatches + 4) * HELD + 2**20, (gpu, peak / HELD)


def test_activations_go_straight_to_the_next_and_back() -> None:
    step = step_of("1f1b")
    gpus.clear()
    step(rows)
    time.sleep(0.3)
    sent: Counter[tuple[str, str]] = Counter()
    for copy in gpus.copies():
        sent[copy.sender, copy.receiver] += copy.bytes
    size = ROWS * WIDTH * 4
    for gpu in range(COUNT - 1):
        assert size <= sent[f"GPU:{gpu}", f"GPU:{gpu + 1}"] < 1.1 * size
        assert size <= sent[f"GPU:{gpu + 1}", f"GPU:{gpu}"] < 1.6 * size  # and the gradients that end on the first
    assert sent["host", "GPU:0"] < 1.1 * size
