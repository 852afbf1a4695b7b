"""The peers: other ways to map a function over rows, each as its best users write it, with the source that it follows.

Each takes `fn` and what it needs, and returns a function of the data, a tuple of tensors `[rows, ...]`, to be called many
times. What is set up or traced once is so in the first call, which is timed apart. A `fn` takes batches of rows.
"""

from __future__ import annotations

import functools
import queue
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

Fn = Callable[..., Any]
Mapped = Callable[..., Any]


def eager_blocks(fn: Fn, devices: Sequence[str]) -> Mapped:
    """A `tf.device` block per device, run eagerly, one after another; as in TensorFlow's guide "Use a GPU"."""

    def step(*data: Any) -> Any:
        results = []
        for shard, device in zip(_shards(data, len(devices)), devices):
            with tf.device(device):
                results.append(fn(*shard))
        return tf.concat(results, 0)

    return step


def graph_blocks(fn: Fn, devices: Sequence[str], gathering: str = "TensorArray") -> Mapped:
    """The same blocks in a `tf.function`: the hand-written recipe.

    Args:
        fn: takes a batch.
        devices: one block each.
        gathering: `"TensorArray"` and `"tf.concat"` outside of the blocks; or `"TensorArray in the block"`, as the recipe
            is often seen, with the writes inside of the device scope.
    """

    @tf.function
    def step(*data: Any) -> Any:
        results, array = [], None
        for i, (shard, device) in enumerate(zip(_shards(data, len(devices)), devices)):
            with tf.device(device):
                result = fn(*shard)
                if gathering == "TensorArray in the block":
                    array = (array or _array_for(result, len(devices))).write(i, result)
            results.append(result)
        if gathering == "tf.concat":
            return tf.concat(results, 0)
        if array is None:
            array = _array_for(results[0], len(devices))
            for i, result in enumerate(results):
                array = array.write(i, result)
        return array.concat()

    return step


def mirrored_strategy(fn: Fn, devices: Sequence[str], replica_rows: int) -> Mapped:
    """`tf.distribute.MirroredStrategy`: `strategy.run` in a `tf.function` over per-replica values of in-memory data.

    Follows TensorFlow's guides "Distributed training" and "Distributed input"
    (`experimental_distribute_values_from_function`, which is faster than a distributed dataset for data in memory). One
    global batch has `replica_rows` rows for each device; the devices wait for each other after each.
    """

    @functools.cache
    def set_up() -> tuple[Any, Any]:
        strategy = tf.distribute.MirroredStrategy(list(devices))
        return strategy, tf.function(lambda *values: strategy.run(fn, args=values))

    def batch_from(strategy: Any, first_row: int, data: tuple[Any, ...]) -> list[Any]:
        def on_replica(leaf: Any, context: Any) -> Any:
            start = first_row + context.replica_id_in_sync_group * replica_rows
            return leaf[start : start + replica_rows]

        distribute = strategy.experimental_distribute_values_from_function
        return [distribute(lambda context, leaf=leaf: on_replica(leaf, context)) for leaf in data]

    def mapped(*data: Any) -> Any:
        strategy, step = set_up()
        results: list[Any] = []
        for first_row in range(0, len(data[0]), replica_rows * len(devices)):
            results += strategy.experimental_local_results(step(*batch_from(strategy, first_row, data)))
        return tf.concat(results, 0)

    return mapped


def joblib_threads(fn: Fn, devices: Sequence[str], batch_size: int) -> Mapped:
    """joblib's threads, each with a `tf.device` that was idle, as VegasFlow does it (`monte_carlo.py`, `device_run`)."""
    from joblib import Parallel, delayed

    traced = tf.function(fn)
    idle: queue.SimpleQueue[str] = queue.SimpleQueue()
    for device in devices:
        idle.put(device)
    pool = Parallel(n_jobs=len(devices), prefer="threads", pre_dispatch="all", batch_size=1)

    def chunk(*leaves: Any) -> Any:
        device = idle.get()
        try:
            with tf.device(device):
                return traced(*leaves)
        finally:
            idle.put(device)

    def mapped(*data: Any) -> Any:
        starts = range(0, len(data[0]), batch_size)
        return tf.concat(pool(delayed(chunk)(*(leaf[i : i + batch_size] for leaf in data)) for i in starts), 0)

    return mapped


def dataset_map(fn: Fn, devices: Sequence[str]) -> Callable[[tf.data.Dataset], Any]:
    """`Dataset.map` over batches, as many calls at once as there are devices, and batch `i` on device `i % n`.

    Follows TensorFlow's guide "Better performance with the tf.data API", and takes a dataset of batches. The guide's own
    form, without a device, computes on the host's CPU alone.
    """

    def on(device: str, batch: Any) -> Any:
        with tf.device(device):
            return fn(*batch) if isinstance(batch, tuple) else fn(batch)

    def call(i: Any, batch: Any) -> Any:
        branches = [lambda device=device: on(device, batch) for device in devices]
        return tf.switch_case(tf.cast(i % len(devices), tf.int32), branches)

    def mapped(batches: tf.data.Dataset) -> tf.data.Dataset:
        return batches.enumerate().map(call, num_parallel_calls=len(devices)).prefetch(tf.data.AUTOTUNE)

    return mapped


def in_memory(dataset_way: Callable[[tf.data.Dataset], Any], batch_size: int) -> Mapped:
    """A way over datasets of batches, for data in memory."""

    def mapped(*data: Any) -> Any:
        return tf.concat(list(dataset_way(tf.data.Dataset.from_tensor_slices(data).batch(batch_size))), 0)

    return mapped


@functools.cache
def start_ray(cpus: int) -> Any:
    """Ray, started with so many CPUs, whose datasets come in order."""
    import ray
    import ray.data

    ray.init(num_cpus=cpus, include_dashboard=False, log_to_driver=False, ignore_reinit_error=True)
    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False
    context.execution_options.preserve_order = True
    context.wait_for_min_actors_s = 600
    return ray


def _shards(data: tuple[Any, ...], count: int) -> list[tuple[Any, ...]]:
    """Equal shards, as users cut them who know that their rows can be divided so."""
    return list(zip(*(tf.split(leaf, count) if count > 1 else [leaf] for leaf in data)))


def _array_for(result: Any, size: int) -> Any:
    shape = [None, *result.shape[1:]]
    return tf.TensorArray(result.dtype, size=size, infer_shape=False, element_shape=shape)
