"""Loops hand on less, and compute the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import devicemap
from devicemap.hoisting import hoist
from devicemap.internals.functions import optimized_graph
from devicemap.optimizing import optimize
from devicemap.options import check_options
from devicemap.rows import as_rows
from devicemap.tracing import trace

X = tf.constant([0.5, -1.0, 2.0])


def _table_and_counter(x: Any) -> Any:
    """Reads what it captures by its own counter, beside TensorFlow's."""
    table = tf.cumsum(x) + 1.0
    total = tf.zeros([])
    for i in tf.range(tf.size(x)):
        total = 0.5 * total + table[i] + tf.cast(i, tf.float32)
    return total


def _no_step(x: Any) -> Any:
    table = tf.cumsum(x)
    total = tf.zeros([])
    for i in tf.range(tf.size(x) - 3):
        total += table[i]
    return total + tf.reduce_sum(table)


def _unchanged_alone(x: Any) -> Any:
    """What is computed of the unchanged alone must not run after the last step."""
    table = tf.cumsum(x)
    total, i = tf.zeros([]), 0
    while total < 10.0:
        total += tf.reduce_max(tf.sort(table))
        i += 1
    return total, i


def _unchanged_and_returned(x: Any) -> Any:
    same = tf.cumsum(x)
    total = tf.zeros([])
    for value in x:
        total += value * same[0]
        same = tf.identity(same)
    return total, same


def _nested(x: Any) -> Any:
    table = tf.cumsum(x)
    total = tf.zeros([])
    for i in tf.range(tf.size(x)):
        for j in tf.range(i):
            total += table[i] * table[j]
        total *= table[0]
    return total


def _branches(x: Any) -> Any:
    table = tf.cumsum(x)
    total = tf.zeros([])
    for i in tf.range(tf.size(x)):
        if table[i] > 0.0:
            total += tf.reduce_sum(table)
        else:
            total -= table[i]
    return total


def _swapped(x: Any) -> Any:
    a, b = tf.cumsum(x), x
    for _ in tf.range(tf.size(x)):
        a, b = b, a
    return a


def _counters_that_differ(x: Any) -> Any:
    up, down, twice = tf.size(x) - 3, tf.size(x) - 3, tf.size(x) - 3
    while up < 4:
        up, down, twice = up + 1, down - 1, twice + 2
    return up, down, twice


def _counter_returned(x: Any) -> Any:
    i, total = 0, tf.zeros([])
    for value in x:
        total += value * tf.cast(i, tf.float32)
        i += 1
    return total, i


def _draws(x: Any) -> Any:
    """Each step draws; one that is none must not."""
    shape = tf.shape(tf.cumsum(x))
    total = tf.zeros_like(x)
    for _ in tf.range(tf.size(x)):
        tf.autograph.experimental.set_loop_options(parallel_iterations=1)  # several draw in any order
        total = total * 0.5 + tf.random.uniform(shape, seed=3)
    return total


def _handed_on(graph_def: Any) -> int:
    return sum(node.op == "NextIteration" for node in graph_def.node)


def _graphs(fn: Callable[..., Any]) -> tuple[Any, Any, list[str]]:
    """The optimised graph of a function, before and after, and what it returns."""
    concrete = tf.function(fn).get_concrete_function(tf.TensorSpec([3]))
    outputs = [tensor.name for tensor in concrete.outputs]
    before = optimized_graph(concrete.graph.as_graph_def(), outputs)
    after = tf.compat.v1.GraphDef.FromString(before.SerializeToString())
    hoist(after)
    return before, after, outputs


def _run(graph_def: Any, outputs: list[str], times: int) -> list[Any]:
    with tf.Graph().as_default() as graph, tf.compat.v1.Session(graph=graph) as session:
        (given,) = (node.name for node in graph_def.node if node.op == "Placeholder")
        tf.graph_util.import_graph_def(graph_def, name="")
        return [session.run(outputs, {f"{given}:0": X.numpy()}) for _ in range(times)]


@pytest.mark.parametrize(
    ("fn", "gone"),
    [
        (_table_and_counter, 3),  # the table, and where the counter ends and by what it grows
        (_no_step, 3),
        (_unchanged_alone, 1),
        (_unchanged_and_returned, 1),  # x, not what is returned
        (_nested, 3),
        (_branches, 2),
        (_swapped, 2),  # where the counter ends and by what it grows
        (_counters_that_differ, 0),
        (_counter_returned, 2),  # x, and the counter that is not returned
        (_draws, 0),
    ],
)
def test_it_hands_on_less_and_computes_the_same(fn: Callable[..., Any], gone: int) -> None:
    before, after, outputs = _graphs(fn)
    assert _handed_on(before) - _handed_on(after) == gone
    for got, wanted in zip(_run(after, outputs, times=3), _run(before, outputs, times=3)):
        for a, b in zip(got, wanted):
            np.testing.assert_array_equal(a, b)


def test_devices_run_what_is_left() -> None:
    rows = tf.reshape(tf.range(12.0), [4, 3])
    traced = trace(_table_and_counter, as_rows(rows).specs, check_options(_table_and_counter, {"vectorize": False}))
    of_loop = optimize(traced).concrete.graph.get_operations()
    constant = [op for op in of_loop if op.type == "Enter" and op.get_attr("is_constant")]
    assert len(constant) >= 3
    got = devicemap.parallel_map(_table_and_counter, rows, devices=["CPU:0", "CPU:1"])
    np.testing.assert_allclose(got, [tf.function(_table_and_counter)(row) for row in rows], rtol=1e-6)
