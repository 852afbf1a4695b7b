"""A pipeline is the composition of its stages, with the gradients of the whole batch, and its stages work at the same time."""

from __future__ import annotations

import itertools
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from oracle import assert_same

from devicemap import Pipeline, split
from devicemap.errors import FunctionError, OptionError
from devicemap.pipelines.pipeline import schedule_of
from devicemap.pipelines.split import cuts
from devicemap.tell.plan.pipeline import starts_of

DEVICE_COUNTS = (3, 4)
SCHEDULES = ("1f1b", "gpipe")

weights = [tf.Variable(tf.random.stateless_normal([4, 4], [1, i])) for i in range(3)]
x = tf.random.stateless_normal([10, 4], [1, 9])


def layer(i: int) -> Any:
    return lambda rows: tf.tanh(rows @ weights[i])


def loss_of_rows(rows: Any) -> Any:
    return tf.reduce_sum(tf.tanh(rows @ weights[2]) ** 2, 1)


DENSE = (layer(0), layer(1), layer(2))
WITH_LOSS = (layer(0), layer(1), loss_of_rows)
WITH_SKIP = (
    lambda rows: ({"h": layer(0)(rows)}, rows),
    lambda values, rows: (layer(1)(values["h"]), rows),
    lambda h, rows: {"sum": h + rows, "ids": tf.range(tf.shape(h)[0])[:, None] * 0 + 1},
)


def composed(stages: Any, rows: Any) -> Any:
    for stage in stages:
        rows = stage(*rows) if type(rows) is tuple else stage(rows)
    return rows


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("stages", [DENSE, WITH_LOSS, WITH_SKIP], ids=["dense", "loss", "skip"])
@pytest.mark.parametrize("rows", [10, 3, 1, 0])
def test_the_composition(schedule: str, stages: Any, rows: int, devices: list[str]) -> None:
    pipe = Pipeline(stages, devices, microbatches=4, schedule=schedule)
    wanted = composed(stages, x[:rows])
    assert_same(pipe(x[:rows]), wanted)
    of_any_length = tf.function(lambda rows: pipe(rows), input_signature=[tf.TensorSpec([None, 4])])
    assert_same(of_any_length(x[:rows]), wanted)


def gradients(call: Any, rows: Any, reduce: Any) -> Any:
    with tf.GradientTape() as tape:
        tape.watch(rows)
        loss = reduce(call(rows))
    return [loss, *tape.gradient(loss, [rows, *weights])]


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("stages", [DENSE, WITH_LOSS], ids=["dense", "loss"])
@pytest.mark.parametrize("where", ["eager", "tf.function", "unknown rows", "tape outside"])
def test_gradients_of_the_whole_batch(schedule: str, stages: Any, where: str, devices: list[str]) -> None:
    pipe = Pipeline(stages, devices, microbatches=4, schedule=schedule)

    def reduce(results: Any) -> Any:
        return tf.reduce_mean(results) if stages is WITH_LOSS else tf.reduce_mean(results) ** 2

    calls = {
        "eager": lambda rows: gradients(pipe, rows, reduce),
        "tf.function": tf.function(lambda rows: gradients(pipe, rows, reduce)),
        "unknown rows": tf.function(
            lambda rows: gradients(pipe, rows, reduce), input_signature=[tf.TensorSpec([None, 4])]
        ),
        "tape outside": lambda rows: gradients(tf.function(lambda rows: pipe(rows)), rows, reduce),
    }
    for rows in (10, 5) if where == "unknown rows" else (10,):
        wanted = gradients(lambda rows: composed(stages, rows), x[:rows], reduce)
        for got, want in zip(calls[where](x[:rows]), wanted):
            np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-6)


def test_1f1b_begins_backward_before_all_is_forward(devices: list[str]) -> None:
    """The edges of the schedule are in the graph, and join ops of one device."""
    for schedule, waits in (("1f1b", True), ("gpipe", False)):
        pipe = Pipeline(WITH_LOSS, devices, microbatches=4, schedule=schedule)
        graph = (
            tf.function(lambda rows, pipe=pipe: gradients(pipe, rows, tf.reduce_mean)).get_concrete_function(x).graph
        )
        calls = [op for op in graph.get_operations() if op.type in ("PartitionedCall", "StatefulPartitionedCall")]
        forward = [op for op in calls if op.name.startswith("stage_")]
        assert len(forward) == 3 * 4
        edges = [(before, op) for op in calls for before in op.control_inputs if before in calls]
        assert {before.device for before, op in edges if before.device != op.device} == set()
        assert any(before not in forward and op in forward for before, op in edges) is waits


@pytest.mark.parametrize(("stages", "microbatches"), itertools.product([1, 2, 4], [1, 3, 8]))
def test_schedules(stages: int, microbatches: int) -> None:
    for kind in SCHEDULES:
        orders = [schedule_of(kind, stages, microbatches, stage) for stage in range(stages)]
        for stage, steps in enumerate(orders):
            assert sorted(steps) == sorted((m, backward) for m in range(microbatches) for backward in (False, True))
            held = list(itertools.accumulate(-1 if step.backward else 1 for step in steps))
            assert max(held) == (microbatches if kind == "gpipe" else min(microbatches, stages - stage))
        named = [tuple("FB"[step.backward] + str(step.microbatch) for step in steps) for steps in orders]
        assert max(starts_of(named).values()) + 1 == 2 * (microbatches + stages - 1)


def test_a_stream_is_in_order(devices: list[str]) -> None:
    pipe = Pipeline(DENSE, devices, microbatches=2)
    batches = list(pipe.stream(tf.data.Dataset.from_tensor_slices(x).batch(4)))
    assert_same(tf.concat(batches, 0), composed(DENSE, x))


def residual() -> Any:
    keras.utils.set_random_seed(0)
    given = keras.Input([4])
    h = keras.layers.Dense(8, "relu")(given)
    h = keras.layers.Add()([h, keras.layers.Dense(8)(h)])
    return keras.Model(given, keras.layers.Concatenate()([keras.layers.Dense(4)(h), given]))


@pytest.mark.parametrize("by", ["time", "bytes"])
def test_split_models_are_trained_as_whole_ones(by: Any, devices: list[str]) -> None:
    alone, cut = residual(), residual()
    pipe = Pipeline(split(cut, 3, by=by), devices, microbatches=3)
    homes = {variable.value.device for variable in cut.variables}
    assert len(homes) > 1

    def trained(model: Any, call: Any) -> Any:
        optimizer = keras.optimizers.SGD(0.1)

        @tf.function
        def step(rows: Any) -> Any:
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(call(rows) ** 2)
            optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
            return loss

        return [float(step(x)) for _ in range(4)]

    np.testing.assert_allclose(trained(cut, pipe), trained(alone, alone), rtol=1e-4)
    for one, other in zip(cut.get_weights(), alone.get_weights()):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-6)


def test_the_best_cut_of_all() -> None:
    random = np.random.default_rng(0)
    for parts in (1, 2, 3, 4):
        values = random.integers(1, 20, 8).tolist()
        ways = itertools.combinations(range(1, 8), parts - 1)
        best = min(max(sum(values[a:b]) for a, b in itertools.pairwise([0, *way, 8])) for way in ways)
        assert max(sum(values[a:b]) for a, b in itertools.pairwise(cuts(values, parts))) == best


def test_explain_tells_the_bubble(devices: list[str]) -> None:
    plan = Pipeline(DENSE, devices, microbatches=6).explain(tf.TensorSpec([None, 4]))
    assert plan.bubble == pytest.approx(2 / 8)
    assert plan.speedup == pytest.approx(3 * 6 / 8)
    assert [stage.variable_bytes for stage in plan.stages] == [64] * 3
    assert [stage.output_bytes_per_row for stage in plan.stages] == [16] * 3


def shared() -> Any:
    given, layer = keras.Input([4]), keras.layers.Dense(4)
    return keras.Model(given, keras.layers.ReLU()(layer(keras.layers.ReLU()(layer(given)))))


@pytest.mark.parametrize(
    "bad",
    [
        lambda: Pipeline([]),
        lambda: Pipeline([3]),
        lambda: Pipeline(DENSE, ["CPU:0", "CPU:1"]),
        lambda: Pipeline(DENSE, ["CPU:0", "CPU:1", "CPU:77"]),
        lambda: Pipeline(DENSE, microbatches=0),
        lambda: Pipeline(DENSE, schedule="zero"),
        lambda: split(residual(), 0),
        lambda: split(residual(), 9),
        lambda: split(residual(), 2, by="luck"),
        lambda: split(shared(), 2),
        lambda: split(len, 2),
    ],
)
def test_what_cannot_be_is_refused(bad: Any) -> None:
    with pytest.raises(OptionError):
        bad()


def test_a_stage_that_fails_is_told(devices: list[str]) -> None:
    pipe = Pipeline([layer(0), lambda rows: tf.debugging.check_numerics(rows / 0.0, "bad")], devices)
    with pytest.raises(FunctionError, match="bad"):
        pipe(x)


def test_batch_normalization_of_microbatches_is_said(devices: list[str]) -> None:
    model = keras.Sequential([keras.Input([4]), keras.layers.Dense(4), keras.layers.BatchNormalization()])
    with pytest.warns(RuntimeWarning, match="microbatch"):
        Pipeline(split(model, 2, by="bytes"), devices)
