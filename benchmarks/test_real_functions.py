"""Real functions on the devices there are: never slower than the best of what TensorFlow offers for one device.

The peers are written as their best users would: traced with autograph, tf.data with AUTOTUNE, the batched function as one
tf.function; on several devices in a `tf.device` block for each. Where vectorized_map lacks an op, it has no entry.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import tensorflow as tf

import devicemap
from benchmarks import peers
from benchmarks.conftest import Scale
from benchmarks.functions import Case, cases
from benchmarks.measuring import Compare, Way

NAMES = (
    "ODE solver", "coupled oscillators", "stencil", "mel spectrogram", "Sinkhorn", "JPEG decoding", "small SVD", "serial scan",
    "Keras CNN", "CNN of one image", "object detection", "attention block", "image augmentation",
)  # fmt: skip
MOST = 1.05  # what the noise of a machine with few cores needs
QUICK, QUICK_ROWS = ("ODE solver", "Keras CNN"), 8


@pytest.mark.parametrize("name", NAMES)
def test_real_function(compare: Compare, real_devices: list[str], scale: Scale, name: str) -> None:
    if scale.quick and name not in QUICK:
        pytest.skip("a short run takes two of them")
    case = cases()[name]
    if scale.quick:
        case = replace(case, data=case.data[:QUICK_ROWS])
    ways = ways_of(case, real_devices) | {"Dataset.map": by_dataset(case)}
    targets = {"most ratio": {"devicemap": MOST}}
    compare(ways, name, rounds=60, tolerance=1e-2, rows=len(case.data), targets=targets)


def ways_of(case: Case, devices: list[str]) -> dict[str, Way]:
    """Each way as a function without arguments; those that TensorFlow cannot trace are left out."""
    x, fn = case.data, tf.function(case.fn)
    mapper = devicemap.DeviceMap(case.fn, devices=devices, batched=case.batched)
    blocks = {
        "tf.map_fn": lambda x: tf.map_fn(fn, x, fn_output_signature=tf.float32),
        "tf.vectorized_map": lambda x: tf.vectorized_map(fn, x, fallback_to_while_loop=False),
    }
    if case.by_hand is not None:
        blocks["tf.function of a batch"] = tf.function(case.by_hand)
    ways: dict[str, Way] = {}
    for name, block in ({"tf.function": fn} if case.batched else blocks).items():
        mapped = peers.graph_blocks(block, devices, "tf.concat")
        if name == "tf.vectorized_map":
            try:
                mapped(x)
            except ValueError:
                continue  # an op without a vectorised form
        ways[name] = lambda mapped=mapped: mapped(x)
    return ways | {"devicemap": lambda: mapper(x)}


def by_dataset(case: Case) -> Way:
    """`Dataset.map`, which knows of no devices."""
    x, fn = case.data, tf.function(case.fn)
    rows = tf.data.Dataset.from_tensor_slices(x)
    if case.batched:
        chunks = rows.batch(64).map(fn, num_parallel_calls=tf.data.AUTOTUNE).prefetch(tf.data.AUTOTUNE)
        return lambda: tf.concat(list(chunks), 0)
    whole = rows.map(fn, num_parallel_calls=tf.data.AUTOTUNE).batch(len(x)).prefetch(tf.data.AUTOTUNE)
    return lambda: next(iter(whole))
