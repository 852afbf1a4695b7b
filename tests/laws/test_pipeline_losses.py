"""`value_and_gradients` and `as_model` of a pipeline give the losses and gradients of Keras on one device."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from laws.test_split import Scaled, assert_close, chain, dense, ids, ids_masked, layers, mixed, regularized, x
from trainings import ACTIVITY, LooksUp

from devicemap import DeviceMap, Pipeline, split
from devicemap.errors import DataError, FunctionError, OptionError

DEVICE_COUNTS = (4,)

labels = np.array([0, 1, 2, 0, 2, 1, 3])
steps = np.stack([x, 2 * x], 1)
weights = np.linspace(0.0, 2.0, 7, dtype="float32")


class Weighted(keras.losses.Loss):
    """A custom loss of nests."""

    def call(self, y: Any, outputs: Any) -> Any:
        return tf.reduce_mean((y["a"] - outputs) ** 2, -1) + tf.reduce_mean(y["b"], -1)


def of_rows(y: Any, outputs: Any) -> Any:
    return tf.reduce_sum((y - outputs) ** 4, 1)


def dense_four(**options: Any) -> Any:
    return chain(dense(), dense(), dense(), dense(), **options)


class Correlation(keras.losses.Loss):
    """One minus the correlation over the batch, for each row."""

    def call(self, y: Any, outputs: Any) -> Any:
        y, outputs = (each - tf.reduce_mean(each, 0) for each in (y, outputs))
        return tf.repeat(1 - tf.reduce_sum(y * outputs) / (tf.norm(y) * tf.norm(outputs)), tf.shape(y)[0])


def balanced(y: Any, outputs: Any) -> Any:
    """A loss with weights by the number of rows of a class."""
    is_one = tf.cast(tf.equal(y, 1), tf.float32)
    return tf.reduce_sum(is_one * (y - outputs) ** 2, 1) / (1 + tf.reduce_sum(is_one))


def contrastive(y: Any, outputs: Any) -> Any:
    return tf.nn.sparse_softmax_cross_entropy_with_logits(tf.range(tf.shape(y)[0]), outputs @ tf.transpose(y))


IGNORING = keras.losses.SparseCategoricalCrossentropy(from_logits=True, ignore_class=0)
BY_WEIGHT = keras.losses.MeanSquaredError("mean_with_sample_weight")
STEPWISE = np.ones([7, 4, 4], "f")


def of_steps() -> Any:
    return dense_four(shape=(None, 4))


def masked() -> Any:
    return ids_masked(dense(), dense(), dense())


CASES: dict[str, tuple[Any, Any, Any, Any, dict[str, Any]]] = {
    "mse": (dense_four, x, x, "mse", {}),
    "labels": (dense_four, x, labels, keras.losses.SparseCategoricalCrossentropy(from_logits=True), {}),
    "mean by weight": (dense_four, x, x, BY_WEIGHT, {}),
    "targets of one axis": (lambda: chain(dense(), dense(), dense(), dense(1)), x, x[:, 0], "mse", {}),
    "nest": (dense_four, x, {"a": x, "b": x}, Weighted(), {}),
    "steps": (of_steps, steps, steps, "mse", {}),
    "steps, ignored labels": (of_steps, steps, np.stack([labels, labels[::-1]], 1), IGNORING, {}),
    "steps, mean by weight": (of_steps, steps, steps, BY_WEIGHT, {}),
    "masks": (masked, ids, STEPWISE, "mse", {}),
    "masks, mean by weight": (masked, ids, STEPWISE, BY_WEIGHT, {}),
    "masks, sum": (masked, ids, STEPWISE, keras.losses.MeanSquaredError("sum"), {}),
    "masks, losses": (
        lambda: ids_masked(dense(), Scaled(loss="mean"), dense()), ids, STEPWISE, "mse", {"added_losses": "mean"}),
    "regularizers": (lambda: chain(*regularized().layers, dense()), x, x, "mse", {"added_losses": ACTIVITY}),
    "mixed precision": (mixed, x, x, "mse", {}),
}  # fmt: skip
"""A model, rows, targets, a loss, and options of the pipeline."""

LOOKUPS = {"lookups": (lambda: chain(LooksUp(), dense(), dense(), dense()), x, x, "mse", {})}

SETTINGS: dict[str, dict[str, Any]] = {
    "1f1b": {"microbatches": 3},
    "gpipe": {"microbatches": 3, "schedule": "gpipe"},
    "replicas": {"microbatches": 2, "replicas": 2},
    "interleaved": {"microbatches": 4, "schedule": "interleaved"},
}


def of_tape(function: Callable[[], Any], variables: Any) -> tuple[Any, Any]:
    """The value of a function, and its gradients."""
    with tf.GradientTape() as tape:
        value = function()
    return value, tape.gradient(value, [v.value if isinstance(v, keras.Variable) else v for v in variables])


def piped(model: Any, name: str, devices: list[str], **options: Any) -> Any:
    setting = SETTINGS[name]
    if name == "replicas" and len(devices) < 4:
        pytest.skip("needs four devices")
    stages, places = {"replicas": (2, 2), "interleaved": (4, 2)}.get(name, (3, 3))
    used = devices[:2] if name == "interleaved" else devices
    made = split(model, min(stages, len(model.layers)), "bytes", devices[:places])
    return Pipeline(made, used, **setting | options), made


LIKE_OTHERS = {
    "targets of one axis", "steps", "steps, mean by weight", "masks", "masks, mean by weight", "mixed precision",
}  # fmt: skip


@pytest.mark.in_ci(8)
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("weighted", [False, True], ids=["", "weights"])
@pytest.mark.parametrize("where", ["eager", "tf.function", "unknown rows"])
@pytest.mark.parametrize(
    "case",
    [
        *(pytest.param(case, marks=[pytest.mark.nightly] * (case in LIKE_OTHERS)) for case in CASES),
        pytest.param("lookups", marks=pytest.mark.private("adding gradients")),
    ],
)
def test_the_loss_and_gradients_of_one_device(
    case: str, setting: str, where: str, weighted: bool, devices: list[str]
) -> None:
    make, rows, targets, loss, options = (CASES | LOOKUPS)[case]
    model = make()
    if setting == "interleaved" and len(model.layers) < 4:
        pytest.skip("too few layers")
    pipe, _ = piped(model, setting, devices, loss=loss, **options)
    data = tf.nest.map_structure(tf.constant, (rows, targets))
    of_elements = case.startswith(("steps", "masks"))  # Keras does not align weights [rows] with them
    if weighted:
        data = (*data, tf.constant(weights[:, None] if of_elements else weights))
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
            atol = 1e-3 if case == "mixed precision" else 1e-5
            np.testing.assert_allclose(tf.convert_to_tensor(got), tf.convert_to_tensor(each), rtol=1e-3, atol=atol)
            if isinstance(each, tf.IndexedSlices):  # optimizers square each slice
                np.testing.assert_allclose(tf.norm(got.values), tf.norm(each.values), rtol=1e-3)


REGULARIZED = layers.ActivityRegularization(l2=0.1)


def from_registry(layer: Any) -> Any:
    registry = {"layers": {1: [layer]}}
    find = lambda name: registry["layers"][name][0]
    return lambda rows: find(1)(rows)


def piped_before(layer: Any) -> Any:
    pipe = Pipeline([lambda rows: layer(rows)], ["CPU:0"], 1, added_losses=ACTIVITY)
    pipe(x)
    return pipe


def mapped_before(layer: Any) -> Any:
    function = tf.function(lambda rows: layer(rows))
    DeviceMap(function, batched=True)(x)
    return function


FUNCTIONS = {
    "closure": lambda layer: lambda rows: layer(rows),
    "recompute_grad": lambda layer: layer if layer.trainable else tf.recompute_grad(lambda rows: layer(rows)),
    "pipeline": piped_before,
}


@pytest.mark.filterwarnings("ignore:.*batch normalization")
@pytest.mark.parametrize("name", FUNCTIONS)
def test_layers_that_functions_call_are_those_of_stages(name: str, devices: list[str]) -> None:
    """Their regularizers, added losses, training mode, moving averages, and whether they are trainable."""
    if len(devices) < 4:
        pytest.skip("needs four devices")

    def model() -> Any:
        keras.utils.set_random_seed(1)
        first = dense(kernel_regularizer="l2", activity_regularizer="l2")
        made = chain(first, layers.Dropout(0.5), layers.BatchNormalization(), dense())
        made.layers[3].trainable = False
        return made

    def on_one_device(rows: Any, targets: Any) -> Any:
        run = lambda: tf.reduce_mean((one(rows, training=True) - targets) ** 2) + sum(one.losses)
        return of_tape(run, one.trainable_variables)

    def trained(model: Any, step: Any, owner: Any) -> Any:
        optimizer = keras.optimizers.SGD(0.1)
        losses = []
        for _ in range(2):
            value, gradients = step(x, x)
            optimizer.apply(gradients, owner.trainable_variables)
            losses.append(value)
        return losses, [*map(tf.convert_to_tensor, model.variables)]

    one, other = model(), model()
    pipe = Pipeline([*map(FUNCTIONS[name], other.layers)], devices, 2, loss="mse", added_losses=ACTIVITY)
    assert_close(trained(other, pipe.value_and_gradients, pipe), trained(one, on_one_device, one))


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


STEPS: dict[str, Callable[[Any], Any]] = {
    "fit": lambda model: model.fit(x, x, verbose=0).history["loss"],
    "predict": lambda model: model.predict(x, verbose=0),
}


@pytest.mark.parametrize("explained", [False, True])
@pytest.mark.parametrize("step", STEPS)
def test_a_model_finds_layers_of_functions(step: str, explained: bool, devices: list[str]) -> None:
    whole = chain(dense(kernel_regularizer="l2"), layers.BatchNormalization(), dense())
    copy = keras.models.clone_model(whole)
    copy.set_weights(whole.get_weights())
    pipe = Pipeline([*map(from_registry, copy.layers)], devices, 3)
    if explained:
        pipe.explain(x)
    piped = pipe.as_model()
    assert len(piped.variables) == (len(whole.variables) if explained else 0)
    for model in (whole, piped):
        model.compile(keras.optimizers.Adam(0.1), "mse", jit_compile=False)
    assert_close([STEPS[step](piped) for _ in range(2)], [STEPS[step](whole) for _ in range(2)])
    assert len(piped.trainable_variables) == len(whole.trainable_variables)


def test_models_of_models_find_layers_of_functions() -> None:
    layer, rows = dense(), keras.Input([4])
    piped = [Pipeline([from_registry(layer)], ["CPU:0"]).as_model() for _ in range(2)]
    functional, sequential = keras.Model(rows, piped[0](rows)), keras.Sequential([piped[1]])
    for model in (functional, sequential):
        np.testing.assert_allclose(model.predict(x, verbose=0), layer(x), rtol=1e-5, atol=1e-6)
        assert [v.path for v in model.trainable_variables] == [v.path for v in layer.trainable_variables]


def test_a_model_that_finds_layers_too_late_to_scale_losses() -> None:
    layer = dense(dtype="mixed_float16")
    piped = Pipeline([from_registry(layer)], ["CPU:0"], loss="mse").as_model()
    piped.compile("sgd")
    with pytest.raises(OptionError, match="mixed_float16"):
        piped.train_on_batch(x, x)


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


def trained(model: Any, rows: Any, targets: Any, loss: Any, **options: Any) -> Any:
    keras.utils.set_random_seed(1)
    metrics = ["mae", keras.metrics.RootMeanSquaredError()]
    optimizer = keras.optimizers.Adam(0.01, use_ema=True, gradient_accumulation_steps=2, clipnorm=1.0)
    model.compile(optimizer, loss, metrics=metrics, weighted_metrics=["mse"], **options)
    weight = weights[:, None] if targets.ndim > 2 else weights
    data = {"validation_data": (rows, targets), "sample_weight": weight, "batch_size": 3, "shuffle": False}
    history = model.fit(rows, targets, epochs=2, verbose=0, **data).history
    return history, model.evaluate(rows, targets, verbose=0), model.predict(rows, verbose=0)


@pytest.mark.parametrize("setting", ["replicas", "interleaved"])
@pytest.mark.parametrize("case", ["masks, losses", "mixed precision"])
def test_fit_of_its_model(case: str, setting: str, devices: list[str]) -> None:
    """Losses, metrics, weights, validation and callbacks are Keras's own."""
    make, rows, targets, loss, options = CASES[case]
    model = make()
    if setting == "interleaved" and len(model.layers) < 4:
        pytest.skip("too few layers")
    pipe, stages = piped(model, setting, devices, **options)
    other = make()
    other.set_weights(model.get_weights())
    eager = case != "mixed precision"  # which rounds other numbers in eager code
    wanted = trained(other, rows, targets, loss, run_eagerly=eager, jit_compile=False)
    assert_close(trained(pipe.as_model(), rows, targets, loss), wanted)
    stages.copy_weights_to(model)
    assert_close(model.get_weights(), other.get_weights())


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


def two_outputs(as_dict: bool) -> Any:
    given = keras.Input([4])
    hidden = dense()(given)
    outputs = {"a": layers.Dense(4, name="a")(hidden), "b": layers.Dense(4, name="b")(hidden)}
    return keras.Model(given, outputs if as_dict else [outputs["b"], outputs["a"]])


OF_OUTPUTS: dict[str, tuple[bool, Any, Any, Any, Any]] = {
    "one for each": (False, "mse", None, [x, -x], None),
    "list": (False, ["mse", keras.losses.SparseCategoricalCrossentropy(True)], [0.5, 2.0], [x, labels], None),
    "list of sums": (False, [keras.losses.Huber(reduction="sum")] * 2, None, [x, -x], [weights, weights[::-1]]),
    "names": (False, {"b": "mae", "a": of_rows}, {"a": 0.5, "b": 2.0}, {"a": x, "b": -x}, None),
    "names, weight": (False, {"a": "mse", "b": "mae"}, [0.5, 2.0], [x, -x], weights),
    "dict": (
        True,
        {"a": "mse", "b": "log_cosh"},
        {"a": 3.0, "b": 1.0},
        {"a": x, "b": -x},
        {"a": weights, "b": weights},
    ),
    "list for a dict": (True, ["mse", "mae"], None, {"a": x, "b": -x}, None),
    "not all": (False, ["mse", None], None, [x, -x], None),
}
"""By what is special about it: whether outputs are a dict, the loss and its factors, targets and their weights."""


@pytest.mark.filterwarnings("ignore:Gradients do not exist")
@pytest.mark.in_ci(4)
@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=[pytest.mark.private("gradients of None")] * (case == "not all")) for case in OF_OUTPUTS],
)
def test_losses_of_several_outputs(case: str, devices: list[str]) -> None:
    """Also their metrics, one for each output. Ftrl sets a variable to zero whose gradient is zero, and not `None`."""
    as_dict, loss, factors, targets, weight = OF_OUTPUTS[case]
    model, other = two_outputs(as_dict), two_outputs(as_dict)
    other.set_weights(model.get_weights())
    stages = split(model, 2, "bytes", devices)
    histories = []
    for each in (other, Pipeline(stages, devices, 3).as_model()):
        each.compile(keras.optimizers.Ftrl(0.1), loss, factors, jit_compile=False)
        data = {"sample_weight": weight, "batch_size": 5, "shuffle": False, "validation_data": (x, targets)}
        histories.append(each.fit(x, targets, epochs=2, verbose=0, **data).history)
    assert_close(*histories)
    stages.copy_weights_to(model)
    assert_close(model.get_weights(), other.get_weights())


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
@pytest.mark.parametrize("setting", SETTINGS)
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


@pytest.mark.parametrize(("loss", "microbatches"), [(keras.losses.Dice(axis=(1,)), 3), (Correlation(), 1)])
def test_losses_of_one_row_or_one_microbatch(loss: Any, microbatches: int, devices: list[str]) -> None:
    """`Dice` has a loss for each row if its axis is that of a row."""
    pipe = Pipeline([tf.abs, tf.square], devices, microbatches, loss=loss)
    assert_close(pipe.value_and_gradients(x, x[::-1] ** 2)[0], loss(x[::-1] ** 2, x**2))


def test_a_loss_that_fails_names_the_cause() -> None:
    pipe = Pipeline([tf.sin, tf.nn.softmax], ["CPU:0", "CPU:1"], 2, loss="sparse_categorical_crossentropy")
    with pytest.raises(FunctionError, match=r"stage 1 of 2 with the loss on CPU:1 failed: .* label value of 99 "):
        pipe.value_and_gradients(x, np.full(len(x), 99))
    with pytest.raises(DataError, match=r"data\.x has \d+, data\.y has 3\. They must share"):
        pipe.value_and_gradients(x, x[:3])


@pytest.mark.parametrize(
    ("bad", "error"),
    [
        (lambda: Pipeline([tf.sin], loss="nothing"), OptionError),
        (lambda: Pipeline([tf.sin], loss="hinge"), OptionError),
        (lambda: Pipeline([tf.sin], loss=keras.losses.MeanSquaredError("none")), OptionError),
        (lambda: Pipeline([tf.sin], replicas=0), OptionError),
        (lambda: Pipeline([tf.sin], ["CPU:0"], replicas=2), OptionError),
        (lambda: Pipeline([tf.sin] * 4, ["CPU:0", "CPU:1"], 3, schedule="interleaved"), OptionError),
        (lambda: Pipeline([tf.sin], loss=None).value_and_gradients(x, x), OptionError),
        (lambda: Pipeline([tf.sin], loss="mse").value_and_gradients(x, None), DataError),
        (lambda: Pipeline([tf.sin], loss=lambda y, z: tf.reduce_mean(y - z)).value_and_gradients(x, x), FunctionError),
        (lambda: Pipeline([tf.sin], loss="mse").value_and_gradients(steps, steps, weights), FunctionError),
        (lambda: Pipeline([tf.sin]).stream(x), DataError),
        (lambda: Pipeline([tf.sin])(tf.data.Dataset.from_tensors(x)), DataError),
        (lambda: Pipeline([tf.function(lambda rows: REGULARIZED(rows))], added_losses="sum")(x), FunctionError),
        (lambda: Pipeline(split(chain(dense(), Scaled(loss="sum")), 2, "bytes"))(x), FunctionError),
        (lambda: Pipeline([mapped_before(REGULARIZED)], added_losses="sum")(x), FunctionError),
        (lambda: keras.models.clone_model(Pipeline([tf.sin]).as_model()), OptionError),
        (lambda: Pipeline([tf.sin], loss=contrastive).value_and_gradients(x, x), OptionError),
        (lambda: Pipeline([layers.Dropout(0.1)], loss=contrastive).value_and_gradients(x, x), OptionError),
        (lambda: Pipeline([tf.sin], loss=balanced).value_and_gradients(x, np.sign(x)), OptionError),
        (lambda: Pipeline([tf.sin], loss=["mse", keras.losses.Huber(reduction="sum")]), OptionError),
        (lambda: Pipeline([tf.sin], loss={"a": "mse"}).value_and_gradients(x, {"b": x}), FunctionError),
        (lambda: Pipeline([lambda z: (z, z)], loss=["mse"] * 2).value_and_gradients(x, x), FunctionError),
        (
            lambda: Pipeline([lambda z: (z, z)], loss=[BY_WEIGHT] * 2).value_and_gradients(x, (x, x), weights),
            FunctionError,
        ),
        (lambda: Pipeline([tf.sin], loss=["mse"] * 2).value_and_gradients(x, x), FunctionError),
        (lambda: Pipeline([tf.sin]).as_model().compile(loss=["mse"] * 2, loss_weights=[1.0]), OptionError),
        (lambda: Pipeline([tf.sin]).as_model().compile(loss_weights=[1.0]), OptionError),
        (lambda: Pipeline([tf.sin]).as_model().compile(loss="mse", jit_compile=True), OptionError),
    ],
)
def test_what_cannot_be_is_refused(bad: Any, error: Any) -> None:
    with pytest.raises(error):
        bad()


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
    assert "all 4 microbatches" in str(pipe.explain(x))
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
