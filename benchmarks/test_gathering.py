"""Gathering the results of all devices, and what travels for it."""

from __future__ import annotations

from typing import Any

import pytest
import tensorflow as tf

import devicemap
from benchmarks import peers
from benchmarks.conftest import Scale
from benchmarks.measuring import Way, compare
from benchmarks.traffic import Meter

GATHERINGS = ("TensorArray", "tf.concat", "TensorArray in the block")


@pytest.mark.parametrize("home", ["CPU:0", "GPU:0"])
@pytest.mark.parametrize("width", [16, 4096])
def test_gathering(benchmark: Any, meter: Meter, real_devices: list[str], scale: Scale, width: int, home: str) -> None:
    """Results of 16 or 4096 numbers per row: gathered outside of the blocks, and written inside of them."""

    def fn(batch: Any) -> Any:
        return tf.repeat(tf.sin(batch), width // 4, axis=1)

    if home.startswith("GPU") and not tf.config.list_logical_devices("GPU"):
        pytest.skip("there is no GPU")
    rows = len(real_devices) * (8 if scale.quick else 128)
    with tf.device(home):
        x = tf.random.stateless_normal([rows, 4], [0, 0])
    functions = {f"graph blocks, {name}": peers.graph_blocks(fn, real_devices, name) for name in GATHERINGS}
    functions["devicemap"] = devicemap.DeviceMap(fn, devices=real_devices, batched=True)
    ways: dict[str, Way] = {name: lambda function=function: function(x) for name, function in functions.items()}
    compare(
        benchmark, ways, topic="gathering", case=f"{rows} rows on {home}, {width} numbers from each",
        rounds=3 if scale.quick else 15, calls=5, devices=len(real_devices), meter=meter,
    )  # fmt: skip
