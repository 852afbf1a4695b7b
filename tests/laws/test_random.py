"""Law 5: no row, device, chunk or call draws the numbers of another."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from graphs import between_devices, partitions
from oracle import assert_close

import devicemap
from devicemap.compile.random import row_seeds

WORKERS = ["CPU:1", "CPU:2", "CPU:3"]
X = tf.reshape(tf.range(60, dtype=tf.float32), [20, 3]) + 1.0
SCALE = tf.Variable([1.0, 2.0, 3.0])


def _distinct(rows: Any) -> int:
    return len({row.tobytes() for row in np.asarray(rows)})


def _taped(mapped: Any, x: Any, persistent: bool = False) -> tuple[Any, Any]:
    with tf.GradientTape(persistent=persistent) as tape:
        tape.watch(x)
        rows = mapped(x)
    return rows, tape.gradient(rows, x)


def test_dropout_draws_another_mask_for_each_device_chunk_and_call() -> None:
    dropout = tf.keras.layers.Dropout(0.5)
    mapper = devicemap.DeviceMap(lambda b: dropout(b, training=True), devices=WORKERS, batched=True)
    ones = tf.ones([9, 256])
    inside = tf.function(lambda x: mapper(x))
    batches = tf.data.Dataset.from_tensor_slices(ones).batch(2)
    masks = [mapper(ones), mapper(ones), mapper(ones[:2]), mapper(batches), inside(ones), inside(ones)]
    with ThreadPoolExecutor(6) as pool:
        masks += pool.map(lambda _: mapper(ones), range(100))
        chunked = devicemap.DeviceMap(lambda b: dropout(b, training=True), devices=WORKERS, batched=True, batch_size=1)
        masks += pool.map(lambda _: chunked(ones), range(20))
    assert _distinct(np.concatenate(masks)) == 9 * 5 + 2 + 9 * 120
    assert between_devices(partitions(mapper, ones)) == []


def _noise(row: Any) -> Any:
    return row * tf.random.normal([3], seed=3)


def _saved_and_loaded() -> Any:
    module = tf.Module()
    module.draw = tf.function(_noise, input_signature=[tf.TensorSpec([3])])
    with TemporaryDirectory() as path:
        tf.saved_model.save(module, path)
        return tf.saved_model.load(path).draw


@tf.custom_gradient
def _doubled(x: Any) -> Any:
    """Its gradient uses what was drawn, and is not that of what it returns."""
    drawn = tf.random.uniform([3], 1.0, 2.0, seed=4)
    return x * drawn, lambda upstream: 2.0 * upstream * drawn


@tf.function
def _doubled_in_a_loop(row: Any) -> Any:
    for _ in tf.range(2):
        row = _doubled(row)
    return row


@tf.function
def _doubled_in_a_branch(row: Any) -> Any:
    return _doubled(row) if row[0] > -1e9 else row


@tf.function
def _doubled_in_a_case(row: Any) -> Any:
    return tf.switch_case(tf.cast(row[0] * 0.0, tf.int32), [lambda: _doubled(row), lambda: row])


_drawing = tf.function(_noise)
_concrete = tf.function(_noise).get_concrete_function(tf.TensorSpec([3]))
_loaded = _saved_and_loaded()
_compiled = tf.function(_noise, jit_compile=True)
_kept = tf.function(_noise, experimental_attributes={"_noinline": True})
_doubling = tf.function(_doubled)
_looping = tf.function(lambda row: tf.map_fn(lambda number: _drawing(number * tf.ones([3]))[0], row))
DRAWS: dict[str, tuple[Callable[[Any], Any], float | None]] = {
    "two ops": (lambda r: 0 * r + tf.random.normal(tf.shape(r)) + tf.random.uniform(tf.shape(r), seed=5), None),
    "candidates": (lambda r: tf.random.uniform_candidate_sampler([[0]], 1, 1, True, 10**9, seed=5)[0], None),
    "a function itself": (_drawing, 1.0),
    "a function": (lambda row: 2.0 * _drawing(row), 1.0),
    "a function in a loop": (lambda row: _looping(row), 1.0),
    "a custom gradient": (lambda row: _doubling(row), 2.0),
    "a custom gradient in a loop": (lambda row: _doubled_in_a_loop(row), 4.0),
    "a custom gradient in a branch": (lambda row: _doubled_in_a_branch(row), 2.0),
    "a custom gradient in a case": (lambda row: _doubled_in_a_case(row), 2.0),
    "a function that is not inlined": (lambda row: _kept(row), 1.0),
    "traced before": (lambda row: _concrete(row), 1.0),
    "traced before and saved": (lambda row: _loaded(row), 1.0),
    "traced before and compiled": (lambda row: _compiled(row), 1.0),
    "traced before, with raw ops": (
        lambda row: row * tf.raw_ops.RandomStandardNormal(shape=[3], dtype=tf.float32, seed=3), 1.0),
}  # fmt: skip
"""Functions, and the gradient of what they return for a row of ones, as a multiple of it.

One device draws all numbers of what was traced before, because its seeds cannot be changed.
"""
TRACED_AGAIN = pytest.mark.private("tracing functions again, with other seeds")


@pytest.mark.in_ci(6)
@pytest.mark.parametrize("seeded", [True, False])
@pytest.mark.parametrize("options", [{}, {"vectorize": False}, {"batch_size": 3}], ids=str)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[TRACED_AGAIN] * (DRAWS[name][1] is not None)) for name in DRAWS]
)
def test_random_ops_never_repeat_a_stream(name: str, options: dict[str, Any], seeded: bool) -> None:
    if seeded:
        tf.random.set_seed(1)
    fn, factor = DRAWS[name]
    mapper = devicemap.DeviceMap(fn, devices=WORKERS, **options)
    ones = tf.ones([20, 3])
    samples = tf.data.Dataset.from_tensor_slices(ones)
    draws = [[mapper(ones), mapper(ones), mapper(ones[:2]), mapper(ones[:1])], [mapper(samples), mapper(samples)]]
    if factor is not None and "batch_size" not in options:
        inside = tf.function(lambda x: _taped(mapper, x))
        for rows, gradient in (_taped(mapper, ones), _taped(mapper, ones, persistent=True), inside(ones), inside(ones)):
            np.testing.assert_allclose(gradient, factor * rows, rtol=1e-4, atol=1e-5)
            draws.append([rows])
    fixed_seeds = name.startswith("traced before")  # which begin again in each graph
    for numbers in draws if fixed_seeds else [[rows for each in draws for rows in each]]:
        assert _distinct(np.concatenate(numbers)) == sum(len(rows) for rows in numbers)
    assert bool(mapper.explain(ones).fixed_seeds) == fixed_seeds


@pytest.mark.private("when tf.random.set_seed was called")
def test_the_same_seed_once_more_gives_the_same_numbers_in_any_way_of_calling() -> None:
    draw = lambda row: row * tf.random.normal([3])
    ones, followed = tf.ones([20, 3]), tf.Variable(tf.ones([20, 3]))
    tf.random.set_seed(1)
    assert len({*tf.reshape([devicemap.DeviceMap(draw, devices=WORKERS)(ones) for _ in range(2)], [-1]).numpy()}) == 120
    mapper = devicemap.DeviceMap(draw, devices=WORKERS)

    def taped(rows: Any) -> Any:
        return _taped(mapper, rows)[0]

    draws = []
    for call, rows in ((mapper, ones), (mapper, ones), (taped, followed), (tf.function(lambda x: mapper(x)), ones)):
        tf.random.set_seed(1)
        draws.append(call(rows).numpy())
        assert len({*draws[-1].flatten()}) == 60
    np.testing.assert_array_equal(draws[0], draws[1])
    chunks = mapper(tf.data.Dataset.from_tensor_slices(ones))
    later = [draws[-1], chunks, mapper(ones), taped(followed)]  # all since the last time
    numbers = np.concatenate([np.asarray(each).flatten() for each in later])
    assert len({*numbers}) == len(numbers) == 4 * 60
    np.testing.assert_array_equal(later[2], draws[0])


@tf.custom_gradient
def _scaled(x: Any) -> Any:
    """Its gradient reads a variable."""
    return x * SCALE, lambda upstream, variables=None: (upstream * SCALE, [tf.reduce_sum(upstream * x, 0)])


def test_a_draw_changes_no_gradient() -> None:
    inner = tf.function(lambda batch: _scaled(batch))

    def gradients(mapped: Any) -> Any:
        with tf.GradientTape(persistent=True) as tape:
            rows = mapped(X)
        return rows, tape.gradient(rows, SCALE)

    drawing = lambda rows: inner(rows) + 0.0 * tf.random.uniform([], seed=1)
    assert_close(gradients(devicemap.DeviceMap(drawing, devices=WORKERS[:2], batched=True)), gradients(inner))


@pytest.mark.in_ci(1)
@pytest.mark.private("which gradients a call keeps; TensorFlow has a copy of the function for each")
@pytest.mark.parametrize("seed", [1, None])
def test_threads_whose_tapes_follow_the_first_calls(seed: int | None) -> None:
    mapper = devicemap.DeviceMap(lambda row: row * tf.random.normal([3], seed=seed), devices=WORKERS[:2])

    def taped(persistent: bool) -> Any:
        rows, gradient = _taped(mapper, X, persistent)
        np.testing.assert_allclose(gradient * X, rows, rtol=1e-6)
        return rows

    with ThreadPoolExecutor(6) as pool:
        draws = tf.concat(list(pool.map(taped, [False, True, False] * 8)), 0)
    assert _distinct(draws) == len(draws)


def test_seeded_results_do_not_depend_on_devices_or_chunks(devices: list[str]) -> None:
    def draw(row: Any, seed: Any) -> Any:
        return row + tf.random.stateless_normal([3], seed)

    def draw_batch(rows: Any, seed: Any) -> Any:
        return rows + tf.map_fn(lambda s: tf.random.stateless_normal([3], s), seed, fn_output_signature=tf.float32)

    wanted = devicemap.parallel_map(draw, X, devices=["CPU:0"], seed=11)
    assert _distinct(wanted - X) == 20
    for options in ({}, {"batch_size": 3}, {"batch_size": 1}):
        for fn in (draw, draw_batch):
            mapper = devicemap.DeviceMap(fn, devices=devices, seed=11, batched=fn is draw_batch, **options)
            np.testing.assert_array_equal(mapper(X), wanted)
    mapper = devicemap.DeviceMap(draw, devices=devices, seed=11)
    np.testing.assert_array_equal(mapper(tf.data.Dataset.from_tensor_slices(X)), wanted)
    np.testing.assert_array_equal(tf.function(lambda: mapper(X))(), wanted)
    assert not np.allclose(devicemap.parallel_map(draw, X, devices=devices, seed=12), wanted)


def test_seeds_of_many_rows() -> None:
    """Words of 32 bits: the seed, and the lower one of the row's index."""
    seeds = row_seeds(2**32 - 1, 2**40 + 2**32 - 2, 3).numpy().view(np.uint32)
    assert seeds.tolist() == [[2**32 - 1, 2**32 - 2], [2**32 - 1, 2**32 - 1], [2**32 - 1, 0]]
