"""Law 10, for models with steps of their own: calls of the model and its layers are mapped, with the results of one device."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from graphs import partitions, placements
from keras import layers
from oracle import assert_close
from steps import MODELS, Twice, stepping
from trainings import STEPS, LooksUp, X, Y

import devicemap
from devicemap.errors import DataError, FunctionError

DEVICE_COUNTS = 2, 3


LIKE_OTHERS = "adversarial", "opposed", "smooth", "variational autoencoder", "distillation", "contrastive"
"""Another test trains these, or their steps call layers as those of other models do."""

NONE = pytest.mark.private("a gradient of None, and not of zeros, for what unused outputs depend on")
ADDED = pytest.mark.private("adding gradients on the devices of variables")
TRAININGS = [
    *(
        pytest.param(name, {}, marks=[pytest.mark.nightly] * (name in LIKE_OTHERS))
        for name in MODELS
        if name not in ("in turn", "a table of the model")
    ),
    pytest.param("in turn", {}, marks=NONE),
    pytest.param("a table of the model", {}, marks=ADDED),
    ("two forward passes", {"recompute": True}),
    ("variables that are not Keras's own", {"recompute": True}),
    ("distillation", {"accumulate": 2, "batch_norm": "local"}),
]


@pytest.mark.parametrize(("name", "options"), TRAININGS, ids=str)
def test_trained_as_by_one_device(name: str, options: dict[str, Any], devices: list[str]) -> None:
    case = MODELS[name]
    got = case.trained(devicemap.parallelize(case.made(), devices, **case.options | options))
    assert_close(got, case.wanted)
    assert any(np.ptp(values) > 1e-3 for values in got["history"].values())


@pytest.mark.parametrize(
    "draw",
    [
        keras.random.normal,
        lambda shape: tf.random.normal(shape, seed=7),
        tf.function(lambda shape: tf.random.normal(shape)),
        tf.function(
            lambda shape: tf.random.normal(shape, seed=7), input_signature=[tf.TensorSpec([2], tf.int32)]
        ).get_concrete_function(),
    ],
    ids=["of Keras", "with a seed", "in a tf.function", "in a function that was traced before"],
)
def test_devices_draw_other_numbers_under_several_tapes(draw: Any, devices: list[str]) -> None:
    keras.utils.set_random_seed(1)
    model = Twice(draw=draw)
    model.compile("sgd", jit_compile=False)
    devicemap.parallelize(model, devices, added_losses="mean")
    history = model.fit(np.zeros([12, 1], "f"), np.zeros(12), batch_size=12, verbose=0).history
    assert history["different"] == [12]


class Dropping(keras.layers.Layer):
    def __init__(self) -> None:
        super().__init__()
        self.drop = layers.Dropout(0.5)

    @tf.function
    def call(self, x: Any) -> Any:
        return self.drop(x, training=True)


@pytest.mark.private("tracing functions again")
def test_devices_draw_other_numbers_in_a_function_of_a_layer(devices: list[str]) -> None:
    """Its trace must not keep the seed of the first device, and cannot have those of two calls."""
    dropping, rows = Dropping(), np.ones([len(devices), 64], "f")
    for repeats in 1, 2:
        model = keras.Sequential([keras.Input([64]), *[dropping] * repeats])
        model.compile(jit_compile=False)
        devicemap.parallelize(model, devices)
        if repeats == 1:
            found = [model.predict_on_batch(rows) for _ in range(3)]
            assert len(np.unique(np.concatenate(found), axis=0)) == 3 * len(devices)
        else:
            with pytest.raises(FunctionError, match=r"draws .* in a tf\.function that is called several"):
                model.predict_on_batch(rows)


def test_several_tapes_multiply_no_functions(devices: list[str]) -> None:
    """For each gradient of a function, TensorFlow would differentiate the functions that it calls again."""

    def functions() -> set[int]:
        gc.collect()
        return {id(each) for each in gc.get_objects() if type(each).__name__ == "FuncGraph"}

    case = MODELS["opposed"]
    wanted, model = case.wanted, case.made()
    before = functions()
    got = case.trained(devicemap.parallelize(model, devices, **case.options))
    assert len(functions() - before) < 30
    assert_close(got, wanted)


@pytest.mark.private("inlining the calls, whose ops are otherwise in no partitioned graph of the step")
def test_each_outermost_call_runs_on_all_devices() -> None:
    workers = ["CPU:1", "CPU:2", "CPU:3"]
    model = devicemap.parallelize(MODELS["variational autoencoder"].made(), workers)
    model.train_on_batch(X[:5], Y[:5])  # runs layers on random rows, too
    counted = placements(partitions(model.train_on_batch, X[:11], Y[:11]), "MatMul")
    assert [counted[worker] for worker in workers] == [11] * 3  # of 4 layers; the first has no gradient to its input
    assert counted["CPU:0"] == 0
    assert model.report().devices[0].rows == 2 + 4


def test_second_derivatives_with_an_unknown_number_of_rows(devices: list[str]) -> None:
    cubes = layers.Lambda(lambda x: x**3)

    def curvature(x: Any) -> Any:
        with tf.GradientTape() as outer, tf.GradientTape() as inner:
            outer.watch(x)
            inner.watch(x)
            slopes = inner.gradient(cubes(x), x)
        return {"curvature": tf.reduce_mean(outer.batch_jacobian(slopes, x))}

    model = keras.Sequential([keras.Input([1]), cubes])
    model.test_step = curvature
    model.compile(jit_compile=False)
    devicemap.parallelize(model, devices)
    for count in 1, 5:
        batches = tf.data.Dataset.from_tensor_slices(X[:count, :1]).batch(5)
        assert float(model.evaluate(batches, verbose=0)) == pytest.approx(6 * X[:count, 0].mean(), rel=1e-5)


@ADDED
@pytest.mark.parametrize("options", [{}, {"accumulate": 2}], ids=str)
def test_lookups_with_fewer_rows_than_devices_have_the_slices_of_one_device(
    options: dict[str, Any], devices: list[str]
) -> None:
    model = keras.Sequential([keras.Input([6]), LooksUp()])

    def slices(x: Any) -> Any:
        with tf.GradientTape() as tape:
            cost = tf.reduce_sum(model(x) ** 2)
        found = tape.gradient(cost, model.trainable_variables)
        return {str(i): tf.size(each.indices) for i, each in enumerate(found)}

    model.test_step = slices
    model.compile(jit_compile=False)
    batches = [tf.data.Dataset.from_tensor_slices(X[:count]).batch(5) for count in (1, 5)]
    wanted = [model.evaluate(each, return_dict=True, verbose=0) for each in batches]
    devicemap.parallelize(model, devices, **options)
    assert [model.evaluate(each, return_dict=True, verbose=0) for each in batches] == wanted


def test_a_step_that_maps_nothing_warns(devices: list[str]) -> None:
    outside = lambda model, x, y: tf.reduce_mean((x @ model.matrix - y) ** 2)
    model = stepping(outside, matrix=lambda: keras.Variable(np.ones([6, 2], "f")))()
    model.compile("sgd", jit_compile=False)
    with pytest.warns(RuntimeWarning, match="train_step of stepping.* calls neither the model nor one of its layers"):
        devicemap.parallelize(model, devices).fit(X, Y, verbose=0)
    assert [share.rows for share in model.report().devices] == [len(X), *[0] * (len(devices) - 1)]


def test_a_step_that_vectorises_calls_of_its_layers_runs_on_one_device(devices: list[str]) -> None:
    model = keras.Sequential([keras.Input([6]), layers.Dense(2)])
    squares = lambda batch: tf.reduce_mean(tf.vectorized_map(lambda row: model.layers[0](row[None]) ** 2, batch[0]))
    kernel = model.trainable_variables[0]

    def step(batch: Any) -> Any:
        with tf.GradientTape() as tape:
            cost = squares(batch)
        return {"slope": tf.reduce_sum(tape.gradient(cost, kernel.value))}

    model.train_step = step
    model.compile(jit_compile=False)
    wanted = model.fit(X, Y, **STEPS).history
    with pytest.warns(RuntimeWarning, match=r"nor in tf\.vectorized_map"):
        assert_close(devicemap.parallelize(model, devices).fit(X, Y, **STEPS).history, wanted)


def test_a_step_that_is_set_on_the_model(devices: list[str]) -> None:
    model = MODELS["distillation"].made()
    model.train_step = lambda batch: {"loss": tf.reduce_mean((model(batch[0]) - batch[1]) ** 2)}
    own = model.train_step
    wanted = model.fit(X, Y, **STEPS).history
    assert_close(devicemap.parallelize(model, devices).fit(X, Y, **STEPS).history, wanted)
    assert model.detach().train_step is own


def test_a_step_that_builds_losses_and_optimizers_is_traced_once(devices: list[str]) -> None:
    traced: list[Any] = []
    case = MODELS["adversarial"]
    model = case.made()
    own = model.train_step
    model.train_step = lambda batch: traced.append(batch) or own(batch)
    assert_close(case.trained(devicemap.parallelize(model, devices)), case.wanted)
    assert len(traced) == 1


class Logits:
    """An output that Keras does not know."""

    def __init__(self, values: Any) -> None:
        self.values = values


class Keeping(layers.Layer):
    def call(self, x: Any) -> Any:
        self.kept = tf.reduce_mean(x)
        return x


def forward_mode(layer: Any, x: Any) -> Any:
    with tf.autodiff.ForwardAccumulator(x, tf.ones_like(x)) as accumulator:
        y = layer(x)
    return accumulator.jvp(y)


def by_gradients(layer: Any, x: Any) -> Any:
    with tf.GradientTape() as tape:
        tape.watch(x)
        slopes = tf.gradients(layer(x), x)[0]
    return tape.gradient(slopes, x)


def values_of(layer: Any, x: Any) -> Any:
    return layer(x).values


def with_a_table(layer: Any, x: Any) -> Any:
    return layer([x, x[: tf.shape(x)[0] - 1]])


def of_pairs(layer: Any, x: Any) -> Any:
    return layer(tf.matmul(x, x, transpose_b=True))


TABLE = (FunctionError, tf.errors.InvalidArgumentError), "add a first axis of length 1"
REFUSED: dict[str, tuple[Callable[[], Any], Callable[[Any, Any], Any], Any, str]] = {
    # a layer, how the step calls it, and the error
    "an object": (lambda: layers.Lambda(Logits), values_of, FunctionError, "a layer returns an object of Logits"),
    "an object, eagerly": (
        lambda: layers.Lambda(Logits),
        values_of,
        FunctionError,
        "a layer returns an object of Logits",
    ),
    "a kept tensor": (Keeping, lambda layer, x: layer(x) + layer.kept, ValueError, "let it return the tensor"),
    "products with a table": (
        lambda: layers.Lambda(lambda both: both[0] @ tf.transpose(both[1])),
        with_a_table,
        *TABLE,
    ),
    "sums of a table": (lambda: layers.Lambda(lambda both: both[0] + tf.reduce_sum(both[1], 0)), with_a_table, *TABLE),
    "a matrix of rows": (
        lambda: layers.Lambda(lambda scores: scores + tf.transpose(scores)),
        of_pairs,
        FunctionError,
        "one row for each row, .* by layers that are not its attributes",
    ),
    "forward mode": (layers.Identity, forward_mode, DataError, "ForwardAccumulator"),
    "gradients under a tape": (lambda: layers.Lambda(tf.sin), by_gradients, NotImplementedError, "use nested tapes"),
}
PRIVATE = {
    "forward mode": "asking whether a tf.autodiff.ForwardAccumulator follows a tensor",
    "gradients under a tape": "asking whether a tape follows a tensor",
}


@pytest.mark.filterwarnings("ignore:.*Each device sees some of the rows")
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.private(PRIVATE[name]) if name in PRIVATE else []) for name in REFUSED],
)
def test_what_layers_cannot_do_in_a_step_is_refused(name: str, devices: list[str]) -> None:
    make, function, error, word = REFUSED[name]
    model = keras.Sequential([make()])
    model.train_step = lambda batch: {"cost": tf.reduce_mean(function(model.layers[0], batch[0]))}
    model.compile(run_eagerly="eagerly" in name, jit_compile=False)
    with pytest.raises(error, match=word):
        devicemap.parallelize(model, devices).fit(X, Y, **STEPS)
