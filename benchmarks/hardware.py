"""The devices of a run: GPUs, whole or cut into several, where there are any; else logical CPU devices."""

from __future__ import annotations

import os
import platform
import subprocess

import tensorflow as tf

import devicemap


def cut_devices(count: int) -> None:
    """Before TensorFlow initialises: make `count` logical CPU devices, and at least `count` GPUs of those that there are.

    Where there are fewer GPUs than that, each is cut into parts of equal memory.
    """
    gpus = tf.config.list_physical_devices("GPU")
    parts = -(-count // len(gpus)) if gpus else 0
    if parts > 1:
        limit = _memory_megabytes() // parts
        for gpu in gpus:
            cuts = [tf.config.LogicalDeviceConfiguration(memory_limit=limit) for _ in range(parts)]
            tf.config.set_logical_device_configuration(gpu, cuts)
    devicemap.simulate_devices(count)  # initialises TensorFlow


def all_devices() -> list[str]:
    """Full names of the devices that compute: all GPUs, else all logical CPU devices."""
    return [device.name for device in devicemap.list_devices("GPU") or devicemap.list_devices("CPU")]


def describe() -> str:
    """Machine and versions, as they stand above every table. No names of the machine or its user."""
    gpus = [tf.config.experimental.get_device_details(gpu) for gpu in tf.config.list_physical_devices("GPU")]
    names = "".join(f", {name}" for name in dict.fromkeys(gpu.get("device_name", "GPU") for gpu in gpus))
    return (
        f"{os.cpu_count()} cores {platform.machine()}{names}, Python {platform.python_version()}, "
        f"TensorFlow {tf.__version__}, devicemap {devicemap.__version__}"
    )


def _memory_megabytes() -> int:
    """What the logical devices of one GPU may take together."""
    command = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    sizes = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
    return int(0.8 * min(map(int, sizes)))
