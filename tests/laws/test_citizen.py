"""Law 8: nothing is left behind. That Ctrl-C stops at once is asserted in tests/test_interruption.py."""

from __future__ import annotations

import copy
import gc
import pickle
import threading
import weakref
from typing import Any

import pytest
import tensorflow as tf

import devicemap

X = tf.reshape(tf.range(60, dtype=tf.float32), [20, 3])


def test_no_thread_stays() -> None:
    before = set(threading.enumerate())
    mapper = devicemap.DeviceMap(lambda row: row * 2, devices=["CPU:0", "CPU:1"], batch_size=2)
    mapper(X)
    devicemap.parallel_map(tf.sin, X)
    with pytest.raises(tf.errors.InvalidArgumentError):
        devicemap.parallel_map(lambda row: tf.debugging.check_numerics(row / 0.0, "nan"), X, batch_size=1)
    assert set(threading.enumerate()) <= before


def test_a_mapper_that_stays_frees_the_graphs_that_it_was_called_in() -> None:
    scale: list[Any] = []
    mapper = devicemap.DeviceMap(lambda row: row * scale[0], devices=["CPU:0", "CPU:1"])
    graphs = []
    for _ in range(2):

        @tf.function
        def user(x: Any) -> Any:
            scale[:] = [tf.reduce_sum(x)]
            graphs.append(weakref.ref(tf.compat.v1.get_default_graph()))
            return mapper(x) + mapper(x)

        user(X)
    del user
    scale.clear()
    gc.collect()
    assert [graph() for graph in graphs] == [None, None]


def test_calls_leave_global_state_alone() -> None:
    tf.random.set_seed(3)
    before = tf.random.normal([2]).numpy().tolist()
    tf.random.set_seed(3)
    devicemap.parallel_map(lambda row: row + tf.random.normal([3]), X, devices=["CPU:1", "CPU:2"])
    assert tf.random.normal([2]).numpy().tolist() == before


def test_a_map_is_copied_and_pickled_as_what_it_was_made_of() -> None:
    mapper = devicemap.DeviceMap(tf.square, devices=["CPU:1", "CPU:2"], batch_size=2)
    mapper(tf.range(5))
    for again in (copy.copy(mapper), copy.deepcopy(mapper), pickle.loads(pickle.dumps(mapper))):
        assert again(tf.range(5)).numpy().tolist() == [0, 1, 4, 9, 16]
        assert [row.device.endswith(("CPU:1", "CPU:2")) for row in again.report.devices] == [True, True]
