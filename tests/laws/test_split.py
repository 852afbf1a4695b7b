"""The stages of a split Keras model compute, train and are saved as the model, which does not change."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from devicemap import Pipeline, split
from devicemap.errors import OptionError

pytestmark = pytest.mark.filterwarnings("ignore:a Pipeline called under a tape")

DEVICE_COUNTS = (3, 4)

layers = keras.layers
ids = np.array([[1, 2, 0, 0], [3, 0, 0, 0], [4, 4, 4, 4], [1, 1, 5, 0], [2, 3, 4, 0], [7, 0, 0, 0], [8, 8, 0, 0]])
x = np.random.default_rng(0).normal(size=[7, 4]).astype("float32")


class Piped(keras.Model):
    """A model that is a pipeline of stages."""

    def __init__(self, stages: Any, devices: Any, **options: Any) -> None:
        super().__init__()
        self.stages, self.pipe = stages, Pipeline(stages, devices, **options)
        self.built, self.jit_compile = True, False

    def call(self, rows: Any, training: bool | None = None) -> Any:
        return self.pipe(rows)


class Scaled(layers.Layer):
    """A custom layer with an argument, state that depends on rows, a draw, or a loss."""

    def __init__(
        self, scale: float = 1.0, counts: bool = False, seed: int | None = None, loss: Any = None, **options: Any
    ):
        super().__init__(**options)
        self.scale, self.counts, self.seed, self.loss = scale, counts, seed, loss
        self.generator = None if seed is None else keras.random.SeedGenerator(seed)
        self.supports_masking = True

    def build(self, shape: Any) -> None:
        self.count = self.add_weight(shape=(), initializer="zeros", trainable=False)

    def call(self, rows: Any) -> Any:
        if self.counts:
            self.count.assign_add(1.0)
        if self.loss:
            reduce = tf.reduce_sum if self.loss == "sum" else tf.reduce_mean
            self.add_loss(0.1 * reduce(tf.reduce_sum(rows**2, 1)))
            self.add_loss(self.count + 3.0)
        drawn = 0.0 if self.generator is None else keras.random.normal(tf.shape(rows), seed=self.generator)
        return self.scale * (rows + self.count) + drawn


class Block(layers.Layer):
    """A custom layer without `build`. Keras builds its layers when it is called."""

    def __init__(self, **options: Any):
        super().__init__(**options)
        self.inner, self.outer = chain(dense(8), dense()), layers.Dense(4)

    def call(self, rows: Any, others: Any) -> Any:
        return rows + self.outer(self.inner(others))


def blocks() -> Any:
    given = keras.Input([4])
    return keras.Model(given, Block()(Block()(given, dense()(given)), given))


def chain(*inner: Any, shape: Any = (4,), **options: Any) -> Any:
    return keras.Sequential([keras.Input(shape, **options), *inner])


def dense(units: int = 4, **options: Any) -> Any:
    return layers.Dense(units, **{"activation": "tanh"} | options)


def residual() -> Any:
    given = keras.Input([4])
    h = dense(8)(given)
    h = layers.Add()([h, dense(8)(h)])
    return keras.Model(given, layers.Concatenate()([dense()(h), given]))


def loaded() -> Any:
    """A model that was made step by step, and saved."""
    model = keras.Sequential()
    for each in (keras.Input([4]), dense(), dense(), dense()):
        model.add(each)
    return keras.models.model_from_json(model.to_json())


def nested() -> Any:
    given = keras.Input([4])
    inner = keras.Model(given, layers.Add()([given, dense()(given)]))
    deep = chain(dense(), inner, chain(dense(), layers.Dropout(0.0)))
    hidden = deep(keras.ops.tanh(deep(given)), training=False)
    return keras.Model(given, {"first": keras.ops.multiply(hidden, 2), "second": dense(2)(inner(hidden))})


def tied() -> Any:
    given, layer = keras.Input([4]), dense()
    return keras.Model(given, dense()(layer(dense()(layer(given)))))


def dicts() -> Any:
    given = {"a": keras.Input([4], name="a"), "b": keras.Input([4], name="b")}
    hidden = layers.Subtract()([dense()(given["b"]), dense()(given["a"])])
    return keras.Model(given, {"one": dense()(hidden), "two": dense()(given["b"])})


def adapted() -> Any:
    normalization = layers.Normalization()
    normalization.adapt(3 * x + 5)
    return chain(normalization, dense(), dense(2))


def looked_up() -> Any:
    lookup = layers.IntegerLookup(output_mode="tf_idf")
    lookup.adapt(ids)
    return chain(lookup, dense(), dense(2), dtype="int32")


def frozen() -> Any:
    model = chain(dense(), layers.BatchNormalization(), dense())
    model.layers[1].trainable = model.layers[2].trainable = False
    return model


def regularized() -> Any:
    options = {"kernel_regularizer": "l2", "kernel_constraint": "max_norm", "activity_regularizer": "l2"}
    return chain(dense(**options), layers.ActivityRegularization(l1=0.1), dense(**options))


def ids_masked(*inner: Any) -> Any:
    return chain(layers.Embedding(9, 4, mask_zero=True), *inner, dtype="int32")


def mixed() -> Any:
    return chain(
        dense(dtype="mixed_float16"), dense(dtype="float32"), dense(dtype="mixed_float16"), dense(dtype="float32")
    )


MODELS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "nested": (nested, x, {}),
    "loaded": (loaded, x, {}),
    "dicts": (dicts, {"a": x, "b": x[::-1]}, {}),
    "mask": (lambda: ids_masked(layers.LSTM(4, use_cudnn=False)), ids, {}),
    "adapted": (adapted, x, {}),
    "vocabulary": (looked_up, ids, {}),
    "frozen": (frozen, x, {}),
    "batch normalization": (lambda: chain(dense(), layers.BatchNormalization(), dense()), x, {}),
    "blocks": (blocks, x, {}),
    "state": (lambda: chain(dense(), Scaled(0.5, counts=True), dense()), x, {}),
    "loss, sum": (lambda: chain(dense(), Scaled(loss="sum"), dense()), x, {"added_losses": "sum"}),
    "seed": (lambda: chain(dense(), Scaled(seed=3), dense()), x, {"microbatches": 1}),
    "dropout": (lambda: chain(dense(), layers.Dropout(0.5), dense()), x, {"microbatches": 1}),
    "augmentation": (
        lambda: chain(layers.RandomFlip(), layers.Flatten(), dense(), shape=(2, 2, 1)),
        x.reshape([7, 2, 2, 1]),
        {"microbatches": 1},
    ),
}
"""Models, rows, and options of the pipeline. One microbatch draws the numbers of the whole batch."""

NIGHTLY = "adapted", "augmentation", "dicts", "frozen", "loaded", "seed"
"""Each is split as another one is, such as "adapted" as "vocabulary". `test_models.py` splits random models, too."""


def fitted(model: Any, rows: Any, eager: bool = False) -> list[float]:
    """The losses of steps of 4 and 3 rows; Keras's losses read the masks of outputs."""
    outputs = model(rows)
    targets = tf.nest.map_structure(lambda each: np.full_like(each, 0.5, "float32"), outputs)
    if not getattr(model, "compiled", False):
        losses = tf.nest.map_structure(lambda _: "mse", outputs)
        model.compile("adam", losses, run_eagerly=eager, jit_compile=False)
    return model.fit(rows, targets, batch_size=4, epochs=2, shuffle=False, verbose=0).history["loss"]


def assert_close(got: Any, wanted: Any) -> None:
    keras.tree.map_structure(lambda *pair: np.testing.assert_allclose(*pair, rtol=2e-3, atol=1e-4), got, wanted)


@pytest.mark.filterwarnings("ignore:.*batch normalization", "ignore:.*LSTM.* will therefore destroy the mask")
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.nightly] * (name in NIGHTLY)) for name in MODELS]
)
@pytest.mark.parametrize("as_model", [True, False], ids=["as_model", "a model of the user"])
def test_stages_train_as_the_model(name: str, as_model: bool, devices: list[str]) -> None:
    make, rows, options = MODELS[name]
    keras.utils.set_random_seed(1)
    model = make()
    model.run_eagerly = True  # which traces nothing
    stages = split(model, 3 if len(model.layers) > 2 else 2, "bytes", devices)
    before, state = model.predict(rows, verbose=0), [variable.numpy() for variable in model.variables]
    options = {"microbatches": 3} | options
    own = isinstance(before, np.ndarray) and as_model
    piped = Pipeline(stages, devices, **options).as_model() if own else Piped(stages, devices, **options)
    assert_close(piped.predict(rows, verbose=0), before)
    losses = fitted(piped, rows)
    after = piped.predict(rows, verbose=0)
    np.testing.assert_equal([variable.numpy() for variable in model.variables], state)
    alike = isinstance(before, np.ndarray)  # Keras weighs the losses of several outputs by rows in eager code only
    assert_close(losses, fitted(model, rows, eager=alike))
    assert_close(after, model.predict(rows, verbose=0))
    other = make()
    stages.copy_weights_to(other)
    assert_close([variable.numpy() for variable in other.variables], [variable.numpy() for variable in model.variables])


def test_a_pipeline_in_a_layer_of_mixed_precision(devices: list[str]) -> None:
    model = chain(dense(), dense(), dense(), dtype="float16")
    piped = Piped(split(model, 3, "bytes", devices), devices, microbatches=3)
    piped.dtype_policy = "mixed_float16"
    losses = fitted(piped, x.astype("float16"))
    assert_close(losses, fitted(model, x.astype("float16")))
    assert {variable.dtype for variable in piped.optimizer.variables} == {"int64", "float32"}


@pytest.mark.parametrize("by", ["time", "bytes"])
def test_split_keeps_the_losses_of_a_call(by: Any, devices: list[str]) -> None:
    model = regularized()
    model(x)
    before = [loss.numpy() for loss in model.losses]
    split(model, 2, by, devices)
    np.testing.assert_equal([loss.numpy() for loss in model.losses], before)


def test_save_load_and_continue_with_two_pipelines(devices: list[str], tmp_path: Path) -> None:
    """Pipelines over one model are independent; the model keeps its traces and its optimizer."""
    model, whole = (chain(dense(), layers.Dropout(0.0), dense(8), dense()) for _ in range(2))
    whole.set_weights(model.get_weights())
    fitted(whole, x, eager=True)
    one, other = (Piped(split(model, 3, "bytes", devices), devices, microbatches=3) for _ in range(2))
    fitted(one, x)
    fitted(model, x)
    one.save_weights(tmp_path / "one.weights.h5")
    other.load_weights(tmp_path / "one.weights.h5")
    for each in (one, other, model):
        assert_close(each.predict(x, verbose=0), whole.predict(x, verbose=0))
    wanted = fitted(whole, x)
    assert_close(fitted(one, x), wanted)
    assert_close(fitted(model, x), wanted)
    assert_close(tf.function(one)(x, training=True), whole.predict(x, verbose=0))


def test_a_loop_with_an_optimizer(devices: list[str]) -> None:
    model = tied()
    stages = split(model, 3, "bytes", devices)
    homes = [device for stage in stages for device in {variable.value.device for variable in stage.variables}]
    assert len(homes) == len({*homes}) > 1

    def trained(call: Any, variables: Any) -> list[float]:
        own = keras.optimizers.AdamW()

        @tf.function
        def step(rows: Any) -> Any:
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(call(rows) ** 2)
            own.apply(tape.gradient(loss, variables), variables)
            return loss

        own.build(variables)
        return [float(step(x)) for _ in range(3)]

    variables = [variable for stage in stages for variable in stage.trainable_variables]
    assert len(variables) == len(model.trainable_variables)
    learned = trained(Pipeline(stages, devices, microbatches=3), variables)
    assert_close(learned, trained(model, model.trainable_variables))


def test_copies_cast_inputs_as_their_layers_do(devices: list[str]) -> None:
    """Rows are infinite in float16, to which the copy of a layer without autocast would cast them."""
    scaled = layers.Lambda(lambda rows: rows / 1e5, (4,), dtype="mixed_float16", autocast=False)
    given = keras.Input([4])
    model = keras.Model(given, dense(dtype="float32")(scaled(given)))
    assert_close(Pipeline(split(model, 2, "bytes", devices), devices)(1e5 * x), model(1e5 * x))


def test_a_model_that_does_not_have_the_stages_is_warned_of(devices: list[str]) -> None:
    pipe = Pipeline(split(chain(dense(), dense()), 2, "bytes", devices), devices)
    piped = chain(layers.Lambda(lambda rows: pipe(rows), (4,)), dense())
    piped.compile("sgd", "mse", jit_compile=False)
    with pytest.warns(RuntimeWarning, match=r"does not train its variables, such as .*attribute"):
        piped.fit(x, x, verbose=0)


def test_a_step_that_stages_do_not_have() -> None:
    class Stepping(keras.Model):
        def train_step(self, data: Any) -> Any:
            return super().train_step(data)

    whole = chain(dense(), dense())
    with pytest.warns(RuntimeWarning, match="overrides train_step, and its stages do not"):
        split(Stepping(whole.inputs, whole.outputs), 2, "bytes")


def test_layers_keep_their_order(devices: list[str]) -> None:
    given = keras.Input([4])
    hidden = dense()(given)
    model = keras.Model(given, [dense()(hidden), dense()(hidden)])
    piped = Pipeline(split(model, 2, "bytes", devices), devices).as_model()
    model.set_weights([tf.random.normal(weight.shape) for weight in model.get_weights()])
    piped.set_weights(model.get_weights())
    assert_close([*piped(x)], [*model(x)])


def test_weights_are_copied_to_all_layers_or_none(devices: list[str]) -> None:
    stages = split(chain(dense(), dense()), 2, "bytes", devices)
    other = chain(dense(), dense(3))
    before = other.get_weights()
    with pytest.raises(OptionError, match="has other layers"):
        stages.copy_weights_to(other)
    np.testing.assert_equal(other.get_weights(), before)


@pytest.mark.private("knowing that XLA compiles")
def test_xla_is_refused(devices: list[str]) -> None:
    piped = Piped(split(chain(dense(), dense()), 2, "bytes", devices), devices)
    piped.compile("sgd", "mse", jit_compile=True)
    with pytest.raises(OptionError, match="jit_compile=False"):
        piped.train_on_batch(x, x)


def test_losses_get_the_logits_of_the_last_activation(devices: list[str]) -> None:
    """A softmax that rounds to 0 has an infinite loss without them."""
    model = chain(dense(), layers.Lambda(lambda rows: 300 * rows), dense(3, activation="softmax"))
    piped, labels = Piped(split(model, 3, "bytes", devices), devices, microbatches=3), np.arange(7) % 3
    losses = []
    for each in (model, piped):
        each.compile("sgd", "sparse_categorical_crossentropy", jit_compile=False)
        losses.append(each.evaluate(x, labels, batch_size=4, verbose=0))
    assert_close(*losses)
