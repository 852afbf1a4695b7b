"""Law 1 for rows that run as one vectorised call: ops that run alone, lookups, lists, and functions that are not vectorised."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from graphs import partitions, placements, traced
from oracle import gradients_of

import devicemap
from benchmarks import functions

_random = np.random.default_rng(0)
VECTOR = tf.constant(_random.normal(size=[3]), tf.float32)
MATRIX = tf.constant(_random.normal(size=[3, 3]), tf.float32)
LEADING = tf.constant(_random.normal(size=[1, 2, 3]), tf.float32)

DATA = {
    "vector": tf.constant(_random.normal(size=[3, 3]), tf.float32),
    "single": tf.constant(_random.normal(size=[3, 1]), tf.float32),
    "matrix": tf.constant(_random.normal(size=[3, 3, 3]), tf.float32),
    "flat matrix": tf.constant(_random.normal(size=[3, 1, 3]), tf.float32),
    "image": tf.constant(_random.normal(size=[3, 6, 6, 2]), tf.float32),
    "integers": tf.constant(_random.integers(0, 3, [3, 3]), tf.int32),
    "index": tf.constant(_random.integers(0, 3, [3]), tf.int32),
}


@pytest.mark.skipif(tf.__version__.startswith("2.16."), reason="not applicable: this TensorFlow ends the process")
def test_axes_of_a_transposition_that_are_counted_from_the_end() -> None:
    """Not beside `tf.map_fn`: with it, some versions of TensorFlow end the process."""
    mapper = devicemap.DeviceMap(lambda r: tf.transpose(r[None], [-1, 0, -2]), devices=["CPU:1", "CPU:2"])
    np.testing.assert_array_equal(mapper(DATA["matrix"]), np.transpose(DATA["matrix"], [0, 2, 1])[:, :, None])


@pytest.mark.in_ci(4)
@pytest.mark.parametrize(
    ("fn", "op"),
    [
        (lambda r: tf.strings.format("{}", r), "StringFormat"),
        (lambda r: tf.size(tf.io.parse_single_example(_example(r), {"v": _ANY})["v"]), "ParseExampleV2"),
        (lambda r: tf.reduce_sum(tf.math.top_k(r, tf.argmax(r, output_type=tf.int32))[0]), "TopKV2"),
        (
            lambda r: tf.raw_ops.ClipByValue(t=r, clip_value_min=-(VECTOR**2), clip_value_max=VECTOR**2),
            "ClipByValue",
        ),
    ],
)
def test_what_vectorising_would_change_is_mapped(fn: Callable[[Any], Any], op: str) -> None:
    data = DATA["vector"]
    mapper = devicemap.DeviceMap(fn, devices=["CPU:1", "CPU:2"])
    assert op in traced(mapper, data).reason
    wanted = devicemap.parallel_map(fn, data, devices=["CPU:1"], vectorize=False).numpy()
    got = mapper(data).numpy()
    assert (got == wanted).all() if wanted.dtype == object else np.allclose(got, wanted)


def _example(row: Any) -> Any:
    examples = [
        tf.train.Example(features=tf.train.Features(feature={"v": tf.train.Feature(int64_list=values)}))
        for values in (tf.train.Int64List(value=range(n)) for n in range(3))
    ]
    return tf.gather([example.SerializeToString() for example in examples], tf.argmax(row))


_ANY = tf.io.FixedLenSequenceFeature([], tf.int64, allow_missing=True)
TABLE = tf.Variable(_random.normal(size=[8, 3]), dtype=tf.float32)
_looked_up = tf.function(lambda i: tf.nn.embedding_lookup(TABLE, i) * 2.0)


def _walk(i: Any) -> Any:
    total = tf.zeros([3])
    for step in tf.range(3):
        total += tf.gather(TABLE, i + step)
    return total


@pytest.mark.in_ci(1)
@pytest.mark.parametrize(
    "fn",
    [
        lambda i: tf.gather(TABLE, i),
        lambda i: tf.reduce_sum(tf.gather(TABLE, [[i, i + 1], [0, i]])) * tf.gather(TABLE, 0),
        lambda i: _looked_up(i),
        _walk,
        lambda i: tf.linalg.det(tf.gather(TABLE, [i, i + 1, 0])),
    ],
)
def test_rows_of_a_variable_are_looked_up_at_once(devices: list[str], fn: Callable[[Any], Any]) -> None:
    rows = tf.constant([1, 5, 2, 2, 4])

    def gradients(mapped: Any) -> Any:
        return gradients_of(lambda _: mapped(rows), TABLE)

    def serial(x: Any) -> Any:
        return tf.map_fn(fn, x, fn_output_signature=tf.float32)

    mapper = devicemap.DeviceMap(fn, devices=devices)
    assert traced(mapper, rows).vectorized, traced(mapper, rows).reason
    np.testing.assert_allclose(mapper(rows), serial(rows), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(gradients(mapper), gradients(tf.function(serial)), rtol=1e-3, atol=1e-4)


@pytest.mark.nightly
@pytest.mark.parametrize(
    "fn",
    [
        lambda r: tf.scan(lambda s, e: tf.sin(s) * 0.5 + e, r),
        lambda r: tf.scan(lambda s, e: (s[0] + e, s[1] * e), r, (tf.zeros([]), tf.ones([]))),
        lambda r: tf.map_fn(lambda e: tf.reduce_sum(e * r), MATRIX),
        lambda r: tf.keras.ops.scan(lambda s, e: (s + e, s * e), tf.zeros([]), r)[1],
    ],
)
def test_loops_that_fill_lists_are_vectorised(devices: list[str], fn: Callable[[Any], Any]) -> None:
    data = tf.constant(_random.normal(size=[5, 3]), tf.float32)

    def serial(x: Any) -> Any:
        return tf.map_fn(fn, x, fn_output_signature=tf.nest.map_structure(lambda _: tf.float32, fn(data[0])))

    mapper = devicemap.DeviceMap(fn, devices=devices)
    assert traced(mapper, data).vectorized, traced(mapper, data).reason
    for rows in (1, 5):
        for got, wanted in zip(tf.nest.flatten(mapper(data[:rows])), tf.nest.flatten(serial(data[:rows]))):
            np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-5)
    (got,), (wanted,) = gradients_of(mapper, data), gradients_of(tf.function(serial), data)
    np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.nightly
def test_numbers_of_a_seed_per_row_are_those_of_the_row_alone(devices: list[str]) -> None:
    def fn(row: Any, seed: Any) -> Any:
        noise = tf.random.stateless_normal([3], seed) + tf.random.stateless_truncated_normal([3], seed)
        return (
            row + noise,
            tf.random.stateless_uniform([2, 2], seed, 0, 99, tf.int32),
            tf.random.stateless_uniform([], seed),
        )

    data = DATA["matrix"][0]
    mapper = devicemap.DeviceMap(fn, devices=devices, seed=7)
    assert traced(mapper, data).vectorized, traced(mapper, data).reason
    wanted = devicemap.DeviceMap(fn, devices=["CPU:1"], seed=7, vectorize=False)(data)
    for rows in (1, 2, 3):
        for got, want in zip(mapper(data[:rows]), wanted):
            np.testing.assert_array_equal(got, want[:rows])


def test_a_list_in_a_loop_that_rows_leave_at_different_times_is_mapped() -> None:
    def until(r: Any) -> Any:
        steps = tf.TensorArray(tf.float32, 5, element_shape=[])
        goes_on = lambda i, total, steps: (i < 5) & (total < r[0] * 4.0)
        step = lambda i, total, steps: (i + 1, total + 1.0, steps.write(i, total))
        return tf.while_loop(goes_on, step, (0, 0.0, steps))[2].stack()

    data = DATA["vector"]
    mapper = devicemap.DeviceMap(until, devices=["CPU:1", "CPU:2"])
    assert "leave at different times" in traced(mapper, data).reason
    np.testing.assert_allclose(mapper(data), tf.map_fn(until, data))


@pytest.mark.in_ci(1)
@pytest.mark.parametrize("options", [{}, {"vectorize": False}, {"batched": True}])
def test_functions_that_the_user_vectorises_himself(options: dict[str, Any]) -> None:
    """In a second trace, they are met as they were left by the first."""
    double = tf.function(lambda x: 2.0 * x)
    mapper = devicemap.DeviceMap(lambda x: tf.vectorized_map(double, x), devices=["CPU:1", "CPU:2"], **options)
    for columns in (3, 4, 5):
        np.testing.assert_array_equal(mapper(tf.ones([4, columns])), 2 * np.ones([4, columns]))


@pytest.mark.nightly
def test_jacobians_of_a_function_in_several_maps() -> None:
    curve = tf.function(lambda x: tf.sin(x) * x)

    def jacobian(x: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = curve(x)
        return tape.jacobian(y, x)

    data = DATA["vector"]
    for _ in range(3):
        got = devicemap.DeviceMap(lambda x: jacobian(x), devices=["CPU:1"])(data)
        np.testing.assert_allclose(got, tf.linalg.diag(tf.sin(data) + data * tf.cos(data)), rtol=1e-5)


def test_overridden_gradients_are_kept() -> None:
    @tf.RegisterGradient("FiveForEach")
    def five(op: Any, upstream: Any) -> Any:
        return 5.0 * tf.ones_like(op.inputs[0]), None

    def fn(r: Any) -> Any:
        with tf.compat.v1.get_default_graph().gradient_override_map({"Sum": "FiveForEach"}):
            return tf.reduce_sum(r)

    mapper = devicemap.DeviceMap(fn, devices=["CPU:1", "CPU:2"])
    with tf.GradientTape() as tape:
        tape.watch(DATA["vector"])
        total = tf.reduce_sum(mapper(DATA["vector"]))
    np.testing.assert_array_equal(tape.gradient(total, DATA["vector"]), 5 * np.ones([3, 3]))


def test_what_was_traced_before_is_vectorised_only_if_that_is_asked_for() -> None:
    before = tf.function(tf.sin).get_concrete_function(tf.TensorSpec([3]))
    data = DATA["vector"]
    for wanted in ("auto", True):
        mapper = devicemap.DeviceMap(before, devices=["CPU:1", "CPU:2"], vectorize=wanted)
        plan = traced(mapper, data)
        assert plan.vectorized is (wanted is True)
        assert plan.vectorized or "traced before" in plan.reason
        np.testing.assert_allclose(mapper(data), tf.sin(data), rtol=1e-6)


def test_ops_that_cannot_be_seen_are_not_vectorised(monkeypatch: pytest.MonkeyPatch) -> None:
    """A `tf.function` inside of `fn`, in a TensorFlow that does not show what such hold."""
    monkeypatch.setattr(devicemap.compile.vectorize, "shows_functions", lambda graph: False)
    padded = tf.function(lambda r: tf.pad(r, [[1, 1]], constant_values=3.0))
    mapper = devicemap.DeviceMap(lambda r: padded(r), devices=["CPU:1"])
    assert "not make public" in traced(mapper, DATA["vector"]).reason
    np.testing.assert_array_equal(mapper(DATA["vector"])[:, 0], [3, 3, 3])


def test_axes_that_only_the_running_graph_knows() -> None:
    spec = tf.TensorSpec([None, None], tf.float32)
    mapper = devicemap.DeviceMap(lambda row: tf.reduce_sum(tf.squeeze(row) * 2.0), devices=["CPU:1"])
    assert "Squeeze drops axes" in traced(mapper, spec).reason
    mapped = tf.function(lambda x: mapper(x), input_signature=[spec])
    for data in (DATA["single"], DATA["vector"], DATA["vector"][:1]):
        np.testing.assert_allclose(mapped(data), tf.reduce_sum(data * 2.0, 1), rtol=1e-5)


@pytest.mark.nightly
def test_nothing_runs_for_one_row_beside_all_rows() -> None:
    """What is vectorised is called for one row first, which stateful ops would keep."""
    level = tf.Variable(1.0)

    def looping(row: Any) -> Any:
        return tf.while_loop(lambda i, _: i < 5, lambda i, s: (i + 1, tf.sin(s) + level), (0, row))[1]

    mapper = devicemap.DeviceMap(looping, devices=["CPU:1", "CPU:2"])
    found = placements(partitions(mapper, tf.ones([8, 3])), "Sin")
    assert traced(mapper, tf.ones([8, 3])).vectorized
    assert found == {"CPU:1": 1, "CPU:2": 1}


BOXES = tf.constant([[0.1, 0.0, 0.8, 0.7], [0.0, 0.2, 0.9, 0.9]])


def _crop(image: Any) -> Any:
    return tf.image.crop_and_resize(image[None], BOXES * image[0, 0, 0] ** 2, [0, 0], [3, 3])


def _crop_in_branch(image: Any) -> Any:
    return tf.cond(image[0, 0, 0] > 0.0, lambda: _crop(image), lambda: tf.zeros([2, 3, 3, 2]))


def _crop_in_loop(image: Any) -> Any:
    total = tf.zeros([2, 3, 3, 2])
    while tf.reduce_sum(total) < 5.0:
        total += tf.abs(_crop(image)) + 0.1
    return total


@pytest.mark.in_ci(1)
@pytest.mark.parametrize("fn", [_crop, _crop_in_branch, _crop_in_loop])
def test_an_op_without_a_vectorised_form_runs_row_by_row_alone(devices: list[str], fn: Callable[[Any], Any]) -> None:
    data = DATA["image"]
    mapper = devicemap.DeviceMap(fn, devices=devices)
    plan = traced(mapper, data)
    assert plan.vectorized
    assert plan.reason.startswith(
        "these ops alone run row by row: CropAndResize has no vectorised form (`return tf.image."
    )
    serial = tf.function(lambda x: tf.map_fn(fn, x))
    for got, wanted in zip([mapper(data), *gradients_of(mapper, data)], [serial(data), *gradients_of(serial, data)]):
        np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", [name for name in functions.cases() if name not in ("JPEG decoding", "Keras CNN")])
def test_functions_of_the_benchmark_are_vectorised(name: str) -> None:
    case = functions.cases()[name]
    plan = traced(devicemap.DeviceMap(case.fn, devices=["CPU:1"]), case.data)
    assert (plan.vectorized, plan.reason) == (True, "every op of fn has a vectorised form")


def test_a_dense_signature_is_vectorised() -> None:
    data = DATA["vector"]
    for signature in (tf.float32, tf.TensorSpec([3]), tf.TensorSpec(None)):
        mapper = devicemap.DeviceMap(tf.sin, devices=["CPU:1", "CPU:2"], fn_output_signature=signature)
        assert traced(mapper, data).vectorized
        np.testing.assert_allclose(mapper(data), tf.sin(data), rtol=1e-6)


@pytest.mark.in_ci(1)
@pytest.mark.parametrize("place", [lambda i: VECTOR[i], lambda i: tf.slice(VECTOR, [i], [1]), lambda i: MATRIX[i, -i]])
def test_a_place_that_there_is_not_is_an_error(place: Callable[[Any], Any]) -> None:
    mapper = devicemap.DeviceMap(place, devices=["CPU:1", "CPU:2"])
    data = tf.constant([2, 0, 1, 2])
    assert traced(mapper, data).vectorized, traced(mapper, data).reason
    np.testing.assert_array_equal(mapper(data), [place(i) for i in data])
    with pytest.raises(devicemap.errors.FunctionError):
        mapper(tf.constant([0, 1, 2, 3]))
