"""A pipeline is the composition of its stages, with the gradients of the whole batch, and its stages work at the same time."""

from __future__ import annotations

import gc
import itertools
import weakref
from functools import partial
from typing import Any

import keras
import numpy as np
import oracle
import pytest
import tensorflow as tf
from graphs import edges, partitions, placements
from oracle import assert_same
from pipelined import Piped, chain

from benchmarks.schedules import duration_of
from devicemap import Pipeline, split
from devicemap.errors import FunctionError
from devicemap.pipelines.schedule import schedule_of
from devicemap.pipelines.split import balanced_bounds

pytestmark = pytest.mark.filterwarnings("ignore:a Pipeline called under a tape")

DEVICE_COUNTS = (3, 4)
SCHEDULES = ("1f1b", "gpipe")

weights = [tf.Variable(tf.random.stateless_normal([4, 4], [1, i])) for i in range(3)]
x = tf.random.stateless_normal([10, 4], [1, 9])


def layer(i: int) -> Any:
    return lambda rows: tf.tanh(rows @ weights[i])


class OtherKeras(tf.Module):
    """Has a method of layers like one of `tf_keras`, whose layers are functions for a pipeline."""

    def __init__(self, i: int):
        super().__init__()
        self.weight, self._flatten_layers = weights[i], lambda: [self]

    def __call__(self, rows: Any) -> Any:
        return tf.tanh(rows @ self.weight)


def loss_of_rows(rows: Any) -> Any:
    return tf.reduce_sum(tf.tanh(rows @ weights[2]) ** 2, 1)


DENSE = (layer(0), layer(1), layer(2))
WITH_LOSS = (layer(0), layer(1), loss_of_rows)
RECOMPUTED = (layer(0), tf.recompute_grad(layer(1)), OtherKeras(2))
WITH_SKIP = (
    lambda rows: ({"h": layer(0)(rows)}, rows),
    lambda values, rows: (layer(1)(values["h"]), rows),
    lambda h, rows: {"sum": h + rows, "ids": tf.range(tf.shape(h)[0])[:, None] * 0 + 1},
)


def composed(stages: Any, rows: Any) -> Any:
    for stage in stages:
        rows = stage(*rows) if type(rows) is tuple else stage(rows)
    return rows


@pytest.mark.in_ci(2)
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("stages", [DENSE, WITH_LOSS, WITH_SKIP], ids=["dense", "loss", "skip"])
def test_the_composition(schedule: str, stages: Any, devices: list[str]) -> None:
    pipe = Pipeline(stages, devices, microbatches=4, schedule=schedule)
    of_any_length = tf.function(lambda rows: pipe(rows), input_signature=[tf.TensorSpec([None, 4])])
    for rows in (10, 3, 1, 0):
        wanted = composed(stages, x[:rows])
        assert_same(pipe(x[:rows]), wanted)
        assert_same(of_any_length(x[:rows]), wanted)
    batches = [*pipe.stream(tf.data.Dataset.from_tensor_slices(x).batch(4))]
    wanted = [composed(stages, x[start : start + 4]) for start in range(0, 10, 4)]
    for got, each in zip(batches, wanted, strict=True):  # in order
        assert_same(got, each)


def gradients(call: Any, rows: Any, reduce: Any) -> Any:
    with tf.GradientTape() as tape:
        tape.watch(rows)
        loss = reduce(call(rows))
    return [loss, *tape.gradient(loss, [rows, *weights])]


@pytest.mark.in_ci(4)
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("stages", [DENSE, WITH_LOSS, RECOMPUTED], ids=["dense", "loss", "recomputed"])
@pytest.mark.parametrize("where", ["eager", "tf.function", "unknown rows", "tape outside"])
def test_gradients_of_the_whole_batch(schedule: str, stages: Any, where: str, devices: list[str]) -> None:
    pipe = Pipeline(stages, devices, microbatches=4, schedule=schedule)
    reduce = tf.reduce_mean if stages is WITH_LOSS else lambda results: tf.reduce_mean(results) ** 2
    signature = [tf.TensorSpec([None, 4])] if where == "unknown rows" else None
    inside = tf.function(lambda rows: gradients(pipe, rows, reduce), input_signature=signature)
    calls = {
        "eager": lambda rows: gradients(pipe, rows, reduce),
        "tape outside": lambda rows: gradients(tf.function(lambda rows: pipe(rows)), rows, reduce),
    }
    for rows in (10, 5) if where == "unknown rows" else (10,):
        wanted = gradients(lambda rows: composed(stages, rows), x[:rows], reduce)
        oracle.assert_close(calls.get(where, inside)(x[:rows]), wanted, atol=1e-6)


CALLS = ("PartitionedCall", "StatefulPartitionedCall")


def waits_across_devices(graph: Any) -> list[Any]:
    edges = [(before, op) for op in graph.get_operations() for before in op.control_inputs]
    return [
        (before, op)
        for before, op in edges
        if before.device and op.device and before.device != op.device and "NoOp" in (op.type, before.type)
    ]


@pytest.mark.private("the order of ops in backward passes")
@pytest.mark.parametrize("rows", [16, None])
def test_1f1b_begins_backward_before_all_is_forward(rows: int | None, devices: list[str]) -> None:
    """The order of the schedule is in the graph, and joins ops of one device."""
    for schedule, waits in (("1f1b", True), ("gpipe", False), ("interleaved", True)):
        used, stages = (devices[:2], [*DENSE, tf.sin]) if schedule == "interleaved" else (devices, DENSE)
        pipe = Pipeline(stages, used, 4, schedule, loss="mse")
        spec = tf.TensorSpec([rows, 4])
        graph = tf.function(pipe.value_and_gradients).get_concrete_function(spec, spec).graph
        nodes = graph.as_graph_def()
        calls = [op for op in graph.get_operations() if "/stage_" in op.name and op.type in CALLS]
        forward = [op for op in calls if op.name.count("/") == 2]
        assert len(forward) == len(stages) * 4
        assert not waits_across_devices(graph)
        parts = {op.name: tf.compat.v1.graph_util.extract_sub_graph(nodes, [op.name]) for op in forward}
        before = {name: {node.name for node in part.node} for name, part in parts.items()}  # all that has to run first
        assert any("grad" in name.lower() for name in set.union(*before.values())) is waits
        for one, later in itertools.combinations(forward, 2):
            assert one.device != later.device or one.name in before[later.name] or later.name in before[one.name]


table = tf.Variable(tf.random.stateless_normal([5, 4], [1, 8]))
shift = tf.random.stateless_normal([4], [1, 7])


def looked_up(rows: Any) -> Any:
    return rows + tf.gather(table, tf.cast(4 * tf.sigmoid(rows[:, 0]), tf.int32))


def reads_twice(rows: Any) -> Any:
    return tf.tanh(rows @ weights[1]) @ weights[1] + shift


@pytest.mark.private("copies of variables that gradients go through")
@pytest.mark.parametrize("where", ["forward", "tape", "loss"])
def test_what_a_stage_reads_of_other_devices_is_sent_once(where: str) -> None:
    """A variable goes to its stage once for all microbatches. Of a table, only rows do."""
    stages = (layer(0), reads_twice, looked_up)
    pipe = Pipeline(stages, ["CPU:0", "CPU:1", "CPU:2"], microbatches=5, loss="mse")
    assert [stage.fetched_bytes for stage in pipe.explain(x).stages] == [0, 64, 80]
    variables = [weights[0], weights[1], table]

    def differentiate(call: Any, rows: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((call(rows) - rows) ** 2)
        return loss, tape.gradient(loss, variables)

    whole = partial(composed, stages)
    step, wanted = {
        "forward": (pipe, whole),
        "tape": (partial(differentiate, pipe), partial(differentiate, whole)),
        "loss": (lambda rows: pipe.value_and_gradients(rows, rows), partial(differentiate, whole)),
    }[where]
    got: list[Any] = []
    graphs = partitions(lambda rows: got.append(step(rows)), x)
    dense = partial(tf.nest.map_structure, tf.convert_to_tensor)
    oracle.assert_close(dense(got[0]), dense(wanted(x)))
    sent = [(edge.sender, edge.receiver) for edge in edges(graphs) if "ReadVariableOp" in edge.source]
    assert sent == [("CPU:0", "CPU:1")]
    assert placements(graphs, "ResourceGather") == {"CPU:0": 5}


@pytest.mark.private("copies of variables that gradients go through")
def test_a_pipeline_as_the_last_stage(devices: list[str]) -> None:
    inner = Pipeline([layer(1), layer(2)], ["CPU:6", "CPU:7"], microbatches=2)
    pipe = Pipeline([layer(0), inner], devices, microbatches=3, loss="mse")
    got, got_gradients = pipe.value_and_gradients(x, x)
    with tf.GradientTape() as tape:
        wanted = tf.reduce_mean((composed(DENSE, x) - x) ** 2)
    oracle.assert_close([got, *got_gradients], [wanted, *tape.gradient(wanted, pipe.trainable_variables)])


def with_print(rows: Any) -> Any:
    tf.print("some rows", output_stream=tf.compat.v1.logging.info)
    return layer(1)(rows)


def with_python(rows: Any) -> Any:
    return tf.ensure_shape(tf.py_function(layer(1), [rows], tf.float32), [None, 4])


mask = tf.Variable([True] * 4, trainable=False)


@tf.function
def in_a_loop(rows: Any) -> Any:
    for _ in tf.range(1):
        rows = tf.where(mask, layer(1)(rows), rows)
    return rows


dropout = keras.layers.Dropout(0.5)
STAGES = {
    "noise": lambda rows: layer(1)(rows) + 0 * tf.random.normal(tf.shape(rows)),
    "seed": lambda rows: layer(1)(rows) + 0 * tf.random.normal(tf.shape(rows), seed=1),
    "print": with_print,
    "Python": with_python,
    "dropout": lambda rows: layer(1)(rows) + 0 * dropout(rows, training=True),
    "mask in a loop": in_a_loop,
}


@pytest.mark.in_ci(3)
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", STAGES)
def test_whatever_is_in_a_stage(schedule: str, name: str, devices: list[str]) -> None:
    """Gradients are those of the whole, and no device waits for another one, but for what it gives or writes."""
    between = len(devices) - 2
    pipe = Pipeline([layer(0), *[STAGES[name]] * between, loss_of_rows], devices, microbatches=6, schedule=schedule)
    plain = (layer(0), *[layer(1)] * between, loss_of_rows)
    step = tf.function(lambda rows: gradients(pipe, rows, tf.reduce_mean))
    got, wanted = step(x), gradients(lambda rows: composed(plain, rows), x, tf.reduce_mean)
    if name == "Python":  # which does not tell TensorFlow what variables it takes
        del got[3], wanted[3]
    oracle.assert_close(got, wanted, atol=1e-6)
    assert_same(pipe(x), composed(plain, x))
    graph = step.get_concrete_function(x).graph
    forward = [op for op in graph.get_operations() if op.type in CALLS and op.name.startswith("stage_")]
    assert len(forward) == 6 * len(devices)
    assert not waits_across_devices(graph)
    shares_state = name == "dropout" and between > 1
    edges = [(before, op) for op in forward for before in op.control_inputs if before in forward]
    assert shares_state or all(before.device == op.device for before, op in edges)


def test_calls_share_a_trace_keep_no_data_and_never_draw_twice(devices: list[str]) -> None:
    tf.random.set_seed(1)
    traced = []

    def stage(rows: Any) -> Any:
        traced.append(rows)
        return rows + 1

    pipe = Pipeline([stage, lambda rows: tf.random.uniform(tf.shape(rows))], devices, microbatches=4)
    step = tf.function(lambda rows: pipe(rows))
    drawn = []
    for count in (3, 4, 9, 10):
        data = np.zeros([count, 2], "f")
        kept = weakref.ref(data)
        drawn += [call(data).numpy() for call in (pipe, step, pipe)]
        del data
        gc.collect()
        assert kept() is None
    assert len(traced) == 1
    assert len(np.unique(np.concatenate(drawn))) == 2 * 3 * 26


@pytest.mark.parametrize("inside", [False, True])
def test_a_stage_returns_a_row_for_each(inside: bool, devices: list[str]) -> None:
    pipe = Pipeline([layer(0), lambda rows: rows[:1]], devices)
    with pytest.raises((FunctionError, tf.errors.InvalidArgumentError), match="rows"):
        (tf.function(lambda rows: pipe(rows)) if inside else pipe)(x)


@pytest.mark.parametrize(("devices_used", "microbatches"), itertools.product([1, 2, 4], [1, 3, 4, 8]))
def test_schedules(devices_used: int, microbatches: int) -> None:
    for kind, each in (("1f1b", 1), ("gpipe", 1), ("interleaved", 1), ("interleaved", 2), ("interleaved", 3)):
        stages = devices_used * each
        orders = [schedule_of(kind, stages, devices_used, microbatches, device) for device in range(devices_used)]
        for device, steps in enumerate(orders):
            own = range(device, stages, devices_used)
            assert sorted(steps) == [*itertools.product(own, range(microbatches), (False, True))]
            held = max(itertools.accumulate(-1 if step.backward else 1 for step in steps))
            assert kind != "1f1b" or held == min(microbatches, devices_used - device)
            assert kind != "gpipe" or held == microbatches
            if kind == "interleaved" and microbatches % devices_used == 0:
                assert held <= 2 * (devices_used - device) - 1 + (each - 1) * devices_used
        if kind != "interleaved" or microbatches % devices_used == 0:
            # All stages are as long together, whatever their number: the idle time is that of 1F1B, divided by `each`.
            assert duration_of(kind, stages, devices_used, microbatches) == 2 * (microbatches * each + devices_used - 1)


@pytest.mark.parametrize("first", ["train", "predict"])
def test_stages_in_a_model_know_whether_it_trains(first: str, devices: list[str]) -> None:
    stages = [keras.Sequential([keras.Input([4]), keras.layers.Dropout(0.5)]), tf.identity]
    model = Piped(stages, Pipeline(stages, devices))
    for training in (True, False) if first == "train" else (False, True):
        assert np.allclose(tf.function(model)(x, training=training), x) == (not training)


@pytest.mark.parametrize("parts", [1, 2, 3, 4])
def test_the_best_cut_of_all(parts: int) -> None:
    values = np.random.default_rng(parts).integers(1, 20, 8).tolist()

    def largest(ends: Any) -> int:
        return max(sum(values[a:b]) for a, b in itertools.pairwise(ends))

    best = min(largest([0, *way, 8]) for way in itertools.combinations(range(1, 8), parts - 1))
    assert largest(balanced_bounds(values, parts)) == best


def test_explain(devices: list[str]) -> None:
    plan = Pipeline(DENSE, devices, microbatches=6).explain(tf.TensorSpec([None, 4]))
    assert (plan.bubble, plan.speedup) == (pytest.approx(2 / 8), pytest.approx(3 * 6 / 8))
    stages = [(stage.variable_bytes, stage.output_bytes_per_row) for stage in plan.stages]
    assert stages == [(64, 16)] * 3
    pipe = Pipeline([lambda x: 2 * x, tf.sin], devices)
    for data in (tf.RaggedTensorSpec([None, None]), tf.RaggedTensor.from_row_lengths(tf.zeros([20]), [1, 3] * 5)):
        assert pipe.explain(data).bubble > 0


def log(rows: Any) -> Any:
    tf.debugging.assert_positive(rows)
    return tf.math.log(rows)


@pytest.mark.parametrize("by", ["bytes", "time"])
def test_a_layer_that_fails_for_random_rows_is_not_compared(by: Any) -> None:
    model = chain(keras.layers.Dense(4, kernel_initializer="ones"), keras.layers.Lambda(log))
    rows = tf.random.stateless_uniform([6, 4], [1, 2], 1.0, 2.0)
    with pytest.warns(RuntimeWarning, match=r"fails for random tensors .*: Condition x > 0 did not hold"):
        stages = split(model, 2, by)
    np.testing.assert_allclose(Pipeline(stages)(rows), model(rows), rtol=1e-5)


def test_layers_that_take_several_rows_as_one() -> None:
    """They fail for large random sizes."""
    inputs = keras.Input([3, 4])
    joined = keras.ops.reshape(keras.layers.Dense(4)(inputs), [-1, 4])
    model = keras.Model(inputs, keras.layers.Dense(2)(keras.ops.reshape(joined, [-1, 3, 4])))
    rows = tf.random.stateless_normal([6, 3, 4], [1, 2])
    np.testing.assert_allclose(Pipeline(split(model, 2, "bytes"))(rows), model(rows), rtol=1e-5, atol=1e-6)
