"""Law 10, for models with steps of their own: calls of the model and its layers are mapped, with the results of one device."""

from __future__ import annotations

import gc
import warnings
from contextvars import ContextVar
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from graphs import partitions, placements
from keras import layers
from oracle import assert_close
from steps import MODELS, Autoencoder, TwoPasses, descend
from trainings import ACTIVITY, STEPS, X, Y

import devicemap
from devicemap.errors import DataError, FunctionError, OptionError

DEVICE_COUNTS = 2, 3


def made(name: str, **compiled: Any) -> tuple[keras.Model, dict[str, Any]]:
    keras.utils.set_random_seed(1)
    model, data = MODELS[name]
    model = model()
    model.compile(**{"optimizer": keras.optimizers.SGD(0.05), "loss": "mse", "jit_compile": False} | compiled)
    return model, data


def fitted(model: keras.Model, data: dict[str, Any]) -> dict[str, Any]:
    history = model.fit(**STEPS | data).history
    return {"history": history, "weights": [variable.numpy() for variable in model.variables]}


def wanted(name: str) -> dict[str, Any]:
    """What one device makes of it, in eager code, which traces nothing."""
    return fitted(*made(name, run_eagerly=True))


NONE = pytest.mark.private("a gradient of None, and not of zeros, for what unused outputs depend on")
LIKE_OTHERS = (
    "two forward passes", "adversarial", "opposed", "smooth", "variational autoencoder", "distillation", "contrastive",
)  # fmt: skip
"""Another test trains these, or their steps call layers as those of other models do."""


@pytest.mark.parametrize("eager", [False, pytest.param(True, marks=pytest.mark.nightly)], ids=["", "eager"])
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[NONE] * (name == "in turn") + [pytest.mark.nightly] * (name in LIKE_OTHERS))
        for name in MODELS
    ],
)
def test_trained_as_by_one_device(name: str, eager: bool, devices: list[str]) -> None:
    model, data = made(name, run_eagerly=eager)
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        added = {"decorated": ACTIVITY, **dict.fromkeys(("inconstant", "in turn", "opposed", "transitions"), "mean")}
        got = fitted(devicemap.parallelize(model, devices, added_losses=added.get(name)), data)
    assert_close(got, wanted(name))
    assert any(np.ptp(values) > 1e-3 for values in got["history"].values())


SHIFT = ContextVar("SHIFT", default=0.0)


class Shifted(layers.Layer):
    """Changes its input before `call`, adds a loss and noise, of which `draw` makes the numbers."""

    def __init__(self, draw: Any = tf.zeros) -> None:
        super().__init__()
        self.draw = draw

    def build(self, shape: Any) -> None:
        self.scale = self.add_weight(shape=(), initializer="ones")

    def __call__(self, x: Any, **options: Any) -> Any:
        return super().__call__(x + 1.0, **options)

    def call(self, x: Any) -> Any:
        self.add_loss(tf.reduce_mean(x))
        return x * self.scale + self.draw(tf.shape(x)) + SHIFT.get()


class Twice(keras.Model):
    """A step with several tapes, a layer that is called twice, and arguments of a call that is not mapped."""

    def __init__(self, *inner: layers.Layer, draw: Any = tf.zeros) -> None:
        super().__init__()
        self.shifted, self.inner = Shifted(draw), keras.Sequential(inner or [layers.Identity()])

    def call(self, x: Any, others: Any) -> Any:
        return self.inner(self.shifted(2.0 * self.shifted(x))) + tf.reduce_sum(others)

    def train_step(self, data: Any) -> Any:
        token = SHIFT.set(2.0)
        with tf.GradientTape() as one, tf.GradientTape() as other:
            outputs = self(data[0], others=tf.ones([5, 2]))
            loss = tf.reduce_mean(outputs) + tf.add_n(self.losses)
        SHIFT.reset(token)
        descend(self, one, loss)
        return {"cost": loss, "slope": other.gradient(loss, self.shifted.scale.value), "different": distinct(outputs)}


def distinct(numbers: Any) -> Any:
    return tf.size(tf.unique(tf.reshape(numbers, [-1]))[0])


@pytest.mark.parametrize("inner", [[], [layers.BatchNormalization]], ids=["", "batch normalization"])
def test_layers_are_called_as_in_the_step(inner: list[Any], devices: list[str]) -> None:
    """Calls on several devices know which calls surround them."""

    def history(parallel: bool) -> Any:
        model = Twice(*(make() for make in inner))
        model.compile("sgd", jit_compile=False)
        if parallel:
            devicemap.parallelize(model, devices, added_losses="mean")
        return model.fit(X, Y, **STEPS).history

    assert_close(history(parallel=True), history(parallel=False))


@pytest.mark.parametrize(
    "draw",
    [
        keras.random.normal,
        tf.random.normal,
        lambda shape: tf.random.normal(shape, seed=7),
        tf.function(lambda shape: tf.random.normal(shape)),
    ],
    ids=["of Keras", "of TensorFlow", "with a seed", "in a tf.function"],
)
def test_devices_draw_other_numbers_under_several_tapes(draw: Any, devices: list[str]) -> None:
    keras.utils.set_random_seed(1)
    model = Twice(draw=draw)
    model.compile("sgd", jit_compile=False)
    devicemap.parallelize(model, devices, added_losses="mean")
    history = model.fit(np.zeros([12, 1], "f"), np.zeros(12), batch_size=12, verbose=0).history
    assert history["different"] == [12]


def test_several_tapes_multiply_no_functions(devices: list[str]) -> None:
    """For each gradient of a function, TensorFlow would differentiate the functions that it calls again."""

    def functions() -> set[int]:
        gc.collect()
        return {id(each) for each in gc.get_objects() if type(each).__name__ == "FuncGraph"}

    on_one = wanted("opposed")
    model, data = made("opposed")
    before = functions()
    got = fitted(devicemap.parallelize(model, devices, added_losses="mean"), data)
    assert len(functions() - before) < 30
    assert_close(got, on_one)


def test_evaluated_and_predicted_as_by_one_device(devices: list[str]) -> None:
    def results(parallel: bool) -> Any:
        model, data = made("two forward passes", run_eagerly=not parallel)
        if parallel:
            devicemap.parallelize(model, devices)
        return model.predict(data["x"], verbose=0), model.evaluate(**data, verbose=0, return_dict=True)

    assert_close(results(True), results(False))


@pytest.mark.private("inlining the calls, whose ops are otherwise in no partitioned graph of the step")
def test_each_outermost_call_runs_on_all_devices() -> None:
    workers = ["CPU:1", "CPU:2", "CPU:3"]
    model, data = made("variational autoencoder")
    devicemap.parallelize(model, workers)
    model.train_on_batch(data["x"][:5], data["y"][:5])  # runs layers on random rows, too
    counted = placements(partitions(model.train_on_batch, data["x"][:11], data["y"][:11]), "MatMul")
    assert [counted[worker] for worker in workers] == [11] * 3  # of 4 layers; the first has no gradient to its input
    assert counted["CPU:0"] == 0
    assert model.report().devices[0].rows == 2 + 4


class Curved(keras.Model):
    """Computes a second derivative for each row."""

    def __init__(self) -> None:
        super().__init__()
        self.cubes = layers.Lambda(lambda x: x**3)

    def test_step(self, x: Any) -> Any:
        with tf.GradientTape() as outer, tf.GradientTape() as inner:
            outer.watch(x)
            inner.watch(x)
            slopes = inner.gradient(self.cubes(x), x)
        return {"curvature": tf.reduce_mean(outer.batch_jacobian(slopes, x))}


def test_second_derivatives_with_an_unknown_number_of_rows(devices: list[str]) -> None:
    model = Curved()
    model.compile(jit_compile=False)
    devicemap.parallelize(model, devices)
    for count in 1, 5:
        batches = tf.data.Dataset.from_tensor_slices(X[:count, :1]).batch(5)
        assert float(model.evaluate(batches, verbose=0)) == pytest.approx(6 * X[:count, 0].mean(), rel=1e-5)


class Outside(keras.Model):
    """Calls layers that it does not have."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = self.add_weight(shape=[6, 2])

    def train_step(self, data: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((data[0] @ self.weight - data[1]) ** 2)
        descend(self, tape, loss)
        return {"cost": loss}


def test_a_step_that_maps_nothing_warns(devices: list[str]) -> None:
    model = Outside()
    model.compile("sgd", jit_compile=False)
    with pytest.warns(RuntimeWarning, match="train_step of outside.* calls neither the model nor one of its layers"):
        devicemap.parallelize(model, devices).fit(X, Y, verbose=0)
    assert [share.rows for share in model.report().devices] == [len(X), *[0] * (len(devices) - 1)]


def test_a_step_that_is_set_on_the_model(devices: list[str]) -> None:
    model, data = made("distillation")
    model.train_step = lambda batch: {"loss": tf.reduce_mean((model(batch[0]) - batch[1]) ** 2)}
    own = model.train_step
    wanted = model.fit(**STEPS | data).history
    assert_close(devicemap.parallelize(model, devices).fit(**STEPS | data).history, wanted)
    assert model.detach().train_step is own
    devicemap.parallelize(model, devices).train_step = own
    with pytest.raises(OptionError, match="got another train_step after it was parallelized; set it before"):
        model.fit(**STEPS | data)


@pytest.mark.parametrize("name", ["two forward passes", "adversarial"])
def test_a_step_that_builds_losses_and_optimizers_is_traced_once(name: str, devices: list[str]) -> None:
    traced: list[Any] = []
    model, data = made(name)
    own = model.train_step
    model.train_step = lambda batch: traced.append(batch) or own(batch)
    assert_close(fitted(devicemap.parallelize(model, devices), data), wanted(name))
    assert len(traced) == 1


class Raw(layers.Layer):
    """Multiplies by a variable that Keras does not track."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix = tf.Variable(tf.ones([6, 3]))

    def call(self, x: Any) -> Any:
        return tf.tanh(x @ self.matrix)


def test_a_step_trains_variables_that_are_not_keras_own(devices: list[str]) -> None:
    found = []
    for options in (None, {}, {"recompute": True}):
        keras.utils.set_random_seed(1)
        model = keras.Sequential([keras.Input([6]), Raw(), layers.Dense(2)])
        matrix = model.layers[0].matrix

        def step(batch: Any, model: Any = model, matrix: Any = matrix) -> Any:
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((model(batch[0]) - batch[1]) ** 2)
            matrix.assign_sub(0.1 * tape.gradient(loss, matrix))
            return {"cost": loss}

        model.train_step = step
        model.compile(jit_compile=False)
        if options is not None:
            devicemap.parallelize(model, devices, **options)
        model.fit(X, Y, **STEPS)
        found.append(matrix.numpy())
    assert_close(found[1:], [found[0]] * 2)


def test_microbatches_need_the_step_of_keras(devices: list[str]) -> None:
    with pytest.raises(OptionError, match=r"accumulate=2 .* train_step of its own.*recompute"):
        devicemap.parallelize(TwoPasses(), devices, accumulate=2)
    for name, options in (
        ("two forward passes", {"recompute": True}),
        ("distillation", {"accumulate": 2, "batch_norm": "local"}),
    ):
        model, data = made(name)
        assert_close(fitted(devicemap.parallelize(model, devices, **options), data), wanted(name))


class Logits:
    """An output that Keras does not know."""

    def __init__(self, values: Any) -> None:
        self.values = values


@pytest.mark.parametrize("eager", [False, True])
def test_objects_that_hold_tensors_are_refused(eager: bool, devices: list[str]) -> None:
    model, data = made("distillation")
    model.objects = layers.Lambda(Logits)
    model.train_step = lambda batch: {"cost": tf.reduce_mean(model.objects(batch[0]).values)}
    model.compile(run_eagerly=eager)
    with pytest.raises(FunctionError, match="a layer returns an object of Logits"):
        devicemap.parallelize(model, devices).fit(**STEPS | data)


class Keeping(layers.Layer):
    def call(self, x: Any) -> Any:
        self.kept = tf.reduce_mean(x)
        return x


def test_a_tensor_that_a_layer_keeps_for_the_step_is_explained(devices: list[str]) -> None:
    model, data = made("distillation")
    model.keeping = Keeping()
    model.train_step = lambda batch: {"cost": tf.reduce_sum(model.keeping(batch[0])) + model.keeping.kept}
    with pytest.raises(ValueError, match="out of scope") as raised:
        devicemap.parallelize(model, devices).fit(**STEPS | data)
    assert "let it return the tensor" in raised.value.__notes__[-1]


class Applies(layers.Layer):
    """Applies a function of itself and its input."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function, self.norm = function, layers.BatchNormalization()
        self.dropout = layers.Dropout(0.5)
        self.norm.build([None, 6])

    def call(self, x: Any) -> Any:
        return self.function(self, x)


def forward_mode(layer: Any, x: Any) -> Any:
    with tf.autodiff.ForwardAccumulator(x, tf.ones_like(x)) as accumulator:
        y = layer(x)
    return accumulator.jvp(y)


@pytest.mark.parametrize(
    ("function", "word"),
    [
        (
            lambda layer, x: tf.cond(x[0, 0] > 9, lambda: layer.norm(x, training=True), lambda: x),
            "moving_mean .* branch",
        ),
        (
            lambda layer, x: tf.while_loop(
                lambda i, _: i < 2, lambda i, x: (i + 1, layer.dropout(x, training=True)), [0, x]
            )[1],
            "the same numbers in each step",
        ),
        (
            lambda layer, x: tf.function(layer.norm)(x, training=True),
            r"moving_mean gets a new value .* tf\.function inside a layer",
        ),
    ],
    ids=["a value in a branch", "numbers in a loop", "a value in a tf.function"],
)
@pytest.mark.parametrize("batch_norm", ["synchronized", "local"])
def test_what_cannot_leave_an_inner_graph_is_refused(
    function: Any, word: str, batch_norm: Any, devices: list[str]
) -> None:
    model = keras.Sequential([keras.Input([6]), Applies(function), layers.Dense(2)])
    model.compile("sgd", "mse", jit_compile=False)
    with pytest.raises(FunctionError, match=word):
        devicemap.parallelize(model, devices, batch_norm=batch_norm).train_on_batch(X, Y)


@pytest.mark.private("asking whether a tf.autodiff.ForwardAccumulator follows a tensor")
def test_forward_mode_and_states_of_rows_are_refused(devices: list[str]) -> None:
    model, data = made("distillation")
    model.train_step = lambda batch: {"cost": tf.reduce_mean(forward_mode(model, batch[0]))}
    with pytest.raises(DataError, match="ForwardAccumulator"):
        devicemap.parallelize(model, devices).train_on_batch(**data)
    stateful = keras.Sequential([keras.Input(batch_shape=[2, 3, 1]), layers.LSTM(2, stateful=True)])
    with pytest.raises(OptionError, match="stateful"):
        devicemap.parallelize(stateful, devices)


@pytest.mark.filterwarnings("ignore:.*Each device sees some of the rows")
@pytest.mark.parametrize(
    "function", [lambda x, table: x @ tf.transpose(table), lambda x, table: x + tf.reduce_sum(table, 0)]
)
def test_tables_of_unknown_length_need_another_axis(function: Any, devices: list[str]) -> None:
    model, data = made("distillation")
    model.layer = layers.Lambda(lambda both: function(*both))
    model.train_step = lambda batch: {
        "cost": tf.reduce_mean(model.layer([batch[0], batch[0][: tf.shape(batch[0])[0] - 1]]))
    }
    devicemap.parallelize(model, devices)
    with pytest.raises((FunctionError, tf.errors.InvalidArgumentError), match="add a first axis of length 1"):
        model.fit(**STEPS | data)


def test_models_without_call_name_what_to_explain(devices: list[str]) -> None:
    model, data = made("adversarial")
    with pytest.raises(OptionError, match="has no call"):
        devicemap.parallelize(model, devices).explain(data["x"])
    assert Autoencoder.call is not keras.Model.call
