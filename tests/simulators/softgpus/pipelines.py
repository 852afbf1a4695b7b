"""What pipelines send, and how many microbatches a GPU holds, by the log of copies and TensorFlow's allocator."""

from __future__ import annotations

import time
import warnings
from collections import Counter
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from oracle import assert_close
from simulators.softgpus.training import COUNT, gpus

from devicemap import Pipeline, split

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
        return rows

    return run


def loss_of_rows(y: Any, outputs: Any) -> Any:
    return tf.reduce_sum((outputs - y) ** 2, 1)


def step_of(schedule: Any, known: bool = True, **options: Any) -> Any:
    stages = [stage(i) for i in range(COUNT)]
    pipe = Pipeline(stages, "GPU", MICROBATCHES, schedule, loss=loss_of_rows, **options)

    @tf.function(input_signature=None if known else [tf.TensorSpec([None, WIDTH])])
    def step(rows: Any) -> Any:
        loss, gradients = pipe.value_and_gradients(rows, rows)
        for weight, gradient in zip(pipe.trainable_variables, gradients):
            weight.assign_sub(0.0 * gradient)
        return loss

    step(rows)
    return step


@pytest.mark.parametrize(
    ("schedule", "known"), [("1f1b", True), ("1f1b", False), ("gpipe", True)], ids=["1f1b", "unknown rows", "gpipe"]
)
def test_activations_held(schedule: str, known: bool) -> None:
    step = step_of(schedule, known)
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


def sent_by(step: Any, *args: Any) -> Counter[tuple[str, str]]:
    """Bytes from each device to each other one."""
    gpus.clear()
    step(*args)
    time.sleep(0.3)  # what is enqueued ends
    sent: Counter[tuple[str, str]] = Counter()
    for copy in gpus.copies():
        sent[copy.sender, copy.receiver] += copy.bytes
    return sent


def test_activations_go_straight_to_the_next_and_back() -> None:
    sent = sent_by(step_of("1f1b"), rows)
    size = ROWS * WIDTH * 4
    for gpu in range(COUNT - 1):
        assert size <= sent[f"GPU:{gpu}", f"GPU:{gpu + 1}"] < 1.1 * size
        assert size <= sent[f"GPU:{gpu + 1}", f"GPU:{gpu}"] < 1.6 * size  # and the gradients that end on the first
    assert sent["host", "GPU:0"] < 1.1 * size
    assert sent["host", f"GPU:{COUNT - 1}"] < 1.1 * size  # targets


WIDE = 1088


def test_variables_slots_and_updates_stay_on_the_gpu_of_their_stage() -> None:
    """Weights, slots and gradients of Adam are 304 MB, of 134 on each GPU. Keras keeps the graph of each fit, so fit once."""
    with tf.device("CPU:0"):
        hidden = [keras.layers.Dense(WIDE, "tanh", use_bias=False) for _ in range(16)]
        stages = split(keras.Sequential([keras.Input([WIDE]), *hidden]), COUNT, "bytes", "GPU")
    pipe = Pipeline(stages, "GPU", microbatches=4, loss="mse")
    model, rows = pipe.as_model(), np.random.default_rng(0).normal(size=[32, WIDE]).astype("float32")
    model.compile(keras.optimizers.Adam(1e-4, clipnorm=1.0, weight_decay=0.01))

    @tf.function
    def step(rows: Any) -> None:
        _, gradients = pipe.value_and_gradients(rows, rows)
        model.optimizer.apply(gradients, pipe.trainable_variables)

    @tf.function
    def with_tape(rows: Any) -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(rows, training=True) - rows) ** 2)
        model.optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)

    fit = lambda rows: model.fit(rows, rows, batch_size=32, verbose=0)
    for train in (fit, step, with_tape):
        given = rows if train is fit else tf.constant(rows)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "a Pipeline called under a tape")
            train(given)
        time.sleep(0.3)  # what is enqueued ends
        for gpu in range(COUNT):
            tf.config.experimental.reset_memory_stats(f"GPU:{gpu}")
        sent = sent_by(train, given)
        peaks = [tf.config.experimental.get_memory_info(f"GPU:{gpu}")["peak"] for gpu in range(COUNT)]
        assert max(peaks) < 1.5 * 304e6 / COUNT, peaks
        assert sent.total() < 20 * rows.nbytes, "rows, activations and gradients; those of a GPU's variables are 19 MB"
    optimizer = model.optimizer
    for variable, *slots in zip(optimizer._trainable_variables, optimizer._momentums, optimizer._velocities):
        assert {slot.value.device for slot in slots} == {variable.value.device}


def loss_and_gradients(pipe: Pipeline) -> tuple[list[Any], Counter[tuple[str, str]]]:
    """Those of a step, and the bytes that it sends."""
    step = tf.function(lambda rows: pipe.value_and_gradients(rows, rows))
    value, gradients = step(rows)
    time.sleep(0.3)
    for gradient, variable in zip(gradients, pipe.trainable_variables):
        assert getattr(gradient, "values", gradient).backing_device == variable.device
    return [value, *gradients], sent_by(step, rows)


def test_what_a_stage_reads_of_other_gpus_is_sent_once() -> None:
    with tf.device("CPU:0"):
        table = tf.Variable(tf.random.stateless_normal([100_000, WIDTH], [3, 3]) / 8)

    def looked_up(rows: Any) -> Any:
        return rows + tf.gather(table, tf.cast(90_000 * tf.sigmoid(rows[:, 0]), tf.int32))

    pipe = Pipeline([stage(0), stage(0), looked_up], ["GPU:0", "GPU:1", "GPU:2"], MICROBATCHES, loss=loss_of_rows)
    got, sent = loss_and_gradients(pipe)
    with tf.device("CPU:0"), tf.GradientTape() as tape:
        wanted = tf.reduce_mean(loss_of_rows(rows, looked_up(stage(0)(stage(0)(rows)))))
    with tf.device("CPU:0"):
        for one, other in zip(got, [wanted, *tape.gradient(wanted, pipe.trainable_variables)], strict=True):
            assert_close(tf.convert_to_tensor(one), tf.convert_to_tensor(other))
    of_weights, of_rows = DEPTH * WIDTH * WIDTH * 4, ROWS * WIDTH * 4
    for sender, receiver in ((0, 1), (1, 0)):
        assert of_weights + of_rows <= sent[f"GPU:{sender}", f"GPU:{receiver}"] < 1.1 * (of_weights + of_rows)
    assert sent["host", "GPU:2"] + sent["GPU:2", "host"] < 5 * of_rows  # of the table, which is larger


def test_replicas_share_values_and_add_gradients_once() -> None:
    stages = [stage(0), stage(1)]
    wanted, _ = loss_and_gradients(Pipeline(stages, "GPU", MICROBATCHES, loss=loss_of_rows))
    got, sent = loss_and_gradients(Pipeline(stages, "GPU", MICROBATCHES // 2, replicas=2, loss=loss_of_rows))
    assert_close(got, wanted)
    of_weights, of_rows = DEPTH * WIDTH * WIDTH * 4, ROWS // 2 * WIDTH * 4
    for gpu in (0, 1):
        assert of_weights <= sent[f"GPU:{gpu}", f"GPU:{gpu + 2}"] < 1.2 * of_weights
        assert of_weights <= sent[f"GPU:{gpu + 2}", f"GPU:{gpu}"] < 1.2 * of_weights
        assert of_rows <= sent[f"GPU:{2 * gpu}", f"GPU:{2 * gpu + 1}"] < 1.1 * of_rows
    assert not sent["GPU:1", "GPU:2"] + sent["GPU:0", "GPU:3"]


def test_interleaved_stages_send_rows_from_device_to_device() -> None:
    stages = [stage(number) for number in (0, 1, 0, 1)]
    wanted, _ = loss_and_gradients(Pipeline(stages, "GPU", 4, loss=loss_of_rows))
    pipe = Pipeline(stages, ["GPU:0", "GPU:1"], 4, "interleaved", loss=loss_of_rows)
    got, sent = loss_and_gradients(pipe)
    assert_close(got, wanted)
    size = ROWS * WIDTH * 4
    assert 2 * size <= sent["GPU:0", "GPU:1"] < 3.3 * size  # activations forward twice, gradients once
    assert 2 * size <= sent["GPU:1", "GPU:0"] < 3.3 * size
    assert not sent["GPU:1", "host"] > size
