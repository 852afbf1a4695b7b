"""`devicemap.ray` on a cluster of Ray's: two hosts with a core each, of which one is lost. `test_ray.py` runs it."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import ray
import ray.data
import tensorflow as tf
from ray.cluster_utils import Cluster
from ray.data.expressions import col

import devicemap
import devicemap.ray

NOTICED_SOON = {"health_check_initial_delay_ms": 0, "health_check_period_ms": 500, "health_check_failure_threshold": 4}


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "_system_config": NOTICED_SOON})
    cluster.add_node(num_cpus=1)
    ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
    yield cluster
    ray.shutdown()
    cluster.shutdown()


def test_columns(cluster: Cluster) -> None:
    """Numbers, text and ragged columns come and go, in order as asked for, some blocks being empty; variables go, too.

    There are no CPUs besides those of the actors, which read and filter by themselves.
    """
    offset = tf.Variable(100, dtype=tf.int64)
    items = [
        {"n": n, "text": "ab" * n, "list": [*range(n)], "square": np.full([2, 2], n), "words": [["a"] * n, ["b"]]}
        for n in range(6)
    ]

    def describe(row):  # no annotations: without their names, autograph would not convert the unpickled function
        total = offset + tf.reduce_sum(row["square"])
        for each in row["list"]:  # a loop that is one in the graph
            total += each
        return {"text": row["text"] + "!", "list": 2 * row["list"], "total": total, "words": row["words"]}

    dataset = ray.data.from_items(items, override_num_blocks=3).filter(expr=col("n") > 1)
    lists, words = tf.RaggedTensorSpec([None], tf.int64), tf.RaggedTensorSpec([None, None], tf.string)
    signature = {"text": tf.string, "list": lists, "total": tf.int64, "words": words}
    dataset.context.execution_options.preserve_order = True
    rows = devicemap.ray.map_batches(dataset, describe, concurrency=2, fn_output_signature=signature).take_all()
    assert [row["text"].decode() for row in rows] == ["ab" * n + "!" for n in range(2, 6)]
    assert [row["list"] for row in rows] == [[2 * i for i in range(n)] for n in range(2, 6)]
    assert [row["words"] for row in rows] == [[[b"a"] * n, [b"b"]] for n in range(2, 6)]
    assert [row["total"] for row in rows] == [100 + 4 * n + n * (n - 1) // 2 for n in range(2, 6)]


class Result(NamedTuple):
    mean: Any
    wide: Any


Result.__module__ = "__main__"  # of the program itself, which is another one in an actor
LAST = devicemap.Reducer(
    np.zeros([2, 2], "f"), lambda state, row: row.wide, lambda state, later: later, lambda state: -state
)


@pytest.mark.parametrize("reducer", [Result("mean", "sum"), LAST], ids=["names", "own"])
def test_reduce(cluster: Cluster, reducer: Any) -> None:
    """By two actors as in one process; a mean is that of rows, however many of them are in a block."""

    def fn(row, seed):
        return Result(row["data"] + tf.random.stateless_normal([], seed), tf.fill([2, 2], row["data"]))

    rows = np.arange(7, dtype=np.float32)
    expected = devicemap.parallel_reduce(fn, {"data": rows}, reducer, seed=4)
    found = devicemap.ray.reduce(ray.data.from_numpy(rows).repartition(5), fn, reducer, concurrency=2, seed=4)
    assert type(found) is type(expected)
    tf.nest.map_structure(partial(np.testing.assert_allclose, rtol=1e-6), found, expected)


def test_blocks_of_other_dtypes_are_not_reduced(cluster: Cluster) -> None:
    dataset = ray.data.from_numpy([np.arange(3), np.full(3, 0.5)])
    with pytest.raises(devicemap.errors.FunctionError, match="int64 for the first block, but float64"):
        devicemap.ray.reduce(dataset, lambda row: row["data"], "sum", concurrency=1)


def careful(row: Any) -> Any:
    tf.debugging.assert_less(row["id"], np.int64(5), message="too large")
    return row["id"]


@pytest.mark.parametrize(
    ("fn", "options", "message"),
    [
        (careful, {}, r"careful failed on row 1 on CPU:0: .*too large"),
        (lambda batch: batch["id"][:3], {"batched": True}, "expected one row for each row"),
    ],
    ids=["raises", "fewer rows"],
)
def test_errors(cluster: Cluster, fn: Any, options: dict[str, Any], message: str) -> None:
    dataset = ray.data.range(8, override_num_blocks=2)
    with pytest.raises(ray.exceptions.RayTaskError, match=message):
        devicemap.ray.map_batches(dataset, fn, concurrency=1, **options).materialize()


def test_a_lost_host(cluster: Cluster, tmp_path: Path) -> None:
    """Lost when both have begun and none is done: its rows come once, in order, with the random numbers that are theirs."""

    def gate(rows: Any) -> Any:
        (tmp_path / ray.get_runtime_context().get_node_id()).touch()
        while not (tmp_path / "lost").exists():
            time.sleep(0.01)
        return rows

    def noisy(columns: Any, seed: Any, gate: Any = gate) -> Any:
        rows = tf.ensure_shape(tf.numpy_function(gate, [columns["data"]], tf.float32), [None, 2])
        return rows + tf.vectorized_map(lambda each: tf.random.stateless_normal([2], each), seed)

    def lose() -> None:
        while len([*tmp_path.iterdir()]) < 2:
            time.sleep(0.01)
        (other,) = cluster.worker_nodes
        cluster.remove_node(other, allow_graceful=False)
        (tmp_path / "lost").touch()

    rows = np.arange(46, dtype=np.float32).reshape(23, 2)
    dataset = ray.data.from_numpy(rows).repartition(5)
    losing = threading.Thread(target=lose)
    losing.start()
    result = devicemap.ray.map_batches(dataset, noisy, concurrency=2, seed=3, batched=True)
    found = np.concatenate([batch["result"] for batch in result.iter_batches(batch_size=None)])
    losing.join()
    expected = devicemap.parallel_map(noisy, {"data": rows}, seed=3, batched=True)
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    assert not dataset.context.execution_options.preserve_order
