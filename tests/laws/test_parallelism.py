"""Law 2 on the graph that really ran: no edge joins two devices, whatever fn holds; and what fn does still happens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from graphs import between_devices, edges, partitions, placements

import devicemap

WORKERS = ["CPU:1", "CPU:2", "CPU:3"]
X = tf.reshape(tf.range(21, dtype=tf.float32), [7, 3])
_inner = tf.function(lambda row: tf.random.normal([3]) + row)


def _python(row: Any) -> Any:
    return tf.ensure_shape(tf.py_function(lambda r: r + 1, [row], tf.float32), [3])


def _asserting(row: Any) -> Any:
    tf.debugging.assert_less(row, 100.0)
    return tf.debugging.check_numerics(row, "not finite")


def _printing(row: Any) -> Any:
    tf.print("row", row, output_stream="file:///dev/null")
    return row * 2


def _everything(row: Any) -> Any:
    _asserting(row)
    return _printing(_python(row) + _inner(row) + tf.random.uniform([]))


def _looping(row: Any) -> Any:
    while tf.reduce_sum(row) < 1000.0:
        row = row + 1.0 + tf.random.uniform([])
    return row


FUNCTIONS = [_python, _asserting, _printing, _everything, _looping, _inner, lambda row: tf.random.shuffle(row)]
BATCHED = [False, True]


@pytest.mark.in_ci(4)
@pytest.mark.parametrize("batched", BATCHED)
@pytest.mark.parametrize("fn", FUNCTIONS, ids=lambda fn: getattr(fn, "__name__", "function"))
@pytest.mark.parametrize("caller", ["eager", "tf.function", "tape", "reduce"])
def test_no_edge_joins_two_devices(fn: Any, batched: bool, caller: str) -> None:
    rows = (lambda batch: tf.map_fn(fn, batch)) if batched else fn
    mapper = devicemap.DeviceMap(rows, devices=WORKERS, batched=batched)

    def taped(x: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            return mapper(x)

    reduced = lambda x: mapper.reduce(x, "sum")
    callers = {"eager": mapper, "tf.function": tf.function(lambda x: mapper(x)), "tape": taped, "reduce": reduced}
    graphs = partitions(callers[caller], X)
    assert between_devices(graphs) == []
    assert not [edge for edge in edges(graphs) if edge.control and edge.receiver == "CPU:0"]


def test_work_is_where_it_belongs() -> None:
    batches = devicemap.DeviceMap(lambda b: tf.matmul(b, b, transpose_b=True)[:, :1], devices=WORKERS, batched=True)
    graphs = partitions(batches, X)
    assert placements(graphs, "MatMul") == {"CPU:1": 1, "CPU:2": 1, "CPU:3": 1}
    # a shard in and a result out for each device, nothing else
    assert sorted((e.sender, e.receiver) for e in edges(graphs)) == sorted(
        pair for worker in WORKERS for pair in (("CPU:0", worker), (worker, "CPU:0"))
    )
    mapper = devicemap.DeviceMap(_everything, devices=WORKERS)
    graphs = partitions(tf.function(lambda x: mapper(mapper(x) * 0)), X)
    assert between_devices(graphs) == []
    graphs = partitions(devicemap.DeviceMap(_asserting, devices=WORKERS), X)
    assert set(placements(graphs, "CheckNumerics")) == set(WORKERS)  # which is colocated with its input


def test_effects_happen_once_per_row_used_or_not(tmp_path: Path) -> None:
    seen: list[float] = []
    count = tf.Variable(0)

    def note(row: Any) -> Any:
        tf.py_function(lambda r: seen.append(float(r[0])), [row], [])
        tf.io.write_file(tf.strings.join([str(tmp_path), "/", tf.strings.as_string(row[0])]), "saved")
        count.assign_add(1)
        return row

    mapper = devicemap.DeviceMap(note, devices=WORKERS)

    @tf.function
    def ignore(x: Any) -> Any:
        mapper(x)
        return x

    for call in (ignore, mapper, tf.function(lambda x: mapper(x))):
        np.testing.assert_array_equal(call(X), X)
        assert sorted(seen) == X[:, 0].numpy().tolist()
        assert int(count) == len(list(tmp_path.iterdir())) == 7
        count.assign(0)
        seen.clear()
        for path in tmp_path.iterdir():
            path.unlink()
    mapper(tf.data.Dataset.from_tensor_slices(X))
    assert len(seen) == int(count) == 7
