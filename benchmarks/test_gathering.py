"""Gathering the results of all devices, and what travels for it and for captured variables.

On CPU devices a tensor that is sent is not copied, so that what is sent, read from the graph that ran, says more than time.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import pytest
import tensorflow as tf

import devicemap
from benchmarks import peers, traffic
from benchmarks.conftest import Scale
from benchmarks.measuring import Way, compare

GATHERINGS = ("TensorArray", "tf.concat", "TensorArray in the block")


@pytest.mark.parametrize("width", [16, 4096])
def test_gathering(benchmark: Any, real_devices: list[str], scale: Scale, width: int) -> None:
    """Results of 16 or 4096 numbers per row: gathered outside of the blocks, and written inside of them."""

    def fn(batch: Any) -> Any:
        return tf.repeat(tf.sin(batch), width // 4, axis=1)

    rows = len(real_devices) * (8 if scale.quick else 128)
    x = tf.random.stateless_normal([rows, 4], [0, 0])
    functions = {f"graph blocks, {name}": peers.graph_blocks(fn, real_devices, name) for name in GATHERINGS}
    functions["devicemap"] = devicemap.DeviceMap(fn, devices=real_devices, batched=True)
    measure(benchmark, functions, x, scale, len(real_devices), f"{rows} rows of {width} numbers")


@pytest.mark.parametrize("lookups", [64, 4096])
def test_embedding(benchmark: Any, real_devices: list[str], scale: Scale, lookups: int) -> None:
    """Rows of a table that `fn` captures, looked up by few ids and by many; the hand-written blocks capture it too."""
    with tf.device(real_devices[0]):
        table = tf.Variable(tf.random.stateless_normal([1000, 64], [0, 0]))

    def fn(ids: Any) -> Any:
        return tf.tanh(tf.gather(table, ids))

    ids = tf.random.stateless_uniform([lookups // len(real_devices) * len(real_devices)], [1, 1], 0, 1000, tf.int32)
    functions = {
        "graph blocks": peers.graph_blocks(fn, real_devices, "tf.concat"),
        "devicemap": devicemap.DeviceMap(fn, devices=real_devices, batched=True),
    }
    measure(benchmark, functions, ids, scale, len(real_devices), f"{lookups} lookups in a table of 256 kB")


def measure(benchmark: Any, functions: dict[str, Any], x: Any, scale: Scale, devices: int, case: str) -> None:
    moved = {name: traffic.between_devices(function, x) for name, function in functions.items()}
    ways: dict[str, Way] = {name: lambda function=function: function(x) for name, function in functions.items()}
    compare(
        benchmark, ways, topic="gathering", case=case, rounds=3 if scale.quick else 15, calls=5, devices=devices,
        traffic={name: asdict(m) for name, m in moved.items()},
    )  # fmt: skip
