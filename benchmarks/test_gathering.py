"""Gathering the results of all devices, and what travels for it."""

from __future__ import annotations

from typing import Any

import pytest
import tensorflow as tf

import devicemap
from benchmarks import peers
from benchmarks.conftest import Scale
from benchmarks.measuring import Compare, Way
from benchmarks.traffic import Meter

GATHERINGS = ("TensorArray", "tf.concat", "TensorArray in the block")


@pytest.mark.parametrize("width", [16, 4096])
def test_gathering(compare: Compare, meter: Meter, real_devices: list[str], scale: Scale, width: int) -> None:
    """Results of 16 or 4096 numbers per row: gathered outside of the blocks, and written inside of them."""

    def fn(batch: Any) -> Any:
        return tf.repeat(tf.sin(batch), width // 4, axis=1)

    rows = len(real_devices) * (8 if scale.quick else 128)
    with tf.device("CPU:0"):
        x = tf.random.stateless_normal([rows, 4], [0, 0])
    functions = {f"graph blocks, {name}": peers.graph_blocks(fn, real_devices, name) for name in GATHERINGS}
    functions["devicemap"] = devicemap.DeviceMap(fn, devices=real_devices, batched=True)
    ways: dict[str, Way] = {name: lambda function=function: function(x) for name, function in functions.items()}
    compare(ways, f"{rows} rows on CPU:0, {width} numbers from each", rounds=15, calls=5, meter=meter)
