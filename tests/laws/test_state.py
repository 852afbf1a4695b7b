"""Law 4: captured variables, and what fn writes."""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from graphs import edges, ops_on, partitions
from oracle import assert_close
from ways import CALLS

import devicemap
from devicemap.compile.audit import Treatment, audit
from devicemap.inspect.plan import Handling

WORKERS = ["CPU:1", "CPU:2", "CPU:3"]
X = tf.reshape(tf.range(60, dtype=tf.float32), [20, 3])
SAMPLES = tf.data.Dataset.from_tensor_slices(X)


def _often(weights: Any, row: Any) -> Any:
    for _ in tf.range(5):
        row = tf.linalg.matvec(weights, tf.linalg.matvec(weights, row)) / 10.0
    return row


def _in_python(weights: Any, row: Any) -> Any:
    return tf.ensure_shape(tf.py_function(lambda row: row, [_often(weights, row)], tf.float32), [3])


def _looked_up(weights: Any, row: Any) -> Any:
    return tf.linalg.matvec(weights, row) + tf.gather(weights, tf.cast(row[0], tf.int32) % 3)


MATRIX = tf.Variable(tf.random.normal([3, 3]))


@pytest.mark.private("gradients through copies of variables; which calls no tape records")
@pytest.mark.parametrize("vectorize", ["auto", False])
@pytest.mark.parametrize(
    ("fn", "captured", "options", "received"),
    [
        pytest.param(_often, MATRIX, {}, 2, id="a variable"),
        pytest.param(_in_python, MATRIX, {}, 2, id="a variable beside Python, which asks for a host, not for a device"),
        pytest.param(_looked_up, MATRIX, {}, 2, id="a variable that is read twice"),
        pytest.param(_looked_up, MATRIX, {"batch_size": 5}, 1, id="a variable that is there before the first chunk"),
        pytest.param(_often, tf.identity(MATRIX), {}, 1, id="a tensor"),
        pytest.param(_often, tf.identity(MATRIX), {"batch_size": 4}, 1, id="a tensor in chunks"),
    ],
)
def test_each_captured_value_travels_once(fn: Any, captured: Any, options: Any, received: int, vectorize: Any) -> None:
    """Rows and variables go to each device and results come back, once per call. Loops ask for nothing in each turn."""
    mapper = devicemap.DeviceMap(partial(fn, captured), devices=WORKERS, vectorize=vectorize, **options)
    if received == 2:
        mapper(X)  # makes the replicas
    graphs = partitions(mapper, X)
    found = edges(graphs)
    travels = {(edge.sender, edge.receiver, edge.source) for edge in found if not edge.control}
    workers = {edge.receiver for edge in found} - {"CPU:0"}
    assert Counter(receiver for _, receiver, _ in travels) == {"CPU:0": len(workers)} | dict.fromkeys(workers, received)
    if received == 1:  # replicas are also copied from worker to worker
        assert not any(edge.control for edge in found)
        assert all("CPU:0" in ends for *ends, _ in travels)
    assert not ops_on(graphs)["CPU:0"]["Enter"]
    np.testing.assert_allclose(mapper(X), tf.map_fn(partial(fn, captured), X), rtol=1e-4, atol=1e-5)


@pytest.mark.in_ci(2)
@pytest.mark.parametrize("copies", [WORKERS, ["CPU:1"], ["CPU:0", *WORKERS]])
def test_an_update_between_calls_is_seen(copies: list[str]) -> None:
    unknown = tf.Variable(2.0, shape=tf.TensorShape(None))
    scale = tf.Variable(2.0)

    def fn(row: Any) -> Any:
        return row * scale + tf.reduce_sum(unknown)

    mapper, chunked = (devicemap.DeviceMap(fn, devices=copies, batch_size=n) for n in (None, 2))
    inside = tf.function(lambda x: mapper(x))
    for value in (2.0, 3.0, -1.0):
        scale.assign(value)
        unknown.assign([1.0, value])
        for result in (mapper(X), inside(X), chunked(X), chunked(SAMPLES)):
            np.testing.assert_allclose(result, value * X + 1.0 + value)


def _looping(row: Any, scale: Any) -> Any:
    return tf.while_loop(lambda i, _: i < 3, lambda i, r: (i + 1, r * scale), (0, row))[1]


@pytest.mark.in_ci(1)
@pytest.mark.parametrize("vectorize", ["auto", False])
@pytest.mark.parametrize(("fn", "power"), [(_looping, 3), (tf.multiply, 1), (lambda row, s: row * s * s, 2)])
def test_an_update_in_the_users_function_comes_after_what_the_call_reads(
    devices: list[str], fn: Any, power: int, vectorize: Any
) -> None:
    with tf.device("CPU:0"):
        scale = tf.Variable(2.0)
    mapper = devicemap.DeviceMap(lambda row: fn(row, scale), devices=devices, vectorize=vectorize)

    def updating(x: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            first = mapper(x)
            scale.assign_add(1.0)
            second = mapper(x)
            total = first + 10.0 * second
        gradient = tape.gradient(total, x)
        scale.assign_sub(1.0)
        return first, second, gradient

    before, after = 2.0**power, 3.0**power
    wanted = X * before, X * after, tf.fill(X.shape, before + 10.0 * after)
    for run in (updating, tf.function(updating)):
        for _ in range(3):
            assert_close(run(X), wanted, rtol=1e-5)


def _straight(state: Any, row: Any) -> None:
    state.assign(state * 0.5 + row[0])


def _in_a_branch_in_a_loop(state: Any, row: Any) -> None:
    for i in tf.range(3):
        if row[0] > 9.0 * tf.cast(i, tf.float32):
            state.assign(state * 0.5 + row[0])


@pytest.mark.parametrize("how", CALLS)
@pytest.mark.parametrize("batched", [False, True])
@pytest.mark.parametrize("update", [_straight, _in_a_branch_in_a_loop])
def test_what_depends_on_order_runs_in_order(devices: list[str], update: Any, batched: bool, how: str) -> None:
    state = tf.Variable(1.0)

    def step(row: Any) -> Any:
        update(state, row)
        return state.read_value()

    fn = (lambda b: tf.map_fn(step, b, parallel_iterations=1)) if batched else step
    wanted = tf.function(lambda x: tf.map_fn(step, x, parallel_iterations=1))(X)
    mapper = devicemap.DeviceMap(fn, devices=devices, batched=batched)
    called = CALLS[how](mapper, X)
    for call in (*[partial(called, X)] * 5, partial(mapper, SAMPLES.batch(4) if batched else SAMPLES)):
        state.assign(1.0)
        np.testing.assert_allclose(call(), wanted)


def test_treatments() -> None:
    v = tf.Variable([1.0, 2.0, 3.0])
    generator = tf.random.Generator.from_seed(1)
    table = tf.lookup.experimental.MutableHashTable(tf.int64, tf.int64, -1)

    def in_loop(row: Any) -> Any:
        for _ in tf.range(2):
            if row[0] > 0.0:
                v.assign_sub(row)
        return row

    def insert(row: Any) -> Any:
        table.insert(tf.cast(row[:1], tf.int64), [1])
        return row

    for fn, wanted in (
        (lambda row: row * v + tf.gather(v, 1), [Treatment.READ]),
        (in_loop, [Treatment.ATOMIC]),
        (lambda row: v.scatter_nd_add([[0]], [row[0]]), [Treatment.ORDERED]),
        (insert, [Treatment.ORDERED]),
        (lambda row: row + generator.normal([3]), [Treatment.ATOMIC]),
        (lambda row: row + tf.constant([1.0, 2.0, 3.0]), []),
    ):
        concrete = tf.function(fn).get_concrete_function(tf.TensorSpec([3]))
        assert list(audit(concrete).treatments) == wanted


@pytest.mark.in_ci(1)
@pytest.mark.parametrize("options", [{"vectorize": False}, {"devices": ["CPU:1"]}, {"devices": WORKERS}], ids=str)
def test_a_variable_that_the_users_function_creates(options: dict[str, Any]) -> None:
    created: list[Any] = []

    @tf.function
    def late(x: Any) -> Any:
        if not created:
            created.append(tf.Variable(tf.range(3.0) + 1.0))
        return devicemap.parallel_map(lambda row: row * created[0], x, **options)

    for rows in (X, X, X[:2]):
        np.testing.assert_allclose(late(rows), rows * [1.0, 2.0, 3.0])
    created[0].assign([4.0, 5.0, 6.0])
    with tf.GradientTape() as tape:
        total = tf.reduce_sum(late(X))
    np.testing.assert_allclose(late(X), X * [4.0, 5.0, 6.0])
    np.testing.assert_allclose(tape.gradient(total, created[0]), tf.reduce_sum(X, 0))


def test_copies_are_not_the_users_variables() -> None:
    created = []

    def creator(create: Any, **how: Any) -> Any:
        created.append(create(**how))
        return created[-1]

    weights = tf.Variable([1.0, 2.0, 3.0])
    with tf.variable_creator_scope(creator):
        devicemap.parallel_map(lambda row: row * weights, X, devices=WORKERS, vectorize=False)
    assert created == []


@pytest.mark.in_ci(2)
@pytest.mark.private("where gradients are computed")
@pytest.mark.parametrize("vectorize", ["auto", False])
@pytest.mark.parametrize("place", ["eager", "tape", "tf.function", "rows unknown", "taped tf.function", "chunks"])
def test_dropout_beside_a_counter_in_a_loop(devices: list[str], place: str, vectorize: Any) -> None:
    dropout, counter, ones = tf.keras.layers.Dropout(0.5), tf.Variable(0.0), tf.ones([7, 64])

    def fn(row: Any) -> Any:
        for _ in tf.range(2):
            row = dropout(row[None], training=True)[0]
            counter.assign_add(1.0)
        return row

    mapper = devicemap.DeviceMap(fn, devices=devices, vectorize=vectorize, batch_size=2 if place == "chunks" else None)
    inside = tf.function(lambda x: mapper(x), input_signature=[tf.TensorSpec([None, 64])] if "rows" in place else None)
    with tf.GradientTape() as tape:
        tape.watch(ones)
        with contextlib.nullcontext() if "tape" in place else tape.stop_recording():
            result = mapper(ones) if place in ("eager", "chunks", "tape") else inside(ones)
    assert counter.numpy() == 14.0
    assert len({row.tobytes() for row in result.numpy()}) == 7
    if "tape" in place:
        np.testing.assert_array_equal(tape.gradient(result, ones), result)


@pytest.mark.in_ci(2)
@pytest.mark.parametrize(
    "options", [{}, {"vectorize": False}, {"batched": True}, {"batch_size": 4}, {"jit_compile": True}]
)
def test_variables_may_stay_in_place(options: dict[str, Any]) -> None:
    table, bias = tf.Variable(tf.random.normal([50, 3])), tf.keras.Variable(tf.random.normal([3]))
    fn, ids = (lambda i: tf.gather(table, i)), tf.range(20) % 7
    mapper = devicemap.DeviceMap(lambda i: fn(i) + bias, devices=WORKERS, in_place=[table, bias], **options)
    for _ in range(2):
        np.testing.assert_allclose(mapper(ids), fn(ids) + bias)
        table.assign_add(tf.ones_like(table))
    assert {thing.handling for thing in mapper.explain(ids).captured} == {Handling.LOOKED_UP}
    with pytest.raises(devicemap.errors.OptionError, match=r"of shape \(3,\), which fn does not use$"):
        devicemap.parallel_map(fn, ids, in_place=[table, bias], devices=WORKERS)
    np.testing.assert_allclose(devicemap.parallel_map(fn, ids, in_place=table, devices=WORKERS), fn(ids))


def test_a_stream_sees_one_value_whatever_is_called_meanwhile() -> None:
    """Each call has its own copies of a variable."""
    level = tf.Variable(1.0)
    streaming = devicemap.DeviceMap(lambda row: row * 0 + level, devices=WORKERS, batch_size=1)
    chunks = streaming.stream(X)
    seen = [next(chunks)]
    level.assign(2.0)
    for batch_size in (None, 3):
        devicemap.parallel_map(lambda row: row + level, X, devices=WORKERS, batch_size=batch_size)
    streaming(X)
    seen += list(chunks)
    np.testing.assert_array_equal(tf.concat(seen, 0), np.ones_like(X))


@pytest.mark.in_ci(2)
def test_a_variable_that_changes_while_threads_read_it(devices: list[str]) -> None:
    """With copies that calls share, one call in sixty read an old value."""
    level, rows = tf.Variable(tf.zeros([100_000])), tf.zeros([8, 1])
    mapper, other = (devicemap.DeviceMap(partial(_thrice, level, n), devices=devices) for n in (0, 1))
    mapper(rows), other(rows)
    ended = threading.Event()

    def read() -> None:
        while not ended.is_set():
            other(rows)

    with ThreadPoolExecutor(8) as pool:
        for _ in range(8):
            pool.submit(read)
        try:
            for i in range(100):
                level.assign(tf.fill([100_000], float(i)))
                np.testing.assert_array_equal(mapper(rows), np.full([8, 1], 3.0 * i))
        finally:
            ended.set()


def _thrice(level: Any, offset: int, row: Any) -> Any:
    for _ in tf.range(3):
        row = row + level[-1] + float(offset)
    return row


@pytest.mark.parametrize(
    ("sine", "in_place"), [(tf.sin, False), (partial(tf.map_fn, tf.sin), True)], ids=["copied", "in place, and a loop"]
)
def test_a_map_that_reads_a_variable_can_be_saved(
    sine: Any, in_place: bool, devices: list[str], tmp_path: Path
) -> None:
    model = tf.Module()
    model.weights, model.table = tf.Variable(tf.eye(3)), tf.Variable(tf.ones([4, 3]))
    mapper = devicemap.DeviceMap(
        lambda row: sine(tf.linalg.matvec(model.weights, row)) + tf.gather(model.table, 1),
        devices=devices,
        in_place=[model.weights, model.table] if in_place else (),
    )
    model.call = tf.function(lambda x: mapper(x), input_signature=[tf.TensorSpec([None, 3], tf.float32)])
    tf.saved_model.save(model, str(tmp_path))
    loaded = tf.saved_model.load(str(tmp_path))
    loaded.weights.assign(2.0 * tf.eye(3))
    np.testing.assert_allclose(loaded.call(X), tf.sin(2.0 * X) + 1.0, rtol=1e-5, atol=1e-6)
