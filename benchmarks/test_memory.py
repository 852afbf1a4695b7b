"""How far the memory of the process rises while 4 GB stream through it. Run in a process of its own."""

from __future__ import annotations

import functools
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import devicemap
from benchmarks import peers
from benchmarks.conftest import Scale
from benchmarks.measuring import Compare, Way

MEGABYTES, BATCH_MEGABYTES, QUICK_MEGABYTES = 4000, 4, 80
MOST_MEGABYTES = 300
WIDTH = 16384

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads the peak of the memory from Linux's /proc")


def test_streamed_gigabytes(compare: Compare, real_devices: list[str], scale: Scale) -> None:
    """Batches that are made as they are read, and a sum for each of their rows."""
    rows = BATCH_MEGABYTES * 10**6 // (4 * WIDTH)
    batches = (QUICK_MEGABYTES if scale.quick else MEGABYTES) // BATCH_MEGABYTES
    dataset = tf.data.Dataset.range(batches).map(lambda n: tf.fill([rows, WIDTH], tf.cast(n, tf.float32)))

    def fn(batch: Any) -> Any:
        return tf.reduce_max(batch, 1)

    mapper = devicemap.DeviceMap(fn, devices=real_devices, batched=True)
    mapped = peers.dataset_map(fn, real_devices)(dataset)

    def sums(chunks: Any) -> Any:
        return tf.stack([tf.reduce_sum(chunk) for chunk in chunks])

    ways = {"devicemap": lambda: sums(mapper.stream(dataset)), "Dataset.map": lambda: sums(mapped)}
    case = f"{batches * BATCH_MEGABYTES} MB in batches of {BATCH_MEGABYTES} MB"
    answer = np.arange(batches, dtype=np.float32) * rows
    compare_rises(compare, ways, case, answer)


def test_reduced_gigabytes(compare: Compare, real_devices: list[str], scale: Scale) -> None:
    """256 000 rows of 16 kB, of which nothing but their mean is left."""
    rows = 2_560 if scale.quick else 256_000
    mapper = devicemap.DeviceMap(lambda n: tf.fill([4096], tf.cast(n, tf.float32)), devices=real_devices)
    ways = {"devicemap": lambda: mapper.reduce(tf.data.Dataset.range(rows), "mean")}
    compare_rises(compare, ways, f"the mean of {rows} rows of 16 kB", np.full(4096, (rows - 1) / 2, np.float32))


def compare_rises(compare: Compare, ways: Mapping[str, Way], case: str, answer: np.ndarray) -> None:
    rises = dict.fromkeys(ways, 0.0)

    def measured(name: str) -> Any:
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak
        start = _megabytes("VmRSS")
        result = ways[name]()
        rises[name] = max(rises[name], _megabytes("VmHWM") - start)
        return result

    compare(
        {name: functools.partial(measured, name) for name in ways}, case, rounds=1, answer=answer, rise_megabytes=rises,
        targets={"most megabytes": {"devicemap": MOST_MEGABYTES}},
    )  # fmt: skip


def _megabytes(field: str) -> float:
    status = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith(field)) / 1000
