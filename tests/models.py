"""Random small Keras models: layers from a table, joined to a graph; with losses, metrics, masks, weights and optimizers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
from hypothesis import strategies as st
from keras import layers

ROWS = 22
_random = np.random.default_rng(3)
DATA: dict[str, Any] = {
    "vectors": _random.normal(size=(ROWS, 4)).astype("f"),
    "steps": _random.normal(size=(ROWS, 5, 4)).astype("f"),
    "images": _random.normal(size=(ROWS, 4, 4, 2)).astype("f"),
    "words": _random.integers(1, 9, size=(ROWS, 5)) * (np.arange(5) < _random.integers(1, 6, size=(ROWS, 1))),
}
"""Inputs by kind. Words end with zeros, which may be masked."""

TARGETS = _random.normal(size=(ROWS, 3)).astype("f")
LABELS = _random.integers(0, 3, size=ROWS)
WEIGHTS = _random.uniform(0, 2, size=ROWS).astype("f")


def _residual(layer: Callable[[], Any]) -> Callable[[Any], Any]:
    return lambda given: layers.Add()([given, layer()(given)])


def _attention(given: Any) -> Any:
    return layers.Add()([given, layers.MultiHeadAttention(2, 3)(given, given)])


def _tied(given: Any) -> Any:
    layer = layers.Dense(given.shape[-1], "tanh")
    return layer(layer(given))


def _branches(given: Any) -> Any:
    return layers.Concatenate()([layers.Dense(3, "tanh")(given), layers.Dense(2, "sigmoid")(given)])


def _nested(given: Any) -> Any:
    inner = keras.Sequential([keras.Input(given.shape[1:]), layers.Dense(4, "tanh"), layers.Dense(4)])
    return inner(given)


ANYWHERE: dict[str, Callable[[Any], Any]] = {
    "dense": lambda given: layers.Dense(5, "tanh")(given),
    "regularized": lambda given: layers.Dense(4, "relu", kernel_regularizer="l2", bias_regularizer="l1")(given),
    "batch norm": lambda given: layers.BatchNormalization(momentum=0.8)(given),
    "unscaled batch norm": lambda given: layers.BatchNormalization(momentum=0.5, scale=False, center=False)(given),
    "layer norm": lambda given: layers.LayerNormalization()(given),
    "prelu": lambda given: layers.PReLU()(given),
    "swish": lambda given: layers.Activation("swish")(given),
    "rescaling": lambda given: layers.Rescaling(0.5, 0.1)(given),
    "op": lambda given: keras.ops.tanh(given) * 2 + 1,
    "tied": _tied,
    "branches": _branches,
    "residual": _residual(lambda: layers.Activation("sigmoid")),
    "frozen": lambda given: layers.Dense(4, "tanh", trainable=False)(given),
}
LAYERS: dict[str, dict[str, tuple[str, Callable[[Any], Any]]]] = {
    # kind of the input: name: (kind of the output, layer)
    "vectors": {
        "nested": ("vectors", _nested),
        "spectral norm": ("vectors", lambda given: layers.SpectralNormalization(layers.Dense(4))(given)),
        "repeat": ("steps", lambda given: layers.RepeatVector(3)(given)),
        "unit norm": ("vectors", lambda given: layers.UnitNormalization()(given)),
    },
    "steps": {
        "gru": ("steps", lambda given: layers.GRU(4, return_sequences=True)(given)),
        "lstm": ("vectors", lambda given: layers.LSTM(4)(given)),
        "both ways": ("steps", lambda given: layers.Bidirectional(layers.SimpleRNN(3, return_sequences=True))(given)),
        "convolution": ("steps", lambda given: layers.Conv1D(4, 2, padding="same", activation="tanh")(given)),
        "attention": ("steps", _attention),
        "each step": ("steps", lambda given: layers.TimeDistributed(layers.Dense(4, "tanh"))(given)),
        "mean": ("vectors", lambda given: layers.GlobalAveragePooling1D()(given)),
        "masking": ("steps", lambda given: layers.Masking()(given)),
    },
    "images": {
        "convolution": ("images", lambda given: layers.Conv2D(3, 2, padding="same", activation="tanh")(given)),
        "depthwise": ("images", lambda given: layers.DepthwiseConv2D(2, padding="same")(given)),
        "pooling": ("images", lambda given: layers.AveragePooling2D(2, padding="same")(given)),
        "group norm": ("images", lambda given: layers.GroupNormalization(1)(given)),
        "batch norm of rows": ("images", lambda given: layers.BatchNormalization(1, momentum=0.8)(given)),
        "flatten": ("vectors", lambda given: layers.Flatten()(given)),
        "mean": ("vectors", lambda given: layers.GlobalAveragePooling2D()(given)),
    },
    "words": {
        "embedding": ("steps", lambda given: layers.Embedding(9, 4)(given)),
        "masked embedding": ("steps", lambda given: layers.Embedding(9, 4, mask_zero=True)(given)),
    },
}
ENDS = {"steps": layers.GlobalAveragePooling1D, "images": layers.Flatten}
LOSSES: dict[str, tuple[Any, Any, list[Any]]] = {
    # loss: activation of the outputs, targets, metrics that suit
    "mse": (None, TARGETS, ["mae", "cosine_similarity"]),
    "huber": ("tanh", TARGETS, ["mse", "r2_score"]),
    "binary_crossentropy": ("sigmoid", (TARGETS > 0).astype("f"), ["binary_accuracy", "auc"]),
    "categorical_crossentropy": ("softmax", np.eye(3, dtype="f")[LABELS], ["accuracy", "precision"]),
    "sparse_categorical_crossentropy": ("softmax", LABELS, ["accuracy"]),
    "poisson": ("softplus", np.abs(TARGETS), ["mse"]),
}
OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "sgd": lambda: keras.optimizers.SGD(0.1),
    "momentum, clipnorm": lambda: keras.optimizers.SGD(0.1, momentum=0.9, nesterov=True, clipnorm=0.3),
    "adam, moving average": lambda: keras.optimizers.Adam(0.01, epsilon=1e-2, use_ema=True, ema_momentum=0.5),
    "adamw, global clipnorm": lambda: keras.optimizers.AdamW(0.01, epsilon=1e-2, global_clipnorm=0.5),
    "adagrad": lambda: keras.optimizers.Adagrad(0.05, epsilon=1e-2),
    "accumulated": lambda: keras.optimizers.SGD(0.1, gradient_accumulation_steps=2),
}


@dataclass(frozen=True)
class RandomModel:
    """A model, how it is compiled, and its data."""

    inputs: str
    names: tuple[str, ...]
    loss: str
    metrics: tuple[str, ...]
    optimizer: str
    weighted: bool

    def made(self) -> keras.Model:
        """Return a new model, with the same weights each time."""
        keras.utils.set_random_seed(1)
        kind, hidden = self.inputs, keras.Input(DATA[self.inputs].shape[1:], dtype=DATA[self.inputs].dtype)
        given = hidden
        for name in self.names:
            kind, layer = (kind, ANYWHERE[name]) if name in ANYWHERE else LAYERS[kind][name]
            hidden = layer(hidden)
        if kind in ENDS:
            hidden = ENDS[kind]()(hidden)
        model = keras.Model(given, layers.Dense(3, LOSSES[self.loss][0])(hidden))
        self.compile(model)
        return model

    def compile(self, model: keras.Model) -> None:
        """Compile this model, or one made of it."""
        model.compile(OPTIMIZERS[self.optimizer](), self.loss, metrics=[*self.metrics], jit_compile=False)

    def fit(self, model: keras.Model, batch_size: int = 13) -> dict[str, Any]:
        """Train for two steps, of which the second has fewer rows, and return all that changes."""
        data = {"x": DATA[self.inputs], "y": LOSSES[self.loss][1]}
        weights = {"sample_weight": WEIGHTS} if self.weighted else {}
        history = model.fit(**data, **weights, batch_size=batch_size, shuffle=False, verbose=0).history
        evaluated = model.evaluate(**data, **weights, batch_size=9, verbose=0, return_dict=True)
        return {"history": history, "evaluated": evaluated, "predicted": model.predict(data["x"], 8, verbose=0)}


def _names(kind: str, draw: Any, most: int) -> tuple[str, ...]:
    names: list[str] = []
    if kind == "words":
        names.append(draw(st.sampled_from([*LAYERS[kind]])))
        kind = "steps"
    for _ in range(draw(st.integers(1, most))):
        names.append(draw(st.sampled_from([*ANYWHERE, *LAYERS[kind]])))
        kind = kind if names[-1] in ANYWHERE else LAYERS[kind][names[-1]][0]
    return tuple(names)


@st.composite
def models(draw: Any, most_layers: int = 5) -> RandomModel:
    """A strategy for random models."""
    inputs = draw(st.sampled_from([*DATA]))
    loss = draw(st.sampled_from([*LOSSES]))
    return RandomModel(
        inputs,
        _names(inputs, draw, most_layers),
        loss,
        tuple(draw(st.lists(st.sampled_from(LOSSES[loss][2]), unique=True, max_size=2))),
        draw(st.sampled_from([*OPTIMIZERS])),
        draw(st.booleans()),
    )
