"""What is vectorised, what runs row by row and why, and what the vectorised graph holds."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from compile import corpus
from graphs import partitions, placements, traced
from oracle import assert_one_by_one, one_by_one

import devicemap
from devicemap.errors import FunctionError

_random = np.random.default_rng(0)


def _normal(*shape: int) -> Any:
    return tf.constant(_random.normal(size=shape), tf.float32)


VECTORS, IMAGES = _normal(3, 3), _normal(3, 6, 6, 2)
VECTOR, MATRIX = VECTORS[0], _normal(3, 3)
LEVEL = tf.Variable(0.8)
TEXT = tf.constant(["abcd"])
RAGGED = tf.ragged.constant([[1.0], []])
TWO = ["CPU:1", "CPU:2"]
ALL_OPS = "every op of fn has a vectorised form"


@tf.function(input_signature=[tf.TensorSpec([None])])
def _growing_from_unknown_length(row: Any) -> Any:
    while tf.reduce_sum(row) < 9.0:
        row = tf.concat([row, tf.abs(row[:1]) + 1.0], 0)
    return tf.reduce_sum(row)


def _branch_of_a_number(row: Any) -> Any:
    sine, cosine = (tf.function(fn).get_concrete_function(row) for fn in (tf.sin, tf.cos))
    branches = {"then_branch": sine, "else_branch": cosine}
    return tf.raw_ops.StatelessIf(cond=tf.abs(row[0]) / 9.0, input=[row], Tout=[tf.float32], **branches)[0]


def _list_of_branches(row: Any) -> Any:
    signs = tf.TensorArray(tf.float32, 3, element_shape=[])
    for i in tf.range(3):
        signs = signs.write(i, 1.0) if row[i] > 0 else signs.write(i, -1.0)
    return signs.stack()


def _joined(row: Any) -> Any:
    array = tf.TensorArray(tf.float32, 2, infer_shape=False).write(0, row[:1]).write(1, row[1:])
    return tf.reduce_sum(array.concat())


def _list_that_grows(row: Any) -> Any:
    steps, level = tf.TensorArray(tf.float32, 0, dynamic_size=True, element_shape=[]), tf.abs(row[0])
    while level > 0.1:
        steps = steps.write(steps.size(), level)
        level /= 2.0
    return tf.reduce_sum(steps.stack())


def _called(row: Any) -> Any:
    return tf.sin(tf.ensure_shape(tf.numpy_function(np.sin, [row], tf.float32, stateful=False), [3]))


@tf.function(input_signature=[tf.TensorSpec([6, None]), tf.TensorSpec([], tf.int32)])
def _rest(row: Any, i: Any) -> Any:
    """The last length is unknown, and its index is part of a vector that differs between rows."""
    return tf.slice(row, tf.concat([[i], [1]], 0), [2, -1])


PLACES, TILES = tf.constant([0, 2, 0, 1, 2]), _normal(5, 6, 5, 3)
OF_AXES = {axes: _normal(3, *[2] * axes) for axes in (5, 6, 7, 8)}


def _cross_entropy(row: Any) -> Any:
    return tf.stop_gradient(tf.nn.softmax_cross_entropy_with_logits(tf.ones([2, 1]), tf.stack([row, row])))


SHORTS = tf.cast(tf.range(10) % 7, tf.uint16)
ROW_BY_ROW: list[tuple[Callable[..., Any], Any, str]] = [
    (_cross_entropy, VECTORS, "inputs that may have different shapes"),
    (lambda r: tf.stack([r, SHORTS[1]]) + tf.concat([[r], SHORTS[:1]], 0), SHORTS, "uint16"),
    (
        lambda r: tf.reduce_sum(tf.math.top_k(r, tf.argmax(r, output_type=tf.int32))[0]),
        VECTORS,
        "TopKV2 has another k for each row",
    ),
    (lambda r: tf.reduce_sum(tf.slice(r, [tf.argmax(r)], [-1])), VECTORS, "Slice"),
    (lambda r: tf.reduce_sum(r[: tf.argmax(r)]), VECTORS, "StridedSlice takes another range of each row"),
    (
        lambda r: tf.raw_ops.ClipByValue(t=r, clip_value_min=-(VECTOR**2), clip_value_max=VECTOR**2),
        VECTORS,
        "ClipByValue",
    ),
    (
        lambda r: tf.reduce_sum(tf.cond(r[0] > 0, lambda: r[:2], lambda: r)),
        VECTORS,
        "a branch whose results may differ",
    ),
    (_growing_from_unknown_length, VECTORS, "a tensor whose shape may change in it"),
    (_branch_of_a_number, VECTORS, "a branch whose condition is not one bool"),
    (_list_that_grows, VECTORS, "a loop that rows leave at different times, with a list that may grow"),
    (_list_of_branches, VECTORS, "a branch that writes to a list"),
    (_joined, VECTORS, "TensorListConcatV2 has no tested vectorised form"),
    (lambda s: tf.unique(tf.strings.bytes_split(s))[0], TEXT, "StringSplit has no vectorised form"),
    (lambda r: tf.numpy_function(np.sin, [r], tf.float32), VECTORS, "PyFunc acts once per row"),
    (lambda r: tf.RaggedTensor.from_tensor(r[None]), VECTORS, "ragged or sparse"),
    (lambda r: tf.reduce_sum(r), RAGGED, "differ in shape"),
    (lambda r: tf.sin(tf.random.shuffle(r)), VECTORS, "RandomShuffle"),
    (_called, VECTORS, "PyFunc"),
    (lambda r: tf.pad(r, [[1, 1]] * 5, "REFLECT"), OF_AXES[5], "its kernel accepts"),
    (lambda r: tf.pad(r, [[1, 1]] * 6), OF_AXES[6], "its kernel accepts"),
    (lambda r: tf.slice(r, [1] * 6, [1] * 6), OF_AXES[6], "its kernel accepts"),
    (_rest, (TILES[:, :, :, 0], PLACES), "slices that may differ in size"),
    (lambda r: r + tf.ones([2, 1, 2, 1, 2]), OF_AXES[5], "its kernel accepts"),
    (tf.nn.softmax, OF_AXES[5], "its kernel accepts"),
    (lambda r: tf.cast(tf.argmax(r, 1), tf.float32), OF_AXES[7], "its kernel accepts"),
    (lambda r: r[1], OF_AXES[8], "its kernel accepts"),
    (lambda r: tf.slice(r, [1] * 8, [1] * 8), OF_AXES[8], "its kernel accepts"),
    (lambda r: tf.where(r > 0.0, r, 0.0), OF_AXES[8], "its kernel accepts"),
    (lambda r: tf.gather_nd(r, [[1] * 7]), OF_AXES[7], "its kernel accepts"),
    (lambda r: tf.tensor_scatter_nd_add(r, [[1] * 7], [1.0]), OF_AXES[7], "its kernel accepts"),
]


def test_what_runs_row_by_row(capfd: pytest.CaptureFixture[str]) -> None:
    for fn, data, reason in ROW_BY_ROW:
        mapper = devicemap.DeviceMap(fn, devices=TWO)
        assert reason in traced(mapper, data).reason
        if fn in (_rest, _cross_entropy) or data is OF_AXES[6] or data is SHORTS:
            assert_one_by_one(mapper, fn, data)
        elif "kernel" in reason:
            np.testing.assert_allclose(mapper(data), one_by_one(fn, data), rtol=1e-6)
    np.testing.assert_allclose(
        devicemap.DeviceMap(_growing_from_unknown_length, devices=TWO)(VECTORS),
        one_by_one(_growing_from_unknown_length, VECTORS),
    )
    assert "pfor" not in capfd.readouterr().err  # which logs the ops that it cannot convert


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


def _written_until_small(row: Any) -> tuple[Any, Any]:
    places, lengths = tf.TensorArray(tf.float32, 4, element_shape=[3]), tf.TensorArray(tf.int32, 4, element_shape=[])
    for i in tf.range(4):
        places, lengths = places.write(i, row), lengths.write(i, 2 * i)
        row *= LEVEL
        if tf.reduce_sum(row**2) < 0.5:
            break
    return places.stack(), lengths.stack()


TENSOR = tf.Variable(tf.reshape(tf.range(60, dtype=tf.float32), [3, 4, 5]))
LONG = tf.Variable(np.sort(_random.normal(size=40)), dtype=tf.float32)
PICTURE, SYSTEM = tf.Variable(_normal(9, 8, 3)), tf.Variable(_normal(5, 5) + 5 * tf.eye(5))
VARIABLES = LEVEL, TENSOR, LONG, PICTURE, SYSTEM


def _shared_list(row: Any) -> Any:
    """A loop that rows leave at different times takes and returns it."""
    shared = tf.TensorArray(tf.float32, 2, element_shape=[], clear_after_read=False).unstack(tf.constant([2.0, 3.0]))
    step = lambda i, values, state: (i + 1, values, state * values.read(i % 2))
    goes_on = lambda i, values, state: tf.cast(i, tf.float32) < 5 * tf.abs(row[0])
    _, values, state = tf.while_loop(goes_on, step, (0, shared, row))
    return state + values.read(1)


def _repeated_variables(row: Any) -> Any:
    def body(a: Any, b: Any, c: Any, y: Any) -> Any:
        return a, b + 1, a, y * 2.0 + tf.cast(c, tf.float32)

    return tf.while_loop(lambda a, b, c, y: b < 3, body, (0, 0, 0, row))[3]


LISTS_AND_KERNELS: dict[str, tuple[Callable[..., Any], Any]] = {
    "a list that rows share": (_shared_list, VECTORS),
    "written until small": (_written_until_small, VECTORS),
    "repeated loop variables": (_repeated_variables, VECTORS),
    "gathered list": (lambda r: tf.TensorArray(tf.float32, 3, element_shape=[]).unstack(r).gather([2, 0]), VECTORS),
    "list that is never written": (
        lambda r: tf.TensorArray(tf.float32, 3, element_shape=[2]).stack() + r[:2], VECTORS),
    "many axes of equal lengths": (
        lambda r: tf.transpose(tf.maximum(r, -r * tf.ones([2] * 6)) * tf.reduce_max(r) + 1.0), OF_AXES[6]),
    # TensorFlow's converter of the cast drops an attribute, and would round.
    "a cast that truncates": (
        lambda r: tf.cast(tf.raw_ops.Cast(x=r, DstT=tf.bfloat16, Truncate=True), tf.float32), VECTORS),
    "a shared matrix times that of the row": (lambda r: tf.matmul(MATRIX, r), _normal(7, 3, 1)),
    "a transposed one times that of the row": (lambda r: tf.matmul(MATRIX, r, transpose_a=True), _normal(7, 3, 2)),
    "a shared matrix times the transposed one": (lambda r: tf.matmul(MATRIX, r, transpose_b=True), _normal(7, 1, 3)),
}  # fmt: skip
FIRST = tf.constant([0, 3, 1, 6, 2])
OF_SHARED: dict[str, tuple[Callable[..., Any], Any]] = {
    "an index, then a range": (lambda x, i: x[i, :2] + x[i, -2:], (TILES, PLACES)),
    "an index after a range": (lambda x, i: x[::-1, i] * x[1:, i][0], (TILES, PLACES)),
    "two indices": (lambda i: TENSOR[i, 1:3, i], PLACES),
    "an ellipsis": (lambda i: TENSOR[..., i] * TENSOR[i, ..., i], PLACES - 1),
    "a new axis": (lambda x, i: TENSOR[i, None, :, 1] * x[None, i, :4, 0], (TILES, PLACES)),
    "an index that rows share": (lambda x, i: TENSOR[1, i, tf.size(x) // 80 :], (TILES, PLACES)),
    "window of a vector": (lambda i: tf.slice(LONG, [4 * i], [5]), FIRST),
    "window of a picture": (lambda i: tf.slice(PICTURE, [i, i // 2, 1], [3, 2, 2]), FIRST),
    "window beside a shared index": (lambda i: tf.slice(PICTURE, [2, i, 1], [-1, 2, -1]), FIRST),
    "all after a shared index": (lambda i: tf.slice(MATRIX, [1, i], [-1, 1]), PLACES),
    "window of each row": (lambda i, x: tf.slice(x, [i // 2, i // 4, 0], [2, 3, 3]), (FIRST, TILES)),
    "window of whole axes": (lambda i, x: tf.slice(x, [0 * i, i // 2, 0 * i], [6, 2, 3]), (FIRST, TILES)),
    "window of all axes": (
        lambda i, x: tf.slice(PICTURE, tf.repeat(0 * i, 3), [9, 8, 3]) + x[0, 0, 0], (FIRST, TILES)),
    "window without elements": (lambda i, x: tf.slice(x, [i // 2, i // 4, 0], [2, 0, 3]), (FIRST, TILES)),
    "solution": (lambda x: tf.linalg.solve(SYSTEM, x[0], adjoint=True), TILES),
    "solution by a triangle": (lambda x: tf.linalg.triangular_solve(SYSTEM, x[0], lower=False), TILES),
    "search for a number": (lambda x: tf.gather(LONG, tf.minimum(tf.searchsorted(LONG, x[0, 0, :1])[0], 39)), TILES),
    "search for several": (lambda x: tf.gather(LONG, tf.minimum(tf.searchsorted(LONG, x[0, 0], side="right"), 39)), TILES),
}  # fmt: skip
VECTORIZED = LISTS_AND_KERNELS | OF_SHARED


@pytest.mark.parametrize("name", VECTORIZED)
def test_what_is_vectorised(name: str) -> None:
    """Also of one row: some kernels of products are wrong for it. Nothing that rows share is copied for each."""
    fn, data = VECTORIZED[name]
    mapper = devicemap.DeviceMap(fn, devices=TWO)
    assert traced(mapper, data).reason == ALL_OPS
    for rows in (data, data[:1]) if "matrix" in name else (data,):
        assert_one_by_one(mapper, fn, rows, *VARIABLES, rtol=1e-5, atol=1e-6)
    if name in OF_SHARED:
        tiled = (node for graph in partitions(mapper, data) for node in graph.node if node.op == "Tile")
        assert tf.float32.as_datatype_enum not in {node.attr["T"].type for node in tiled}  # only indices are


@pytest.mark.parametrize(
    "place",
    [
        lambda i: VECTOR[i],
        lambda i: TENSOR[i, 1:3, i],
        lambda i: tf.slice(VECTOR, [i], [1]),
        lambda i: MATRIX[i, -i],
        lambda i: tf.image.crop_to_bounding_box(IMAGES[0], i, 1, 4, 5),
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
        assert_one_by_one(mapped, fn, IMAGES)
    nodes = {node.name: node for graph in partitions(mapper, IMAGES) for node in graph.node}
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


def test_what_the_vectorised_graph_does_not_hold() -> None:
    """No gathered rows, no lists and branches for loops that rows leave at once, and no list with a tensor for each row."""
    graphs = partitions(devicemap.DeviceMap(tf.sin, devices=TWO), VECTORS)
    assert not [node.op for graph in graphs for node in graph.node if "Gather" in node.op]
    for fn in (corpus.power, corpus.shared_start):
        mapper = devicemap.DeviceMap(fn, devices=["CPU:1"])
        whole = tf.function(lambda x: mapper(x)).get_concrete_function(corpus.TRIPLES).graph.as_graph_def()
        held = {node.op for function in whole.library.function for node in function.node_def}
        assert not {"TensorListReserve", "If", "StatelessIf"} & held
    mapper = devicemap.DeviceMap(corpus.until_small, devices=TWO)
    assert traced(mapper, corpus.TRIPLES).vectorized
    assert not placements(partitions(mapper, corpus.TRIPLES), "TensorListScatterIntoExistingList")


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


def test_random_numbers_in_a_loop_differ_between_rows() -> None:
    def walk(row: Any) -> Any:
        place = tf.constant(0.0)
        for _ in tf.range(3):
            place += tf.random.normal([])
        return row + place

    mapper = devicemap.DeviceMap(walk, devices=TWO)
    assert traced(mapper, VECTORS).vectorized
    assert len(np.unique(mapper(tf.zeros([7])))) == 7


@pytest.mark.nightly
def test_nothing_runs_for_one_row_beside_all_rows() -> None:
    """What is vectorised is called for one row first, which stateful ops would keep."""
    level = tf.Variable(1.0)

    def looping(row: Any) -> Any:
        return tf.while_loop(lambda i, _: i < 5, lambda i, s: (i + 1, tf.sin(s) + level), (0, row))[1]

    mapper = devicemap.DeviceMap(looping, devices=TWO)
    assert placements(partitions(mapper, tf.ones([8, 3])), "Sin") == {"CPU:1": 1, "CPU:2": 1}
    assert traced(mapper, tf.ones([8, 3])).vectorized


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


def test_a_call_of_a_function_without_a_graph_runs_row_by_row() -> None:
    sine = tf.function(lambda x: tf.sin(x))
    graph = tf.function(lambda x: sine(x) * 2.0).get_concrete_function(tf.TensorSpec([3])).graph
    names = graph.inputs[0].op.name, graph.outputs[0].name

    def imported(row: Any) -> Any:
        return tf.graph_util.import_graph_def(graph.as_graph_def(), {names[0]: row}, [names[1]])[0]

    mapper = devicemap.DeviceMap(imported)
    assert traced(mapper, VECTORS).reason == "fn calls a function of TensorFlow 1"
    np.testing.assert_allclose(mapper(VECTORS), 2.0 * np.sin(VECTORS), rtol=1e-5)


def test_a_loop_of_tensorflow_1_runs_row_by_row() -> None:
    tf.compat.v1.disable_control_flow_v2()
    try:
        with tf.Graph().as_default() as graph:
            tf.compat.v1.while_loop(lambda i: i < 3, lambda i: i + 1, [tf.constant(0)], name="loop")
    finally:
        tf.compat.v1.enable_control_flow_v2()
    count = tf.compat.v1.wrap_function(
        lambda: tf.graph_util.import_graph_def(graph.as_graph_def(), {}, ["loop/Exit:0"])[0], []
    )
    mapper = devicemap.DeviceMap(lambda row: row + tf.cast(count(), tf.float32))
    assert traced(mapper, VECTORS).reason == "fn has a loop of TensorFlow 1"
    np.testing.assert_allclose(mapper(VECTORS), VECTORS + 3.0, rtol=1e-6)
