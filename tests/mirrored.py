"""Programs that fail or compute something else under `MirroredStrategy` (docs/reference/mirroredstrategy.md)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import layers
from steps import Stepping, dense
from trainings import WORDS, Case, Largest, X, Y, mlp, normalized, recurrent, sequential, using

TWELVE = {"batch_size": 12}
"""34 rows in batches of 12, 12 and 10: two replicas have equally many rows of each."""

NAMES = np.array(["one", "two", "three"])[np.arange(34) % 3, None]
RAGGED = tf.RaggedTensor.from_tensor(WORDS, padding=0)


@dataclass(frozen=True)
class Program(Case):
    """A case with batches of twelve rows, unless it says otherwise."""

    data: dict[str, Any] = field(default_factory=lambda: {"x": X, "y": Y} | TWELVE)


class OnBatches(Program):
    """Calls the methods for one batch."""

    def trained(self, model: keras.Model) -> Any:
        losses = [model.train_on_batch(X[:12], Y[:12]) for _ in range(3)]
        return {
            "losses": losses,
            "test": model.test_on_batch(X[:12], Y[:12]),
            "predicted": model.predict_on_batch(X[:12]),
        }


def squared(model: Any, x: Any, y: Any) -> Any:
    """A mean over the rows of the batch."""
    return tf.reduce_mean((model(x, training=True) - y) ** 2)


def remembered(model: Any, x: Any, y: Any) -> Any:
    """Outputs are repelled by those for the first ten rows of the previous batch."""
    outputs = model(x, training=True)
    repelled = 0.1 * tf.reduce_mean(tf.matmul(outputs, model.bank.value, transpose_b=True))
    model.bank.assign(outputs[:10])
    return tf.reduce_mean((outputs - y) ** 2) + repelled


class OwnStep(Stepping):
    """Has a step of its own, and a call."""

    def __init__(self, cost: Any = squared, **parts: Any) -> None:
        super().__init__(cost, out=lambda: dense(2), **parts)
        self(keras.Input([6]))  # builds it

    def call(self, x: Any) -> Any:
        return self.out(x)


class Accumulating(OwnStep):
    """Applies the sum of the gradients of two steps."""

    def __init__(self) -> None:
        super().__init__(sums=lambda: [constant(6, 2), constant(2)], steps=constant)

    def learn(self, gradients: Any) -> None:
        for total, gradient in zip(self.sums, gradients):
            total.assign_add(gradient)
        self.steps.assign_add(1.0)
        tf.cond(self.steps % 2 == 0, self.apply, lambda: None)

    def apply(self) -> None:
        super().learn([total.value for total in self.sums])
        for total in self.sums:
            total.assign(tf.zeros_like(total))


def constant(*shape: int) -> keras.Variable:
    return keras.Variable(np.zeros(shape, "f"), trainable=False)


def in_batch_negatives(_: Any, outputs: Any) -> Any:
    """The cross-entropy of finding each row among those of the batch."""
    similar = tf.matmul(outputs, outputs, transpose_b=True)
    return tf.nn.sparse_softmax_cross_entropy_with_logits(tf.range(tf.shape(outputs)[0]), similar)


def lookup() -> keras.Model:
    names = keras.Input([1], dtype="string")
    ids = layers.StringLookup(vocabulary=["one", "two"])(names)
    return keras.Model(names, layers.Dense(2)(layers.Flatten()(layers.Embedding(4, 3)(ids))))


def mean_of_words() -> keras.Model:
    words = keras.Input([None], dtype="int64", ragged=True)
    mean = layers.Lambda(lambda embedded: tf.reduce_mean(embedded, 1))
    return keras.Model(words, layers.Dense(2)(mean(layers.Embedding(9, 4)(words))))


def dataset(x: Any) -> dict[str, Any]:
    return {"x": tf.data.Dataset.from_tensor_slices((x, Y)).batch(12)}


def rows(count: int, batch_size: int = 12) -> dict[str, Any]:
    return {"x": X[:count], "y": Y[:count], "batch_size": batch_size}


PROGRAMS = {
    "jit_compile": Program(compile=lambda: {"jit_compile": True}),
    "gradient_accumulation": Program(compile=using("SGD", 0.1, gradient_accumulation_steps=2)),
    "accumulating_step": Program(Accumulating),
    "ema_overwrite": Program(compile=using("SGD", 0.1, use_ema=True, ema_momentum=0.5, ema_overwrite_frequency=2)),
    "steps_per_execution": Program(compile=lambda: {"steps_per_execution": 3}),
    "strings": Program(lookup, data=dataset(NAMES)),
    "ragged": Program(mean_of_words, data=dataset(RAGGED)),
    "sparse": Program(
        lambda: keras.Sequential([keras.Input([6], sparse=True), layers.Dense(2)]),
        data=dataset(tf.sparse.from_dense(X * (X > 0))),
    ),
    "odd_batches": Program(data=rows(34, 13)),
    "replica_without_rows": Program(
        lambda: sequential(layers.Reshape([3, 2, 1]), layers.Conv2D(2, 2), layers.Flatten()), data=rows(25)
    ),
    "memory_bank": Program(lambda: OwnStep(remembered, bank=lambda: constant(10, 2))),
    "last_row": Program(data=rows(25)),
    "last_row_normalized": Program(normalized, data=rows(25)),
    "batch_norm": Program(normalized),
    "synchronized_batch_norm": Program(lambda: normalized(synchronized=True), data=rows(27)),
    "clipnorm": Program(compile=using("SGD", 0.1, clipnorm=0.05)),
    "own_step": Program(OwnStep),
    "in_batch_negatives": Program(compile=lambda: {"loss": in_batch_negatives}),
    "largest_output": Program(compile=lambda: {"metrics": [Largest()]}),
    "train_on_batch": OnBatches(),
    "masks": Program(recurrent, data={"x": WORDS, "y": np.repeat(Y[:, :1], 5, 1)[..., None]} | TWELVE),
}
REFUSED = {
    "stateful_rnn": Program(
        lambda: keras.Sequential([keras.Input([6, 1], batch_size=12), layers.LSTM(3, stateful=True), layers.Dense(2)]),
        data={"x": X[:24, :, None], "y": Y[:24]} | TWELVE,
        forward=False,
    )
}
FIXED = {
    "plain": Program(mlp, lambda: {"metrics": ["mae"]}),
    "loss_scaling": Program(
        compile=lambda: {"optimizer": keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1))}
    ),
    "embedding": Program(
        lambda: sequential(layers.Embedding(9, 4), layers.Flatten(), inputs=WORDS), data={"x": WORDS, "y": Y} | TWELVE
    ),
    "nadam": Program(compile=using("Nadam", 0.01)),
    "spectral_norm": Program(lambda: sequential(layers.SpectralNormalization(layers.Dense(5)))),
}
