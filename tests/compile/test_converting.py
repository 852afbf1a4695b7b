"""Law 1 for control flow of a row in one vectorised call: loops that rows leave at once or one by one, branches, gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from graphs import partitions, traced
from oracle import gradients_of

import devicemap

_random = np.random.default_rng(0)
ROWS = tf.constant(_random.normal(size=[7, 3]), tf.float64)
WEIGHTS = tf.Variable(_random.normal(size=[3, 3]), dtype=tf.float64)
KERNEL = tf.constant(_random.normal(size=[2, 1, 2]), tf.float64)
NEVER = 1e3


def _power(row: Any) -> Any:
    state = row
    for _ in tf.range(5):
        state = tf.tanh(tf.linalg.matvec(WEIGHTS, state) + row[0])
    return state


def _from_shared_start(row: Any) -> Any:
    """Variables that rows share at first, and that differ after one and two steps."""
    first, second, shared = tf.zeros([3], tf.float64), tf.zeros([3], tf.float64), tf.constant(1.0, tf.float64)
    for _ in tf.range(4):
        second = second + first * shared
        first = first + row
        shared = shared * 1.1
    return second + shared


def _nested(row: Any) -> Any:
    total = tf.zeros([3], tf.float64)
    for i in tf.range(3):
        for j in tf.range(i + 1):
            total += row * tf.cast(i + j, tf.float64)
        while tf.norm(total) > 2.0:
            total *= 0.7
    return total


def _collected(row: Any) -> Any:
    array = tf.TensorArray(tf.float64, 4, clear_after_read=False)
    array = array.write(0, row)
    for i in tf.range(3):
        array = array.write(i + 1, array.read(i) * row)
    return array.stack()


def _until_it_is_small(row: Any) -> Any:
    while tf.norm(row) > 0.5:
        row = row * 0.6
    return row


def _no_step(row: Any) -> Any:
    for _ in tf.range(tf.size(row) - 3):
        row *= 2.0
    return row


def _branch_in_loop(row: Any) -> Any:
    for i in tf.range(4):
        if row[0] > 0.2:
            row = tf.linalg.matvec(WEIGHTS, row[::-1]) / 3.0
        elif i > 2:
            row = row + 1.0
        else:
            row = row - row[1] * 0.1
    return row


SHARED_LOOPS = [_power, _from_shared_start, _collected, _no_step]
LOOPS = [*SHARED_LOOPS, _nested, _until_it_is_small, _branch_in_loop]


def _serial(fn: Callable[..., Any]) -> Callable[..., Any]:
    spec = tf.TensorSpec(None, tf.float64)
    signature = [tf.TensorSpec([None, 3], tf.float64)]
    return tf.function(lambda x: tf.map_fn(fn, x, fn_output_signature=spec), input_signature=signature)


@pytest.mark.in_ci(2)
@pytest.mark.parametrize("fn", LOOPS)
def test_loops_give_what_they_give_for_a_row(devices: list[str], fn: Callable[[Any], Any]) -> None:
    """With its gradients."""
    mapper, serial = devicemap.DeviceMap(fn, devices=devices), _serial(fn)
    plan = traced(mapper, ROWS)
    assert plan.vectorized, plan.reason
    for rows in (1, 2, 7):
        np.testing.assert_allclose(mapper(ROWS[:rows]), serial(ROWS[:rows]), rtol=1e-9)
    for got, wanted in zip(gradients_of(mapper, ROWS, WEIGHTS), gradients_of(serial, ROWS, WEIGHTS)):
        np.testing.assert_allclose(got, wanted, rtol=1e-8, atol=1e-10)


@pytest.mark.nightly
@pytest.mark.parametrize("fn", [_from_shared_start, _collected])  # _power: tests/laws/test_gradients.py
def test_loops_that_rows_leave_at_once_have_second_gradients(fn: Callable[[Any], Any]) -> None:
    def second(mapped: Callable[..., Any]) -> Any:
        with tf.GradientTape() as outer:
            outer.watch(ROWS)
            with tf.GradientTape() as inner:
                inner.watch(ROWS)
                loss = tf.reduce_sum(mapped(ROWS) ** 3)
            first = inner.gradient(loss, ROWS)
        return outer.gradient(first, ROWS)

    mapper = devicemap.DeviceMap(fn, devices=["CPU:1", "CPU:2"])
    np.testing.assert_allclose(second(mapper), second(_serial(fn)), rtol=1e-8)


@pytest.mark.parametrize("fn", SHARED_LOOPS[:2])
def test_loops_that_rows_leave_at_once_keep_no_lists(fn: Callable[[Any], Any]) -> None:
    mapper = devicemap.DeviceMap(fn, devices=["CPU:1"])
    whole = tf.function(lambda x: mapper(x)).get_concrete_function(ROWS).graph.as_graph_def()
    held = {node.op for function in whole.library.function for node in function.node_def}
    assert "TensorListReserve" not in held
    assert not {"If", "StatelessIf"} & held


BRANCHES: dict[str, Callable[[Any], Any]] = {
    "product": lambda r: tf.cond(r[0] > NEVER, lambda: tf.matmul(r[None], WEIGHTS)[0], lambda: r * 2.0),
    "convolution": lambda r: tf.cond(
        r[0] > NEVER, lambda: tf.nn.conv1d(r[None, :, None], KERNEL, 1, "SAME")[0, :, 0], lambda: r - 1.0
    ),
    "segments": lambda r: tf.cond(
        r[0] > NEVER, lambda: tf.math.unsorted_segment_sum(r, [0, 1, 0], 3), lambda: tf.reverse(r, [0])
    ),
    "slice": lambda r: tf.cond(r[0] < NEVER, lambda: r[:2], lambda: tf.slice(r, [tf.cast(r[1], tf.int32)], [2])),
    "assert": lambda r: tf.cond(r[0] < NEVER, lambda: r, lambda: _refused(r)),
    "pair": lambda r: tf.add_n(tf.cond(r[0] > 0, lambda: (r, r * 2.0), lambda: (-r, r[::-1]))),
    "some rows": lambda r: tf.cond(r[0] > 0, lambda: tf.linalg.matvec(WEIGHTS, r), lambda: r),
    "all share it": lambda r: tf.cond(WEIGHTS[0, 0] > NEVER, lambda: tf.linalg.matvec(WEIGHTS, r), lambda: r),
    "cases": lambda r: tf.switch_case(
        tf.cast(tf.round(r[0] * 2.0), tf.int32), [lambda: r, lambda: r * 2.0, lambda: tf.linalg.matvec(WEIGHTS, r)]
    ),
    "cases of pairs": lambda r: tf.add_n(
        tf.switch_case(tf.cast(r[0], tf.int32), [lambda: (r, r), lambda: (r[::-1], r * 2.0)])
    ),
}


def _refused(row: Any) -> Any:
    tf.debugging.assert_equal(WEIGHTS[0, 0] > NEVER, True)
    return row


@pytest.mark.in_ci(2)
@pytest.mark.parametrize("name", BRANCHES)
def test_branches_give_what_they_give_for_a_row(devices: list[str], name: str) -> None:
    fn = BRANCHES[name]
    mapper = devicemap.DeviceMap(fn, devices=devices)
    assert traced(mapper, ROWS).vectorized
    serial = _serial(fn)
    for rows in (1, 7):
        np.testing.assert_allclose(mapper(ROWS[:rows]), serial(ROWS[:rows]), rtol=1e-9)


def _growing(row: Any) -> Any:
    found, i = tf.zeros([0], tf.float64), 0
    while i < 3 and row[i] > -0.5:
        tf.autograph.experimental.set_loop_options(shape_invariants=[(found, tf.TensorShape([None]))])
        found = tf.concat([found, [row[i]]], 0)
        i += 1
    return tf.reduce_sum(found)


def _joined(row: Any) -> Any:
    array = tf.TensorArray(tf.float64, 2, infer_shape=False).write(0, row[:1]).write(1, row[1:])
    return tf.reduce_sum(array.concat())


@pytest.mark.parametrize(
    ("fn", "reason"),
    [
        (_growing, "fn has a loop that rows leave at different times, with a tensor that grows in it"),
        (_joined, "TensorListConcatV2 has no tested vectorised form"),
        (lambda r: tf.reduce_sum(tf.slice(r, [tf.argmax(r)], [-1])), "Slice"),
        (
            lambda r: tf.reduce_sum(tf.cond(r[0] > 0, lambda: r[:2], lambda: r)),
            "fn has a branch whose results may differ",
        ),
    ],
)
def test_rows_of_different_shapes_inside_are_mapped(fn: Callable[[Any], Any], reason: str) -> None:
    mapper = devicemap.DeviceMap(fn, devices=["CPU:1", "CPU:2"])
    assert reason in traced(mapper, ROWS).reason
    np.testing.assert_allclose(mapper(ROWS), _serial(fn)(ROWS), rtol=1e-9)


@pytest.mark.in_ci(1)
@pytest.mark.parametrize("fn", [_power, _until_it_is_small, _branch_in_loop])
def test_compiled_loops(fn: Callable[[Any], Any]) -> None:
    mapper = devicemap.DeviceMap(fn, devices=["CPU:1", "CPU:2"], jit_compile=True)
    np.testing.assert_allclose(mapper(ROWS), _serial(fn)(ROWS), rtol=1e-9)


def _random_walk(row: Any) -> Any:
    place = tf.constant(0.0, tf.float64)
    for _ in tf.range(3):
        place += tf.random.normal([], dtype=tf.float64)
    return row + place


def test_what_ops_do_not_tell_to_differ_between_rows() -> None:
    mapper = devicemap.DeviceMap(_random_walk, devices=["CPU:1", "CPU:2"])
    assert traced(mapper, ROWS).vectorized
    drawn = mapper(tf.zeros_like(ROWS)).numpy()
    assert len({*drawn[:, 0]}) == len(ROWS)
    assert (drawn == drawn[:, :1]).all()


@pytest.mark.in_ci(1)
@pytest.mark.parametrize(
    ("fn", "avoided"),
    [(tf.sin, "Gather"), (lambda r: tf.linalg.matvec(WEIGHTS, r), "Transpose")],
)
def test_rows_are_neither_gathered_nor_turned_around(fn: Callable[[Any], Any], avoided: str) -> None:
    mapper = devicemap.DeviceMap(fn, devices=["CPU:1", "CPU:2"])
    ran = {node.op for graph in partitions(mapper, ROWS) for node in graph.node}
    assert not {op for op in ran if avoided in op}


@pytest.mark.in_ci(1)
@pytest.mark.parametrize("transposed", [{}, {"transpose_a": True}, {"transpose_b": True}])
@pytest.mark.parametrize("columns", [1, 2])
def test_a_shared_matrix_times_a_matrix_of_each_row(columns: int, transposed: dict[str, bool]) -> None:
    shape = [columns, 3] if "transpose_b" in transposed else [3, columns]
    shared = tf.constant(_random.normal(size=[3, 4] if "transpose_a" in transposed else [4, 3]))
    rows = tf.constant(_random.normal(size=[7, *shape]))
    fn = lambda row: tf.matmul(shared, row, **transposed)
    mapper = devicemap.DeviceMap(fn, devices=["CPU:1", "CPU:2"])
    assert traced(mapper, rows).vectorized
    for count in (1, 7):
        got = mapper(rows[:count])
        assert got.shape == [count, 4, columns]
        np.testing.assert_allclose(got, [fn(row) for row in rows[:count]], rtol=1e-9)
    unknown = tf.function(lambda x: mapper(x), input_signature=[tf.TensorSpec([None, None, None], tf.float64)])
    np.testing.assert_allclose(unknown(rows), mapper(rows), rtol=1e-9)
