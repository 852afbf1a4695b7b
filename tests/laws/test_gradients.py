"""Law 6: gradients of an in-memory map are those of the serial map, wherever the tape is."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from graphs import between_devices, edges, ops_on, partitions, placements

import devicemap

X = tf.reshape(tf.range(21, dtype=tf.float32), [7, 3]) / 10


@pytest.mark.parametrize("batched", [False, True])
@pytest.mark.parametrize("place", ["eager", "tape inside tf.function", "tape outside tf.function"])
def test_gradients_are_those_of_the_serial_map(devices: list[str], batched: bool, place: str) -> None:
    weights = tf.Variable(tf.reshape(tf.range(9, dtype=tf.float32), [3, 3]) / 9)

    def fn(x: Any) -> Any:
        return tf.tanh(x @ weights if batched else tf.linalg.matvec(weights, x)) * x

    mapper = devicemap.DeviceMap(fn, devices=devices, batched=batched)

    def gradients(mapped: Any, x: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = tf.reduce_sum(mapped(x) ** 2)
        return tape.gradient(loss, [x, weights])

    def serial(x: Any) -> Any:
        return fn(x) if batched else tf.map_fn(fn, x)

    wanted = gradients(serial, X)
    mapped = tf.function(lambda x: mapper(x)) if place.startswith("tape outside") else mapper
    run = (
        tf.function(lambda x: gradients(mapped, x))
        if place.startswith("tape inside")
        else lambda x: gradients(mapped, x)
    )
    for got, want in zip(run(X), wanted):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.private("gradients of what several maps share are built one after another")
def test_maps_in_threads_may_share_a_function() -> None:
    data = tf.eye(3, batch_shape=[4]) * tf.range(1.0, 4.0)

    def gradient(shared: Any) -> Any:
        mapper = devicemap.DeviceMap(lambda row: shared(row), devices=["CPU:1", "CPU:2"], vectorize=False)
        with tf.GradientTape() as tape:
            tape.watch(data)
            total = tf.reduce_sum(mapper(data) ** 2)
        return tape.gradient(total, data)

    for _ in range(3):
        shared = tf.function(tf.linalg.eigvalsh)
        with ThreadPoolExecutor(4) as pool:
            for got in pool.map(gradient, [shared] * 4):
                np.testing.assert_allclose(got, 2 * data, rtol=1e-5, atol=1e-5)


def _with_a_function_within() -> Any:
    norm = tf.function(lambda row: tf.reduce_sum(tf.linalg.svd(row, compute_uv=False)))
    return lambda row: norm(row) ** 2


@pytest.mark.private("another gradient for an op, where TensorFlow's own fails in a loop")
@pytest.mark.parametrize("place", ["eager", "tf.function"])
@pytest.mark.parametrize(
    "make",
    [
        lambda: lambda row: tf.linalg.svd(row, compute_uv=False),
        _with_a_function_within,
        lambda: lambda row: tf.linalg.eigvalsh(row + tf.transpose(row)),
        lambda: lambda row: tf.abs(tf.linalg.eigvals(row)),
    ],
)
def test_gradients_of_values_without_their_vectors(devices: list[str], make: Any, place: str) -> None:
    fn = make()
    matrices = tf.constant(np.random.default_rng(0).normal(size=[7, 3, 3]))

    def first_and_second(mapped: Any) -> Any:
        with tf.GradientTape() as outer:
            outer.watch(matrices)
            with tf.GradientTape() as inner:
                inner.watch(matrices)
                loss = tf.reduce_sum(mapped(matrices) ** 2)
            first = inner.gradient(loss, matrices)
        return first, outer.gradient(first, matrices)

    mapper = devicemap.DeviceMap(fn, devices=devices, vectorize=False)
    run = tf.function(first_and_second, autograph=False) if place == "tf.function" else first_and_second
    mapped = run(mapper)  # first: TensorFlow keeps the gradients that it once made for a tf.function within fn
    wanted = first_and_second(lambda rows: tf.stack([fn(row) for row in rows]))
    for got, want in zip(mapped, wanted):
        np.testing.assert_allclose(got, want, rtol=1e-7, atol=1e-8)


WEIGHTS = tf.Variable(tf.reshape(tf.range(9, dtype=tf.float32), [3, 3]) / 9)


def _in_a_loop(row: Any) -> Any:
    for _ in tf.range(3):
        row = tf.tanh(tf.linalg.matvec(WEIGHTS, row))
    return row


@pytest.mark.parametrize("vectorize", ["auto", False])
@pytest.mark.parametrize("fn", [_in_a_loop, lambda row: tf.linalg.matvec(WEIGHTS, tf.sin(row))])
def test_gradients_where_the_graph_does_not_know_how_many_rows_there_are(
    devices: list[str], fn: Any, vectorize: Any
) -> None:
    """As in the `train_step` of a Keras model."""
    mapper = devicemap.DeviceMap(fn, devices=devices, vectorize=vectorize)

    def gradients(x: Any, mapped: Any = mapper) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = tf.reduce_sum(mapped(x) ** 2)
        return tape.gradient(loss, [x, WEIGHTS])

    step = tf.function(gradients, input_signature=[tf.TensorSpec([None, 3])])
    for rows in (1, 2, 7):
        wanted = gradients(X[:rows], lambda x: tf.map_fn(fn, x))
        for got, want in zip(step(X[:rows]), wanted):
            np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("place", ["eager", "tf.function"])
def test_gradients_of_what_was_drawn_with_a_seed(devices: list[str], place: str) -> None:
    scale = tf.Variable(2.0)
    fn = lambda row: scale * row * tf.random.normal([3], seed=2)
    mapper = devicemap.DeviceMap(fn, devices=devices, vectorize=False)

    def first_and_second() -> Any:
        with tf.GradientTape() as outer:
            with tf.GradientTape() as inner:
                loss = tf.reduce_sum(mapper(X) ** 2)
            first = inner.gradient(loss, scale)
        return loss, first, outer.gradient(first, scale)

    loss, first, second = tf.function(first_and_second)() if place == "tf.function" else first_and_second()
    np.testing.assert_allclose([first, second], [loss, loss / 2], rtol=1e-4)


def test_gradients_through_python_functions(devices: list[str]) -> None:
    mapper = devicemap.DeviceMap(
        lambda batch: tf.ensure_shape(tf.py_function(lambda b: b**3, [batch], tf.float32), [None, 3]),
        devices=devices,
        batched=True,
    )
    for _ in range(2):
        with tf.GradientTape() as tape:
            tape.watch(X)
            total = tf.reduce_sum(mapper(X))
        np.testing.assert_allclose(tape.gradient(total, X), 3 * X**2, rtol=1e-5)


def _sum_of_squares(result: Any) -> Any:
    if isinstance(result, tf.RaggedTensor):
        return tf.reduce_sum(result.flat_values**2)
    return tf.reduce_sum((result.values if isinstance(result, tf.SparseTensor) else result) ** 2)


SCALE = tf.Variable(2.0)
RAGGED = {
    "ragged to dense": (lambda row: tf.reduce_sum(tf.sin(row) * SCALE), [2, 0, 1, 3, 0]),
    "ragged to ragged": (lambda row: tf.sin(row) * SCALE, [2, 0, 1, 3, 0]),
    "dense to ragged": (lambda row: tf.RaggedTensor.from_row_lengths(row * SCALE, [1, 0, 2]), None),
    "dense to sparse": (lambda row: tf.sparse.from_dense(tf.nn.relu(row[::2] * SCALE - 1.0)), None),
}


@pytest.mark.parametrize("place", ["eager", "tape inside tf.function", "tape outside tf.function"])
@pytest.mark.parametrize("name", RAGGED)
def test_gradients_of_ragged_and_sparse_rows(devices: list[str], name: str, place: str) -> None:
    fn, lengths = RAGGED[name]
    values = tf.reshape(X, [-1])[:6] if lengths else X

    def rows_of(values: Any) -> Any:
        return tf.RaggedTensor.from_row_lengths(values, lengths) if lengths else values

    def gradients(mapped: Any, values: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(values)
            loss = mapped(rows_of(values))
        return tape.gradient(loss, [values, SCALE])

    mapper = devicemap.DeviceMap(fn, devices=devices)
    whole = lambda rows: _sum_of_squares(mapper(rows))
    mapped = tf.function(whole) if place.startswith("tape outside") else whole
    run = tf.function(gradients) if place.startswith("tape inside") else gradients
    wanted = gradients(lambda rows: tf.add_n([_sum_of_squares(fn(row)) for row in rows]), values)
    for got, want in zip(run(mapped, values), wanted):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


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


def test_several_maps_in_one_tape_and_second_order() -> None:
    scale = tf.Variable(2.0)
    mapper = devicemap.DeviceMap(lambda row: tf.sin(row) * scale, devices=["CPU:1", "CPU:2"])
    with tf.GradientTape() as outer:
        outer.watch(X)
        with tf.GradientTape() as inner:
            inner.watch(X)
            y = tf.reduce_sum(mapper(mapper(X)))
        first = inner.gradient(y, X)
        total = tf.reduce_sum(first)
    np.testing.assert_allclose(first, 4 * np.cos(2 * np.sin(X)) * np.cos(X), rtol=1e-4)
    of_x, of_scale = outer.gradient(total, [X, scale])
    wanted = -4 * (np.sin(2 * np.sin(X)) * 2 * np.cos(X) ** 2 + np.cos(2 * np.sin(X)) * np.sin(X))
    np.testing.assert_allclose(of_x, wanted, rtol=1e-3, atol=1e-3)
    assert of_scale is not None


def _simulate(weights: Any) -> Any:
    def step(row: Any) -> Any:
        for _ in tf.range(3):
            row = tf.tanh(tf.linalg.matvec(weights, row))
        return row

    return step


@pytest.mark.parametrize("place", ["eager", "tf.function"])
@pytest.mark.parametrize(
    ("name", "options"),
    [("batch", {"batched": True}), ("loop", {}), ("loop", {"vectorize": False}), ("embedding", {})],
)
def test_second_order_reaches_inputs_and_variables(name: str, options: dict[str, Any], place: str) -> None:
    weights = tf.Variable(tf.reshape(tf.range(9, dtype=tf.float32), [3, 3]) / 9)
    fn = {
        "batch": lambda b: tf.tanh(b @ weights) @ weights,
        "loop": _simulate(weights),
        "embedding": lambda row: tf.reduce_prod(tf.gather(weights, tf.cast(row[:2], tf.int32)), 0) * row,
    }[name]
    mapper = devicemap.DeviceMap(fn, devices=["CPU:1", "CPU:2", "CPU:0"], **options)

    def serial(x: Any) -> Any:
        return fn(x) if "batched" in options else tf.map_fn(fn, x)

    def gradients(mapped: Any, x: Any) -> Any:
        with tf.GradientTape() as outer:
            outer.watch(x)
            with tf.GradientTape() as inner:
                inner.watch(x)
                loss = tf.reduce_sum(mapped(x) ** 2)
            first = [tf.convert_to_tensor(g) for g in inner.gradient(loss, [x, weights])]
            total = tf.add_n([tf.reduce_sum(g**2) for g in first])
        return [*first, *map(tf.convert_to_tensor, outer.gradient(total, [x, weights]))]

    run = gradients if place == "eager" else tf.function(gradients)
    for got, want in zip(run(mapper, X), tf.function(gradients)(serial, X)):
        np.testing.assert_allclose(got, want, rtol=1e-3, atol=1e-4)


def _looping_over_batches(weights: Any) -> Any:
    def fn(batch: Any) -> Any:
        for _ in tf.range(3):
            batch = tf.tanh(batch @ weights)
        return batch

    return fn


FUNCTIONS = {
    "batch": (lambda weights: lambda b: tf.tanh(b @ weights) @ weights, {"batched": True}),
    "loop over a batch": (_looping_over_batches, {"batched": True}),
    "gather from a batch": (lambda weights: lambda b: tf.gather(b @ weights, [2, 0, 0], axis=1), {"batched": True}),
    "loop": (_simulate, {}),
    "loop, mapped": (_simulate, {"vectorize": False}),
}


@pytest.mark.private("where gradients are computed")
@pytest.mark.parametrize("place", ["eager", "tf.function"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_backward_work_runs_where_the_forward_work_ran(name: str, place: str) -> None:
    # A call that assigns copies of variables stays a function of its own in the user's; there TensorFlow shows no parts of it.
    weights = tf.Variable(tf.eye(3)) if place == "eager" else tf.eye(3)
    make, options = FUNCTIONS[name]
    mapper = devicemap.DeviceMap(make(weights), devices=["CPU:1", "CPU:2", "CPU:3"], **options)
    rows = X[:6]  # as many for each device, so that TensorFlow finds the same constants in each

    def gradients() -> Any:
        with tf.GradientTape() as tape:
            tape.watch([rows, weights])
            loss = tf.reduce_sum(mapper(rows) ** 2)
        return tape.gradient(loss, [rows, weights])

    graphs = partitions(gradients if place == "eager" else tf.function(gradients))
    assert between_devices(graphs) == []
    assert not [edge for edge in edges(graphs) if edge.control]
    counts = {device: sum(ops.values()) for device, ops in ops_on(graphs).items()}
    assert counts["CPU:1"] == counts["CPU:2"] == counts["CPU:3"]
    # where rows are cut and joined there is no part of a loop, and nothing that computes
    on_host = ops_on(graphs)["CPU:0"]
    assert not {"Enter", "NextIteration", "MatMul", "_FusedMatMul", "Tanh", "TanhGrad"} & set(on_host)
    assert placements(graphs, "MatMul")["CPU:1"]


@tf.custom_gradient
def _reversed(row: Any) -> Any:
    return 1.0 * row, lambda upstream: -upstream


@pytest.mark.private("what makes vectorising safe")
@pytest.mark.parametrize(
    ("fn", "wanted"),
    [(_reversed, -1.0), (lambda row: _inner_reversed(row), -1.0), (tf.grad_pass_through(tf.round), 1.0)],
    ids=["custom", "in a function", "passed through"],
)
def test_custom_gradients_are_kept(fn: Any, wanted: float) -> None:
    mapper = devicemap.DeviceMap(fn, devices=["CPU:1", "CPU:2"])
    for mapped in (mapper, lambda x: tf.map_fn(fn, x)):
        with tf.GradientTape() as tape:
            tape.watch(X)
            total = tf.reduce_sum(mapped(X))
        np.testing.assert_array_equal(tape.gradient(total, X), wanted * tf.ones_like(X))
    plan = mapper.explain(X)  # of a call without a tape
    assert plan.vectorized
    assert "one by one where a GradientTape may record, because fn has a custom gradient" in plan.reason
    np.testing.assert_array_equal(mapper(X), tf.map_fn(fn, X))
    inside = tf.function(lambda x: mapper(x))
    with tf.GradientTape() as tape:
        tape.watch(X)
        total = tf.reduce_sum(inside(X))
    np.testing.assert_array_equal(tape.gradient(total, X), wanted * tf.ones_like(X))


_inner_reversed = tf.function(lambda row: _reversed(_reversed(_reversed(row))))


def test_tapes_of_all_kinds_take_turns(devices: list[str]) -> None:
    """With a function whose loop hands variables on."""
    lstm = tf.keras.layers.LSTM(3, use_cudnn=False)
    lstm.build([None, None, 1])

    def fn(row: Any) -> Any:
        return lstm(row[None, :, None])[0]

    def once(mapped: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(X)
            total = tf.reduce_sum(mapped(X) ** 2)
        return [tape.gradient(total, [X, *lstm.weights])]

    def twice(mapped: Any) -> Any:
        with tf.GradientTape(persistent=True) as tape:
            tape.watch(X)
            total = tf.reduce_sum(mapped(X) ** 2)
        return [tape.gradient(total, [X, *lstm.weights]) for _ in range(2)]

    def nested(mapped: Any) -> Any:
        with tf.GradientTape() as outer:
            outer.watch(X)
            with tf.GradientTape() as inner:
                inner.watch(X)
                total = tf.reduce_sum(mapped(X) ** 2)
            first = inner.gradient(total, [X, *lstm.weights])
            of_first = tf.add_n([tf.reduce_sum(gradient**2) for gradient in first])
        return [first, outer.gradient(of_first, [X, *lstm.weights])]

    mapper = devicemap.DeviceMap(fn, devices=devices)
    wanted = nested(lambda x: tf.map_fn(fn, x))
    for kind in (None, once, twice, None, nested, once):
        np.testing.assert_allclose(mapper(X), tf.map_fn(fn, X), rtol=1e-4, atol=1e-6)
        for got, want in zip(kind(mapper) if kind else [], wanted if kind is nested else wanted[:1] * 2):
            for a, b in zip(got, want):
                np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-5)


@pytest.mark.private("where gradients are computed")
@pytest.mark.parametrize("name", [name for name in FUNCTIONS if "loop" in name])
def test_what_a_loop_leaves_for_its_gradient_stays_on_its_device(name: str) -> None:
    make, options = FUNCTIONS[name]
    mapper = devicemap.DeviceMap(make(tf.Variable(tf.eye(3))), devices=["CPU:1", "CPU:2"], name="worker", **options)

    def gradient() -> Any:
        with tf.GradientTape() as tape:
            tape.watch(X)
            loss = tf.reduce_sum(mapper(X) ** 2)
        return tape.gradient(loss, X)

    graphs = partitions(gradient)
    ends = [
        node for graph in graphs for node in graph.node if node.op in ("_Arg", "_Retval") and "worker_" in node.name
    ]
    lists = [node for node in ends if node.attr["T"].type == tf.variant.as_datatype_enum]
    assert {node.op for node in lists} == {"_Arg", "_Retval"}
    for node in lists:
        assert node.device[-5:] == ("CPU:1" if "worker_0" in node.name else "CPU:2")


@pytest.mark.parametrize("place", ["eager", "tape inside tf.function", "tape outside tf.function"])
@pytest.mark.parametrize("beside", ["a counter", "a table", "an order", "a generator"])
def test_loops_that_read_variables_beside_what_stays_where_it_is(beside: str, place: str) -> None:
    """TensorFlow has one device for all variables that such a loop hands on."""
    weights, count, mean = tf.Variable([1.0, 2.0, 3.0]), tf.Variable(0.0), tf.Variable([0.0, 0.0, 0.0])
    keys = tf.lookup.KeyValueTensorInitializer(tf.range(3), tf.constant([1.0, 2.0, 3.0]))
    table, generator = tf.lookup.StaticHashTable(keys, 0.0), tf.random.Generator.from_seed(1)

    def used(row: Any) -> Any:
        if beside == "a counter":
            count.assign_add(1.0)
        elif beside == "an order":
            mean.assign(mean * 0.5 + row)
            return mean
        elif beside == "a generator":
            return 0.0 * generator.normal([3])
        return table.lookup(tf.constant([0, 1, 2]))

    def fn(row: Any) -> Any:
        return row * weights + used(row)

    def gradients(mapped: Any) -> Any:
        mean.assign([0.0, 0.0, 0.0])
        with tf.GradientTape() as tape:
            tape.watch(X)
            loss = tf.reduce_sum(mapped(X) ** 2)
        return tape.gradient(loss, [X, weights])

    mapper = devicemap.DeviceMap(fn, devices=["CPU:1", "CPU:2", "CPU:3"])
    mapped = tf.function(lambda x: mapper(x)) if place.startswith("tape outside") else mapper
    run = tf.function(gradients) if place.startswith("tape inside") else gradients
    results = run(mapped)
    assert float(count) == (7.0 if beside == "a counter" else 0.0)
    for got, want in zip(results, tf.function(gradients)(lambda x: tf.map_fn(fn, x))):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("acts", [False, True])
@pytest.mark.parametrize("batched", [False, True])
def test_ops_that_ask_for_the_device_of_a_variable(batched: bool, acts: bool) -> None:
    """`tf.nn.embedding_lookup` does, by the name of its handle: one name for the copies on all devices."""
    table = tf.Variable(tf.reshape(tf.range(24.0), [8, 3]))

    def fn(rows: Any) -> Any:
        if acts:  # not optimised then, and so inlined as it is
            tf.print("", output_stream="file:///dev/null")
        return tf.nn.embedding_lookup(table, tf.cast(rows, tf.int32)) ** 2

    mapper = devicemap.DeviceMap(fn, devices=["CPU:1", "CPU:2", "CPU:3"], batched=batched)

    def gradients(mapped: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(X)
            y = mapped(X)
        return y, tf.convert_to_tensor(tape.gradient(y, table))

    for got, wanted in zip(gradients(mapper), gradients(fn)):
        np.testing.assert_allclose(got, wanted, rtol=1e-5)
    np.testing.assert_allclose(mapper(X), fn(X), rtol=1e-5)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_calls_with_and_without_a_tape_take_turns(name: str, devices: list[str]) -> None:
    weights = tf.Variable(tf.reshape(tf.range(9, dtype=tf.float32), [3, 3]) / 9)
    make, options = FUNCTIONS[name]
    fn = make(weights)
    mapper = devicemap.DeviceMap(fn, devices=devices, **options)
    wanted = fn(X) if "batched" in options else tf.map_fn(fn, X)
    plans = []
    for _ in range(2):
        plans.append(mapper.explain(X))
        with tf.GradientTape() as tape:
            tape.watch(X)
            np.testing.assert_allclose(mapper(X), wanted, rtol=1e-5)
        assert tape.gradient(mapper(X), X) is None
        np.testing.assert_allclose(mapper(X), wanted, rtol=1e-5)
        np.testing.assert_allclose(mapper(tf.data.Dataset.from_tensors(X)), wanted, rtol=1e-5) if (
            "batched" in options
        ) else None
    assert plans[0].to_dict() == plans[1].to_dict()


@pytest.mark.private("gradients through copies of variables")
@pytest.mark.parametrize("vectorize", ["auto", False])
@pytest.mark.parametrize(
    "around", ["a loop", "an updating loop", "a loop around a function", "a branch", "a second tape"]
)
def test_loops_that_read_a_variable_inside_what_is_around_the_call(
    devices: list[str], around: str, vectorize: Any
) -> None:
    scale = tf.Variable([0.5, 0.7, 0.9])

    def fn(row: Any) -> Any:
        for _ in tf.range(2):
            row = tf.sin(row) * scale
        return row

    def around_it(call: Any) -> Any:
        function = tf.function(lambda x: call(x))
        function(X)

        def several(x: Any) -> Any:
            for _ in tf.range(3):
                x = function(x) if around == "a loop around a function" else call(x)
                if around == "an updating loop":
                    scale.assign(scale * 1.1)
            return x

        @tf.function
        def gradients(x: Any) -> Any:
            with tf.GradientTape() as outer:
                outer.watch(x)
                with tf.GradientTape() as tape:
                    tape.watch(x)
                    if around == "a branch":
                        mapped = call(x) if tf.reduce_sum(x) > 0 else x
                    else:
                        mapped = several(x) if "loop" in around else call(x)
                    loss = tf.reduce_sum(mapped**3)
                found = tape.gradient(loss, [x, scale])
            return outer.gradient(found, [x, scale]) if around == "a second tape" else found

        scale.assign([0.5, 0.7, 0.9])
        return gradients

    mapped = around_it(devicemap.DeviceMap(fn, devices=devices, vectorize=vectorize))(X)
    for got, want in zip(mapped, around_it(lambda x: tf.map_fn(fn, x))(X)):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.private("gradients through copies of variables")
def test_an_update_between_two_calls_in_one_tape(devices: list[str]) -> None:
    scale = tf.Variable(2.0)
    mapper = devicemap.DeviceMap(lambda row: row * row * scale, devices=devices)

    def gradients(x: Any) -> Any:
        with tf.GradientTape(persistent=True) as tape:
            tape.watch(x)
            first = mapper(x)
            scale.assign_add(1.0)
            second = mapper(x)
        result = tape.gradient(first, x), tape.gradient(second, x)
        scale.assign_sub(1.0)
        return result

    for run in (gradients, tf.function(gradients), tf.function(gradients)):
        for got, factor in zip(run(X), (2.0, 3.0)):
            np.testing.assert_allclose(got, 2 * X * factor, rtol=1e-5)


def _until_it_is_large(row: Any) -> Any:
    while tf.reduce_sum(row) < 20.0:
        row = row * 1.5 + 1.0
    return row


def _and_twice_itself(row: Any) -> Any:
    return _until_it_is_large(row) + 2 * row


@pytest.mark.parametrize("fn", [_until_it_is_large, _and_twice_itself])
def test_one_known_row_for_a_device_and_a_loop_that_rows_leave_at_different_times(devices: list[str], fn: Any) -> None:
    def gradient(x: Any, vectorize: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = devicemap.DeviceMap(fn, devices=devices, vectorize=vectorize)(x)
        return tape.gradient(y, x)

    for rows in (len(devices), 2 * len(devices) - 1):
        x = X[: min(rows, len(X))]
        wanted = gradient(x, False)
        np.testing.assert_allclose(tf.function(gradient)(x, "auto"), wanted, rtol=1e-5)


@pytest.mark.parametrize("batched", [False, True])
def test_jacobians(batched: bool) -> None:
    weights = tf.Variable(tf.eye(3) * 2)
    fn = (lambda b: tf.tanh(b @ weights)) if batched else (lambda x: tf.tanh(tf.linalg.matvec(weights, x)))
    mapper = devicemap.DeviceMap(fn, devices=["CPU:1", "CPU:2"], batched=batched)
    with tf.GradientTape() as tape:
        tape.watch(X)
        y = mapper(X)
    wanted = tf.linalg.diag((1 - tf.tanh(2 * X) ** 2) * 2)
    np.testing.assert_allclose(tape.batch_jacobian(y, X), wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.private("what a ForwardAccumulator follows")
def test_forward_mode_is_refused() -> None:
    mapper = devicemap.DeviceMap(tf.sin, devices=["CPU:1", "CPU:2"])
    with (
        tf.autodiff.ForwardAccumulator(X, tf.ones_like(X)),
        pytest.raises(devicemap.errors.DataError, match=r"use a tf\.GradientTape"),
    ):
        mapper(X)


@pytest.mark.private("whether a tape is recording")
def test_gradients_through_chunks_are_refused_not_lost() -> None:
    with tf.GradientTape() as tape:
        with pytest.raises(devicemap.errors.OptionError, match="gradients do not go through chunks"):
            devicemap.parallel_map(tf.sin, X, batch_size=2)
        with tape.stop_recording():
            devicemap.parallel_map(tf.sin, X, batch_size=2)


def test_gradients_of_rows_one_by_one_in_a_compiled_function() -> None:
    mapper = devicemap.DeviceMap(lambda row: tf.sin(row) * row, vectorize=False, devices=["CPU:0"])

    @tf.function(jit_compile=True)
    def gradient(x: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = tf.reduce_sum(mapper(x))
        return tape.gradient(y, x)

    np.testing.assert_allclose(gradient(X), tf.cos(X) * X + tf.sin(X), rtol=1e-4, atol=1e-5)
