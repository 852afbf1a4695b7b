"""What is vectorised, what runs row by row and why, and what the vectorised graph holds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import functions
import numpy as np
import pytest
import tensorflow as tf
from graphs import partitions, traced
from oracle import assert_one_by_one, one_by_one

import devicemap
from devicemap.errors import FunctionError

VECTORS = functions.ROWS
VECTOR, MATRIX = VECTORS[0], functions.SHARED_MATRIX
TWO = ["CPU:1", "CPU:2"]
ALL_OPS = "every op of fn has a vectorised form"


def _growing(row: Any, known: bool) -> Any:
    def step(i: Any, state: Any) -> Any:
        state = tf.reshape(state * 1.5, [-1])
        return i + 1, tf.ensure_shape(state, [3]) if known else state

    shapes = tf.TensorShape([]), tf.TensorShape([3] if known else [None])
    goes_on = lambda i, state: (tf.norm(state) < 9.0) & (i < 9)
    return tf.while_loop(goes_on, step, (0, row), shape_invariants=shapes)[1]


REMEDIES: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "tf.ensure_shape": (partial(_growing, known=False), partial(_growing, known=True)),
    "tf.slice": (
        lambda r: r[(i := tf.argmin(r[:2])) : i + 2],
        lambda r: tf.slice(r, tf.argmin(r[:2])[None], [2]),
    ),
}


@pytest.mark.parametrize("remedy", REMEDIES)
def test_remedies_let_functions_be_vectorised(remedy: str) -> None:
    refused, remedied = (devicemap.DeviceMap(fn, devices=TWO) for fn in REMEDIES[remedy])
    assert remedy in traced(refused, VECTORS).remedy
    assert traced(remedied, VECTORS).vectorized
    np.testing.assert_allclose(refused(VECTORS), remedied(VECTORS), rtol=1e-6)


@pytest.mark.parametrize(
    "place",
    [
        lambda i: VECTOR[i],
        lambda i: functions.TENSOR[i, 1:3, i],
        lambda i: tf.slice(VECTOR, [i], [1]),
        lambda i: MATRIX[i, -i],
        lambda i: tf.image.crop_to_bounding_box(functions.SMALL_IMAGES[0], i, 1, 4, 5),
    ],
)
def test_a_place_that_there_is_not_is_an_error(place: Callable[[Any], Any]) -> None:
    mapper = devicemap.DeviceMap(place, devices=TWO)
    data = tf.constant([2, 0, 1, 2])
    assert traced(mapper, data).vectorized, traced(mapper, data).reason
    np.testing.assert_array_equal(mapper(data), one_by_one(place, data))
    with pytest.raises(FunctionError):
        mapper(tf.constant([0, 1, 2, 3]))


def test_no_reshape_keeps_grappler_from_fusing() -> None:
    """A bias and Relu follow the convolution of one sample, as those of a batch."""
    filters = tf.ones([3, 3, 2, 4])

    def fn(image: Any) -> Any:
        convolved = tf.nn.conv2d(image[None], filters, 1, "VALID")
        return tf.nn.relu(tf.nn.bias_add(convolved, [1.0, 2.0, 3.0, 4.0]))[0]

    mapper = devicemap.DeviceMap(fn, devices=["CPU:1"])
    for mapped in (mapper, tf.function(mapper, input_signature=[tf.TensorSpec([None, None, None, 2])])):
        assert_one_by_one(mapped, fn, functions.SMALL_IMAGES)
    nodes = {node.name: node for graph in partitions(mapper, functions.SMALL_IMAGES) for node in graph.node}
    following = [node for node in nodes.values() if node.op in ("BiasAdd", "Relu")]
    assert not [node.name for node in following if nodes[node.input[0]].op == "Reshape"]
    assert any("Conv2D" in node.op for node in nodes.values())  # also fused, or of oneDNN


def test_the_choice_can_be_made_by_hand() -> None:
    for options, vectorized in (
        ({}, True),
        ({"vectorize": False}, False),
        ({"fn_output_signature": "float32"}, True),
        ({"fn_output_signature": tf.TensorSpec(None)}, True),
    ):
        mapper = devicemap.DeviceMap(tf.sin, devices=TWO, **options)
        assert traced(mapper, VECTORS).vectorized is vectorized
        np.testing.assert_allclose(mapper(VECTORS), tf.sin(VECTORS), rtol=1e-6)


energy = tf.function(lambda x: tf.reduce_sum(tf.sin(x) * x))


def test_texts_of_rows_are_formatted_one_by_one() -> None:
    """TensorFlow's converter formats all rows together."""
    mapper = devicemap.DeviceMap(lambda word: tf.strings.format("<{}>", word), devices=TWO, vectorize=True)
    assert mapper(tf.constant(["a", "b", "c"])).numpy().tolist() == [b'<"a">', b'<"b">', b'<"c">']


def test_axes_that_only_the_running_graph_knows() -> None:
    spec = tf.TensorSpec([None, None], tf.float32)
    mapper = devicemap.DeviceMap(lambda row: tf.reduce_sum(tf.squeeze(row) * 2.0), devices=["CPU:1"])
    assert "Squeeze drops axes" in traced(mapper, spec).reason
    mapped = tf.function(lambda x: mapper(x), input_signature=[spec])
    for data in (VECTORS[:, :1], VECTORS, VECTORS[:1]):
        np.testing.assert_allclose(mapped(data), tf.reduce_sum(data * 2.0, 1), rtol=1e-5)


def test_functions_that_the_user_vectorises() -> None:
    """In a second trace, they are met as they were left by the first."""
    double = tf.function(lambda x: 2.0 * x)
    mapper = devicemap.DeviceMap(lambda x: tf.vectorized_map(double, x), devices=TWO)
    for columns in (3, 4, 5):
        np.testing.assert_array_equal(mapper(tf.ones([4, columns])), 2 * np.ones([4, columns]))


def _descent(row: Any) -> Any:
    with tf.GradientTape() as tape:
        tape.watch(row)
        level = energy(row)
    return level + energy(row - 0.1 * tape.gradient(level, row))


def _branch(row: Any) -> Any:
    return tf.cond(row[0] > 0.0, lambda: tf.sin(row) * row, lambda: row)


@pytest.mark.parametrize(
    ("inner", "reason"),
    [
        (energy, ALL_OPS),  # TensorFlow adds results to its graph
        (tf.function(_branch), "gradient was taken before"),  # the branch returns what its gradient needs
    ],
)
def test_functions_whose_gradient_was_taken_before(inner: Any, reason: str) -> None:
    concrete = inner.get_concrete_function(tf.TensorSpec([3]))
    with tf.GradientTape() as tape:
        tape.watch(VECTOR)
        result = concrete(VECTOR)
    assert tape.gradient(result, VECTOR) is not None
    for fn in (_descent, concrete) if inner is energy else (concrete,):
        mapper = devicemap.DeviceMap(fn, devices=TWO)
        assert reason in traced(mapper, VECTORS).reason
        np.testing.assert_allclose(mapper(VECTORS), one_by_one(fn, VECTORS), rtol=1e-5)


def _cropped(row: Any, seed: Any) -> Any:
    image = tf.image.stateless_random_crop(
        tf.reshape(tf.tile(functions.features(row), [8]), [4, 4, 3]), [2, 2, 3], seed
    )
    return tf.image.stateless_random_brightness(image, 0.2, seed + 2)


def _transcoded(row: Any, seed: Any) -> Any:
    text = tf.as_string(row[0])
    for _ in range(4):
        text = tf.strings.unicode_transcode(text, "UTF-8", "UTF-8")
    return tf.strings.length(text)


HELD: dict[str, tuple[Callable[..., Any], Any, dict[str, Any], dict[str, int]]] = {
    "no gathered rows": (tf.sin, VECTORS, {}, {"GatherV2": 0, "ResourceGather": 0}),
    "one gather of adjacent axes": (
        lambda i: functions.SMALL_IMAGES[:, i, 1, i], tf.constant([0, 1, 2]), {}, {"GatherV2": 1, "GatherNd": 0}),
    "no branch, and no list, in a loop that rows leave at once": (
        functions.power, functions.TRIPLES, {}, {"TensorListReserve": 0, "If": 0, "StatelessIf": 0}),
    "none for variables that rows share at first": (
        functions.shared_start, functions.TRIPLES, {}, {"TensorListReserve": 0, "If": 0, "StatelessIf": 0}),
    "no list with a tensor for each row": (
        functions.until_small, functions.TRIPLES, {}, {"TensorListScatterIntoExistingList": 0}),
    # What is vectorised is called for one row first, which stateful ops would keep.
    "no op for one row beside that for all rows": (
        functions.in_steps, *functions.SHARED["steps of an integer variable"][1:], {}, {"Tanh": 1}),
    "no op twice": (functions.mean_and_deviation, functions.SIXES, {}, {"Where": 1}),
    "no op twice, whose results have a known size": (functions.padded, functions.SIXES, {}, {"Where": 1}),
    "one loop for random numbers of seeds of rows": (
        _cropped, functions.SIXES, {"seed": 1}, {"While": 0, "StatelessWhile": 1}),
    "one loop for ops that take results of each other": (
        _transcoded, functions.SIXES, {"seed": 1}, {"While": 0, "StatelessWhile": 1}),
}  # fmt: skip


@pytest.mark.parametrize(("fn", "data", "options", "counts"), HELD.values(), ids=HELD)
def test_what_the_vectorised_graph_holds(fn: Any, data: Any, options: dict[str, Any], counts: dict[str, int]) -> None:
    mapper = devicemap.DeviceMap(fn, devices=["CPU:1"], **options)
    assert traced(mapper, data).vectorized
    graph = tf.function(lambda x: mapper(x)).get_concrete_function(data).graph.as_graph_def()
    found = Counter(node.op for function in graph.library.function for node in function.node_def)
    assert {op: found[op] for op in counts} == counts


def test_other_ops_wait_for_ops_that_run_row_by_row() -> None:
    def checked(row: Any) -> Any:
        row = functions.features(row)
        with tf.control_dependencies([tf.ensure_shape(tf.boolean_mask(row, row > -9.0), [6])]):
            checks = tf.ensure_shape(tf.boolean_mask(row, row > 0.0), [6])
        with tf.control_dependencies([checks]):
            return row * 2.0

    mapper = devicemap.DeviceMap(checked)
    assert traced(mapper, functions.SIXES).vectorized
    with pytest.raises(FunctionError, match="not compatible with expected shape"):
        mapper(functions.SIXES)


def test_functions_without_arguments_or_results() -> None:
    @tf.function
    def check(row: Any) -> None:
        tf.debugging.assert_less(row, 9.0)

    @tf.function
    def draw() -> Any:
        return tf.random.uniform([3], 1.0, 2.0)

    def fn(row: Any) -> Any:
        check(row)
        return draw() + row

    mapper = devicemap.DeviceMap(fn, devices=TWO)
    assert traced(mapper, VECTORS).reason == ALL_OPS
    drawn = mapper(VECTORS) - VECTORS
    assert np.all((drawn > 0.999) & (drawn < 2.001))
    assert len(np.unique(drawn)) > 7
    with pytest.raises(tf.errors.InvalidArgumentError):
        mapper(10.0 + tf.abs(VECTORS))


@pytest.mark.parametrize("shape", [(1, 3), (2, 2)])
def test_equality_with_an_unknown_shape(shape: tuple[int, int]) -> None:
    """`==` of shapes that do not match is one `False` per row; a known length and an unknown one may not match."""
    known = tf.ones([2, 2])

    def fn(row: Any) -> Any:
        return row == known

    mapper = devicemap.DeviceMap(fn, devices=["CPU:1", "CPU:2"])
    spec = tf.TensorSpec([None, None, None])
    found = tf.function(mapper, input_signature=[spec])(tf.ones([3, *shape]))
    assert found.numpy().tolist() == [np.array(fn(tf.ones(shape))).tolist()] * 3
    assert not mapper.explain(spec).vectorized
