"""What a call on a few rows costs, against the best graph that a hand could write for the same devices.

The hand-written graph does what devicemap promises and no more: a tf.function with a static tf.split, a tf.device block per
device, the function's ops inlined, and tf.concat or a TensorArray outside of the blocks. The better of the two counts.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

import devicemap
from benchmarks import peers
from benchmarks.measuring import Compare

ROWS = 16
MOST = 1.0


def fn(batch: Any) -> Any:
    return tf.sin(batch) * 2.0


def test_call_on_few_rows(compare: Compare, real_devices: list[str]) -> None:
    with tf.device("CPU:0"):
        x = tf.random.stateless_normal([ROWS, 3], [0, 0])
    concat, array = (peers.graph_blocks(fn, real_devices, gathering) for gathering in ("tf.concat", "TensorArray"))
    mapper = devicemap.DeviceMap(fn, devices=real_devices, batched=True)
    ways = {
        "graph blocks, tf.concat": lambda: concat(x),
        "graph blocks, TensorArray": lambda: array(x),
        "devicemap": lambda: mapper(x),
    }
    compare(ways, f"{ROWS} rows", rounds=40, calls=20, targets={"most ratio": {"devicemap": MOST}})
