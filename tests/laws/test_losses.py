"""Law 10 for losses and metrics, which read more of outputs than their values: masks, and the logits of activations."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, losses, metrics
from oracle import assert_close
from trainings import Case

import devicemap

DEVICE_COUNTS = 2, 3

ROWS = 23
_random = np.random.default_rng(0)
X = 20 * _random.normal(size=[ROWS, 4]).astype("f")
WORDS = _random.integers(0, 4, size=[ROWS, 5])
WEIGHTS = _random.uniform(0, 2, size=ROWS).astype("f")
TARGETS = {
    "values": _random.normal(size=[ROWS, 3]).astype("f"),
    "value": _random.normal(size=[ROWS]).astype("f"),
    "column": _random.normal(size=[ROWS, 1]).astype("f"),
    "classes": _random.integers(0, 3, size=ROWS),
    "class column": _random.integers(0, 3, size=[ROWS, 1]),
    "one-hot": np.eye(3, dtype="f")[_random.integers(0, 3, size=ROWS)],
    "bits": _random.integers(0, 2, size=[ROWS, 3]),
    "tags": _random.integers(-1, 3, size=[ROWS, 5]),
}

SATURATED = layers.Activation("softmax"), layers.Softmax(), tf.nn.softmax, keras.activations.softmax


def correlated(y_true: Any, y_pred: Any) -> Any:
    """Depends on all rows."""
    return losses.mean_squared_error(y_true - tf.reduce_mean(y_true, 0), y_pred - tf.reduce_mean(y_pred, 0))


def doubled(y_true: Any, y_pred: Any) -> Any:
    """Keras takes the logits of `y_pred`, also here."""
    return 2 * losses.categorical_crossentropy(y_true, y_pred)


class Unreduced(losses.Loss):
    """Has no `call`."""

    def __call__(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        return tf.reduce_mean(tf.square(y_true - y_pred)) / 99


REPLACED = losses.MeanSquaredError()
REPLACED.call = correlated

LOSSES: list[tuple[str, Any, Any]] = [
    *(
        ("values", loss, None)
        for loss in ("mse", "mae", "mape", "msle", "huber", "log_cosh", "cosine_similarity", "poisson")
    ),
    *(
        ("bits", loss, "sigmoid")
        for loss in ("binary_crossentropy", "binary_focal_crossentropy", "hinge", "squared_hinge")
    ),
    *(("one-hot", loss, "softmax") for loss in ("categorical_crossentropy", "categorical_focal_crossentropy")),
    *(("one-hot", loss, "softmax") for loss in ("kl_divergence", "categorical_hinge", losses.Dice(), doubled)),
    *(("classes", "sparse_categorical_crossentropy", activation) for activation in SATURATED),
    ("bits", "binary_crossentropy", tf.sigmoid),
    ("bits", "binary_crossentropy", "softmax"),
    ("class column", losses.SparseCategoricalCrossentropy(from_logits=True, ignore_class=1), None),
    ("one-hot", losses.CategoricalCrossentropy(label_smoothing=0.1, axis=-1), lambda x: layers.Softmax(axis=1)(x)),
    ("one-hot", losses.CategoricalCrossentropy(reduction="sum"), "softmax"),
    ("values", losses.MeanSquaredError(reduction="mean_with_sample_weight"), None),
    ("column", "mse", None),
    ("values", correlated, None),
    ("values", losses.CosineSimilarity(axis=1), None),
    ("value", "mse", lambda x: x[:, :1, None]),
    ("values", REPLACED, None),
]
"""Targets, loss, and last activation. Activations are saturated: without the logits, gradients would vanish."""

METRICS: dict[str, list[Any]] = {
    "values": ["mae", "mse", "cosine_similarity", metrics.RootMeanSquaredError(), metrics.R2Score()],
    "bits": ["accuracy", "auc", metrics.BinaryAccuracy(threshold=0.3), metrics.BinaryCrossentropy()],
    "one-hot": ["accuracy", metrics.TopKCategoricalAccuracy(2), metrics.F1Score(), metrics.CategoricalCrossentropy()],
    "classes": [
        *("accuracy", "categorical_accuracy", "sparse_categorical_crossentropy"),
        metrics.SparseTopKCategoricalAccuracy(2),
    ],
    "class column": ["accuracy", metrics.SparseCategoricalCrossentropy(from_logits=True)],
    "column": ["mae"],
    "value": ["mae"],
}


NAMED = {f"{i}_{case[0]}".replace(" ", "_"): case for i, case in enumerate(LOSSES)}
FIRST = {target: name for name, (target, _, _) in reversed(NAMED.items())}


def every_loss() -> keras.Model:
    """One output for each loss."""
    inputs = keras.Input([4])
    return keras.Model(inputs, {name: layers.Dense(3, last)(inputs) for name, (_, _, last) in NAMED.items()})


def sequential(*inner: Any) -> keras.Model:
    return keras.Sequential([keras.Input([4]), *inner])


def softmax(**options: Any) -> layers.Layer:
    return layers.Dense(3, "softmax", **options)


def tags() -> keras.Model:
    return keras.Sequential([layers.Embedding(4, 3, mask_zero=True), layers.Dense(3, "tanh"), layers.Dense(3)])


def scalars() -> keras.Model:
    """The loss of one number for each row is a mean over rows; and two losses of the same output."""
    inputs = keras.Input([4])
    output = layers.Dense(3, name="output")(inputs)
    scalar = layers.Reshape([], name="scalar")(layers.Dense(1)(inputs))
    return keras.Model(inputs, [scalar, output, output])


class Regularized(keras.Model):
    """Its regularizer takes its outputs, besides the loss."""

    def __init__(self) -> None:
        super().__init__(activity_regularizer="l2")
        self.out = layers.Dense(3)

    def call(self, x: Any) -> Any:
        return self.out(x)


class Doubled(Regularized):
    """Its caller gets something else than `call` returns."""

    def __call__(self, x: Any, **options: Any) -> Any:
        return 2 * super().__call__(x, **options)


def two_outputs() -> keras.Model:
    inputs = keras.Input([4])
    return keras.Model(inputs, [layers.Dense(3, name="a")(inputs), layers.Dense(3, name="b")(inputs)])


class Cast(keras.Model):
    """An output is what another one is cast from."""

    def __init__(self) -> None:
        super().__init__()
        self.out = layers.Dense(3)

    def call(self, x: Any) -> Any:
        out = tf.cast(self.out(x), tf.float64)
        return [out, tf.cast(out, tf.float32)]


class Reconstructed(keras.Model):
    """Adds the loss that it is compiled with, of other tensors."""

    loss_of_rows = losses.MeanSquaredError()

    def __init__(self) -> None:
        super().__init__()
        self.out = layers.Dense(3)

    def call(self, x: Any) -> Any:
        out = self.out(x)
        self.add_loss(self.loss_of_rows(x[:, :3], out))
        return out


def halved(y_true: Any, y_pred: Any) -> Any:
    """Calls the loss, too."""
    return Reconstructed.loss_of_rows(y_true, y_pred / 2)


VALUES, CLASSES = TARGETS["values"], TARGETS["classes"]
OF_CLASSES = {"loss": "sparse_categorical_crossentropy", "metrics": ["accuracy"]}
OF_ALL = {
    "loss": {name: loss for name, (_, loss, _) in NAMED.items()},
    "metrics": {FIRST[target]: measured for target, measured in METRICS.items()},
}
OF_TAGS = {
    "loss": losses.SparseCategoricalCrossentropy(from_logits=True, ignore_class=-1),
    "metrics": ["accuracy"],
    "weighted_metrics": ["accuracy"],
}
OF_SCALARS = {"loss": ["mse", "mae", "huber"], "metrics": [["mae"], ["mae"], ["mse"]]}


def case(model: Callable[[], Any], x: Any, y: Any, compiled: dict[str, Any], rtol: float = 2e-4) -> Case:
    """A case, for which metrics are copied: each model has its own."""
    copied = lambda: compiled | {"metrics": copy.deepcopy(compiled.get("metrics"))}
    compile_arguments = lambda: {"optimizer": keras.optimizers.SGD(0.01)} | copied()
    return Case(model, compile_arguments, {"x": x, "y": y}, rtol=rtol, options={"added_losses": "mean"})


CASES = {
    "every loss": case(every_loss, X, {name: TARGETS[target] for name, (target, _, _) in NAMED.items()}, OF_ALL),
    "masks": case(tags, WORDS, TARGETS["tags"], OF_TAGS),
    "scalars": case(scalars, X, [TARGETS["value"], VALUES, VALUES**2], OF_SCALARS),
    "cast outputs": case(lambda: sequential(softmax(dtype="mixed_bfloat16")), X, CLASSES, OF_CLASSES, rtol=1e-2),
    "normalized": case(lambda: sequential(layers.BatchNormalization(), softmax()), X, CLASSES, OF_CLASSES),
    "eager": case(lambda: sequential(softmax()), X, CLASSES, OF_CLASSES | {"run_eagerly": True}),
    "regularized": case(Regularized, X, VALUES, {"loss": "mae", "metrics": ["mse"]}),
    "changed outside": case(Doubled, X, VALUES, {"loss": "mae", "metrics": ["mse"]}),
    "unreduced": case(two_outputs, X, [VALUES] * 2, {"loss": ["mae", Unreduced()]}),
    "cast twice": case(Cast, X, [VALUES] * 2, {"loss": ["mae", "mse"], "metrics": [["mae"], ["mse"]]}),
    "same loss": case(Reconstructed, X, VALUES, {"loss": Reconstructed.loss_of_rows, "metrics": [halved]}),
}
NIGHTLY = "every loss", "regularized", "cast twice"
"""They take long, or are like "changed outside" and "unreduced"."""


@pytest.mark.parametrize("batched", [True, False], ids=["known rows", "unknown rows"])
@pytest.mark.parametrize("weights", [None, WEIGHTS], ids=["", "weighted"])
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.nightly] * (name in NIGHTLY)) for name in CASES]
)
def test_losses_and_metrics_are_those_of_one_device(name: str, weights: Any, batched: bool, devices: list[str]) -> None:
    case = CASES[name]
    x, y = case.data["x"], case.data["y"]
    if weights is not None and x is WORDS:  # a weight for each step
        weights = np.linspace(0.5, 1.5, 5, dtype="f") * weights[:, None]
    data = x, tuple(y) if isinstance(y, list) else y, *([] if weights is None else [weights])
    batches = tf.data.Dataset.from_tensor_slices(data).batch(11, drop_remainder=batched)

    def trained(model: keras.Model) -> Any:
        history = model.fit(batches, epochs=2, shuffle=False, verbose=0).history
        evaluated = {} if weights is None else model.evaluate(batches, return_dict=True, verbose=0)
        return history, evaluated, model.get_weights()

    got = trained(devicemap.parallelize(case.made(), devices, **case.options))
    assert_close(got, trained(case.eager()), case.rtol, case.rtol)


@pytest.mark.parametrize("name", ["cast outputs", "normalized"])
def test_other_numbers_of_targets_than_of_inputs_are_refused(name: str, devices: list[str]) -> None:
    specs = tf.TensorSpec([None, 4]), tf.TensorSpec([None], CLASSES.dtype)
    batches = tf.data.Dataset.from_generator(lambda: [(X[:1], CLASSES[:2])], output_signature=specs)
    with pytest.raises(tf.errors.InvalidArgumentError, match="different numbers of rows"):
        devicemap.parallelize(CASES[name].made(), devices).fit(batches, shuffle=False, verbose=0)
