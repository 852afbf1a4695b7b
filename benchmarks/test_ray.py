"""Ray Data datasets by `devicemap.ray.map_batches`, against `Dataset.map_batches` with the function written by hand."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import devicemap.ray
from benchmarks import functions, peers
from benchmarks.conftest import Scale
from benchmarks.measuring import Compare, Way
from benchmarks.simulator import Simulator

BLOCKS, QUICK_BLOCKS = 60, 3
BLOCK_SECONDS = 0.05
ROWS, SOUNDS = 256, 64

BY_HAND, OURS = "Dataset.map_batches", "devicemap.ray"

MOST = 1.05
"""From the first block to the last, by the time of the function by hand: what the noise of a machine with few cores needs."""


def simulated(rows: Any) -> Any:
    """A block that takes the time of a device, and no CPU."""
    from benchmarks.simulator import load

    return load().work(rows, tf.fill([tf.shape(rows)[0]], BLOCK_SECONDS / ROWS))


class ByHand:
    """A class for Ray's actors, as in its guide "Offline batch inference", with the function as a best user writes it."""

    def __init__(self, fn: Callable[[Any], Any]):
        self._fn = tf.function(fn, reduce_retracing=True)

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        return {"result": self._fn(tf.convert_to_tensor(batch["data"])).numpy()}


def _compare(
    compare: Compare, case: str, blocks: list[Any], by_hand: Callable[[Any], Any], ours: Callable[[Any], Any], **facts: Any,
) -> None:  # fmt: skip
    """`ours` gets a dict of columns, of one row or a batch as its options say."""
    pytest.importorskip("ray.data", reason="Ray Data is not installed")
    ray = peers.start_ray(2)
    pool = ray.data.ActorPoolStrategy(size=1)
    dataset = ray.data.from_numpy(blocks)
    steady: dict[str, list[float]] = {BY_HAND: [], OURS: []}

    def way(name: str, make: Callable[[], Any]) -> Way:
        def computed() -> Any:
            arrived, results = [], []
            for batch in make().iter_batches(batch_size=None, batch_format="numpy"):
                arrived.append(time.perf_counter())
                results.append(batch["result"])
            steady[name].append((arrived[-1] - arrived[0]) * len(blocks) / (len(blocks) - 1))
            return np.concatenate(results)

        return computed

    ways = {
        BY_HAND: way(
            BY_HAND,
            lambda: dataset.map_batches(
                ByHand, fn_constructor_args=(by_hand,), compute=pool, batch_size=None, num_cpus=1
            ),
        ),
        OURS: way(OURS, lambda: ours(dataset)),
    }
    targets = {"most ratio": {OURS: MOST}}
    compare(ways, case, rounds=3, devices=1, patience_seconds=60, steady_seconds=steady, targets=targets, **facts)


def test_simulated(compare: Compare, sim: Simulator, scale: Scale) -> None:
    blocks = [np.zeros([ROWS, 512], "f")] * (QUICK_BLOCKS if scale.quick else BLOCKS)

    def ours(dataset: Any) -> Any:
        return devicemap.ray.map_batches(dataset, lambda batch: simulated(batch["data"]), concurrency=1, batched=True)

    _compare(compare, f"{BLOCKS} blocks of 50 ms and {ROWS} rows of 2 kB", blocks, simulated, ours)


def test_spectrograms(compare: Compare, scale: Scale) -> None:
    """A function of one sample, which its author has written for batches by hand."""
    if scale.quick:
        pytest.skip("a short run takes the other one")
    sounds = np.random.default_rng(0).normal(size=(BLOCKS, SOUNDS, 16000)).astype("f")

    def ours(dataset: Any) -> Any:
        return devicemap.ray.map_batches(dataset, lambda row: functions.mel(row["data"]), concurrency=1)

    _compare(
        compare, f"mel spectrograms of {BLOCKS} blocks of {SOUNDS} seconds", [*sounds], functions.mel, ours,
        tolerance=1e-2,
    )  # fmt: skip
