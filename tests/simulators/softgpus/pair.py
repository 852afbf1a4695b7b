"""Two GPUs of 64 MiB, which most files here run on, in one process; rows, a variable, and what is said of copies."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import tensorflow as tf

import devicemap
from benchmarks import softgpu

GPUS = ("GPU:0", "GPU:1")
gpus = softgpu.start(2, 64 << 20)

with tf.device("CPU:0"):
    x = tf.random.stateless_normal([64, 64], [0, 0])
    rows = tf.random.stateless_normal([8, 20, 16], [0, 1])
    weights = tf.Variable(tf.ones([16]))
shard, weight = rows.numpy().nbytes // 2, 16 * 4


def wave(row: Any) -> Any:
    return tf.sin(row) * weights


def scanning(row: Any) -> Any:
    return tf.scan(lambda state, element: tf.sin(state) * weights + element, row)


on_gpus = functools.partial(devicemap.DeviceMap, devices="GPU", output_device="CPU:0")


def copies_of(call: Callable[[], Any]) -> list[softgpu.Copy]:
    """What a call copies until its results, which lie on the host, are there."""
    gpus.clear()
    results = tf.nest.flatten(call())
    assert all(leaf.backing_device.endswith("CPU:0") for leaf in results), results
    [leaf.numpy() for leaf in results]
    return gpus.copies()


def sent(call: Callable[[Any], Any]) -> tuple[list[int], list[int]]:
    """Bytes to each GPU, and from each, in a call that was traced before; none may go from one to another."""
    call(rows)
    copies_of(lambda: call(rows))
    copies = copies_of(lambda: call(rows))
    assert not [copy for copy in copies if copy.kind == "between"], copies
    to = [sum(copy.bytes for copy in copies if copy.receiver == gpu) for gpu in GPUS]
    return to, [sum(copy.bytes for copy in copies if copy.sender == gpu) for gpu in GPUS]
