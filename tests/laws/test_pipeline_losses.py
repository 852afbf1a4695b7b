"""`value_and_gradients` and `as_model` of a pipeline give the losses and gradients of Keras on one device."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pipelined
import pytest
import tensorflow as tf
from keras import layers
from oracle import assert_close
from pipelined import (
    PIPELINED,
    Y,
    chain,
    contrastive,
    dense,
    dense_four,
    ids,
    ids_masked,
    of_rows,
    piped,
    piped_model,
    settings_of,
    x,
)
from trainings import ACTIVITY, WEIGHTS

from devicemap import Pipeline, split
from devicemap.errors import FunctionError, OptionError

DEVICE_COUNTS = (4,)

weights = np.linspace(0.0, 2.0, 7, dtype="float32")

IN_CI = {
    "nested": "a model of the user", "vocabulary": "1f1b", "blocks": "interleaved", "dropout": "gpipe",
    "state and losses of masked steps": "1f1b", "saturated softmax": "a model of the user",
    "steps, ignored labels": "gpipe", "masks, sum": "replicas", "mixed precision": "interleaved",
    "losses in a list": "1f1b", "losses that are sums": "replicas", "losses by name": "gpipe",
    "losses of all rows": "1f1b", "loss of the values of a row": "replicas",
    "batch normalization": "a model of the user", "regularizers, global_clipnorm, sample weights, split": "replicas",
}  # fmt: skip
PRIVATE = {"lookups": "adding gradients", "a loss of one output": "gradients of None"}


def training(name: str, setting: str) -> Any:
    private = [pytest.mark.private(PRIVATE[name])] if name in PRIVATE else []
    nightly = [pytest.mark.nightly] * (IN_CI.get(name) != setting)
    return pytest.param(name, setting, marks=[*private, *nightly])


@pytest.mark.filterwarnings(
    "ignore:Gradients do not exist", "ignore:.*batch normalization", "ignore:a Pipeline called under a tape"
)
@pytest.mark.parametrize(
    ("name", "setting"),
    [
        *(training(name, each) for name, case in PIPELINED.items() for each in settings_of(case)),
        training("blocks", "a parallelized model"),
    ],
)
def test_trained_as_by_one_device(name: str, setting: str, devices: list[str]) -> None:
    case = PIPELINED[name]
    model = case.made()
    if (setting, len(devices)) == ("replicas", 3):
        pytest.skip("not applicable: too few devices")
    before = [variable.numpy() for variable in model.variables]
    own, stages = piped_model(model, setting, devices, **case.options)
    got = case.trained(case.compiled(own))
    np.testing.assert_equal([variable.numpy() for variable in model.variables], before)
    del got["slots"]  # in another order
    stages.copy_weights_to(other := case.made())
    got["weights"] = other.get_weights()
    assert_close(got, {key: case.wanted[key] for key in got}, case.rtol, case.rtol)


class Weighted(keras.losses.Loss):
    """A custom loss of nests."""

    def call(self, y: Any, outputs: Any) -> Any:
        return tf.reduce_mean((y["a"] - outputs) ** 2, -1) + tf.reduce_mean(y["b"], -1)


VALUES = {
    "nest": pipelined.case(dense_four, Weighted(), {"a": Y, "b": Y}),
    **{name: PIPELINED[name] for name in ("steps, ignored labels", "state and losses of masked steps", "lookups")},
}


def of_tape(function: Callable[[], Any], variables: Any) -> tuple[Any, Any]:
    """The value of a function, and its gradients."""
    with tf.GradientTape() as tape:
        value = function()
    return value, tape.gradient(value, [v.value if isinstance(v, keras.Variable) else v for v in variables])


@pytest.mark.in_ci(4)
@pytest.mark.parametrize("setting", ["1f1b", "gpipe", "replicas", "interleaved"])
@pytest.mark.parametrize("weighted", [False, True], ids=["", "weights"])
@pytest.mark.parametrize("where", ["eager", "tf.function", "unknown rows"])
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.private("adding gradients")] * (name == "lookups")) for name in VALUES],
)
def test_the_loss_and_gradients_of_one_device(
    name: str, setting: str, where: str, weighted: bool, devices: list[str]
) -> None:
    case = VALUES[name]
    model = case.made()
    if (setting, len(devices)) == ("replicas", 3):
        pytest.skip("not applicable: too few devices")
    pipe, _ = piped(model, setting, devices, loss=case.compile().get("loss", "mse"), **case.options)
    data = tf.nest.map_structure(tf.constant, (case.data["x"], case.data["y"]))
    if weighted:  # Keras does not align weights [rows] with those of steps
        data = (*data, tf.constant(WEIGHTS[:, None] if "steps" in name else WEIGHTS))
    specs = tf.nest.map_structure(lambda leaf: tf.TensorSpec([None, *leaf.shape[1:]], leaf.dtype), data)
    step = {
        "eager": pipe.value_and_gradients,
        "tf.function": tf.function(pipe.value_and_gradients),
        "unknown rows": tf.function(pipe.value_and_gradients, input_signature=specs),
    }[where]
    for count in (7, 1) if where == "tf.function" else (7, 2, 1):  # a `tf.function` is traced for each
        taken = tf.nest.map_structure(lambda leaf: leaf[-count:], data)
        value, gradients = step(*taken)
        run = lambda: pipe.loss(taken[1], model(taken[0], training=True), *taken[2:]) + sum(model.losses)
        wanted, of_model = of_tape(run, model.trainable_variables)
        assert_close(value, wanted)
        for got, each in zip(gradients, of_model, strict=True):
            np.testing.assert_allclose(tf.convert_to_tensor(got), tf.convert_to_tensor(each), rtol=1e-3, atol=1e-5)
            if isinstance(each, tf.IndexedSlices):  # optimizers square each slice
                np.testing.assert_allclose(tf.norm(got.values), tf.norm(each.values), rtol=1e-3)


def from_registry(layer: Any) -> Any:
    registry = {"layers": {1: [layer]}}
    find = lambda name: registry["layers"][name][0]
    return lambda rows: find(1)(rows)


def piped_before(layer: Any) -> Any:
    pipe = Pipeline([lambda rows: layer(rows)], ["CPU:0"], 1, added_losses=ACTIVITY)
    pipe(x)
    return pipe


FUNCTIONS = {
    "closure": lambda layer: lambda rows: layer(rows),
    "recompute_grad": lambda layer: layer if layer.trainable else tf.recompute_grad(lambda rows: layer(rows)),
    "pipeline": piped_before,
    "found by a step": from_registry,
    "found by predict": from_registry,
    "found by explain": from_registry,
}
CALLED = pipelined.case(
    lambda: chain(
        dense(kernel_regularizer="l2", activity_regularizer="l2"),
        *(layers.Dropout(0.5), layers.BatchNormalization(), dense(trainable=False)),
    ),
    added_losses=ACTIVITY,
)


@pytest.mark.filterwarnings("ignore:.*batch normalization")
@pytest.mark.parametrize("name", FUNCTIONS)
def test_layers_that_functions_call_are_those_of_stages(name: str, devices: list[str]) -> None:
    """Their regularizers, added losses, training mode, moving averages, and whether they are trainable."""
    if len(devices) < 4:
        pytest.skip("not applicable: needs four devices")
    model, whole = CALLED.made(), CALLED.eager()
    pipe = Pipeline([*map(FUNCTIONS[name], model.layers)], devices, 2, **CALLED.options)
    if name == "found by explain":
        pipe.explain(Y)
    own = CALLED.compiled(pipe.as_model())
    if name.startswith("found"):
        assert len(own.variables) == (len(model.variables) if "explain" in name else 0)
    if name == "found by predict":
        assert_close(own.predict(Y, verbose=0), whole.predict(Y, verbose=0))
    losses = [[each.train_on_batch(Y[:11], Y[:11]) for _ in range(2)] for each in (own, whole)]
    assert_close(losses[0], losses[1])
    assert_close([*map(tf.convert_to_tensor, model.variables)], [*map(tf.convert_to_tensor, whole.variables)])


def test_functions_that_use_variables_of_layers(devices: list[str]) -> None:
    layer = dense(kernel_regularizer="l2")
    layer.build([None, 4])
    calls = {"layer": lambda rows: layer(rows), "kernel": lambda rows: rows @ tf.transpose(layer.kernel)}
    pipe = Pipeline([calls["layer"], calls["kernel"]], devices, 2, loss="mse")
    run = lambda: tf.reduce_mean((calls["kernel"](layer(x)) - x) ** 2) + sum(layer.losses)
    assert_close(pipe.value_and_gradients(x, x), of_tape(run, layer.trainable_variables))
    alone = Pipeline([calls["kernel"]], devices, 2, loss="mse")
    assert_close(alone.value_and_gradients(x, x)[0], tf.reduce_mean((calls["kernel"](x) - x) ** 2) + sum(layer.losses))


def test_layers_that_other_threads_call_are_not_those_of_stages(devices: list[str]) -> None:
    other = dense(activity_regularizer="l2")

    def stage(rows: Any) -> Any:
        with ThreadPoolExecutor(1) as pool:
            pool.submit(other, x).result()
        return rows

    methods = keras.Layer.__call__, keras.Layer.add_loss, keras.Variable.value
    pipe = Pipeline([stage], devices, 2, loss="mse")
    pipe.value_and_gradients(x, x)
    assert pipe.trainable_variables == []
    assert float(other.losses[0]) > 0
    with pytest.raises(FunctionError):
        Pipeline([lambda rows: other(rows, 1, 2)])(x)
    assert methods == (keras.Layer.__call__, keras.Layer.add_loss, keras.Variable.value)


class Unbuilt(layers.Layer):
    """A layer that Keras builds by a symbolic call."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = dense(activity_regularizer="l2"), layers.BatchNormalization()

    def call(self, rows: Any, training: Any = None) -> Any:
        return self.second(self.first(rows), training=training)


@pytest.mark.filterwarnings("ignore:.*batch normalization")
@pytest.mark.parametrize("function", [lambda layer: layer, from_registry], ids=["layer", "function"])
def test_layers_that_a_pipeline_builds_are_in_training_mode(function: Any, devices: list[str]) -> None:
    layer = Unbuilt()
    pipe = Pipeline([function(layer), tf.identity], devices, 2, loss="mse", added_losses=ACTIVITY)
    got = [pipe.value_and_gradients(x, x)[0] for _ in range(2)]
    assert_close(got, 2 * [tf.reduce_mean((layer(x, training=True) - x) ** 2) + sum(layer.losses)])


def test_models_of_models_find_layers_of_functions() -> None:
    layer, rows = dense(), keras.Input([4])
    piped = [Pipeline([from_registry(layer)], ["CPU:0"]).as_model() for _ in range(2)]
    functional, sequential = keras.Model(rows, piped[0](rows)), keras.Sequential([piped[1]])
    for model in (functional, sequential):
        np.testing.assert_allclose(model.predict(x, verbose=0), layer(x), rtol=1e-5, atol=1e-6)
        assert [v.path for v in model.trainable_variables] == [v.path for v in layer.trainable_variables]


def test_threads_that_trace_stages_with_shared_layers(devices: list[str]) -> None:
    model = chain(*(dense(activity_regularizer="l2") for _ in range(4)))
    stages = split(model, 2, devices="CPU:0")
    pipes = [Pipeline(stages, devices, 2, loss="mse", added_losses=ACTIVITY) for _ in range(4)]
    with ThreadPoolExecutor(len(pipes)) as pool:
        values = [*pool.map(lambda pipe: float(pipe.value_and_gradients(x, x)[0]), pipes)]
    np.testing.assert_allclose(values, float(tf.reduce_mean((model(x) - x) ** 2)) + sum(map(float, model.losses)), 1e-5)
    assert not any("add_loss" in vars(layer) for stage in stages for layer in stage._flatten_layers())


def test_an_idle_replica_leaves_gradients_sparse(devices: list[str]) -> None:
    """Keras's optimizers treat `tf.IndexedSlices` with repeated rows in another way than their dense sum."""
    model = ids_masked(dense(), dense(), dense())
    pipe = Pipeline(split(model, len(devices) // 2, devices="CPU:0"), devices, 2, replicas=2, loss="mse")
    _, (gradient, *_) = pipe.value_and_gradients(ids[:1], np.ones([1, 4, 4], "f"))
    assert gradient.indices.shape == [4]


def test_fit_and_evaluate_with_a_loss_of_all_outputs(devices: list[str]) -> None:
    """Keras would compute a loss for each output in `evaluate`."""
    given = keras.Input([4])
    hidden = dense()(given)
    model = keras.Model(given, [dense(name="a")(hidden), dense(2, name="b")(hidden)])
    fitted = Pipeline(split(model, 2, "bytes", devices), devices, 3).as_model()
    first, second = model(x)
    loss = lambda y, outputs: of_rows(y[0], outputs[0]) + 3 * of_rows(y[1], outputs[1])
    fitted.compile(keras.optimizers.SGD(0.0), loss, 0.5, metrics=[["mae"], ["mse"]])
    wanted = 0.5 * tf.reduce_mean(of_rows(x, first) + 3 * of_rows(x[:, :2], second))
    targets = (x, x[:, :2])
    history = fitted.fit(x, targets, verbose=0).history
    assert_close(history["loss"], [wanted])
    assert {"a_mae", "b_mse"} <= history.keys()
    assert_close(fitted.evaluate(x, targets, verbose=0)[0], wanted)
    whole, doubled = np.full(len(x), 2.0, "f"), {"verbose": 0, "batch_size": len(x)}
    assert_close(fitted.fit(x, targets, sample_weight=whole, **doubled).history["loss"], [2 * wanted])
    assert_close(fitted.evaluate(x, targets, sample_weight=whole, **doubled)[0], 2 * wanted)
    with pytest.raises(tf.errors.InvalidArgumentError, match="differs between outputs"):
        fitted.fit(x, targets, sample_weight=(whole, weights), **doubled)


def test_scales_of_losses_are_those_of_the_optimizer(devices: list[str]) -> None:
    """Also of the second one of a pipeline whose graphs exist; `compile` scales losses if the split model's would."""
    keras.config.set_dtype_policy("mixed_float16")
    try:
        model = dense_four()
    finally:
        keras.config.set_dtype_policy("float32")
    stages = split(model, 2, "bytes", devices)
    fitted, loss = Pipeline(stages, devices, 3, loss="mse").as_model(), keras.losses.MeanSquaredError()
    before = fitted.get_weights()
    after = []
    for factor in (None, 8.0):
        fitted.set_weights(before)
        fitted.compile(
            keras.optimizers.SGD(0.1, loss_scale_factor=factor), loss, run_eagerly=True, auto_scale_loss=False
        )
        fitted.train_on_batch(x, x)
        after.append(fitted.get_weights())
    for one, other in zip(*after, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-3)
    fitted.compile("sgd")
    assert isinstance(fitted.optimizer, keras.optimizers.LossScaleOptimizer)
    fitted.pipe.value_and_gradients(x, x)
    fitted.run_eagerly = True
    fitted.train_on_batch(x, x)  # its graph returns outputs, too


def test_variables_that_are_added_or_frozen_between_calls(devices: list[str]) -> None:
    stages = [dense(), dense()]
    for stage in stages:
        stage.build([None, 4])
    pipe = Pipeline(stages, devices, 3, loss="mse")
    _, (_, *others) = pipe.value_and_gradients(x, x)
    stages[0].kernel.trainable = False
    assert_close(pipe.value_and_gradients(x, x)[1], others)
    stages[0].enable_lora(2)
    _, gradients = pipe.value_and_gradients(x, x)
    assert len(gradients) == len(pipe.trainable_variables) == 5
    assert None not in gradients


def test_fit_of_stages_without_trainable_variables(devices: list[str]) -> None:
    fitted = Pipeline([chain(layers.Rescaling(2.0)), tf.identity], devices, 3).as_model()
    fitted.compile("sgd", "mse")
    with pytest.warns(UserWarning, match="no stage has trainable variables"):
        history = fitted.fit(x, x, verbose=0).history
    assert_close(history["loss"], [np.mean(x**2)])


def test_functions_train_in_a_loop_of_their_own(devices: list[str]) -> None:
    """Also variables that the loss uses."""
    matrices = [tf.Variable(tf.random.stateless_normal([4, 4], [1, i])) for i in range(3)]
    stages = [lambda rows, matrix=matrix: tf.tanh(rows @ matrix) for matrix in matrices[:2]]
    loss = lambda y, outputs: tf.reduce_mean((y @ matrices[2] - outputs) ** 2, 1)
    pipe = Pipeline(stages, devices, 3, loss=loss)
    run = lambda: tf.reduce_mean(loss(x[::-1], stages[1](stages[0](x))))
    assert_close(pipe.value_and_gradients(x, x[::-1]), of_tape(run, matrices))
    assert [id(variable) for variable in pipe.trainable_variables] == [id(matrix) for matrix in matrices]
    layer = chain(layers.Dense(4), layers.Dense(4))
    of_layers = Pipeline([tf.identity, layer], devices, 3, loss=loss)
    _, gradients = of_layers.value_and_gradients(x, x[::-1])
    _, (wanted,) = of_tape(lambda: tf.reduce_mean(loss(x[::-1], layer(x))), matrices[2:])
    assert of_layers.trainable_variables[-1] is matrices[2]
    assert_close(gradients[-1], wanted)
    fitted = of_layers.as_model()
    fitted.compile("sgd")
    with pytest.raises(OptionError, match=r"a function, or the loss, uses a trainable tf\.Variable"):
        fitted.fit(x, x, verbose=0)


@pytest.mark.parametrize("kind", ["ragged", "sparse", "ragged floats"])
def test_gradients_beside_ragged_and_sparse_results_of_stages(kind: str, devices: list[str]) -> None:
    lengths = [2, 1, 3, 1, 2, 1, 2]
    ragged = tf.RaggedTensor.from_row_lengths(tf.range(12.0 if "floats" in kind else 12), lengths)
    first, second = tf.Variable(2.0), tf.Variable(3.0)

    def begin(rows: Any) -> Any:
        ids = rows["ids"].to_sparse() if kind == "sparse" else rows["ids"]
        return ids, rows["x"] * first, rows["x"] * second

    def end(ids: Any, a: Any, b: Any) -> Any:
        total = tf.reduce_sum(tf.sparse.to_dense(ids) if kind == "sparse" else ids, 1)
        return tf.reduce_sum(a * b, 1) * tf.cast(total, tf.float32)

    pipe = Pipeline([begin, end], devices, 3, loss=lambda y, outputs: outputs)
    data = {"ids": ragged, "x": x}
    wanted = of_tape(lambda: tf.reduce_mean(end(*begin(data))), [first, second])
    assert_close(pipe.value_and_gradients(data, tf.zeros([7])), wanted)


def test_functions_that_write_variables_see_the_whole_batch(devices: list[str]) -> None:
    average, count = tf.Variable(0.0), tf.Variable(0)

    def centered(rows: Any) -> Any:
        average.assign(0.5 * average + tf.reduce_mean(rows))
        count.assign_add(1)
        return rows - average

    pipe = Pipeline([tf.sin, centered], devices, 3)
    for state in (tf.reduce_mean(tf.sin(x)), 1.5 * tf.reduce_mean(tf.sin(x))):
        np.testing.assert_allclose(pipe(x), tf.sin(x) - state, rtol=1e-5, atol=1e-6)
    assert int(count) == 2
    assert pipe.explain(x).microbatches == 1


@pytest.mark.private("the order of ops in backward passes")
@pytest.mark.filterwarnings("ignore:.*needs the whole batch:RuntimeWarning")
@pytest.mark.parametrize(("batch_norm", "microbatches"), [("synchronized", 1), ("local", 4)])
def test_the_plan_has_the_microbatches_of_training(batch_norm: Any, microbatches: int, devices: list[str]) -> None:
    stages = dense(), keras.Sequential([layers.BatchNormalization(), dense()])
    pipe = Pipeline(stages, devices[:2], microbatches=4, loss="mse", batch_norm=batch_norm)
    plan = pipe.explain(x)
    assert plan.microbatches == microbatches
    assert len(pipe.report(x, x).calls) == sum(len(stage.schedule) for stage in plan.stages) == 4 * microbatches


@pytest.mark.private("the order of ops in backward passes")
@pytest.mark.in_ci(2)
@pytest.mark.parametrize("setting", ["1f1b", "gpipe", "replicas", "interleaved"])
@pytest.mark.parametrize("trains", [True, False], ids=["loss", "call"])
def test_the_report_shows_the_schedule(setting: str, trains: bool, devices: list[str], tmp_path: Path) -> None:
    pipe, _ = piped(dense_four(), setting, devices, loss="mse")
    rows = np.ones([16, 4], "f")
    report = pipe.report(rows, rows) if trains else pipe.report(rows)
    plan = pipe.explain(rows)
    for stage, planned in enumerate(plan.stages):
        own = [call for call in report.calls if call.stage == stage and call.device == planned.device]
        order = [step for step in planned.schedule if trains or step.startswith("F")]
        assert ["FB"[call.backward] + str(call.microbatch) for call in own] == order
    assert len(report.calls) == sum(len(s.schedule) for s in plan.stages) * len(report.devices) // len(
        {s.device for s in plan.stages}
    ) // (1 if trains else 2)
    for device in report.devices:  # one after the other
        own = [call for call in report.calls if call.device == device]
        assert all(one.finished_seconds <= other.started_seconds for one, other in pairwise(own))
    report.plot(tmp_path / "schedule.png")
    assert (tmp_path / "schedule.png").stat().st_size


def test_a_loss_may_compare_rows_of_one_microbatch() -> None:
    """The whole batch is one microbatch, because batch normalization needs it."""
    norm = layers.BatchNormalization()
    norm.build([None, 4])
    with pytest.warns(RuntimeWarning, match="batch normalization"):
        pipe = Pipeline([tf.identity, norm], ["CPU:1", "CPU:2"], 2, loss=contrastive)
    value = pipe.value_and_gradients(x, x)[0]
    wanted = tf.reduce_mean(contrastive(x, (x - x.mean(0)) / np.sqrt(x.var(0) + norm.epsilon)))
    np.testing.assert_allclose(value, wanted, rtol=1e-5)


def test_weights_of_losses_have_the_precision_of_the_loss() -> None:
    layer = layers.Dense(1, use_bias=False, kernel_initializer="zeros", dtype="float64")
    layer.build([None, 1])
    model = Pipeline([layer], ["CPU:1"]).as_model()
    model.compile(keras.optimizers.SGD(1.0), [keras.losses.MeanSquaredError(dtype="float64")], loss_weights=[0.1])
    model.train_on_batch(np.ones([2, 1]), np.ones([2, 1]))
    assert abs(layer.kernel.numpy().item() - 0.2) < 1e-12


def test_functions_that_run_eagerly_are_refused() -> None:
    tf.config.run_functions_eagerly(True)
    try:
        with pytest.raises(OptionError, match="run_functions_eagerly"):
            Pipeline([tf.sin])(x)
    finally:
        tf.config.run_functions_eagerly(False)


def test_lists_of_inputs_and_targets(devices: list[str]) -> None:
    one, other = keras.Input([4]), keras.Input([4])
    whole = keras.Model([one, other], dense()(layers.Add()([dense()(one), other])))
    pipe = Pipeline(split(whole, 2, "bytes", devices), devices, 2)
    with pytest.raises(FunctionError, match="takes 2 inputs, not 3"):
        pipe((x, x, x))
    own = Pipeline([keras.models.clone_model(whole), lambda rows: rows], devices, 2).as_model()
    own.set_weights(whole.get_weights())
    models = whole, pipe.as_model(), own
    for model in models:
        model.compile("sgd", "mse", jit_compile=False)
    for call in ("train_on_batch", "test_on_batch"):
        wanted, *got = (getattr(model, call)([x, 2 * x], x) for model in models)
        assert_close(got, [wanted] * 2)
    wanted, *got = (model.predict_on_batch([x, 2 * x]) for model in models)
    assert_close(got, [wanted] * 2)


@pytest.mark.private("asking whether a tape is recording")
def test_a_tape_without_a_loss_is_said_to_hold_all(devices: list[str]) -> None:
    pipe = Pipeline([tf.sin, tf.cos], devices, 4)
    assert "activations of all microbatches" in str(pipe.explain(x))
    with pytest.warns(RuntimeWarning, match="activations of all microbatches"), tf.GradientTape():
        pipe(x)
    plan = Pipeline([tf.sin, tf.cos], devices, 4, loss="mse").explain(np.zeros([8, 4], "f"))
    assert [stage.held_microbatches for stage in plan.stages] == [2, 1]


def test_explain_shows_that_stages_with_python_run_all_forward_calls_first() -> None:
    def python(rows: Any) -> Any:
        return tf.ensure_shape(tf.py_function(lambda rows: rows * 2, [rows], tf.float32), [None, 4])

    plan = Pipeline([tf.sin, python], ["CPU:1", "CPU:2"], 4, loss="mse").explain(np.zeros([8, 4], "f"))
    assert [stage.held_microbatches for stage in plan.stages] == [4, 4]
    assert "a stage calls Python" in str(plan)
