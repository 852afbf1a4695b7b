"""What is refused of Keras models and pipelines. `messages.txt` has the messages (`test_messages.py`)."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import keras
import numpy as np
import tensorflow as tf
import trainings
from keras import layers
from mirrored import REFUSED
from pipelined import BY_WEIGHT, chain, contrastive, dense, dense_four, x
from steps import Adversarial, TwoPasses
from trainings import AddsLosses, X, mlp, normalized, sequential

from devicemap import DeviceMap, Pipeline, parallelize, split

TWO = ["CPU:0", "CPU:1"]


def parallelized(make: Callable[[], Any], devices: Any = TWO, **options: Any) -> Any:
    """Parallelize a model, which an error leaves as it was."""
    model = make()
    before = dict(vars(model))
    try:
        return parallelize(model, devices, **options)
    except Exception:
        assert vars(model) == before
        raise


def instructed() -> keras.Model:
    model = mlp()
    model.make_test_function = lambda force=False: None
    return model


class Reporting(trainings.Subclassed):
    def report(self) -> str:
        return self.name


def quantized() -> keras.Model:
    model = mlp()
    model.layers[0].quantize("float8")
    return model


def of_a_strategy() -> keras.Model:
    with tf.distribute.MirroredStrategy(TWO).scope():
        return mlp()


def unbuilt() -> keras.Model:
    return keras.Sequential([layers.Dense(2)])


def noisy() -> keras.Model:
    return sequential(layers.Lambda(lambda rows: rows + tf.random.normal(tf.shape(rows), seed=7), (6,)))


def fitted(model: Any, jit_compile: bool = False) -> None:
    model.compile("sgd", "mse", jit_compile=jit_compile)
    model.fit(X, X[:, :2], verbose=0)


def another_step(model: Any) -> None:
    model.train_step = lambda batch: {}
    fitted(model)


def sharing() -> Any:
    """Two layers that share a variable, which their copies would not."""
    one, other = layers.Dense(4), layers.Dense(4)
    model = chain(one, other)
    other._trainable_variables[0] = one.kernel
    return model


class WithSublayer(layers.Layer):
    """A layer whose copy has the same sublayer."""

    def __init__(self, inner: Any, **options: Any):
        super().__init__(**options)
        self.inner = inner

    def call(self, rows: Any, training: bool = False) -> Any:
        return self.inner(rows, training=training)

    def get_config(self) -> Any:
        return super().get_config() | {"inner": self.inner}


def with_default(inner: Any, default: Any) -> Any:
    """A layer whose sublayer, or function, is not in get_config. A copy has the default."""

    class WithDefault(WithSublayer):
        def __init__(self, inner: Any = default, **options: Any):
            super().__init__(inner, **options)

        def get_config(self) -> Any:
            return layers.Layer.get_config(self)

    return WithDefault(inner, name="with_default")


def in_training(rows: Any, training: bool, scale: float) -> Any:
    return scale * rows if training else rows / 0.0


def small(rows: Any, training: bool) -> Any:
    tf.debugging.assert_less(rows, -1e3)
    return rows


class Centered(layers.Layer):
    """A layer that mixes rows, in training only."""

    def call(self, rows: Any, training: bool = False) -> Any:
        return rows - tf.reduce_mean(rows, 0) if training else rows


class WithArgument(layers.Layer):
    def __init__(self, scale: float):
        super().__init__()
        self.scale = scale

    def call(self, rows: Any) -> Any:
        return self.scale * rows


def of_seven_rows() -> Any:
    """A model with a fixed number of rows, which it mixes."""
    given = keras.Input(batch_shape=[7, 4])
    return keras.Model(given, layers.Softmax(0)(layers.Dense(4)(given)))


def using_a_kernel(by_lambda: bool) -> Any:
    """A model in which an op uses the kernel of a layer."""
    given, first = keras.Input([4]), layers.Dense(4)
    hidden = first(given)
    times = lambda rows: keras.ops.matmul(rows, first.kernel)
    return keras.Model(given, layers.Lambda(times)(hidden) if by_lambda else times(hidden))


def with_one_mask() -> Any:
    """A model in which a stage passes on one mask for all rows."""
    given = keras.Input([4])
    mask = layers.Lambda(lambda rows: tf.ones([1, 4]))(given)
    return keras.Model(given, layers.Dense(4)(layers.Dense(4)(given) * mask) * mask)


class OwnStep(keras.Model):
    def train_step(self, data: Any) -> Any:
        return super().train_step(data)


def of_own_step() -> Any:
    whole = dense_four()
    return OwnStep(whole.inputs, whole.outputs, name="own")


def balanced(y: Any, outputs: Any) -> Any:
    """A loss with weights by the number of rows of a class."""
    is_one = tf.cast(tf.equal(y, 1), tf.float32)
    return tf.reduce_sum(is_one * (y - outputs) ** 2, 1) / (1 + tf.reduce_sum(is_one))


REGULARIZED = layers.ActivityRegularization(l2=0.1)


def mapped_before(layer: Any) -> Any:
    function = tf.function(lambda rows: layer(rows))
    DeviceMap(function, batched=True)(x)
    return function


def found_too_late() -> None:
    """A model that finds layers when it is too late to scale losses."""
    registry = {"layer": [dense(dtype="mixed_float16")]}
    model = Pipeline([lambda rows: registry["layer"][0](rows)], ["CPU:0"], loss="mse").as_model()
    model.compile("sgd")
    model.train_on_batch(x, x)


def missed() -> None:
    """A model that calls a pipeline without having its stages."""
    pipe = Pipeline(split(dense_four(), 2, "bytes", TWO), TWO)
    model = chain(layers.Lambda(lambda rows: pipe(rows), (4,)), dense())
    model.compile("sgd", "mse", jit_compile=False)
    model.fit(x, x, verbose=0)


def trained(*stages: Any, loss: Any = "mse", y: Any = x, weights: Any = None, **options: Any) -> Any:
    return Pipeline(stages, loss=loss, **options).value_and_gradients(x, y, weights)


def split_after(layer: Any, by: Any = "bytes") -> Any:
    return split(chain(layers.Dense(4), layer), 2, by)


def second(stage: Any) -> Any:
    return Pipeline([tf.tanh, stage], TWO)(x)


twice = lambda rows: (rows, rows)
normalize, batch_norm = layers.LayerNormalization, layers.BatchNormalization

REFUSED_MODELS: dict[str, Callable[[], object]] = {
    "training: a layer": lambda: parallelized(lambda: layers.Dense(2, name="layer")),
    "training: make_test_function": lambda: parallelized(instructed),
    "training: a method of this name": lambda: parallelized(Reporting),
    "training: a strategy": lambda: parallelized(of_a_strategy),
    "training: float8": lambda: parallelized(quantized),
    "training: a stateful layer": lambda: parallelized(REFUSED["stateful_rnn"].model),
    "training: an unknown device": lambda: parallelized(mlp, ["CPU:0", "GPU:17"]),
    "training: a parallelized model": lambda: parallelized(lambda: parallelize(mlp(), TWO)),
    "training: batch_norm": lambda: parallelized(normalized, batch_norm="global"),
    "training: added_losses": lambda: parallelized(mlp, added_losses="max"),
    "training: accumulate": lambda: parallelized(mlp, accumulate=0),
    "training: accumulate, synchronized": lambda: parallelized(normalized, accumulate=2),
    "training: accumulate, built later": lambda: fitted(parallelized(
        lambda: keras.Sequential([batch_norm(), layers.Dense(2)]), accumulate=2)),
    "training: accumulate, a step of its own": lambda: parallelized(TwoPasses, accumulate=2),
    "training: an unknown layer": lambda: parallelized(mlp, recompute=["last"]),
    "training: recompute": lambda: parallelized(mlp, recompute="dense"),
    "training: recomputed averages": lambda: parallelized(lambda: sequential(batch_norm(name="norm")), recompute=["norm"]),
    "training: a plan before it is built": lambda: parallelized(unbuilt).explain(X),
    "training: a plan without call": lambda: parallelized(Adversarial).explain(X),
    "training: a step that is set later": lambda: another_step(parallelized(mlp)),
    "training: warning, XLA and random ops": lambda: fitted(parallelized(noisy), jit_compile=True),
    "split: a shared variable": lambda: split(sharing(), 2, "bytes"),
    "split: no stages": lambda: split(dense_four(), 0),
    "split: too many stages": lambda: split(dense_four(), 9),
    "split: by": lambda: split(dense_four(), 2, by="luck"),
    "split: a parallelized model": lambda: split(parallelize(mlp(), TWO), 2),
    "split: a function": lambda: split(len, 2),
    "split: no get_config": lambda: split_after(WithArgument(2.0)),
    "split: an axis of rows": lambda: split_after(layers.UnitNormalization(axis=0)),
    "split: a failing copy": lambda: split_after(with_default(lambda rows, training: rows, small)),
    "split: mixed rows in training": lambda: split_after(Centered()),
    "split: a fixed number of rows": lambda: split(of_seven_rows(), 2, "bytes"),
    "split: a shared sublayer": lambda: split_after(WithSublayer(layers.Dense(4))),
    "split: another epsilon": lambda: split_after(with_default(normalize(epsilon=1e-12), normalize(epsilon=1e-5))),
    "split: another momentum": lambda: split_after(with_default(batch_norm(momentum=0.5), batch_norm())),
    "split: another result in training": lambda: split_after(
        with_default(partial(in_training, scale=2.0), partial(in_training, scale=1.0)), "time"),
    "split: a kernel in a Lambda": lambda: split(using_a_kernel(by_lambda=True), 2, "bytes"),
    "split: a kernel in an op": lambda: split(using_a_kernel(by_lambda=False), 2, "bytes"),
    "split: a copy of a stage": lambda: copy.deepcopy(split(dense_four(), 2, "bytes")[0]),
    "split: warning, a step": lambda: split(of_own_step(), 2, "bytes"),
    "pipeline: a number": lambda: Pipeline([3]),
    "pipeline: a model": lambda: Pipeline(dense_four()),
    "pipeline: a generator": lambda: Pipeline(stage for stage in [tf.sin]),
    "pipeline: too few devices": lambda: Pipeline([tf.sin] * 3, TWO),
    "pipeline: an unknown device": lambda: Pipeline([tf.sin] * 3, [*TWO, "CPU:77"]),
    "pipeline: microbatches": lambda: Pipeline([tf.sin], microbatches=0),
    "pipeline: a schedule": lambda: Pipeline([tf.sin], schedule="zero"),
    "pipeline: batch_norm": lambda: Pipeline([tf.sin], batch_norm="none"),
    "pipeline: added_losses": lambda: Pipeline([tf.sin], added_losses="max"),
    "pipeline: replicas": lambda: Pipeline([tf.sin], replicas=0),
    "pipeline: replicas on too few devices": lambda: Pipeline([tf.sin], ["CPU:0"], replicas=2),
    "pipeline: interleaved microbatches": lambda: Pipeline([tf.sin] * 4, TWO, 3, schedule="interleaved"),
    "pipeline: a stateful layer": lambda: Pipeline([layers.LSTM(2, stateful=True)]),
    "pipeline: one mask": lambda: Pipeline(split(with_one_mask(), 3, "bytes"))(x),
    "pipeline: a stage that fails": lambda: second(lambda rows: tf.debugging.check_numerics(rows / 0.0, "bad")),
    "pipeline: a stage of another shape": lambda: second(lambda rows: tf.matmul(rows, tf.ones([5, 2]))),
    "pipeline: a stage of two arguments": lambda: second(lambda rows, more: rows),
    "pipeline: a scalar": lambda: second(tf.reduce_sum),
    "pipeline: a stream of rows": lambda: Pipeline([tf.sin]).stream(x),
    "pipeline: a dataset": lambda: Pipeline([tf.sin])(tf.data.Dataset.from_tensors(x)),
    "pipeline: losses in a tf.function": lambda: Pipeline(
        [tf.function(lambda rows: REGULARIZED(rows))], added_losses="sum")(x),
    "pipeline: added losses": lambda: Pipeline(split_after(AddsLosses("sum")))(x),
    "pipeline: losses of a traced function": lambda: Pipeline([mapped_before(REGULARIZED)], added_losses="sum")(x),
    "loss: an unknown name": lambda: trained(tf.sin, loss="nothing"),
    "loss: no mean": lambda: trained(tf.sin, loss="hinge"),
    "loss: no reduction": lambda: trained(tf.sin, loss=keras.losses.MeanSquaredError("none")),
    "loss: two reductions": lambda: trained(tf.sin, loss=["mse", keras.losses.Huber(reduction="sum")]),
    "loss: none": lambda: trained(tf.sin, loss=None),
    "loss: no targets": lambda: trained(tf.sin, y=None),
    "loss: fewer targets": lambda: trained(tf.sin, y=x[:3]),
    "loss: a label": lambda: trained(tf.sin, tf.nn.softmax, loss="sparse_categorical_crossentropy", y=np.full(7, 99)),
    "loss: a scalar": lambda: trained(tf.sin, loss=lambda y, z: tf.reduce_mean(y - z)),
    "loss: weights of steps": lambda: trained(
        lambda rows: tf.stack([rows, rows], 1), y=np.stack([x, x], 1), weights=np.ones(7, "f")),
    "loss: all pairs of rows": lambda: trained(tf.sin, loss=contrastive),
    "loss: all pairs of rows, dropout": lambda: trained(layers.Dropout(0.1), loss=contrastive),
    "loss: numbers of a class": lambda: trained(tf.sin, loss=balanced, y=np.sign(x)),
    "loss: one name": lambda: trained(tf.sin, loss={"a": "mse"}, y={"b": x}),
    "loss: one target for two outputs": lambda: trained(twice, loss=["mse"] * 2),
    "loss: weights of two outputs": lambda: trained(twice, loss=[BY_WEIGHT] * 2, y=(x, x), weights=np.ones(7, "f")),
    "loss: two for one output": lambda: trained(tf.sin, loss=["mse"] * 2),
    "model: a clone": lambda: keras.models.clone_model(Pipeline([tf.sin]).as_model()),
    "model: one factor for two losses": lambda: Pipeline([tf.sin]).as_model().compile(loss=["mse"] * 2, loss_weights=[1.0]),
    "model: a factor without a loss": lambda: Pipeline([tf.sin]).as_model().compile(loss_weights=[1.0]),
    "model: jit_compile": lambda: Pipeline([tf.sin]).as_model().compile(loss="mse", jit_compile=True),
    "model: layers found late": found_too_late,
    "model: warning, stages that it does not have": missed,
}  # fmt: skip
