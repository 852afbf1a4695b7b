"""Independent jobs, one per device at a time."""

from __future__ import annotations

import contextlib
import gc
import signal
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable
from contextvars import ContextVar
from functools import partial
from pathlib import Path
from typing import Any

import keras
import numpy as np
import processes
import pytest
import tensorflow as tf
import threads
from oracle import assert_close

import devicemap
from devicemap.types import CallFinished, CallStarted, ChunkFailed, ChunkFinished, ChunkRetried, ChunkStarted, RowFailed

X = np.random.default_rng(0).normal(size=(96, 4)).astype(np.float32)
Y = X.sum(1, keepdims=True)

pytestmark = pytest.mark.usefixtures("no_thread_stays")


@pytest.mark.parametrize("count", [0, 1, 2, 5, 12])
def test_results_are_in_the_order_of_items(devices: list[str], count: int) -> None:
    results = devicemap.parallel_tasks(lambda n: {"n": n, "object": object}, range(count), devices=devices)
    assert results == [{"n": n, "object": object} for n in range(count)]


def test_all_devices_work_at_once_and_each_on_one_task(devices: list[str]) -> None:
    """A barrier lets no task pass before as many run as there are devices."""
    barrier = threading.Barrier(len(devices), timeout=60)

    def task(item: int, device: str) -> str:
        barrier.wait()
        assert tf.constant(item).device == device
        return device

    used = devicemap.parallel_tasks(task, range(3 * len(devices)), devices=devices)
    assert [*Counter(used).values()] == [3] * len(devices)


def test_maps_and_models_inside_a_task_use_its_device(devices: list[str]) -> None:
    def task(item: int, device: str) -> None:
        plan = devicemap.DeviceMap(lambda n: n + item).explain(tf.range(8))
        assert [part.device for part in plan.devices] == [device]
        np.testing.assert_array_equal(devicemap.parallel_map(tf.negative, [item]), [-item])
        model = keras.Sequential([keras.Input([4]), keras.layers.Dense(1)])
        model.compile("sgd", "mse", jit_compile=False)
        devicemap.parallelize(model).fit(X, Y, verbose=0)
        assert [share.device for share in model.report().devices] == [device]

    devicemap.parallel_tasks(task, range(len(devices)), devices=devices)
    assert len(devicemap.DeviceMap(tf.negative, devices=devices).explain(tf.range(8)).devices) == len(devices)


@pytest.mark.parametrize("error", [KeyError("missing"), tf.errors.InternalError(None, None, "bad"), SystemExit(3)])
def test_the_first_error_is_raised_and_running_tasks_finish(error: BaseException) -> None:
    failed, finished, started = threading.Event(), [], threading.Barrier(3, timeout=60)

    def task(item: int) -> None:
        started.wait()
        if item == 1:
            raise error
        failed.wait(60)
        finished.append(item)
        if item == 2:
            raise ValueError("not the first one")

    def observe(event: Any) -> None:
        if isinstance(event, ChunkFailed):
            failed.set()

    with pytest.raises(type(error)) as caught:
        devicemap.parallel_tasks(task, range(50), devices=["CPU:0", "CPU:1", "CPU:2"], progress=observe)
    assert caught.value is error
    assert caught.value.__notes__[-1] == "item 1 on CPU:1: 1"
    assert {*finished} == {0, 2}


def test_a_stop_iteration_is_the_cause_of_an_error() -> None:
    with pytest.raises(RuntimeError, match="StopIteration") as caught:
        devicemap.parallel_tasks(next, [iter(())], devices="CPU:1")
    assert isinstance(caught.value.__cause__, StopIteration)
    assert caught.value.__cause__.__notes__[0].startswith("item 0 on CPU:1: <")


def test_skipped_errors_take_the_place_of_results(devices: list[str]) -> None:
    events: list[Any] = []
    options = {"devices": devices, "on_error": "skip", "progress": events.append}
    results = devicemap.parallel_tasks(lambda n: 6 // n, [3, 0, 2], **options)
    assert results[::2] == [2, 3]
    assert isinstance(results[1], ZeroDivisionError)
    assert [event.shard.start for event in events if isinstance(event, RowFailed)] == [1]


def test_a_retry_does_not_wait_for_a_busy_device() -> None:
    """The device that failed is idle, and the other one is busy until the retry ends."""
    retried, calls = threading.Event(), Counter[int]()

    def task(item: int) -> bool:
        calls[item] += 1
        if item == 0:
            return retried.wait(30)
        if calls[item] == 1:
            raise OSError("busy")
        retried.set()
        return True

    assert devicemap.parallel_tasks(task, range(2), devices=["CPU:1", "CPU:2"], max_retries=1) == [True, True]


def test_retries_and_events() -> None:
    calls, events = Counter[int](), []

    def task(item: int) -> int:
        calls[item] += 1
        if item == 1 and calls[item] < 3:
            raise OSError("busy")
        return item

    assert devicemap.parallel_tasks(task, range(3), devices="CPU:0", max_retries=2, progress=events.append) == [0, 1, 2]
    assert [*calls.items()] == [(0, 1), (1, 3), (2, 1)]  # they start in the order of items
    retries = {ChunkStarted: 5, ChunkFailed: 2, ChunkRetried: 2, ChunkFinished: 3}
    assert Counter(map(type, events)) == {CallStarted: 1, **retries, CallFinished: 1}
    assert (events[0].rows, events[-1].error) == (3, None)
    assert [event.attempt for event in events if isinstance(event, ChunkRetried)] == [2, 3]
    calls.clear()
    with pytest.raises(OSError, match="busy"):
        devicemap.parallel_tasks(task, [1], max_retries=1)


def test_context_variables_hold_in_tasks() -> None:
    setting = ContextVar("setting", default=0)
    setting.set(3)
    assert devicemap.parallel_tasks(lambda n: setting.get() + n, [1, 2]) == [4, 5]


def test_an_interrupt_returns_at_once() -> None:
    """Also while tasks are running that never end by themselves."""
    release, started = threading.Event(), threading.Barrier(2)

    def task(item: int) -> None:
        started.wait(60)
        if item == 0:
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        release.wait(60)

    try:
        with pytest.raises(KeyboardInterrupt):
            devicemap.parallel_tasks(task, range(9), devices=["CPU:0", "CPU:1"])
        assert not release.is_set()
    finally:
        release.set()
    threads.wait_until_ended()  # the two tasks that were running end, and no other starts


def test_an_interrupt_names_the_task_that_failed_before() -> None:
    release, started = threading.Event(), threading.Barrier(2)

    def task(item: int) -> None:
        started.wait(60)
        if item == 0:
            raise ValueError("bad")
        time.sleep(1)  # until the failure is known
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        release.wait(60)

    try:
        with pytest.raises(KeyboardInterrupt) as caught:
            devicemap.parallel_tasks(task, range(2), devices=["CPU:0", "CPU:1"])
    finally:
        release.set()
    assert caught.value.__notes__ == ["a task failed before: ValueError: bad", "item 0 on CPU:0: 0"]
    threads.wait_until_ended()


def _train(seed: int, eagerly: bool = False) -> list[np.ndarray]:
    """Train a model whose random numbers all have seeds of their own."""
    dense = keras.layers.Dense(4, "relu", kernel_initializer=keras.initializers.GlorotUniform(seed))
    rest = [keras.layers.Dropout(0.3, seed=seed), keras.layers.BatchNormalization()]
    model = keras.Sequential([keras.Input([4]), dense, *rest, keras.layers.Dense(1, kernel_initializer="ones")])
    model.compile(keras.optimizers.Adam(0.01), "mse", metrics=["mae"], jit_compile=False, run_eagerly=eagerly)
    model.fit(X, Y, batch_size=32, epochs=2, shuffle=False, verbose=0)
    weights: list[np.ndarray] = model.get_weights()
    return weights


def test_models_equal_those_that_are_trained_alone(devices: list[str]) -> None:
    seeds = range(len(devices) + 1)
    together = devicemap.parallel_tasks(_train, seeds, devices=devices)
    for seed, weights in zip(seeds, together):
        assert_close(weights, _train(seed, eagerly=True))


@pytest.mark.private("knowing that the global seed was set")
@pytest.mark.parametrize("set_seed", [tf.random.set_seed, keras.utils.set_random_seed])
def test_a_task_that_sets_the_global_seed(set_seed: Callable[[int], None]) -> None:
    set_seed(7)
    with pytest.warns(RuntimeWarning, match="a task set the global seed") as warned:
        assert devicemap.parallel_tasks(lambda n: set_seed(7), range(2), devices=["CPU:0", "CPU:1"]) == [None, None]
    assert warned[0].filename == __file__


def test_the_global_seed_on_one_device_or_without_changes() -> None:
    def drawn(n: int) -> list[float]:
        tf.random.set_seed(n)
        return tf.random.normal([2]).numpy().tolist()

    assert devicemap.parallel_tasks(drawn, [3, 4], devices=["CPU:1"]) == [drawn(3), drawn(4)]
    tf.random.set_seed(5)
    first, second = (tf.random.normal([2]).numpy() for _ in range(2))
    tf.random.set_seed(5)
    np.testing.assert_array_equal(tf.random.normal([2]), first)
    assert devicemap.parallel_tasks(lambda n: n, range(2), devices=["CPU:0", "CPU:1"]) == [0, 1]
    np.testing.assert_array_equal(tf.random.normal([2]), second)


def test_settings_of_keras_hold_in_tasks() -> None:
    """Keras keeps them for each thread."""
    keras.config.set_dtype_policy("mixed_float16")
    keras.config.disable_interactive_logging()
    try:
        policies = devicemap.parallel_tasks(
            lambda n: (keras.layers.Dense(n).dtype_policy.name, keras.config.is_interactive_logging_enabled()), [1, 2]
        )
    finally:
        keras.config.set_dtype_policy("float32")
        keras.config.enable_interactive_logging()
    assert policies == [("mixed_float16", False)] * 2


@pytest.mark.private("copying the default writer")
@pytest.mark.parametrize("records", [True, False])
def test_settings_of_summaries_hold_in_tasks(records: bool, devices: list[str], tmp_path: Path) -> None:
    """TensorFlow keeps them for each thread, and silently drops summaries without a writer."""
    with tf.summary.create_file_writer(str(tmp_path)).as_default(3), tf.summary.record_if(records):
        written = devicemap.parallel_tasks(lambda n: bool(tf.summary.write("n", n)), range(4), devices=devices)
    assert written == [records] * 4
    (file,) = tmp_path.iterdir()
    events = [tf.compat.v1.Event.FromString(record.numpy()) for record in tf.data.TFRecordDataset(str(file))]
    assert [event.step for event in events if event.HasField("summary")] == [3] * 4 * records


DEFAULTS = """
import keras
import devicemap

devicemap.simulate_devices(2)
devicemap.parallel_tasks(lambda n: keras.layers.Dense(n).dtype, [1, 2])
keras.config.set_floatx("float64")
print(keras.layers.Dense(1).dtype)
"""


def test_tasks_choose_no_dtype_policy() -> None:
    assert processes.run(DEFAULTS) == ["float64"]


class _Memory:
    pass


def test_a_retry_finds_the_memory_of_the_failed_attempt_free() -> None:
    attempts: list[weakref.ref[_Memory]] = []

    def task(item: int) -> list[bool]:
        memory = _Memory()
        free = [attempt() is None for attempt in attempts]
        attempts.append(weakref.ref(memory))
        if len(attempts) < 3:
            raise MemoryError
        return free

    assert devicemap.parallel_tasks(task, [0], max_retries=2) == [[True, True]]


def test_a_kept_error_keeps_no_other_items_and_results(devices: list[str]) -> None:
    items = [_Memory() for _ in range(6)]
    numbers = {id(item): number for number, item in enumerate(items)}
    references = [*map(weakref.ref, items)]

    def task(item: _Memory) -> _Memory:
        if numbers[id(item)] % 2:
            raise LookupError("odd")
        result = _Memory()
        references.append(weakref.ref(result))
        return result

    results = devicemap.parallel_tasks(task, items, devices=devices, on_error="skip")
    kept = results[1]
    assert isinstance(kept, LookupError)
    del items, results
    threads.wait_until_ended()
    gc.collect()
    assert [number for number, reference in enumerate(references) if reference() is not None] == [1]


def test_a_raised_error_is_in_no_cycle() -> None:
    """Which would keep the results of the other tasks until the garbage collector runs."""
    references: list[weakref.ref[_Memory]] = []

    def task(item: int) -> _Memory:
        if item == 3:
            raise LookupError("odd")
        references.append(weakref.ref(result := _Memory()))
        return result

    gc.collect()
    gc.disable()
    try:
        with contextlib.suppress(LookupError):
            devicemap.parallel_tasks(task, range(6), devices="CPU:0")
        threads.wait_until_ended()
        assert [reference() for reference in references] == [None] * 3
    finally:
        gc.enable()


@pytest.mark.parametrize(
    ("fn", "result"),
    [
        (type, int),  # of an unknown signature
        (partial(lambda item, device: device, device="chosen"), "chosen"),
        (lambda item, device="default", /: device, "default"),
        (lambda item, *device: device, ()),
    ],
)
def test_functions_that_get_no_device(fn: Any, result: Any) -> None:
    assert devicemap.parallel_tasks(fn, [1]) == [result]
