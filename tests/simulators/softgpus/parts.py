"""Of three GPUs of 2 GiB one is hidden, and one is cut into logical ones of 16 and 32 MiB."""

from __future__ import annotations

import tensorflow as tf

from benchmarks import softgpu

gpus = softgpu.start(3, 2 << 30)
_, whole, cut = tf.config.list_physical_devices("GPU")
tf.config.set_visible_devices([whole, cut], "GPU")
sizes = [tf.config.LogicalDeviceConfiguration(memory_limit=mebibytes) for mebibytes in (16, 32)]
tf.config.set_logical_device_configuration(cut, sizes)
