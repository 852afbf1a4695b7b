"""Laws 4 and 5: captured variables, what fn writes, and random numbers."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from graphs import between_towers, edges, ops_on, partitions

import devicemap
from devicemap.auditing import Treatment, audit

TOWERS = ["CPU:1", "CPU:2", "CPU:3"]
X = tf.reshape(tf.range(60, dtype=tf.float32), [20, 3])


def _samples(x: Any = X) -> Any:
    return tf.data.Dataset.from_tensor_slices(x)


def _treatments(fn: Any) -> list[Treatment | None]:
    concrete = tf.function(fn).get_concrete_function(tf.TensorSpec([3]))
    return list(audit(concrete, concrete.graph.as_graph_def()).treatments)


def test_a_captured_variable_travels_once_per_device_and_call() -> None:
    weights = tf.Variable(tf.random.normal([3, 3]))

    def often(row: Any) -> Any:
        for _ in tf.range(5):
            row = tf.linalg.matvec(weights, tf.linalg.matvec(weights, row)) / 10.0
        return row

    mapper = devicemap.DeviceMap(often, devices=TOWERS)
    towards = Counter(edge.receiver for edge in edges(partitions(mapper, X)))
    assert towards == {"CPU:0": 3, "CPU:1": 2, "CPU:2": 2, "CPU:3": 2}  # shard and variable in, result out


@pytest.mark.parametrize("options", [{}, {"vectorize": False}, {"batch_size": 4}, {"report": False}], ids=str)
def test_a_captured_tensor_travels_never_again(options: dict[str, Any]) -> None:
    """Nor does a loop ask for it, or for its turn, where it comes from."""
    weights = tf.random.normal([3, 3])

    def often(row: Any) -> Any:
        for _ in tf.range(5):
            row = tf.linalg.matvec(weights, tf.linalg.matvec(weights, row)) / 10.0
        return row

    mapper = devicemap.DeviceMap(often, devices=TOWERS, **options)
    graphs = partitions(mapper, X)
    found = {(edge.sender, edge.receiver, edge.source) for edge in edges(graphs)}
    towers = {receiver for _, receiver, _ in found} - {"CPU:0"}
    assert Counter((sender, receiver) for sender, receiver, _ in found) == {
        pair: 1 for tower in towers for pair in (("CPU:0", tower), (tower, "CPU:0"))
    }
    assert not ops_on(graphs)["CPU:0"]["Enter"]
    np.testing.assert_allclose(mapper(X), tf.map_fn(often, X), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("vectorize", ["auto", False])
def test_chunks_bring_no_variable_along(vectorize: Any) -> None:
    """It is on each device before the first chunk of a call; then rows go in and results out, and nothing else."""
    weights, table = tf.Variable(tf.random.normal([3, 3])), tf.Variable(tf.random.normal([50, 3]))

    def fn(row: Any) -> Any:
        return tf.linalg.matvec(weights, row) + tf.gather(table, tf.cast(row[0], tf.int32) % 50)

    mapper = devicemap.DeviceMap(fn, devices=TOWERS, batch_size=5, vectorize=vectorize)
    found = edges(partitions(mapper, X))
    assert {(edge.sender, edge.receiver) for edge in found} <= {
        pair for tower in TOWERS for pair in [("CPU:0", tower), (tower, "CPU:0")]
    }
    assert not any(edge.control for edge in found)
    towers = {edge.receiver for edge in found} - {"CPU:0"}
    assert len({(edge.sender, edge.receiver, edge.source) for edge in found}) == 2 * len(towers)
    np.testing.assert_allclose(mapper(X), tf.map_fn(fn, X), rtol=1e-4, atol=1e-5)


def test_an_update_between_calls_is_seen() -> None:
    scale = tf.Variable(2.0)
    mapper = devicemap.DeviceMap(lambda row: row * scale, devices=["CPU:0", *TOWERS])
    for value in (2.0, 3.0, -1.0):
        scale.assign(value)
        np.testing.assert_allclose(mapper(X), value * X)
        np.testing.assert_allclose(mapper(_samples()), value * X)


@pytest.mark.parametrize("copies", [TOWERS, ["CPU:1"], ["CPU:0", "CPU:1"]])
def test_an_update_between_chunked_calls_is_seen(copies: list[str]) -> None:
    scale = tf.Variable(2.0)
    mapper = devicemap.DeviceMap(lambda row: row * scale, devices=copies, batch_size=2)
    for value in (2.0, 3.0, -1.0):
        scale.assign(value)
        np.testing.assert_allclose(mapper(X), value * X)
        np.testing.assert_allclose(mapper(_samples()), value * X)


def test_variables_in_inner_functions_modules_and_layers() -> None:
    class Affine(tf.Module):
        def __init__(self) -> None:
            self.a, self.b = tf.Variable(2.0), tf.Variable([1.0, 2.0, 3.0])

        @tf.function
        def __call__(self, row: Any) -> Any:
            return self.a * row + self.b

    affine, dense = Affine(), tf.keras.layers.Dense(3)
    dense.build([None, 3])
    y = devicemap.parallel_map(lambda b: dense(affine(b)), X, devices=TOWERS, batched=True)
    np.testing.assert_allclose(y, dense(affine(X)), rtol=1e-4)


def test_atomic_updates_lose_nothing_and_stay_parallel() -> None:
    total = tf.Variable(tf.zeros([3]))

    def add(row: Any) -> Any:
        total.assign_add(row)
        return row

    assert _treatments(add) == [Treatment.ATOMIC]
    mapper = devicemap.DeviceMap(add, devices=TOWERS)
    mapper(X)
    mapper(_samples())
    np.testing.assert_allclose(total, 2 * tf.reduce_sum(X, 0))


@pytest.mark.parametrize("batched", [False, True])
def test_what_depends_on_order_runs_in_order(devices: list[str], batched: bool) -> None:
    state = tf.Variable(1.0)

    def step(row: Any) -> Any:
        state.assign(state * 0.5 + row[0])
        return state.read_value()

    fn = (lambda b: tf.map_fn(step, b, parallel_iterations=1)) if batched else step
    wanted = tf.function(lambda x: tf.map_fn(step, x, parallel_iterations=1))(X)
    for data in (X, _samples().batch(4) if batched else _samples()):
        state.assign(1.0)
        np.testing.assert_allclose(devicemap.DeviceMap(fn, devices=devices, batched=batched)(data), wanted)


def _calls(mapper: Any, how: str) -> Callable[[], Any]:
    """Mapping `X` in eager code, or inside a user's `tf.function` that knows how many rows there are, or does not."""
    if how == "eager":
        return partial(mapper, X)
    rows = 20 if how == "known rows" else None
    return partial(tf.function(lambda x: mapper(x), input_signature=[tf.TensorSpec([rows, 3])]), X)


hows = pytest.mark.parametrize("how", ["eager", "known rows", "unknown rows"])


@hows
def test_writes_of_several_devices_follow_each_other(how: str) -> None:
    c = tf.Variable(0)

    def write(batch: Any) -> Any:
        c.assign(c * 2 + 1)
        return batch

    call = _calls(devicemap.DeviceMap(write, devices=TOWERS, batched=True), how)
    ends = []
    for _ in range(30):
        c.assign(0)
        np.testing.assert_array_equal(call(), X)
        ends.append(int(c))
    assert ends == [7] * 30


@hows
def test_no_device_writes_between_the_read_and_the_write_of_another(how: str) -> None:
    c = tf.Variable(0.0)

    def slow(batch: Any) -> Any:
        time.sleep(0.005)  # other devices would read meanwhile
        return tf.reduce_sum(batch)

    def add(batch: Any) -> Any:
        old = c.read_value()
        c.assign(old + tf.ensure_shape(tf.py_function(slow, [batch], tf.float32), []))
        return batch

    call = _calls(devicemap.DeviceMap(add, devices=TOWERS, batched=True), how)
    sums = []
    for _ in range(5):
        np.testing.assert_array_equal(call(), X)
        sums.append(float(c))
    assert sums == [1770.0 * n for n in range(1, 6)]


def test_treatments() -> None:
    v, w = tf.Variable([1.0, 2.0, 3.0]), tf.Variable([1.0, 2.0, 3.0])
    generator = tf.random.Generator.from_seed(1)
    table = tf.lookup.experimental.MutableHashTable(tf.int64, tf.int64, -1)

    def in_loop(row: Any) -> Any:
        for _ in tf.range(2):
            if row[0] > 0.0:
                v.assign_sub(row)
        return row

    def scatter(row: Any) -> Any:
        w.scatter_nd_add([[0]], [row[0]])
        return row

    def insert(row: Any) -> Any:
        table.insert(tf.cast(row[:1], tf.int64), [1])
        return row

    assert _treatments(lambda row: row * v + tf.gather(v, 1)) == [Treatment.READ]
    assert _treatments(in_loop) == [Treatment.ATOMIC]
    assert _treatments(scatter) == [Treatment.ORDERED]
    assert _treatments(insert) == [Treatment.ORDERED]
    assert _treatments(lambda row: row + generator.normal([3])) == [Treatment.ATOMIC]
    assert _treatments(lambda row: row + tf.constant([1.0, 2.0, 3.0])) == []


def _distinct(rows: Any) -> int:
    return len({row.tobytes() for row in np.asarray(rows)})


def test_dropout_draws_another_mask_for_each_device_chunk_and_call() -> None:
    dropout = tf.keras.layers.Dropout(0.5)
    mapper = devicemap.DeviceMap(lambda b: dropout(b, training=True), devices=TOWERS, batched=True)
    ones = tf.ones([9, 256])
    inside = tf.function(lambda x: mapper(x))
    masks = [mapper(ones), mapper(ones), mapper(ones[:2]), mapper(_samples(ones).batch(2)), inside(ones), inside(ones)]
    assert _distinct(np.concatenate(masks)) == 9 * 5 + 2

    mapper = devicemap.DeviceMap(lambda b: dropout(b, training=True), devices=TOWERS, batched=True)
    assert between_towers(partitions(mapper, ones)) == []


@pytest.mark.parametrize("batch_size", [None, 1])
def test_threads_that_share_a_mapper_draw_different_masks(batch_size: int | None) -> None:
    dropout = tf.keras.layers.Dropout(0.5)
    mapper = devicemap.DeviceMap(
        lambda batch: dropout(batch, training=True), batched=True, batch_size=batch_size, devices=["CPU:1", "CPU:2"]
    )
    rows = tf.ones([8, 256])
    mapper(rows)
    with ThreadPoolExecutor(6) as pool:
        masks = tf.concat(list(pool.map(lambda _: mapper(rows), range(300))), 0)
    assert _distinct(masks) == len(masks)


@pytest.mark.parametrize("seeded", [True, False])
@pytest.mark.parametrize("options", [{}, {"vectorize": False}, {"batched": True}])
def test_random_ops_never_repeat_a_stream(seeded: bool, options: dict[str, Any]) -> None:
    tf.random.set_seed(1) if seeded else None

    def draw(row: Any) -> Any:
        return 0 * row + tf.random.normal(tf.shape(row)) + tf.random.uniform(tf.shape(row), seed=5)

    mapper = devicemap.DeviceMap(draw, devices=TOWERS, **options)
    chunks = _samples().batch(3) if options.get("batched") else _samples()
    draws = [mapper(X), mapper(X), mapper(X[:2]), mapper(X[:1]), mapper(chunks), mapper(chunks)]
    assert _distinct(np.concatenate(draws)) == 20 + 20 + 2 + 1 + 20 + 20


@pytest.mark.parametrize("options", [{}, {"vectorize": False}, {"batch_size": 3}])
@pytest.mark.parametrize("depth", [0, 1, 2])
def test_random_ops_in_inner_functions_never_repeat_a_stream(depth: int, options: dict[str, Any]) -> None:
    """The function itself, one that it calls, and one that this calls in a loop."""
    tf.random.set_seed(1)
    inner = tf.function(lambda row: row + tf.random.normal([3], seed=3))
    looping = tf.function(lambda row: tf.map_fn(lambda number: inner(number)[0], row))
    fn = (inner, lambda row: inner(row) + 1.0, lambda row: looping(row))[depth]
    mapper = devicemap.DeviceMap(fn, devices=TOWERS, **options)
    assert _distinct(np.concatenate([mapper(X), mapper(X), mapper(X[:2])])) == 20 + 20 + 2
    if not options.get("batch_size"):
        with tf.GradientTape() as tape:
            tape.watch(X)
            total = tf.reduce_sum(mapper(X))
        np.testing.assert_array_equal(tape.gradient(total, X), tf.ones_like(X))


def test_random_ops_never_repeat_a_stream_in_other_calls_and_maps() -> None:
    """With a tape and without, in functions of the user's, for data of another kind, and in maps with other options."""
    tf.random.set_seed(1)

    def draw(row: Any) -> Any:
        return 0.0 * row + tf.random.normal([3])

    mapper = devicemap.DeviceMap(draw, devices=TOWERS)
    followed = tf.Variable(X)
    draws = [mapper(X)]
    for _ in range(2):
        with tf.GradientTape() as tape:
            draws.append(mapper(followed))
        np.testing.assert_array_equal(tape.gradient(draws[-1], followed), tf.zeros_like(X))
    twice = tf.function(lambda x: (mapper(x), mapper(x)))
    draws += [mapper(X), *twice(X), *twice(X), tf.function(lambda x: mapper(x) + 0.0)(X)]
    draws += [mapper(tf.zeros([4, 5, 3])), devicemap.DeviceMap(draw, devices=TOWERS, batch_size=5)(X)]
    draws += [devicemap.DeviceMap(draw, devices=["CPU:1"])(X) for _ in range(2)]
    numbers = np.concatenate([np.unique(each) for each in draws])
    assert len(numbers) == 12 * X.shape[0] * 3 + 4 * 3  # rows of [5, 3] repeat what they drew five times
    assert len({*numbers}) == len(numbers)


def test_random_ops_with_seeds_that_cannot_change_are_refused_where_they_would_repeat() -> None:
    inner = tf.function(lambda row: row + tf.random.normal([3], seed=3)).get_concrete_function(tf.TensorSpec([3]))
    with pytest.raises(devicemap.errors.FunctionError, match="same numbers on every device"):
        devicemap.parallel_map(lambda row: inner(row), X, devices=TOWERS)
    devicemap.parallel_map(lambda row: inner(row) + 1, X, devices=["CPU:1"])


def test_seeded_results_do_not_depend_on_devices_or_chunks(devices: list[str]) -> None:
    def draw(row: Any, seed: Any) -> Any:
        return row + tf.random.stateless_normal([3], seed)

    def draw_batch(rows: Any, seed: Any) -> Any:
        return rows + tf.map_fn(lambda s: tf.random.stateless_normal([3], s), seed, fn_output_signature=tf.float32)

    wanted = devicemap.parallel_map(draw, X, devices=["CPU:0"], seed=11)
    assert _distinct(wanted - X) == 20
    for options in ({}, {"batch_size": 3}, {"batch_size": 1}):
        got = devicemap.parallel_map(draw, X, devices=devices, seed=11, **options)
        np.testing.assert_array_equal(got, wanted)
        got = devicemap.parallel_map(draw_batch, X, devices=devices, seed=11, batched=True, **options)
        np.testing.assert_array_equal(got, wanted)
    np.testing.assert_array_equal(devicemap.parallel_map(draw, _samples(), devices=devices, seed=11), wanted)
    np.testing.assert_array_equal(
        tf.function(lambda: devicemap.parallel_map(draw, X, devices=devices, seed=11))(), wanted
    )
    assert not np.allclose(devicemap.parallel_map(draw, X, devices=devices, seed=12), wanted)
