"""Parts of a GPU have memory of their own, and take turns."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from simulators.softgpus.parts import cut, gpus

import devicemap
from devicemap.base.devices import choose_devices, gpu_indices

with tf.device("CPU:0"):
    x = tf.random.stateless_normal([64, 64], [0, 0])


def test_each_part_has_memory_of_its_own() -> None:
    devices = devicemap.list_devices("GPU")
    assert [device.memory for device in devices] == [2 << 30, 16 << 20, 32 << 20]
    names = [device.description for device in devices]
    assert names == [names[0], f"part 1 of 2 of {names[0]}", f"part 2 of 2 of {names[0]}"]
    assert [*gpu_indices(choose_devices("GPU")).values()] == [1, 2, 2]
    np.testing.assert_allclose(devicemap.parallel_map(tf.sin, x, devices=cut), np.sin(x), rtol=1e-5)
    assert {run.device for run in gpus.runs()} == {"GPU:1", "GPU:2"}
    (advice,) = devicemap.DeviceMap(tf.sin).explain(x).advice
    assert advice.startswith("GPU:1 and GPU:2 are parts of one GPU, where large kernels take turns")
    with tf.device("GPU:2"):
        tf.zeros([6 << 20])
    with tf.device("GPU:1"):
        held = tf.zeros([3 << 20])
        with pytest.raises(tf.errors.ResourceExhaustedError):
            tf.zeros([2 << 20])
    del held


def test_parts_take_turns() -> None:
    size = 64 * 64 * 4

    def measure(*names: str) -> tuple[float, float, float]:
        """Seconds of three kernels on each at a time; how far apart copies to them, and how long one between them."""

        @tf.function
        def call(x: Any) -> Any:
            results = []
            for name in names:
                with tf.device(name):
                    results.append(tf.sin(tf.sin(tf.sin(x))))
            return results

        gpus.reset()
        [y.numpy() for y in call(x)]
        for gpu in range(3):
            gpus.configure(gpu, kernel_seconds=0.1)
        began = time.perf_counter()
        [y.numpy() for y in call(x)]
        seconds = time.perf_counter() - began
        for gpu in range(3):
            gpus.configure(gpu, bytes_per_second=size / 0.2)
        gpus.clear()
        first, _ = call(x)
        with tf.device(names[1]):
            tf.cos(first).numpy()
        starts = [copy.start_seconds for copy in gpus.copies("to device")]
        (between,) = gpus.copies("between")
        assert (between.sender, between.receiver, between.bytes) == (*names, size)
        return seconds, max(starts) - min(starts), between.end_seconds - between.start_seconds

    two, copies_to_two, between_two = measure("GPU:0", "GPU:1")
    one, copies_to_one, between_parts = measure("GPU:1", "GPU:2")
    assert two < 0.5
    assert one >= 0.6
    assert copies_to_two < 0.1
    assert copies_to_one > 0.19
    assert between_two >= 0.2
    assert between_parts < 0.1
