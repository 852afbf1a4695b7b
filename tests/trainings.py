"""What models are trained on, for the law that several devices train as one does: models, how they are compiled, and data."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import layers

STEPS = {"batch_size": 11, "epochs": 2, "shuffle": False, "verbose": 0}
"""8 steps, on 11 rows or 1: no number of rows that devices share, and fewer than there are devices."""

ACTIVITY = "mean" if tuple(map(int, keras.__version__.split(".")[:2])) >= (3, 14) else "sum"
"""How Keras reduces the losses of an `activity_regularizer` over rows."""

_random = np.random.default_rng(0)
X = _random.normal(size=(34, 6)).astype("f")
Y = np.stack([X[:, 0] * X[:, 1], np.sin(X).sum(1)], 1)
LABELS = (X[:, 0] > 0.4).astype("i") + (X[:, 1] > 0)
WORDS = _random.integers(1, 9, size=(34, 5)) * (np.arange(5) < _random.integers(1, 6, size=(34, 1)))
WEIGHTS = _random.uniform(0, 2, size=34).astype("f")


def sequential(*hidden: Any, inputs: Any = X, outputs: int = 2) -> keras.Model:
    return keras.Sequential([keras.Input(inputs.shape[1:]), *hidden, layers.Dense(outputs)])


def mlp(**options: Any) -> keras.Model:
    return sequential(layers.Dense(8, "tanh", **options))


def recurrent() -> keras.Model:
    return sequential(
        layers.Embedding(9, 4, mask_zero=True),
        layers.SimpleRNN(5, return_sequences=True),
        inputs=WORDS,
        outputs=1,
    )


def normalized(*before: Any, axis: int = -1, **options: Any) -> keras.Model:
    return sequential(*before, layers.BatchNormalization(axis, momentum=0.8, **options), layers.Dense(4, "tanh"))


def nested() -> keras.Model:
    x = keras.Input([6])
    inner = normalized(AddsLosses(), gamma_regularizer="l2")
    return keras.Model(x, layers.Dense(2)(inner(x) + inner(2 * x)))


def masked_normalization(channels: int = 4) -> keras.Model:
    norms = [layers.BatchNormalization(axis, momentum=0.8) for axis in (-1, 1)]
    embedded = layers.Embedding(9, channels, mask_zero=True)
    return sequential(embedded, *norms, layers.SimpleRNN(3), inputs=WORDS)


class Packed(layers.Layer):
    """Normalizes three pairs of the rows whose first value is positive, which most devices do not have."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = layers.BatchNormalization(momentum=0.8)
        self.norm.build([None, 2])

    def call(self, x: Any, training: bool = False) -> Any:
        places = tf.where(x[:, 0] > 0)
        pairs = tf.reshape(tf.gather_nd(x, places), [-1, 2])
        return tf.scatter_nd(places, tf.reshape(self.norm(pairs, training=training), [-1, 6]), tf.shape(x, tf.int64))


def in_each_step() -> keras.Model:
    inner = keras.Sequential([layers.BatchNormalization(momentum=0.8), layers.Dense(3, "tanh")])
    return sequential(layers.Reshape([3, 2]), layers.TimeDistributed(inner), layers.Flatten())


def several() -> keras.Model:
    a, b = keras.Input([6], name="a"), keras.Input([2], name="b")
    joined = layers.Dense(5, "tanh")(layers.concatenate([a, b]))
    outputs = {"one": layers.Dense(2, name="one")(joined), "other": layers.Dense(1, name="other")(joined)}
    return keras.Model({"a": a, "b": b}, outputs)


class AddsLosses(layers.Layer):
    """The mean of squares over rows, or their sum; and one of a weight."""

    def __init__(self, reduce: str = "mean", **options: Any) -> None:
        super().__init__(**options)
        self.reduce, self.supports_masking = reduce, True
        self.scale = self.add_weight(name="scale", initializer="ones")

    def call(self, x: Any) -> Any:
        self.add_loss(0.01 * getattr(keras.ops, self.reduce)(keras.ops.sum(keras.ops.square(x), 1)))
        self.add_loss(0.1 * keras.ops.square(self.scale))
        return self.scale * x


class LooksUp(layers.Layer):
    """Looks up rows of tables: the same for all rows, those of each row, and those of all rows, each once."""

    def build(self, shape: Any) -> None:
        self.tables = [self.add_weight(shape=[6, shape[-1]], name=f"table_{i}") for i in range(7)]
        self.order = self.add_weight(shape=[2], initializer="ones", dtype="int32", trainable=False)

    def call(self, x: Any) -> Any:
        largest = tf.argmax(x, 1)
        ids, places = tf.unique(largest)
        of_all = tf.range(3), [0, 1, 1, 5], tf.range(tf.shape(x)[1] // 2), self.order
        of_rows = tf.tile(tf.range(2)[None], [tf.shape(x)[0], 1]), largest[:, None]
        tables = [tf.convert_to_tensor(table) for table in self.tables]
        found = [tf.gather(table, indices)[None] for table, indices in zip(tables, of_all)]
        found += [tf.gather(table, indices) for table, indices in zip(tables[4:], of_rows)]
        distinct = tf.gather(tf.gather(tables[6], ids), places)
        return x * tf.add_n([tf.reduce_sum(each, 1) * tf.ones_like(x) for each in found]) + distinct


class Traced(layers.Layer):
    """Its `call` is a `tf.function`, which keeps its traces."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = layers.Dense(5, "tanh")
        self.dense.build([None, 6])

    @tf.function
    def call(self, x: Any, training: bool | None = None) -> Any:
        return self.dense(x)


def checks() -> layers.Layer:
    return layers.Lambda(lambda x: tf.debugging.check_numerics(x, "not a number"))


class Applies(layers.Layer):
    """Applies a function of its input and a weight."""

    def __init__(self, function: Callable[[Any, Any], Any], shape: Sequence[int] = ()) -> None:
        super().__init__()
        self.function, self.weight = function, self.add_weight(shape=shape, name="weight")

    def call(self, x: Any) -> Any:
        return self.function(x, self.weight)


def spectrum(x: Any, kernel: Any) -> Any:
    """Complex numbers."""
    parts = x @ kernel
    return tf.complex(parts[:, :4], parts[:, 4:])


def decaying(x: Any, scale: Any) -> Any:
    """Changes a weight that is trained."""
    scale.assign(0.9 * scale)
    return scale * x


def by_function(x: Any, kernel: Any) -> Any:
    return tf.function(lambda x: tf.tanh(x @ kernel))(x)


class Concrete(layers.Layer):
    """Has a `ConcreteFunction`, which reads the variables themselves, also in the scope of other values."""

    def __init__(self, numbers: Any = lambda x: tf.cast(5 * tf.sigmoid(x[:, 0]), tf.int32)) -> None:
        super().__init__()
        self.numbers = numbers

    def build(self, shape: Any) -> None:
        self.table = self.add_weight(shape=(5, shape[-1]), name="table")
        self.kernel = self.add_weight(shape=(shape[-1], 4), name="kernel")
        self.apply = tf.function(self._apply).get_concrete_function(tf.TensorSpec([None, shape[-1]]))

    def _apply(self, x: Any) -> Any:
        return tf.tanh((x + tf.gather(self.table.value, self.numbers(x))) @ self.kernel.value)

    def call(self, x: Any) -> Any:
        return self.apply(x)


def recomputed(x: Any, kernel: Any) -> Any:
    return tf.recompute_grad(lambda x: tf.tanh(x @ kernel))(x)


def every_layer() -> keras.Model:
    """Kinds of layers that no other case has."""
    given = keras.Input([6])
    steps = layers.Masking()(layers.Reshape([3, 2])(given))
    last = layers.Bidirectional(layers.LSTM(2))(layers.GRU(4, return_sequences=True)(steps))
    steps = layers.Conv1D(4, 2, padding="same")(layers.RepeatVector(3)(last))
    steps = layers.TimeDistributed(layers.Dense(4))(steps)
    images = layers.Reshape([3, 4, 1])(layers.Add()([steps, layers.MultiHeadAttention(2, 3)(steps, steps)]))
    images = layers.GroupNormalization(1)(layers.Conv2D(3, 2, padding="same")(images))
    images = layers.PReLU()(layers.AveragePooling2D(2)(layers.DepthwiseConv2D(2, padding="same")(images)))
    hidden = layers.LayerNormalization()(layers.Flatten()(images))
    return keras.Model(given, layers.Dense(2)(layers.UnitNormalization()(hidden)))


class Subclassed(keras.Model):
    """With branches in Python, a loss of its own, and one that it adds."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.out = layers.Dense(7), layers.Dense(2)
        self(keras.Input([6]))  # builds its layers

    def call(self, x: Any, training: bool = False) -> Any:
        hidden = self.hidden(x)
        return self.out(keras.ops.tanh(hidden) if training else keras.ops.sigmoid(hidden))

    def compute_loss(self, x: Any, y: Any, y_pred: Any, *_: Any, **__: Any) -> Any:
        return tf.reduce_mean(tf.abs(y_pred - y) ** 3) + 0.1 * tf.math.reduce_std(y_pred)


class Counted(layers.Layer):
    """Weighs what it adds as a loss by the steps so far, and its outputs by those and this one."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.steps = self.add_weight(name="steps", initializer="zeros", trainable=False)
        self.supports_masking = True

    def call(self, x: Any, training: bool = False) -> Any:
        self.add_loss(0.1 * self.steps * keras.ops.mean(keras.ops.square(x)))
        if training:
            self.steps.assign_add(1.0)
        return x * (1 + 0.1 * self.steps)


class Averaged(layers.Layer):
    """Uses a moving average of its weights, which has no gradient."""

    def build(self, shape: Any) -> None:
        self.kernel = self.add_weight(shape=(shape[-1], 3), name="kernel")
        self.average = self.add_weight(shape=(shape[-1], 3), name="average", trainable=False)

    def call(self, x: Any, training: bool = False) -> Any:
        if training:
            self.average.assign(0.5 * self.average + 0.5 * self.kernel)
        return x @ self.average + 0.1 * (x @ self.kernel)


def tied() -> keras.Model:
    dense = layers.Dense(5, "tanh")
    return sequential(dense, layers.Lambda(lambda x: x @ keras.ops.transpose(dense.kernel)), Averaged())


class Relative(keras.Model):
    """With a loss that is relative to those of the steps so far, and this one."""

    def __init__(self) -> None:
        super().__init__()
        self.out = layers.Dense(2)
        self.usual = tf.Variable(1.0, trainable=False)
        self.note = tf.function(lambda loss: self.usual.assign(0.9 * self.usual + 0.1 * loss))
        self(keras.Input([6]))  # builds its layer

    def call(self, x: Any) -> Any:
        return self.out(x)

    def compute_loss(self, x: Any, y: Any, y_pred: Any, *_: Any, **__: Any) -> Any:
        loss = tf.reduce_mean((y_pred - y) ** 2)
        self.note(tf.stop_gradient(loss))
        return loss / self.usual


class InTraining(layers.Layer):
    """Applies a function in training only, beside a layer that no call uses."""

    def __init__(self, function: Callable[[Any], Any], **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.function, self.unused = function, layers.Dense(3)

    def build(self, shape: Any) -> None:
        """Leave `unused` unbuilt."""

    def call(self, x: Any, training: bool = False) -> Any:
        return self.function(x) if training else x


class Inheriting(keras.Model):
    """A model whose layers get the training mode from the calls around them, or from the layer before."""

    def __init__(self, first: Callable[[], layers.Layer]) -> None:
        super().__init__()
        self.first, self.frozen, self.out = first(), layers.Dense(6, "tanh"), layers.Dense(2)
        self.doubled, self.last = (InTraining(lambda x: 2.0 * x, name=name) for name in ("doubled", "last"))
        self(keras.Input([6]))  # builds its layers

    def call(self, x: Any) -> Any:
        return self.out(self.last(self.frozen(self.doubled(self.first(x)), training=False)))


class Scaled(layers.Layer):
    """Uses a tensor that another layer assigns to it."""

    def call(self, x: Any) -> Any:
        return tf.tanh(x * self.scale)


class Scaling(layers.Layer):
    def __init__(self) -> None:
        super().__init__()
        self.scores, self.scaled = layers.Dense(6, kernel_initializer="ones"), Scaled(name="scaled")

    def call(self, x: Any) -> Any:
        self.scaled.scale = self.scores(x)
        return self.scaled(x)


class Largest(keras.metrics.Metric):
    """A metric that is no mean."""

    def __init__(self) -> None:
        super().__init__(name="largest")
        self.found = self.add_weight(initializer="zeros")

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        self.found.assign(keras.ops.maximum(self.found, keras.ops.max(y_pred)))

    def result(self) -> Any:
        return self.found


@dataclass(frozen=True)
class Case:
    """A model, how it is compiled, and what it is fitted to."""

    model: Callable[[], keras.Model] = mlp
    compile: Callable[[], dict[str, Any]] = dict
    data: dict[str, Any] = field(default_factory=lambda: {"x": X, "y": Y})
    policy: str = "float32"
    rtol: float = 1e-5
    forward: bool = True
    """Whether evaluation and prediction say what those of another case do not."""
    options: dict[str, Any] = field(default_factory=dict)
    """Of `parallelize`, or of `Pipeline`."""

    def made(self) -> keras.Model:
        """The same each time."""
        keras.utils.set_random_seed(1)
        keras.config.set_dtype_policy(self.policy)
        try:
            model = self.model()
        finally:
            keras.config.set_dtype_policy("float32")
        return self.compiled(model)

    def compiled(self, model: keras.Model) -> keras.Model:
        """Compile a model, for instance one that was made of `made()`."""
        model.compile(**{"optimizer": keras.optimizers.SGD(0.1), "loss": "mse", "jit_compile": False, **self.compile()})
        return model

    def eager(self) -> keras.Model:
        """The same model on one device, in eager code, which traces nothing.

        Except for several outputs: Keras weighs their losses by the rows of a batch in eager code only.
        """
        model = self.made()
        model.run_eagerly |= not isinstance(self.data.get("y"), list | dict)
        return model

    @functools.cached_property
    def wanted(self) -> Any:
        """What one device makes of it."""
        return self.trained(self.eager())

    def trained(self, model: keras.Model) -> Any:
        results = self.fitted(model)
        if self.forward:
            data = {name: self.data[name] for name in ("x", "y", "sample_weight") if name in self.data}
            results["evaluated"] = model.evaluate(**data, batch_size=8, verbose=0, return_dict=True)
            results["predicted"] = model.predict(self.data["x"], batch_size=10, verbose=0)
        return results

    def fitted(self, model: keras.Model) -> Any:
        return {
            "history": model.fit(**STEPS | self.data).history,
            "weights": model.get_weights(),
            "slots": [variable.numpy() for variable in model.optimizer.variables],
        }


def using(name: str, *args: Any, **options: Any) -> Callable[[], dict[str, Any]]:
    """Arguments of `compile` with an optimizer of this name."""
    return lambda: {"optimizer": getattr(keras.optimizers, name)(*args, **options)}


def scaled() -> dict[str, Any]:
    return {"optimizer": keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1, 0.9), dynamic_growth_steps=2)}


OUTPUTS = {"one": Y, "other": Y[:, :1]}
WORDS_DATA = {"x": WORDS * (np.arange(34) < 33)[:, None], "y": Y[:, :1]}  # without any word in the last batch
FEW_ROWS_DATA = {"x": np.where(np.arange(6), X, np.where(np.arange(34) % 11, -1, 1)[:, None]).astype("f"), "y": Y}
CROSSENTROPY = {"loss": keras.losses.SparseCategoricalCrossentropy(from_logits=True), "metrics": ["accuracy"]}

CASES = {
    "momentum, clipnorm": Case(compile=using("SGD", 0.5, momentum=0.9, clipnorm=0.1), forward=False),
    "moving average": Case(compile=using("Adam", 0.01, use_ema=True, ema_momentum=0.5), forward=False),
    "scaled": Case(compile=scaled, forward=False),
    "class weights, accumulated": Case(
        lambda: sequential(layers.Dense(8, "tanh"), outputs=3),
        lambda: CROSSENTROPY | {"optimizer": keras.optimizers.SGD(0.5, gradient_accumulation_steps=3)},
        {"x": X, "y": LABELS, "class_weight": {0: 1, 1: 3, 2: 0.5}},
        forward=False,
    ),
    "masks, gradients of slices": Case(
        recurrent,
        lambda: {"optimizer": keras.optimizers.Adam(0.01), "metrics": ["mae"]},
        {"x": WORDS, "y": np.repeat(Y[:, :1], 5, 1)[..., None]},
    ),
    "lookups": Case(lambda: sequential(LooksUp()), using("Adagrad", 0.1), forward=False),
    "lookups, weights in recompute_grad": Case(
        lambda: sequential(LooksUp(), Applies(recomputed, [6, 6])), using("Adagrad", 0.1), forward=False
    ),
    "lookups, batch normalization": Case(lambda: normalized(LooksUp()), using("Adagrad", 0.1), forward=False),
    "lookups, loop, clipnorm": Case(
        lambda: sequential(LooksUp(), layers.Reshape([3, 2]), layers.SimpleRNN(3)),
        using("SGD", 0.1, clipnorm=0.05),
        forward=False,
    ),
    "regularizers, global_clipnorm, sample weights, split": Case(
        lambda: mlp(kernel_regularizer="l2", bias_regularizer="l1", activity_regularizer="l2"),
        lambda: {
            "optimizer": keras.optimizers.SGD(0.5, global_clipnorm=0.1),
            "metrics": [keras.metrics.RootMeanSquaredError()],
            "weighted_metrics": ["mse"],
        },
        {"x": X, "y": Y, "sample_weight": WEIGHTS, "validation_split": 0.2},
        options={"added_losses": ACTIVITY},
    ),
    "added sums": Case(lambda: sequential(AddsLosses("sum"), layers.Dense(4)), options={"added_losses": "sum"}),
    "outputs in a dict": Case(
        several,
        lambda: {
            "loss": {"one": "mse", "other": "mae"},
            "loss_weights": {"one": 1.0, "other": 0.3},
            "metrics": {"one": ["mae"]},
        },
        {"x": {"a": X, "b": Y}, "y": OUTPUTS},
    ),
    "subclassed, validation, several steps per execution": Case(
        Subclassed,
        lambda: {"steps_per_execution": 3, "metrics": ["mae"]},
        {"x": X, "y": Y, "validation_data": (X[:13], Y[:13], WEIGHTS[:13])},
    ),
    "weights changed in a step that uses them": Case(
        lambda: sequential(Counted(), layers.SpectralNormalization(layers.Dense(5)), Counted()),
        options={"added_losses": "mean"},
    ),
    "tied weights, moving average of weights": Case(tied),
    "every layer": Case(every_layer, using("AdamW", 0.01, epsilon=1e-2, global_clipnorm=0.5)),
    "trained weights that a layer changes": Case(lambda: sequential(Applies(decaying), layers.Dense(4))),
    "weights in a tf.function": Case(lambda: sequential(Applies(by_function, [6, 6]))),
    "weights in a ConcreteFunction": Case(lambda: sequential(Concrete()), using("Adagrad", 0.1), forward=False),
    "a call that is a tf.function": Case(lambda: sequential(Traced())),
    "weights in recompute_grad": Case(lambda: sequential(Applies(recomputed, [6, 6]))),
    "weights in recompute_grad, batch normalization": Case(lambda: normalized(Applies(recomputed, [6, 6]))),
    "tensors assigned to a recomputed layer": Case(
        lambda: sequential(Scaling()), forward=False, options={"recompute": ["scaled"]}
    ),
    "inherited training mode": Case(lambda: Inheriting(layers.Identity)),
    "inherited training mode, normalized": Case(lambda: Inheriting(layers.BatchNormalization)),
    "inherited training mode, recomputed": Case(
        lambda: Inheriting(layers.LayerNormalization), options={"recompute": ["last"]}
    ),
    "a loss that changes what it uses": Case(Relative),
    "complex values": Case(lambda: sequential(Applies(spectrum, [6, 8]), layers.Lambda(tf.abs)), forward=False),
    "batch normalization": Case(normalized, using("Adam", 0.01, epsilon=1e-3)),
    "batch normalization, checks": Case(
        lambda: sequential(checks(), layers.BatchNormalization(momentum=0.8), checks(), layers.Dense(4, "tanh"))
    ),
    "batch normalization, nested, adding losses": Case(nested, options={"added_losses": "mean"}),
    "batch normalization, masked": Case(masked_normalization, data=WORDS_DATA),
    "batch normalization, masked, of one channel": Case(lambda: masked_normalization(1), data=WORDS_DATA),
    "batch normalization of few rows": Case(lambda: sequential(Packed(), layers.Dense(4)), data=FEW_ROWS_DATA),
    "batch normalization in each step": Case(in_each_step),
    "zero weights": Case(data={"x": X, "y": Y, "sample_weight": WEIGHTS * (np.arange(34) % 11 > 5)}),
    "batch normalization, float16, several steps per execution": Case(
        normalized, lambda: {"steps_per_execution": 2}, policy="mixed_float16", rtol=2e-2
    ),
    "batch normalization, eager": Case(normalized, lambda: {"run_eagerly": True}),
}
