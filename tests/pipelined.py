"""What pipelines are trained on: models that are special to `split`, cases of `trainings.py`, and settings of a `Pipeline`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import keras
import numpy as np
import tensorflow as tf
import trainings
from keras import layers
from trainings import LABELS, WEIGHTS, WORDS, AddsLosses, Case, Counted, X, using

import devicemap
from devicemap import Pipeline, split

x = np.random.default_rng(0).normal(size=[7, 4]).astype("float32")
ids = np.array([[1, 2, 0, 0], [3, 0, 0, 0], [4, 4, 4, 4], [1, 1, 5, 0], [2, 3, 4, 0], [7, 0, 0, 0], [8, 8, 0, 0]])
Y = X[:, :4]


class Piped(keras.Model):
    """A model of the user, which calls a pipeline of stages."""

    def __init__(self, stages: Any, pipe: Pipeline) -> None:
        super().__init__()
        self.stages, self.pipe = stages, pipe
        self.built, self.jit_compile = True, False

    def call(self, rows: Any, training: bool | None = None) -> Any:
        return self.pipe(rows)


USERS = "a model of the user", "a parallelized model"
SETTINGS: dict[str, dict[str, Any]] = {
    "1f1b": {"microbatches": 3},
    "gpipe": {"microbatches": 3, "schedule": "gpipe"},
    "replicas": {"microbatches": 2, "replicas": 2},
    "interleaved": {"microbatches": 4, "schedule": "interleaved"},
    "a model of the user": {"microbatches": 3},
    "a parallelized model": {"microbatches": 3},
}


def settings_of(case: Case) -> list[str]:
    """A pipeline of one microbatch has one device at a time: it draws numbers, or compares rows, of the whole batch."""
    apart = ("replicas", "interleaved") if "microbatches" in case.options else ()
    return [each for each in SETTINGS if each not in (*apart, "a parallelized model")]


def piped(model: Any, setting: str, devices: list[str], **options: Any) -> tuple[Pipeline, Any]:
    """A pipeline on three devices, or on two twice, and its stages."""
    count, used = {"replicas": (2, devices[:4]), "interleaved": (4, devices[:2])}.get(setting, (3, devices[:3]))
    most = sum(not isinstance(layer, layers.InputLayer) for layer in model.layers)
    if setting == "interleaved" and most < 4:
        count = 2
    stages = split(model, min(count, most), "bytes", used)
    return Pipeline(stages, used, **SETTINGS[setting] | options), stages


def piped_model(model: Any, setting: str, devices: list[str], **options: Any) -> tuple[keras.Model, Any]:
    """A Keras model with a pipeline, and its stages."""
    pipe, stages = piped(model, setting, devices, **options)
    if setting not in USERS:
        return pipe.as_model(), stages
    made = Piped(stages, pipe)
    if not isinstance(model, keras.Sequential):
        made.output_names = model.output_names  # of which Keras makes names of metrics
    return (devicemap.parallelize(made, devices[:2]) if "parallelized" in setting else made), stages


class Drawing(layers.Layer):
    """Adds random numbers."""

    def __init__(self, seed: int = 3, **options: Any):
        super().__init__(**options)
        self.generator = keras.random.SeedGenerator(seed)

    def call(self, rows: Any) -> Any:
        return rows + keras.random.normal(tf.shape(rows), seed=self.generator)


class Block(layers.Layer):
    """A custom layer without `build`. Keras builds its layers when it is called."""

    def __init__(self, **options: Any):
        super().__init__(**options)
        self.inner, self.outer = chain(dense(8), dense()), layers.Dense(4)

    def call(self, rows: Any, others: Any) -> Any:
        return rows + self.outer(self.inner(others))


class Restored(layers.Dense):
    """A custom layer that `from_config` builds."""

    @classmethod
    def from_config(cls, config: Any) -> Any:
        layer = cls(**config)
        layer.build([None, 4])
        return layer


def blocks() -> Any:
    given = keras.Input([4])
    return keras.Model(given, Restored(4)(Block()(Block()(given, dense()(given)), given)))


def chain(*inner: Any, shape: Any = (4,), **options: Any) -> Any:
    return keras.Sequential([keras.Input(shape, **options), *inner])


def dense(units: int = 4, **options: Any) -> Any:
    return layers.Dense(units, **{"activation": "tanh"} | options)


def dense_four(**options: Any) -> Any:
    return chain(dense(), dense(), dense(), dense(), **options)


def nested() -> Any:
    given = keras.Input([4])
    inner = keras.Model(given, layers.Add()([given, dense()(given)]))
    deep = chain(dense(), inner, chain(dense(), layers.Dropout(0.0)))
    hidden = deep(keras.ops.tanh(deep(given)), training=False)
    return keras.Model(given, {"first": keras.ops.multiply(hidden, 2), "second": dense(2)(inner(hidden))})


def looked_up() -> Any:
    lookup = layers.IntegerLookup(output_mode="tf_idf")
    lookup.adapt(WORDS)
    return chain(lookup, dense(), dense(), shape=(5,), dtype="int32")


def ids_masked(*inner: Any) -> Any:
    return chain(layers.Embedding(9, 4, mask_zero=True), *inner, shape=(None,), dtype="int32")


def two_outputs(as_dict: bool = False) -> Any:
    given = keras.Input([4])
    hidden = dense()(given)
    outputs = {"a": layers.Dense(4, name="a")(hidden), "b": layers.Dense(4, name="b")(hidden)}
    return keras.Model(given, outputs if as_dict else [outputs["b"], outputs["a"]])


def saturated() -> Any:
    """A softmax that rounds to 0 has an infinite loss without its logits."""
    return chain(dense(), layers.Lambda(lambda rows: 30 * rows), dense(3, activation="softmax"))


def of_rows(y: Any, outputs: Any) -> Any:
    return tf.reduce_sum((y - outputs) ** 4, 1)


def contrastive(y: Any, outputs: Any) -> Any:
    """Compares all rows of a batch."""
    return tf.nn.sparse_softmax_cross_entropy_with_logits(tf.range(tf.shape(y)[0]), outputs @ tf.transpose(y))


def case(
    model: Callable[[], Any], loss: Any = "mse", y: Any = Y, rows: Any = Y, weights: Any = None, **options: Any
) -> Case:
    """Options are those of a pipeline."""
    data = {"x": rows, "y": y} | ({} if weights is None else {"sample_weight": weights})
    return Case(model, lambda: {"loss": loss}, data, forward=False, options=options)


def of_outputs(loss: Any, y: Any, factors: Any = None, weights: Any = None, as_dict: bool = False) -> Case:
    """Two outputs. Ftrl sets a variable to zero whose gradient is zero, and not `None`."""
    data = {"x": Y, "y": y, "sample_weight": weights, "validation_data": (Y, y)}
    compiled = lambda: using("Ftrl", 0.1)() | {"loss": loss, "loss_weights": factors}
    return Case(lambda: two_outputs(as_dict), compiled, data, forward=False)


IGNORING = keras.losses.SparseCategoricalCrossentropy(from_logits=True, ignore_class=0)
BY_WEIGHT = keras.losses.MeanSquaredError("mean_with_sample_weight")
DICE = keras.losses.Dice(axis=(1,))
STEPS, STEPWISE = np.stack([Y, 2 * Y], 1), np.ones([34, 5, 4], "f")
masked = lambda: ids_masked(dense(), dense(), dense())
of_steps = lambda: dense_four(shape=(None, 4))

MIXED = "mixed_float16", "float32"

PIPELINED: dict[str, Case] = {
    "nested": case(nested, {"first": "mse", "second": "mae"}, {"first": Y, "second": Y[:, :2]}),
    "loaded": case(lambda: keras.models.model_from_json(dense_four().to_json())),
    "vocabulary": case(looked_up, rows=WORDS),
    "frozen": case(lambda: chain(dense(), layers.BatchNormalization(trainable=False), dense(trainable=False))),
    "blocks": case(blocks),
    "dropout": case(lambda: chain(dense(), layers.Dropout(0.5), dense()), microbatches=1),
    "seed": case(lambda: chain(dense(), Drawing(), dense()), microbatches=1),
    "augmentation": case(
        lambda: chain(layers.RandomFlip(), layers.Flatten(), dense(), shape=(2, 2, 1)),
        rows=Y.reshape([34, 2, 2, 1]),
        microbatches=1,
    ),
    "state and losses of masked steps": case(
        lambda: ids_masked(dense(), Counted(), AddsLosses(), dense()), y=STEPWISE, rows=WORDS, added_losses="mean"
    ),
    "saturated softmax": replace(case(saturated, "sparse_categorical_crossentropy", LABELS), rtol=1e-3),
    "targets of one axis": case(lambda: chain(dense(), dense(), dense(1)), y=Y[:, 0], weights=WEIGHTS),
    "mean by weight": case(dense_four, BY_WEIGHT, weights=WEIGHTS),
    "steps, mean by weight": case(of_steps, BY_WEIGHT, STEPS, STEPS, WEIGHTS[:, None]),
    "steps, ignored labels": case(of_steps, IGNORING, np.stack([LABELS, LABELS[::-1]], 1), STEPS, WEIGHTS[:, None]),
    "masks, mean by weight": case(masked, BY_WEIGHT, STEPWISE, WORDS),
    "masks, sum": case(masked, keras.losses.MeanSquaredError("sum"), STEPWISE, WORDS),
    "mixed precision": replace(case(lambda: chain(*(dense(dtype=each) for each in 2 * MIXED))), rtol=2e-2),
    "loss of the values of a row": case(lambda: chain(dense(), dense(activation="sigmoid")), DICE, np.abs(Y)),
    "losses of all rows": case(dense_four, contrastive, microbatches=1),
    "one loss for each output": of_outputs("mse", [Y, -Y]),
    "losses in a list": of_outputs(["mse", keras.losses.SparseCategoricalCrossentropy(True)], [Y, LABELS], [0.5, 2.0]),
    "losses that are sums": of_outputs(
        [keras.losses.Huber(reduction="sum")] * 2, [Y, -Y], weights=[WEIGHTS, WEIGHTS[::-1]]
    ),
    "losses by name": of_outputs({"b": "mae", "a": of_rows}, {"a": Y, "b": -Y}, {"a": 0.5, "b": 2.0}),
    "losses by name, weights": of_outputs({"a": "mse", "b": "mae"}, [Y, -Y], [0.5, 2.0], WEIGHTS),
    "losses of a dict": of_outputs(
        {"a": "mse", "b": "log_cosh"},
        {"a": Y, "b": -Y},
        {"a": 3.0, "b": 1.0},
        {"a": WEIGHTS, "b": WEIGHTS},
        as_dict=True,
    ),
    "a list of losses for a dict": of_outputs(["mse", "mae"], {"a": Y, "b": -Y}, as_dict=True),
    "a loss of one output": of_outputs(["mse", None], [Y, -Y]),
}
for name in (
    "momentum, clipnorm", "moving average", "scaled", "class weights, accumulated", "masks, gradients of slices", "lookups",
    "regularizers, global_clipnorm, sample weights, split", "added sums", "outputs in a dict",
    "weights changed in a step that uses them", "batch normalization", "every layer",
    "batch normalization, float16, several steps per execution",
):  # fmt: skip
    PIPELINED[name] = trainings.CASES[name]
PIPELINED["every layer"] = replace(PIPELINED["every layer"], rtol=1e-4)
