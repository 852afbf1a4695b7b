"""Law 6: gradients of an in-memory map are those of the serial map, wherever the tape is."""

from __future__ import annotations

import threading
from functools import partial
from typing import Any

import functions
import numpy as np
import pytest
import tensorflow as tf
from graphs import between_devices, edges, ops_on, partitions, placements
from oracle import assert_close, gradients_of, one_by_one
from ways import PLACES, places

import devicemap
from devicemap.compile import graph_builder

X = tf.reshape(tf.range(21, dtype=tf.float32), [7, 3]) / 10
WEIGHTS = tf.Variable(tf.reshape(tf.range(9, dtype=tf.float32), [3, 3]) / 9)
SCALE, SHIFT, BIAS = tf.Variable(2.0), tf.Variable(0.5), tf.Variable([1.0, 2.0, 3.0])


def _gradients(*variables: Any) -> Any:
    """What a tape takes: gradients by rows and variables."""
    return lambda call, rows: gradients_of(call, rows, *variables)


def _first_and_second(mapped: Any, x: Any) -> list[Any]:
    with tf.GradientTape() as tape:
        tape.watch(x)
        first = gradients_of(mapped, x, WEIGHTS)
        total = tf.add_n([tf.reduce_sum(gradient**2) for gradient in first if gradient.dtype == x.dtype])
    second = tape.gradient(total, [x, WEIGHTS], unconnected_gradients="zero")
    return [*first, *map(tf.convert_to_tensor, second)]


def _jacobian(mapped: Any, x: Any) -> Any:
    with tf.GradientTape() as tape:
        tape.watch(x)
        results = mapped(x)
    return tape.batch_jacobian(results, x)


def _looping(weights: Any, x: Any) -> Any:
    """Of a batch or a row."""
    for _ in tf.range(3):
        x = tf.tanh(x @ weights if x.shape.rank == 2 else tf.linalg.matvec(weights, x))
    return x


def _embedded(weights: Any, row: Any) -> Any:
    one, other = (tf.gather(weights, tf.cast(row[i], tf.int32)) for i in range(2))
    return one * other * row


def _looked_up(weights: Any, rows: Any) -> Any:
    """`embedding_lookup` asks for the device of a variable by the name of its handle: one for the copies on all devices."""
    tf.print(
        "", output_stream="file:///dev/null"
    )  # functions with effects are not optimised, and so inlined as they are
    return tf.nn.embedding_lookup(weights, tf.cast(rows, tf.int32)) ** 2


def _python(weights: Any, batch: Any) -> Any:
    return tf.ensure_shape(tf.py_function(lambda b: b**3, [batch], tf.float32), [None, 3])


COUNT, LAST, GENERATOR = tf.Variable(0), tf.Variable([0.0, 0.0, 0.0]), tf.random.Generator.from_seed(1)


def _counted(weights: Any, row: Any) -> Any:
    COUNT.assign_add(1)
    return tf.linalg.matvec(weights, row)


def _in_order(weights: Any, row: Any) -> Any:
    """TensorFlow has one device for all variables that the loop over rows hands on."""
    LAST.assign(row)
    return tf.linalg.matvec(weights, row) + LAST + 0.0 * GENERATOR.normal([3])


FUNCTIONS: dict[str, tuple[Any, dict[str, Any]]] = {
    "batch": (lambda weights, b: tf.tanh(b @ weights) @ weights, {"batched": True}),
    "gather from a batch": (lambda weights, b: tf.gather(b @ weights, [2, 0, 0], axis=1), {"batched": True}),
    "loop over a batch": (_looping, {"batched": True}),
    "loop": (_looping, {}),
    "loop, mapped": (_looping, {"vectorize": False}),
}
OTHERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "rows, mapped, that are counted": (_counted, {}),
    "rows in order": (_in_order, {}),
    "lookup by a batch, with effects": (_looked_up, {"batched": True}),
    "Python": (_python, {"batched": True}),
}


@pytest.mark.parametrize("name", FUNCTIONS | OTHERS)
@places
def test_gradients_are_those_of_the_serial_map(devices: list[str], name: str, place: Any) -> None:
    """`test_functions.py` has functions of single rows."""
    fn, options = (FUNCTIONS | OTHERS)[name]
    fn = partial(fn, WEIGHTS)
    mapper, serial = devicemap.DeviceMap(fn, devices=devices, **options), partial(one_by_one, fn)
    if "batched" in options:
        serial = (lambda x: x**3) if name == "Python" else fn
    for _ in range(2):  # calls with and without a tape take turns
        assert_close(place(_gradients(WEIGHTS), mapper, X), gradients_of(serial, X, WEIGHTS))
        assert_close(mapper(X), serial(X))


NO_GRADIENT_IN_LOOPS = pytest.mark.private("another gradient for an op, where TensorFlow's own fails in a loop")
CONVERTED = pytest.mark.private("what makes vectorising safe")
SECOND_ORDER = {
    "batch": (partial(FUNCTIONS["batch"][0], WEIGHTS), X, {"batched": True}),
    "embedding": (partial(_embedded, WEIGHTS), X, {}),
    **{name: (fn, functions.SQUARES[:4], {"vectorize": False}) for name, fn in functions.VALUES_ALONE.items()},
}


@pytest.mark.in_ci(4)
@pytest.mark.parametrize("place", [*PLACES.values()][:2], ids=[*PLACES][:2])
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(
            name, marks=[NO_GRADIENT_IN_LOOPS if name in functions.VALUES_ALONE else CONVERTED] * (name != "batch")
        )
        for name in SECOND_ORDER
    ],
)
def test_second_order(devices: list[str], name: str, place: Any) -> None:
    fn, rows, options = SECOND_ORDER[name]
    mapper = devicemap.DeviceMap(fn, devices=devices, **options)
    serial = fn if "batched" in options else partial(one_by_one, fn)
    tolerances = {"rtol": 1e-7, "atol": 1e-8} if rows.dtype == tf.float64 else {"rtol": 1e-3, "atol": 1e-4}
    assert_close(place(_first_and_second, mapper, rows), _first_and_second(serial, rows), **tolerances)
    if name not in functions.VALUES_ALONE:
        assert_close(place(_jacobian, mapper, rows), _jacobian(serial, rows), **tolerances)


def _sum_of_squares(result: Any) -> Any:
    return tf.add_n([tf.reduce_sum(part**2) for part in tf.nest.flatten(result, True) if part.dtype.is_floating])


RAGGED = {
    "ragged to dense": (lambda row: tf.reduce_sum(tf.sin(row) * SCALE), [2, 0, 1, 3, 0]),
    "ragged to ragged": (lambda row: tf.sin(row) * SCALE, [2, 0, 1, 3, 0]),
    "dense to ragged": (lambda row: tf.RaggedTensor.from_row_lengths(row * SCALE, [1, 0, 2]), None),
    "dense to sparse": (lambda row: tf.sparse.from_dense(tf.nn.relu(row[::2] * SCALE - 1.0)), None),
}


@pytest.mark.in_ci(2)
@places
@pytest.mark.parametrize("name", RAGGED)
def test_gradients_of_ragged_and_sparse_rows(devices: list[str], name: str, place: Any) -> None:
    fn, lengths = RAGGED[name]
    values = tf.reshape(X, [-1])[:6] if lengths else X

    def taken(loss: Any, values: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(values)
            total = loss(tf.RaggedTensor.from_row_lengths(values, lengths) if lengths else values)
        return tape.gradient(total, [values, SCALE])

    mapper = devicemap.DeviceMap(fn, devices=devices)
    got = place(taken, lambda rows: _sum_of_squares(mapper(rows)), values)
    assert_close(got, taken(lambda rows: tf.add_n([_sum_of_squares(fn(row)) for row in rows]), values))


def test_gradients_of_sparse_rows_in_any_order(devices: list[str]) -> None:
    values = tf.constant([1.0, 2.0, 3.0, 4.0])
    places = tf.constant([[2, 1], [0, 2], [6, 0], [0, 0]], tf.int64)
    mapper = devicemap.DeviceMap(
        lambda row: tf.reduce_sum(tf.sparse.to_dense(row, validate_indices=False)) ** 2, devices=devices
    )
    with tf.GradientTape() as tape:
        tape.watch(values)
        result = mapper(tf.SparseTensor(places, values, [7, 3]))
        loss = tf.reduce_sum(result)
    assert result.numpy().tolist() == [36.0, 0.0, 1.0, 0.0, 0.0, 0.0, 9.0]
    assert tape.gradient(loss, values).numpy().tolist() == [2.0, 12.0, 6.0, 12.0]


@pytest.mark.in_ci(2)
@pytest.mark.private("where gradients are computed")
@pytest.mark.parametrize("place", ["eager", "tf.function"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_backward_work_runs_where_the_forward_work_ran(name: str, place: str) -> None:
    # A call that assigns copies of variables stays a function of its own in the user's; there TensorFlow shows no parts of it.
    weights = tf.Variable(tf.eye(3)) if place == "eager" else tf.eye(3)
    fn, options = FUNCTIONS[name]
    mapper = devicemap.DeviceMap(partial(fn, weights), devices=["CPU:1", "CPU:2"], **options)
    rows = X[:6]  # as many for each device, so that TensorFlow finds the same constants in each
    gradients = lambda: gradients_of(mapper, rows, weights)
    graphs = partitions(gradients if place == "eager" else tf.function(gradients))
    assert between_devices(graphs) == []
    assert not [edge for edge in edges(graphs) if edge.control]
    counts = {device: sum(ops.values()) for device, ops in ops_on(graphs).items()}
    assert counts["CPU:1"] == counts["CPU:2"]
    # where rows are cut and joined there is no part of a loop, and nothing that computes
    on_host = ops_on(graphs)["CPU:0"]
    assert not {"Enter", "NextIteration", "MatMul", "_FusedMatMul", "Tanh", "TanhGrad"} & set(on_host)
    assert placements(graphs, "MatMul")["CPU:1"]


@tf.custom_gradient
def _reversed(row: Any) -> Any:
    return 1.0 * row, lambda upstream: -upstream


@tf.RegisterGradient("FiveForEach")
def _five(op: Any, upstream: Any) -> Any:
    return 5.0 * tf.ones_like(upstream)


def _overridden(row: Any) -> Any:
    with tf.compat.v1.get_default_graph().gradient_override_map({"Sin": "FiveForEach"}):
        return tf.sin(row)


@pytest.mark.in_ci(4)
@pytest.mark.private("what makes vectorising safe")
@pytest.mark.parametrize(
    ("fn", "wanted"),
    [
        (_reversed, -1.0),
        (lambda row: _inner_reversed(row), -1.0),
        (tf.grad_pass_through(tf.round), 1.0),
        (_overridden, 5.0),
    ],
    ids=["custom", "in a function", "passed through", "overridden"],
)
def test_custom_gradients_are_kept(fn: Any, wanted: float) -> None:
    mapper = devicemap.DeviceMap(fn, devices=["CPU:1", "CPU:2"])

    def check(mapped: Any) -> None:
        with tf.GradientTape() as tape:
            tape.watch(X)
            total = tf.reduce_sum(mapped(X))
        np.testing.assert_array_equal(tape.gradient(total, X), wanted * tf.ones_like(X))

    check(mapper)
    plan = mapper.explain(X)  # of a call without a tape
    assert plan.vectorized
    assert "custom gradient" in plan.reason
    np.testing.assert_array_equal(mapper(X), tf.map_fn(fn, X))
    check(tf.function(lambda x: mapper(x)))


_inner_reversed = tf.function(lambda row: _reversed(_reversed(_reversed(row))))


@pytest.mark.in_ci(1)
@pytest.mark.private("where gradients are computed")
@pytest.mark.parametrize("name", [name for name in FUNCTIONS if "loop" in name])
def test_what_a_loop_leaves_for_its_gradient_stays_on_its_device(name: str) -> None:
    fn, options = FUNCTIONS[name]
    mapper = devicemap.DeviceMap(partial(fn, WEIGHTS), devices=["CPU:1", "CPU:2"], name="worker", **options)
    graphs = partitions(lambda: gradients_of(mapper, X))
    ends = [
        node for graph in graphs for node in graph.node if node.op in ("_Arg", "_Retval") and "worker_" in node.name
    ]
    lists = [node for node in ends if node.attr["T"].type == tf.variant.as_datatype_enum]
    assert {node.op for node in lists} == {"_Arg", "_Retval"}
    for node in lists:
        assert node.device[-5:] == ("CPU:1" if "worker_0" in node.name else "CPU:2")


_in_a_loop = partial(_looping, WEIGHTS)


@tf.custom_gradient
def _seven_fold(x: Any) -> Any:
    return tf.sin(x), lambda upstream: 7.0 * upstream


@pytest.mark.in_ci(2)
@pytest.mark.private("gradients through copies of variables")
@pytest.mark.parametrize(
    ("around", "fn", "options"),
    [
        ("loop", _in_a_loop, {}),
        ("updating loop", _in_a_loop, {"vectorize": False}),
        ("function in a loop", _in_a_loop, {}),
        ("function in a loop", lambda row: _seven_fold(tf.linalg.matvec(WEIGHTS, row)), {"vectorize": False}),
        ("branch", _in_a_loop, {"jit_compile": True}),
        ("branch", lambda row: tf.tanh(tf.linalg.matvec(WEIGHTS, row)), {}),
        ("branch with one row", lambda row: tf.tanh(tf.linalg.matvec(WEIGHTS, row)), {}),
    ],
)
def test_a_tape_around_a_loop_or_branch_that_calls_a_map(
    devices: list[str], around: str, fn: Any, options: dict[str, Any]
) -> None:
    if devices[0].startswith("GPU"):  # for those in software, XLA does not compile
        options = {}
    mapper = devicemap.DeviceMap(fn, devices=devices, **options)

    def several(mapped: Any, x: Any) -> Any:
        if around.startswith("branch"):
            x = x[:1] if around == "branch with one row" else x
            return tf.cond(tf.reduce_sum(x) > -1e9, lambda: mapped(x), lambda: x)
        for _ in tf.range(3):
            x = mapped(x)
            if around == "updating loop":
                WEIGHTS.assign(WEIGHTS * 1.1)
        return x

    before = tf.identity(WEIGHTS)
    wanted = gradients_of(partial(several, partial(one_by_one, fn)), X, WEIGHTS)
    WEIGHTS.assign(before)
    called = tf.function(lambda x: mapper(x)) if around == "function in a loop" else mapper
    called(X)
    in_a_graph = tf.function(lambda: gradients_of(partial(tf.autograph.to_graph(several), called), X, WEIGHTS))
    assert_close(in_a_graph(), wanted)
    WEIGHTS.assign(before)


def _until_it_is_large(row: Any) -> Any:
    while tf.reduce_sum(row) < 20.0:
        row = row * 1.5 + 1.0
    return row


def test_known_rows_and_a_loop_that_rows_leave_at_different_times(devices: list[str]) -> None:
    """One row for a device, two rows for some, and several for the only device."""
    for used, rows in ((devices, len(devices)), (devices, 2 * len(devices) - 1), (devices[:1], 7)):
        mapper, x = devicemap.DeviceMap(_until_it_is_large, devices=used), X[:rows]
        got = tf.function(lambda x, m=mapper: gradients_of(m, x))(x)
        assert_close(got, gradients_of(partial(one_by_one, _until_it_is_large), x))


@pytest.mark.private("what a ForwardAccumulator follows, and whether a tape is recording")
@places
def test_gradients_of_rows_one_by_one_with_hard_placement(place: Any, devices: list[str]) -> None:
    def fn(row: Any) -> Any:
        return tf.reduce_sum(tf.boolean_mask(row, row > 0.5))

    tf.config.set_soft_device_placement(False)
    try:
        got = place(_gradients(), devicemap.DeviceMap(fn, devices=devices), X)
    finally:
        tf.config.set_soft_device_placement(True)
    assert_close(got, gradients_of(partial(one_by_one, fn), X))


@pytest.mark.private("knowing whether a tape is recording")
def test_gradients_that_do_not_go_through_are_refused() -> None:
    mapper = devicemap.DeviceMap(tf.sin, devices=["CPU:1", "CPU:2"])
    with (
        tf.autodiff.ForwardAccumulator(X, tf.ones_like(X)),
        pytest.raises(devicemap.errors.DataError, match=r"use a tf\.GradientTape"),
    ):
        mapper(X)
    for data in (X, tf.data.Dataset.from_tensor_slices(X)):
        with tf.GradientTape() as tape:
            message = "GradientTape is recording, and gradients do not go through chunks.* batch_size and on_"
            with pytest.raises(devicemap.errors.OptionError, match=message):
                devicemap.parallel_map(tf.sin, data, batch_size=2)
            with tape.stop_recording():
                np.testing.assert_allclose(devicemap.parallel_map(tf.sin, data, batch_size=2), tf.sin(X), rtol=1e-6)


@pytest.mark.private("knowing that XLA compiles")
def test_gradients_of_rows_one_by_one_in_a_compiled_function(devices: list[str]) -> None:
    if devices[0].startswith("GPU"):
        pytest.skip("not applicable: XLA does not compile for emulated GPUs")
    mapper = devicemap.DeviceMap(lambda row: tf.sin(row) * row, vectorize=False, devices=devices)
    gradient = tf.function(lambda x: gradients_of(mapper, x), jit_compile=True)
    assert_close(gradient(X), gradients_of(lambda x: tf.sin(x) * x, X))


@pytest.mark.in_ci(1)
@pytest.mark.parametrize("options", [{}, {"vectorize": False}, {"batched": True}], ids=str)
@places
def test_gradients_of_no_rows_are_zeros(place: Any, options: dict[str, Any], devices: list[str]) -> None:
    mapper = devicemap.DeviceMap(lambda x: tf.sin(tf.reshape(x, [-1, 3]) @ WEIGHTS), devices=devices, **options)

    def taken(mapped: Any, x: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            total = tf.reduce_sum(mapped(x))
        return tape.gradient(total, [x, WEIGHTS])

    for mapped in (mapper, lambda x: mapper.reduce(x, "sum")):
        of_rows, of_weights = place(taken, mapped, X[:0])
        assert of_rows.shape == [0, 3]
        np.testing.assert_array_equal(of_weights, tf.zeros([3, 3]))
        assert np.any(taken(mapped, X)[1])  # a call without rows leaves the next one alone


def test_a_taped_call_while_another_thread_builds_a_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph that is being built captures replicas of variables, which no tape follows."""
    variable = tf.Variable(3.0)
    mapper = devicemap.DeviceMap(lambda row: row * variable, devices=["CPU:1", "CPU:2"])
    x = tf.ones([4])

    def gradient() -> Any:
        with tf.GradientTape() as tape:
            y = mapper(x)
        return tape.gradient(y, variable)

    assert float(gradient()) == 4.0
    with_captures = graph_builder.with_captures
    building, go_on = threading.Event(), threading.Event()

    def slow(*args: Any) -> Any:
        building.set()
        go_on.wait(0.5)
        return with_captures(*args)

    monkeypatch.setattr(graph_builder, "with_captures", slow)
    builder = threading.Thread(target=mapper, args=(tf.ones([1]),))  # of one shard, which has no graph yet
    builder.start()
    assert building.wait(20)
    try:
        found = gradient()
    finally:
        go_on.set()
        builder.join()
    assert found is not None
    assert float(found) == 4.0


def _sent_together(row: Any) -> Any:
    return row * SCALE + tf.stop_gradient(SHIFT) * row + tf.gather(WEIGHTS, 1) + BIAS


def _looked_up_by(indices: Any, batch: Any) -> Any:
    return batch * tf.reduce_sum(tf.gather(WEIGHTS, indices(batch)), -2) * SCALE + BIAS


NUMBERS = [0, 2, 2, 1, -1]
SLICES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "a row": (lambda i: WEIGHTS[i], NUMBERS, {}),
    "a number": (lambda i: tf.convert_to_tensor(BIAS)[i] * WEIGHTS[0], NUMBERS, {}),
    "a part": (lambda i: WEIGHTS[i, :2], NUMBERS, {}),
    "rows of all": (partial(_looked_up_by, lambda _: [0, 1, 1]), X, {"batched": True}),
    "a row of each": (partial(_looked_up_by, lambda batch: tf.argmax(batch, 1)[:, None]), X, {"batched": True}),
    "variables that are sent together, of which one has no gradient": (_sent_together, X, {}),
}


@places
@pytest.mark.private("gradients of the variables on each device by themselves")
@pytest.mark.parametrize("name", SLICES)
def test_optimizers_square_what_they_do_in_the_serial_map(name: str, place: Any, devices: list[str]) -> None:
    """Optimizers of Keras square each slice of `tf.IndexedSlices`."""

    def gradients(mapped: Any, x: Any) -> list[Any]:
        with tf.GradientTape() as tape:
            total = tf.reduce_sum(mapped(x) ** 2)
        return tape.gradient(total, [WEIGHTS, BIAS, SCALE, SHIFT])

    fn, rows, options = SLICES[name]
    rows = tf.constant(rows)
    serial = fn if options else lambda x: tf.map_fn(fn, x, fn_output_signature=tf.float32)
    found, wanted = place(gradients, devicemap.DeviceMap(fn, devices=devices, **options), rows), gradients(serial, rows)
    assert [each is None for each in found] == [each is None for each in wanted]
    for got, expected in zip(found, wanted):
        if got is not None:
            assert_close(tf.convert_to_tensor(got), tf.convert_to_tensor(expected))
            if fn is not _sent_together:  # which gathers by itself, outside of what is sent
                assert_close(*(tf.norm(getattr(each, "values", each)) for each in (got, expected)))
