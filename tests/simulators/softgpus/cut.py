"""Parts of a GPU have memory of their own: of three GPUs one is hidden, and one is cut into two logical ones."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

import devicemap
from benchmarks import softgpu
from devicemap.devices import choose_devices, gpu_indices

gpus = softgpu.start(3, 2 << 30)
_, whole, cut = tf.config.list_physical_devices("GPU")
tf.config.set_visible_devices([whole, cut], "GPU")
sizes = [tf.config.LogicalDeviceConfiguration(memory_limit=mebibytes) for mebibytes in (16, 32)]
tf.config.set_logical_device_configuration(cut, sizes)

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
