"""What is vectorised, what runs row by row and why, and what the vectorised graph holds. test_corpus.py compares values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from compile.corpus import control_flow
from graphs import partitions, placements, traced
from oracle import assert_same, gradients_of, one_by_one, serial

import devicemap
from benchmarks import functions
from devicemap.errors import FunctionError

_random = np.random.default_rng(0)
VECTORS = tf.constant(_random.normal(size=[3, 3]), tf.float32)
IMAGES = tf.constant(_random.normal(size=[3, 6, 6, 2]), tf.float32)
VECTOR, MATRIX = VECTORS[0], tf.constant(_random.normal(size=[3, 3]), tf.float32)
LEVEL = tf.Variable(0.8)
TEXT = tf.constant(["abcd"])
RAGGED = tf.ragged.constant([[1.0], []])
TWO = ["CPU:1", "CPU:2"]
ALL_OPS = "every op of fn has a vectorised form"


def _growing(row: Any) -> Any:
    found, i = tf.zeros([0]), 0
    while i < 3 and row[i] > -0.5:
        tf.autograph.experimental.set_loop_options(shape_invariants=[(found, tf.TensorShape([None]))])
        found = tf.concat([found, [row[i]]], 0)
        i += 1
    return tf.reduce_sum(found)


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


def _parsed(row: Any) -> Any:
    """Features of variable length."""
    values = [tf.train.Feature(int64_list=tf.train.Int64List(value=range(n))) for n in range(3)]
    examples = [tf.train.Example(features=tf.train.Features(feature={"v": value})) for value in values]
    text = tf.gather([example.SerializeToString() for example in examples], tf.argmax(row))
    any_length = tf.io.FixedLenSequenceFeature([], tf.int64, allow_missing=True)
    return tf.size(tf.io.parse_single_example(text, {"v": any_length})["v"])


padded = tf.function(lambda r: tf.pad(r, [[1, 1]], constant_values=3.0))
ROW_BY_ROW: list[tuple[Callable[..., Any], Any, str]] = [
    (lambda r: tf.strings.format("{}", r), VECTORS, "StringFormat"),
    (_parsed, VECTORS, "ParseExampleV2"),
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
    (_growing, VECTORS, "a loop that rows leave at different times, with a tensor whose shape may change in it"),
    (_growing_from_unknown_length, VECTORS, "a tensor whose shape may change in it"),
    (_branch_of_a_number, VECTORS, "a branch whose condition is not one bool"),
    (_list_that_grows, VECTORS, "a loop that rows leave at different times, with a list that may grow"),
    (_list_of_branches, VECTORS, "a branch that writes to a list"),
    (_joined, VECTORS, "TensorListConcatV2 has no tested vectorised form"),
    (lambda s: tf.unique(tf.strings.bytes_split(s))[0], TEXT, "StringSplit has no vectorised form"),
    (lambda r: tf.numpy_function(np.sin, [r], tf.float32), VECTORS, "PyFunc acts once per row"),
    (lambda r: tf.RaggedTensor.from_tensor(r[None]), VECTORS, "ragged or sparse"),
    (lambda r: tf.reduce_sum(r), RAGGED, "differ in shape"),
]


def test_what_runs_row_by_row(capfd: pytest.CaptureFixture[str]) -> None:
    for fn, data, reason in ROW_BY_ROW:
        assert reason in traced(devicemap.DeviceMap(fn, devices=TWO), data).reason
    np.testing.assert_allclose(
        devicemap.DeviceMap(_growing_from_unknown_length, devices=TWO)(VECTORS),
        one_by_one(_growing_from_unknown_length, VECTORS),
    )
    assert "pfor" not in capfd.readouterr().err  # which logs the ops that it cannot convert


def test_a_known_shape_lets_rows_part() -> None:
    """As the remedy says."""

    def growing(row: Any, known: bool) -> Any:
        step = lambda i, state: (i + 1, tf.reshape(state * 1.5, [-1]))
        fixed = lambda i, state: (i + 1, tf.ensure_shape(tf.reshape(state * 1.5, [-1]), [3]))
        shapes = tf.TensorShape([]), tf.TensorShape([3] if known else [None])
        goes_on = lambda i, state: (tf.norm(state) < 9.0) & (i < 9)
        return tf.while_loop(goes_on, fixed if known else step, (0, row), shape_invariants=shapes)[1]

    unknown = traced(devicemap.DeviceMap(lambda row: growing(row, False), devices=TWO), VECTORS)
    assert "tf.ensure_shape" in unknown.remedy
    assert traced(devicemap.DeviceMap(lambda row: growing(row, True), devices=TWO), VECTORS).vectorized


def test_a_known_size_lets_ranges_differ() -> None:
    """As the remedy says."""
    ranges = [lambda r: r[(i := tf.argmin(r[:2])) : i + 2], lambda r: tf.slice(r, tf.argmin(r[:2])[None], [2])]
    differing, sized = (devicemap.DeviceMap(fn, devices=TWO) for fn in ranges)
    assert "tf.slice" in traced(differing, VECTORS).remedy
    assert traced(sized, VECTORS).vectorized
    np.testing.assert_array_equal(differing(VECTORS), sized(VECTORS))


TENSOR = tf.Variable(tf.reshape(tf.range(60, dtype=tf.float32), [3, 4, 5]))
PARTS: dict[str, Callable[[Any, Any], Any]] = {
    "an index, then a range": lambda x, i: x[i, :2] + x[i, -2:],
    "an index after a range": lambda x, i: x[::-1, i] * x[1:, i][0],
    "two indices": lambda x, i: TENSOR[i, 1:3, i],
    "an ellipsis": lambda x, i: TENSOR[..., i] * TENSOR[i, ..., i],
    "a new axis": lambda x, i: TENSOR[i, None, :, 1] * x[None, i],
    "an index that rows share": lambda x, i: TENSOR[1, i, tf.size(x) // 8 :],
}


@pytest.mark.parametrize("part", PARTS.values(), ids=PARTS)
def test_indices_that_differ_beside_ranges_that_do_not(part: Any) -> None:
    rows, places = tf.reshape(tf.range(60, dtype=tf.float32), [5, 3, 4]), tf.constant([0, 2, -1, 1, 2])

    def taken(mapped: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(rows)
            results = mapped((rows, places))
            sources = [rows, TENSOR]
        gradients = tape.gradient(results**2, sources, unconnected_gradients="zero")
        return results, *map(tf.convert_to_tensor, gradients)

    mapper = devicemap.DeviceMap(part, devices=TWO)
    assert traced(mapper, (rows, places)).vectorized
    wanted = taken(lambda data: tf.stack([part(*row) for row in zip(*map(tf.unstack, data))]))
    for got, expected in zip(taken(mapper), wanted):
        np.testing.assert_allclose(got, expected)
    with pytest.raises(FunctionError, match="slice index out of bounds"):
        mapper((rows, places + 4))


def test_a_list_that_rows_share() -> None:
    """A loop that rows leave at different times takes and returns it."""

    def fn(row: Any) -> Any:
        shared = tf.TensorArray(tf.float32, 2, element_shape=[], clear_after_read=False).unstack(
            tf.constant([2.0, 3.0])
        )
        step = lambda i, values, state: (i + 1, values, state * values.read(i % 2))
        goes_on = lambda i, values, state: tf.cast(i, tf.float32) < 5 * tf.abs(row[0])
        _, values, state = tf.while_loop(goes_on, step, (0, shared, row))
        return state + values.read(1)

    mapper = devicemap.DeviceMap(fn, devices=TWO[:1])
    assert traced(mapper, VECTORS).vectorized
    np.testing.assert_allclose(mapper(VECTORS), one_by_one(fn, VECTORS), rtol=1e-5)
    (got,), (wanted,) = gradients_of(mapper, VECTORS), gradients_of(lambda rows: one_by_one(fn, rows), VECTORS)
    np.testing.assert_allclose(got, wanted, rtol=1e-5)


def test_ops_that_draw_or_call_python_do_not_run_row_by_row_alone() -> None:
    def called(row: Any) -> Any:
        return tf.sin(tf.ensure_shape(tf.numpy_function(np.sin, [row], tf.float32, stateful=False), [3]))

    for fn in (called, lambda row: tf.sin(tf.random.shuffle(row))):
        assert not traced(devicemap.DeviceMap(fn, devices=TWO), VECTORS).vectorized


def test_no_reshape_keeps_grappler_from_fusing() -> None:
    """A bias and Relu follow the convolution of one sample, as those of a batch."""
    filters = tf.ones([3, 3, 2, 4])

    def fn(image: Any) -> Any:
        convolved = tf.nn.conv2d(image[None], filters, 1, "VALID")
        return tf.nn.relu(tf.nn.bias_add(convolved, [1.0, 2.0, 3.0, 4.0]))[0]

    def alone(rows: Any) -> Any:
        return one_by_one(fn, rows)

    mapper = devicemap.DeviceMap(fn, devices=["CPU:1"])
    of_any_size = tf.function(mapper, input_signature=[tf.TensorSpec([None, None, None, 2])])
    for mapped in (mapper, of_any_size):
        np.testing.assert_allclose(mapped(IMAGES), alone(IMAGES), rtol=1e-5, atol=1e-5)
        (got,), (wanted,) = gradients_of(mapped, IMAGES), gradients_of(alone, IMAGES)
        np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-5)
    nodes = {node.name: node for graph in partitions(mapper, IMAGES) for node in graph.node}
    following = [node for node in nodes.values() if node.op in ("BiasAdd", "Relu")]
    assert not [node.name for node in following if nodes[node.input[0]].op == "Reshape"]
    assert any("Conv2D" in node.op for node in nodes.values())  # also fused, or of oneDNN


def test_the_choice_can_be_made_by_hand() -> None:
    concrete = tf.function(tf.sin).get_concrete_function(tf.TensorSpec([3]))
    for fn, options, vectorized in (
        (tf.sin, {}, True),
        (tf.sin, {"vectorize": False}, False),
        (concrete, {"vectorize": True}, True),
        (lambda row: row[0] + tf.random.normal([]), {}, True),
        (tf.sin, {"fn_output_signature": tf.float32}, True),
        (tf.sin, {"fn_output_signature": "float32"}, True),
        (tf.sin, {"fn_output_signature": np.float32}, True),
        (tf.sin, {"fn_output_signature": tf.TensorSpec([3])}, True),
        (tf.sin, {"fn_output_signature": tf.TensorSpec(None)}, True),
    ):
        mapper = devicemap.DeviceMap(fn, devices=TWO, **options)
        plan = traced(mapper, VECTORS)
        assert plan.vectorized is vectorized
        assert not options or plan.vectorized or ALL_OPS not in plan.reason
        if fn in (tf.sin, concrete):
            np.testing.assert_allclose(mapper(VECTORS), tf.sin(VECTORS), rtol=1e-6)


def test_texts_of_rows_are_formatted_one_by_one() -> None:
    """TensorFlow's converter formats all rows together."""
    words = tf.constant(["a", "b", "c"])
    mapper = devicemap.DeviceMap(lambda word: tf.strings.format("<{}>", word), devices=TWO, vectorize=True)
    assert mapper(words).numpy().tolist() == [b'<"a">', b'<"b">', b'<"c">']


def test_ops_that_cannot_be_seen_are_not_vectorised(monkeypatch: pytest.MonkeyPatch) -> None:
    """A `tf.function` inside of `fn`, in a TensorFlow that does not show what such hold."""
    monkeypatch.setattr(devicemap.compile.vectorize, "can_list_functions", lambda graph: False)
    mapper = devicemap.DeviceMap(lambda r: padded(r), devices=["CPU:1"])
    assert "lacks non-public names" in traced(mapper, VECTORS).reason
    np.testing.assert_array_equal(mapper(VECTORS)[:, 0], [3, 3, 3])


@pytest.mark.nightly
@pytest.mark.parametrize(
    "name", [name for name in functions.cases() if name not in ("JPEG decoding", "Keras CNN", "object detection")]
)
def test_functions_of_the_benchmark_are_vectorised(name: str) -> None:
    case = functions.cases()[name]
    plan = traced(devicemap.DeviceMap(case.fn, devices=["CPU:1"]), case.data)
    assert (plan.vectorized, plan.reason) == (True, ALL_OPS)


def test_axes_that_only_the_running_graph_knows() -> None:
    spec = tf.TensorSpec([None, None], tf.float32)
    mapper = devicemap.DeviceMap(lambda row: tf.reduce_sum(tf.squeeze(row) * 2.0), devices=["CPU:1"])
    assert "Squeeze drops axes" in traced(mapper, spec).reason
    mapped = tf.function(lambda x: mapper(x), input_signature=[spec])
    for data in (VECTORS[:, :1], VECTORS, VECTORS[:1]):
        np.testing.assert_allclose(mapped(data), tf.reduce_sum(data * 2.0, 1), rtol=1e-5)


@pytest.mark.in_ci(1)
@pytest.mark.parametrize("options", [{}, {"vectorize": False}, {"batched": True}])
def test_functions_that_the_user_vectorises(options: dict[str, Any]) -> None:
    """In a second trace, they are met as they were left by the first."""
    double = tf.function(lambda x: 2.0 * x)
    mapper = devicemap.DeviceMap(lambda x: tf.vectorized_map(double, x), devices=TWO, **options)
    for columns in (3, 4, 5):
        np.testing.assert_array_equal(mapper(tf.ones([4, columns])), 2 * np.ones([4, columns]))


def test_a_function_that_was_mapped_stays_as_it_was() -> None:
    """It runs an op row by row, for which TensorFlow has no converter, where it was traced before."""
    fn = tf.function(_crop).get_concrete_function(tf.TensorSpec(IMAGES.shape[1:]))
    before = tf.vectorized_map(fn, IMAGES)
    np.testing.assert_array_equal(devicemap.DeviceMap(fn, devices=TWO)(IMAGES), before)
    np.testing.assert_array_equal(tf.vectorized_map(fn, IMAGES), before)
    assert not any(hasattr(op, "pfor_converter") for op in fn.graph.get_operations())


energy = tf.function(lambda x: tf.reduce_sum(tf.sin(x) * x))


def _descent(row: Any) -> Any:
    with tf.GradientTape() as tape:
        tape.watch(row)
        level = energy(row)
    return level + energy(row - 0.1 * tape.gradient(level, row))


def test_a_function_is_vectorised_also_after_its_gradient_was_taken() -> None:
    """TensorFlow then adds results to its graph."""
    concrete = energy.get_concrete_function(tf.TensorSpec([3]))
    with tf.GradientTape() as tape:
        tape.watch(VECTOR)
        level = concrete(VECTOR)
    assert tape.gradient(level, VECTOR) is not None
    for fn in (_descent, concrete):
        mapper = devicemap.DeviceMap(fn, devices=TWO)
        assert traced(mapper, VECTORS).vectorized, traced(mapper, VECTORS).reason
        np.testing.assert_allclose(mapper(VECTORS), one_by_one(fn, VECTORS), rtol=1e-5)


def test_a_branch_of_a_function_whose_gradient_was_taken() -> None:
    """TensorFlow then lets the branch return what its gradient needs, also where no tape records."""
    branch = tf.function(lambda x: tf.cond(x[0] > 0.0, lambda: tf.sin(x) * x, lambda: x))
    concrete = branch.get_concrete_function(tf.TensorSpec([3]))
    with tf.GradientTape() as tape:
        tape.watch(VECTOR)
        result = concrete(VECTOR)
    assert tape.gradient(result, VECTOR) is not None
    mapper = devicemap.DeviceMap(concrete, devices=TWO)
    assert "gradient was taken before" in traced(mapper, VECTORS).reason
    np.testing.assert_allclose(mapper(VECTORS), one_by_one(concrete, VECTORS), rtol=1e-5)


@pytest.mark.nightly
def test_jacobians_of_a_function_in_several_maps() -> None:
    curve = tf.function(lambda x: tf.sin(x) * x)

    def jacobian(x: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = curve(x)
        return tape.jacobian(y, x)

    for _ in range(3):
        got = devicemap.DeviceMap(lambda x: jacobian(x), devices=["CPU:1"])(VECTORS)
        np.testing.assert_allclose(got, tf.linalg.diag(tf.sin(VECTORS) + VECTORS * tf.cos(VECTORS)), rtol=1e-5)


def test_overridden_gradients_are_kept() -> None:
    @tf.RegisterGradient("FiveForEach")
    def five(op: Any, upstream: Any) -> Any:
        return 5.0 * tf.ones_like(op.inputs[0]), None

    def fn(r: Any) -> Any:
        with tf.compat.v1.get_default_graph().gradient_override_map({"Sum": "FiveForEach"}):
            return tf.reduce_sum(r)

    mapper = devicemap.DeviceMap(fn, devices=TWO)
    with tf.GradientTape() as tape:
        tape.watch(VECTORS)
        total = tf.reduce_sum(mapper(VECTORS))
    np.testing.assert_array_equal(tape.gradient(total, VECTORS), 5 * np.ones([3, 3]))


def _random_walk(row: Any) -> Any:
    place = tf.constant(0.0)
    for _ in tf.range(3):
        place += tf.random.normal([])
    return row + place


def test_a_map_inside_fn_copies_no_variables() -> None:
    """Its loop reads a variable of another device. Assigning a copy there would be a write of the outer function."""
    variable = tf.Variable(2.0)

    def powers(row: Any) -> Any:
        return tf.while_loop(lambda i, _: i < 3, lambda i, power: (i + 1, power * variable), (0, row))[1]

    inner = devicemap.DeviceMap(powers, devices=TWO)
    outer = devicemap.DeviceMap(inner, devices=TWO)
    plan = outer.explain(VECTORS)
    assert plan.vectorized
    assert not plan.ordered
    np.testing.assert_allclose(outer(VECTORS), VECTORS * 8)


def test_random_numbers_differ_between_rows() -> None:
    mapper = devicemap.DeviceMap(_random_walk, devices=TWO)
    assert traced(mapper, VECTORS).vectorized
    drawn = mapper(tf.zeros([7, 3])).numpy()
    assert len({*drawn[:, 0]}) == 7
    assert (drawn == drawn[:, :1]).all()


def test_what_the_vectorised_graph_does_not_hold() -> None:
    """No gathered rows, no lists and branches for loops that rows leave at once, and no list with a tensor for each row."""
    graphs = partitions(devicemap.DeviceMap(tf.sin, devices=TWO), VECTORS)
    assert not [node.op for graph in graphs for node in graph.node if "Gather" in node.op]
    for fn in (control_flow.power, control_flow.shared_start):
        mapper = devicemap.DeviceMap(fn, devices=["CPU:1"])
        whole = tf.function(lambda x: mapper(x)).get_concrete_function(control_flow.ROWS).graph.as_graph_def()
        held = {node.op for function in whole.library.function for node in function.node_def}
        assert not {"TensorListReserve", "If", "StatelessIf"} & held
    mapper = devicemap.DeviceMap(control_flow.until_small, devices=TWO)
    assert traced(mapper, control_flow.ROWS).vectorized
    assert not placements(partitions(mapper, control_flow.ROWS), "TensorListScatterIntoExistingList")


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


@pytest.mark.nightly
def test_nothing_runs_for_one_row_beside_all_rows() -> None:
    """What is vectorised is called for one row first, which stateful ops would keep."""
    level = tf.Variable(1.0)

    def looping(row: Any) -> Any:
        return tf.while_loop(lambda i, _: i < 5, lambda i, s: (i + 1, tf.sin(s) + level), (0, row))[1]

    mapper = devicemap.DeviceMap(looping, devices=TWO)
    assert placements(partitions(mapper, tf.ones([8, 3])), "Sin") == {"CPU:1": 1, "CPU:2": 1}
    assert traced(mapper, tf.ones([8, 3])).vectorized


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
    mapper = devicemap.DeviceMap(fn, devices=devices)
    plan = traced(mapper, IMAGES)
    assert plan.vectorized
    reason = "these ops alone run row by row: CropAndResize has no vectorised form (`return tf.image."
    assert plan.reason.startswith(reason)
    serial = tf.function(lambda x: tf.map_fn(fn, x))
    pairs = zip([mapper(IMAGES), *gradients_of(mapper, IMAGES)], [serial(IMAGES), *gradients_of(serial, IMAGES)])
    for got, wanted in pairs:
        np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.in_ci(2)
@pytest.mark.parametrize("place", [lambda i: VECTOR[i], lambda i: tf.slice(VECTOR, [i], [1]), lambda i: MATRIX[i, -i]])
def test_a_place_that_there_is_not_is_an_error(place: Callable[[Any], Any]) -> None:
    mapper = devicemap.DeviceMap(place, devices=TWO)
    data = tf.constant([2, 0, 1, 2])
    assert traced(mapper, data).vectorized, traced(mapper, data).reason
    np.testing.assert_array_equal(mapper(data), one_by_one(place, data))
    with pytest.raises(FunctionError):
        mapper(tf.constant([0, 1, 2, 3]))


def _written_until_small(row: Any) -> tuple[Any, Any]:
    places, lengths = tf.TensorArray(tf.float32, 4, element_shape=[3]), tf.TensorArray(tf.int32, 4, element_shape=[])
    for i in tf.range(4):
        places, lengths = places.write(i, row), lengths.write(i, 2 * i)
        row *= LEVEL
        if tf.reduce_sum(row**2) < 0.5:
            break
    return places.stack(), lengths.stack()


def _written_at_other_places(row: Any) -> Any:
    array = tf.TensorArray(tf.float32, 3, element_shape=[], clear_after_read=False).unstack(row)
    for i in tf.range(tf.argmax(row, output_type=tf.int32) + 1):
        for j in tf.range(i):
            array = array.write(2 - i, array.read(j) * LEVEL)
    return array.stack()


def _scans_in_a_loop(row: Any) -> Any:
    array = tf.TensorArray(tf.float32, 3, element_shape=[]).unstack(tf.zeros([3]))
    for i in tf.range(tf.argmin(row, output_type=tf.int32)):
        array = array.write(i, tf.scan(lambda total, each: total * LEVEL + each, row)[i])
    return array.stack()


@pytest.mark.in_ci(1)
@pytest.mark.parametrize("fn", [_written_until_small, _written_at_other_places, _scans_in_a_loop])
def test_lists_in_loops_that_rows_leave_at_different_times(fn: Callable[[Any], Any], devices: list[str]) -> None:
    mapper = devicemap.DeviceMap(fn, devices=devices)
    assert traced(mapper, VECTORS).reason == ALL_OPS
    for rows in (VECTORS, VECTORS[:1], VECTORS[:0]):
        assert_same(mapper(rows), serial(fn, rows, batched=False), rtol=1e-5)

    def numbers(mapped: Callable[[Any], Any]) -> Callable[[Any], Any]:
        return lambda rows: tf.nest.flatten(mapped(rows))[0]

    got = gradients_of(numbers(mapper), VECTORS, LEVEL)
    wanted = gradients_of(numbers(lambda rows: serial(fn, rows, batched=False)), VECTORS, LEVEL)
    for one, other in zip(got, wanted):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


ALTERNATING = tf.ones([2, 1, 2, 1, 2])


@pytest.mark.in_ci(1)
@pytest.mark.parametrize(
    ("fn", "axes"),
    [
        (lambda row: tf.pad(row, [[1, 1]] * 5, "REFLECT"), 5),
        (lambda row: tf.pad(row, [[1, 1]] * 6), 6),
        (lambda row: row + ALTERNATING, 5),
        (tf.nn.softmax, 5),
        (lambda row: tf.cast(tf.argmax(row, 1), tf.float32), 7),
        (lambda row: row[1], 8),
        (lambda row: tf.slice(row, [1] * 8, [1] * 8), 8),
        (lambda row: tf.where(row > 0.0, row, 0.0), 8),
        (lambda row: tf.gather_nd(row, [[1] * 7]), 7),
        (lambda row: tf.tensor_scatter_nd_add(row, [[1] * 7], [1.0]), 7),
    ],
)
def test_kernels_that_accept_no_more_axes_run_row_by_row(fn: Callable[[Any], Any], axes: int) -> None:
    rows = tf.constant(_random.normal(size=[3] + [2] * axes), tf.float32)
    mapper = devicemap.DeviceMap(fn, devices=TWO)
    assert "its kernel accepts" in traced(mapper, rows).reason
    np.testing.assert_allclose(mapper(rows), one_by_one(fn, rows), rtol=1e-6)


def test_gradients_of_slices_of_many_axes() -> None:
    rows = tf.constant(_random.normal(size=[3] + [2] * 6), tf.float32)
    (gradient,) = gradients_of(devicemap.DeviceMap(lambda row: tf.slice(row, [1] * 6, [1] * 6)), rows)
    assert np.count_nonzero(gradient) == 3


def test_broadcasts_of_many_axes_that_merge() -> None:
    fn = lambda row: tf.maximum(row * tf.ones([2, 2]), tf.ones([2, 1, 1, 1, 1, 1]))
    rows = tf.constant(_random.normal(size=[3] + [2] * 6), tf.float32)
    mapper = devicemap.DeviceMap(fn, devices=TWO)
    assert traced(mapper, rows).reason == ALL_OPS
    np.testing.assert_allclose(mapper(rows), one_by_one(fn, rows), rtol=1e-6)


@pytest.mark.in_ci(1)
@pytest.mark.parametrize(
    "fn",
    [
        lambda i: tf.slice(MATRIX, [i, 0], [2, -1]),
        lambda i: tf.slice(MATRIX, [1, i], [-1, 1]),
        lambda i: tf.image.crop_to_bounding_box(IMAGES[0], i, 1, 3, 5),
    ],
)
def test_a_slice_of_all_elements_after_a_shared_index(fn: Callable[[Any], Any]) -> None:
    """Its size is -1 on one axis, and its index differs between rows on another axis."""
    mapper = devicemap.DeviceMap(fn, devices=TWO)
    data = tf.constant([0, 1, 0, 1])
    assert traced(mapper, data).reason == ALL_OPS
    np.testing.assert_array_equal(mapper(data), one_by_one(fn, data))
    with pytest.raises(FunctionError):
        mapper(tf.constant([0, 1, 7, 1]))


LONG = tf.constant(np.sort(np.random.default_rng(1).normal(size=40)), tf.float32)
PICTURE = tf.constant(np.random.default_rng(2).normal(size=[9, 8, 3]), tf.float32)
TILES = tf.constant(np.random.default_rng(3).normal(size=[5, 6, 5, 3]), tf.float32)
SYSTEM = tf.constant(np.random.default_rng(4).normal(size=[5, 5]) + 5 * np.eye(5), tf.float32)
OF_SHARED: dict[str, Callable[[Any, Any], Any]] = {
    "window of a vector": lambda i, _: tf.slice(LONG, [4 * i], [5]),
    "window of a picture": lambda i, _: tf.slice(PICTURE, [i, i // 2, 1], [3, 2, 2]),
    "window beside a shared index": lambda i, _: tf.slice(PICTURE, [2, i, 1], [-1, 2, -1]),
    "window of each row": lambda i, x: tf.slice(x, [i // 2, i // 4, 0], [2, 3, 3]),
    "window of whole axes": lambda i, x: tf.slice(x, [0 * i, i // 2, 0 * i], [6, 2, 3]),
    "window of all axes": lambda i, x: tf.slice(PICTURE, tf.repeat(0 * i, 3), [9, 8, 3]) + x[0, 0, 0],
    "window without elements": lambda i, x: tf.slice(x, [i // 2, i // 4, 0], [2, 0, 3]),
    "solution": lambda _, x: tf.linalg.solve(SYSTEM, x[0], adjoint=True),
    "solution by a triangle": lambda _, x: tf.linalg.triangular_solve(SYSTEM, x[0], lower=False),
    "search for a number": lambda _, x: LONG[tf.searchsorted(LONG, x[0, 0, :1])[0] - 1],
    "search for several": lambda _, x: tf.gather(LONG, tf.searchsorted(LONG, x[0, 0], side="right") - 1),
}


@pytest.mark.parametrize("fn", OF_SHARED.values(), ids=OF_SHARED)
def test_nothing_that_rows_share_is_copied_for_each(fn: Any) -> None:
    rows = tf.constant([0, 3, 1, 6, 2]), TILES

    def taken(mapped: Any) -> Any:
        sources = [LONG, PICTURE, TILES, SYSTEM]
        with tf.GradientTape() as tape:
            tape.watch(sources)
            results = mapped(rows)
        return results, *tape.gradient(results**2, sources, unconnected_gradients="zero")

    mapper = devicemap.DeviceMap(fn, devices=TWO)
    assert traced(mapper, rows).reason == ALL_OPS
    tiled = (node for graph in partitions(mapper, rows) for node in graph.node if node.op == "Tile")
    assert tf.float32.as_datatype_enum not in {node.attr["T"].type for node in tiled}  # only indices are
    wanted = taken(lambda data: tf.stack([fn(*row) for row in zip(*map(tf.unstack, data))]))
    for got, expected in zip(taken(mapper), wanted):
        np.testing.assert_allclose(got, expected, rtol=1e-5)


def test_a_size_of_minus_one_after_an_index_of_each_row() -> None:
    """The last length is unknown, and its index is part of a vector that differs between rows."""
    fn = tf.function(
        lambda row, i: tf.slice(row, tf.concat([[i], [1]], 0), [2, -1]),
        input_signature=[tf.TensorSpec([4, None]), tf.TensorSpec([], tf.int32)],
    )
    data = tf.reshape(tf.range(24.0), [2, 4, 3]), tf.constant([0, 2])
    np.testing.assert_array_equal(devicemap.DeviceMap(fn, devices=TWO)(data), [data[0][0, :2, 1:], data[0][1, 2:, 1:]])


@pytest.mark.in_ci(1)
@pytest.mark.parametrize("fn", [control_flow.power, control_flow.until_small, control_flow.branch_in_loop])
def test_compiled_loops(fn: Callable[[Any], Any]) -> None:
    mapper = devicemap.DeviceMap(fn, devices=TWO, jit_compile=True)
    np.testing.assert_allclose(mapper(control_flow.ROWS), one_by_one(tf.function(fn), control_flow.ROWS), rtol=1e-9)


@pytest.mark.in_ci(2)
@pytest.mark.parametrize("transposed", [{}, {"transpose_a": True}, {"transpose_b": True}])
@pytest.mark.parametrize("columns", [1, 2])
def test_a_shared_matrix_times_a_matrix_of_each_row(columns: int, transposed: dict[str, bool]) -> None:
    """Also of one row: some kernels of products are wrong for it."""
    shape = [columns, 3] if "transpose_b" in transposed else [3, columns]
    shared = tf.constant(_random.normal(size=[3, 4] if "transpose_a" in transposed else [4, 3]))
    rows = tf.constant(_random.normal(size=[7, *shape]))
    fn = lambda row: tf.matmul(shared, row, **transposed)
    mapper = devicemap.DeviceMap(fn, devices=TWO)
    assert traced(mapper, rows).vectorized
    unknown = tf.function(lambda x: mapper(x), input_signature=[tf.TensorSpec([None, None, None], tf.float64)])
    for count in (1, 7):
        for run in (mapper, unknown):
            np.testing.assert_allclose(run(rows[:count]), one_by_one(fn, rows[:count]), rtol=1e-9)


def test_a_cast_that_truncates() -> None:
    """TensorFlow's converter drops this attribute, and would round."""
    mapper = devicemap.DeviceMap(lambda row: tf.raw_ops.Cast(x=row, DstT=tf.bfloat16, Truncate=True), devices=TWO)
    assert traced(mapper, VECTORS).vectorized
    truncated = (VECTORS.numpy().view(np.uint32) & 0xFFFF0000).view(np.float32)
    np.testing.assert_array_equal(tf.cast(mapper(VECTORS), tf.float32), truncated)


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
