"""Plans tell the memory of calls and training steps, and the largest batch, by TensorFlow's allocator: two GPUs of 1 GiB."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import keras
import pytest
import tensorflow as tf

import devicemap
from benchmarks import softgpu
from devicemap.training import models

GPUS = ("GPU:0", "GPU:1")
LIMIT = 1 << 30
gpus = softgpu.start(2, LIMIT)
for gpu in GPUS:
    with tf.device(gpu):
        tf.zeros(
            [(LIMIT >> 2) - (4 << 20)]
        )  # one region of memory, instead of ever larger ones, which are left in pieces

layers = keras.layers
with tf.device("GPU:0"):
    w, v = tf.Variable(tf.ones([64, 256])), tf.Variable(tf.ones([256, 32]))


def dense(x: Any) -> Any:
    return tf.nn.relu(x @ w + 1.0) @ v


def several(row: Any) -> Any:
    a, b = tf.sin(row), tf.cos(row)
    c = a * b + row
    return tf.reduce_sum(tf.nn.softmax(c) * a) + c


def standardized(x: Any) -> Any:
    centred = x - tf.reduce_mean(x, 1, keepdims=True)
    return centred / tf.sqrt(tf.reduce_mean(tf.square(centred), 1, keepdims=True) + 1e-3)


def looping(row: Any) -> Any:
    return tf.while_loop(lambda i, _: i < 9, lambda i, state: (i + 1, tf.sin(state) + row), (0, row))[1]


def spectrum(row: Any) -> Any:
    return tf.abs(tf.signal.fft(tf.cast(row, tf.complex64)))


def mlp() -> Any:
    hidden = [layers.Dense(512, "relu"), layers.Dense(512, "relu")]
    return keras.Sequential([keras.Input([256]), *hidden, layers.Dense(64)])


def deep() -> Any:
    hidden = [layers.Dense(64, "relu") for _ in range(16)]
    return keras.Sequential([keras.Input([64]), *hidden])


def cnn() -> Any:
    convolved = [layers.Conv2D(8, 3, activation="relu"), layers.MaxPool2D(), layers.Conv2D(16, 3, activation="relu")]
    return keras.Sequential([keras.Input([16, 16, 3]), *convolved, layers.Flatten(), layers.Dense(10)])


def lstm() -> Any:
    return keras.Sequential([keras.Input([20, 16]), layers.LSTM(32, use_cudnn=False), layers.Dense(4)])


def transformer() -> Any:
    x = given = keras.Input([16, 32])
    for _ in range(2):
        x = layers.LayerNormalization()(x + layers.MultiHeadAttention(4, 8)(x, x))
        x = layers.LayerNormalization()(x + layers.Dense(32)(layers.Dense(64, "gelu")(x)))
    return keras.Model(given, layers.Dense(4)(layers.GlobalAveragePooling1D()(x)))


def rows_of(spec: Any, count: int) -> Any:
    with tf.device("CPU:0"):
        return tf.random.stateless_normal([count, *spec.shape[1:]], [1, 2])


def held() -> list[int]:
    time.sleep(0.2)  # what is enqueued ends
    return [tf.config.experimental.get_memory_info(gpu)["current"] for gpu in GPUS]


def peaks(call: Callable[[], object], times: int = 3) -> list[int]:
    """On each GPU, the least of some: steps of a loop overlap now and then."""
    found = []
    for _ in range(times):
        held()
        for gpu in GPUS:
            tf.config.experimental.reset_memory_stats(gpu)
        call()
        held()
        found.append([tf.config.experimental.get_memory_info(gpu)["peak"] for gpu in GPUS])
    return [min(each) for each in zip(*found)]


def map_of(fn: Any, spec: Any, batched: bool) -> tuple[Any, Callable[[int], Any]]:
    """In one graph, as results go to a GPU."""
    mapper = devicemap.DeviceMap(fn, devices="GPU", output_device="GPU:0", batched=batched, max_retries=0)
    return mapper.explain(spec), lambda count: mapper(rows_of(spec, count)).numpy()  # waits for it


def of_map(fn: Any, shape: tuple[int, ...], batched: bool) -> tuple[Any, Callable[[int], Any]]:
    return map_of(fn, tf.TensorSpec([None, *shape]), batched)


def of_model(make: Any) -> tuple[Any, Callable[[int], Any]]:
    model = make()
    return map_of(lambda x: model(x, training=False), tf.TensorSpec(model.input_shape), True)


def of_training(make: Any) -> tuple[Any, Callable[[int], Any]]:
    model = make()
    model.compile("adam", "mse", jit_compile=False)
    devicemap.parallelize(model)
    x, y = tf.TensorSpec(model.input_shape), tf.TensorSpec(model.output_shape)

    def step(count: int) -> None:
        with tf.device("CPU:0"):  # Keras brings arrays to a GPU
            batches = tf.data.Dataset.from_tensors((rows_of(x, count), rows_of(y, count)))
        model.fit(batches, shuffle=False, verbose=0)

    return model.explain(x), step


FUNCTIONS = [
    pytest.param(of_map, (dense, (64,), True), id="dense"),
    pytest.param(of_map, (several, (64,), False), id="several"),
    pytest.param(of_map, (standardized, (64,), True), id="standardized"),
    pytest.param(of_map, (looping, (64,), False), id="looping"),
    pytest.param(of_map, (spectrum, (64,), False), id="spectrum"),
]
FORWARD = [pytest.param(of_model, (make,), id=f"{make.__name__} forward") for make in (mlp, cnn, transformer)]
TRAINING = [
    pytest.param(of_training, (make,), id=f"{make.__name__} training") for make in (mlp, cnn, lstm, transformer)
]
LARGEST = [*FUNCTIONS[:2], pytest.param(of_training, (deep,), id="deep training")]
"""None with a few tensors that take all of the memory: TensorFlow's allocator loses up to half of it between those. They come
first, and training next, before other calls leave the memory in pieces, of which a tensor may get one of twice its size."""


@pytest.mark.parametrize(("case", "arguments"), LARGEST)
def test_the_largest_batch_runs_and_a_larger_one_does_not(
    case: Any, arguments: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, call = case(*arguments)
    rows = plan.largest_batch()
    call(rows)
    monkeypatch.setattr(models, "step_fits", lambda *_: True)  # to run into the limit
    with pytest.raises((tf.errors.ResourceExhaustedError, RuntimeWarning), match="memory"):  # of steps, a warning
        call(int(1.15 * rows))


@pytest.mark.parametrize(("case", "arguments"), [*TRAINING, *FUNCTIONS, *FORWARD])
def test_peaks_are_as_told(case: Any, arguments: Any) -> None:
    """Within 10 % for one of some numbers of rows: the allocator may give a tensor a piece of up to twice its size, if others
    have left one, and how far ahead of each other parts of a loop are differs from call to call."""
    before = held()
    plan, call = case(*arguments)
    shared = plan.memory[0].variable_bytes if arguments[0] is dense else 0  # was there before
    most = plan.largest_batch(192 << 20)
    seen = []
    for rows in (most, most * 3 // 4, most // 2):
        call(rows)
        told = [memory.peak_bytes(rows) for memory in plan.memory]
        taken = [peak - base for peak, base in zip(peaks(lambda: call(rows)), (before[0] - shared, before[1]))]
        seen.append([peak / memory for peak, memory in zip(taken, told)])
        if 1 / 1.1 < min(seen[-1]) and max(seen[-1]) < 1 / 0.9:
            return
    raise AssertionError(seen)


def test_steps_of_a_loop_that_may_run_ahead_are_counted() -> None:
    plan, call = of_model(lstm)
    rows = plan.largest_batch(192 << 20)
    call(rows)
    assert max(peaks(lambda: call(rows))) <= 192 << 20
