"""Keras models with steps of their own, as programs for research have them, without random numbers."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops
from trainings import ACTIVITY, WORDS, AddsLosses, Case, X, Y, using


def dense(*sizes: int, inputs: int = 6, norm: bool = False) -> keras.Model:
    """A net with tanh between its layers."""
    hidden: list[Any] = []
    for size in sizes[:-1]:
        hidden += [layers.Dense(size, "tanh"), *([layers.BatchNormalization(momentum=0.8)] if norm else [])]
    return keras.Sequential([keras.Input([inputs]), *hidden, layers.Dense(sizes[-1])])


def descend(model: Any, tape: Any, loss: Any, variables: Any = None, optimizer: Any = None) -> None:
    """Apply the gradients of a loss."""
    variables = model.trainable_variables if variables is None else variables
    (optimizer or model.optimizer).apply_gradients(zip(tape.gradient(loss, variables), variables))


class Stepping(keras.Model):
    """A model whose step applies the gradients of a cost: a function of the model, with its parts, and of a batch."""

    def __init__(self, cost: Callable[..., Any], **parts: Callable[[], Any]) -> None:
        super().__init__()
        self.cost = cost
        for name, make in parts.items():
            setattr(self, name, make())

    def train_step(self, data: Any) -> Any:
        with tf.GradientTape() as tape:
            cost = self.cost(self, *data)
        self.learn(tape.gradient(cost, self.trainable_variables))
        return {"cost": cost}

    def learn(self, gradients: Any) -> None:
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables))


def stepping(cost: Callable[..., Any], **parts: Callable[[], Any]) -> Callable[[], Stepping]:
    return lambda: Stepping(cost, **parts)


class TwoPasses(keras.Model):
    """Predicts the same for rows and for their neighbors."""

    def __init__(self) -> None:
        super().__init__()
        self.net = dense(8, 8, 2, norm=True)

    def call(self, x: Any, training: bool = False) -> Any:
        return self.net(x, training=training)

    def train_step(self, data: Any) -> Any:
        x, y = data
        with tf.GradientTape() as tape:
            first, second = self(x, training=True), self(x + 0.1 * tf.sin(9 * x), training=True)
            loss = self.compute_loss(x, y, first) + tf.reduce_mean((first - second) ** 2)
        descend(self, tape, loss)
        return {"cost": loss, **self.compute_metrics(x, y, first)}

    def test_step(self, data: Any) -> Any:
        x, y = data
        return {"difference": tf.reduce_mean(tf.abs(self(x, training=False) - y))}

    def predict_step(self, data: Any) -> Any:
        x = data[0] if isinstance(data, tuple) else data
        return {"one": self(x), "other": self.net.layers[0](x)}


class Adversarial(keras.Model):
    """A Wasserstein GAN with gradient penalty, whose parts alone have a `call` (Gulrajani et al., 2017)."""

    def __init__(self) -> None:
        super().__init__()
        self.generator, self.critic = dense(8, 6, inputs=2, norm=True), dense(8, 1)
        self.critic_loss = keras.metrics.Mean(name="critic_loss")

    def compile(self, **options: Any) -> None:
        super().compile(**options)
        self.critic_optimizer, self.generator_optimizer = (
            keras.optimizers.Adam(0.01, epsilon=1e-2),
            keras.optimizers.SGD(0.1),
        )

    def train_step(self, data: Any) -> Any:
        real, noise = data
        made = self.generator(noise, training=True)
        with tf.GradientTape() as tape:
            judged = self.critic(tf.concat([real, made], 0))
            loss = tf.reduce_mean(judged[tf.shape(real)[0] :]) - tf.reduce_mean(judged[: tf.shape(real)[0]])
            between = 0.3 * real + 0.7 * made
            with tf.GradientTape() as inner:
                inner.watch(between)
                score = self.critic(between)
            norms = tf.norm(inner.gradient(score, between), axis=1)
            loss += 10.0 * tf.reduce_mean((norms - 1.0) ** 2)
        descend(self, tape, loss, self.critic.trainable_variables, self.critic_optimizer)
        with tf.GradientTape() as tape:
            wanted = -tf.reduce_mean(self.critic(self.generator(noise, training=True)))
        descend(self, tape, wanted, self.generator.trainable_variables, self.generator_optimizer)
        self.critic_loss.update_state(loss)
        return {"critic_loss": self.critic_loss.result(), "generator_loss": wanted}


class Counting(layers.Layer):
    """Counts its calls."""

    def build(self, shape: Any) -> None:
        self.count = self.add_weight(shape=(), initializer="zeros", trainable=False)

    def call(self, x: Any) -> Any:
        self.count.assign_add(1.0)
        return x


class Opposed(keras.Model):
    """A GAN with two tapes at once, without batch normalization (Goodfellow et al., 2014)."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = keras.Sequential([dense(8, 6, inputs=2), AddsLosses(), Counting()])
        self.critic = keras.Sequential([keras.Input([6]), layers.LayerNormalization(), Counting(), dense(8, 1)])
        self.optimizers = keras.optimizers.SGD(0.05, momentum=0.5), keras.optimizers.SGD(0.1)

    def train_step(self, data: Any) -> Any:
        real, noise = data
        with tf.GradientTape() as outer, tf.GradientTape(persistent=True) as inner:
            made = self.generator(noise, training=True)
            judged, judged_real = self.critic(made, training=True), self.critic(real, training=True)
            wanted = tf.reduce_mean((judged - 1.0) ** 2) + tf.add_n(self.generator.losses)
            loss = tf.reduce_mean((judged_real - 1.0) ** 2) + tf.reduce_mean(judged**2)
        descend(self, outer, wanted, self.generator.trainable_variables, self.optimizers[0])
        descend(self, inner, loss, self.critic.trainable_variables, self.optimizers[1])
        return {"generator_loss": wanted, "critic_loss": loss}


def smooth(model: Any, x: Any, y: Any) -> Any:
    """The gradient is kept small. The second gradient goes through batch normalization."""
    with tf.GradientTape() as inner:
        inner.watch(x)
        outputs = model.net(x, training=True)
        cubes = outputs**3
    return tf.reduce_mean((outputs - y) ** 2) + 0.1 * tf.reduce_mean(inner.gradient(cubes, x) ** 2)


class Sampling(layers.Layer):
    """Adds noise, which is made of the mean, and the loss of its distribution."""

    def call(self, mean: Any, log_variance: Any) -> Any:
        return mean + ops.exp(0.5 * log_variance) * ops.stop_gradient(ops.sin(17 * mean))


def autoencoder(model: Any, x: Any, *_: Any) -> Any:
    """A variational autoencoder, in layers that the step calls one by one (Kingma and Welling, 2013)."""
    mean, log_variance = tf.split(model.encoder(x), 2, 1)
    decoded = model.decoder(model.sampling(mean, log_variance))
    divergence = -0.5 * tf.reduce_sum(1 + log_variance - mean**2 - tf.exp(log_variance), 1)
    return tf.reduce_mean(tf.reduce_mean((decoded - x) ** 2, 1) + 0.1 * divergence)


COMPARE = layers.Lambda(lambda scores: scores - tf.reduce_mean(scores, 0))
"""A layer that compares rows, and is no attribute of a model."""


class Distilled(keras.Model):
    """A small net that learns from a frozen one, with normalization, one that judges what it returns, and fixed points."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher, self.student, self.judge = dense(9, 2, norm=True), dense(3, 2), dense(4, 1, inputs=2)
        self.teacher.trainable = self.judge.trainable = False
        self.points = tf.constant(X[:4])

    def call(self, x: Any) -> Any:
        return self.student(x)

    def compute_loss(
        self, x: Any = None, y: Any = None, y_pred: Any = None, sample_weight: Any = None, training: bool = True
    ) -> Any:
        of_teacher = self.teacher(x, training=False)
        of_both = tf.reduce_mean((y_pred - y) ** 2) + 0.5 * tf.reduce_mean((y_pred - of_teacher) ** 2)
        of_pairs = tf.reduce_mean(COMPARE(tf.matmul(y_pred, y, transpose_b=True)) ** 2)
        return of_both + tf.reduce_mean(self.judge(y_pred)) + tf.reduce_mean(self.student(self.points) ** 2) + of_pairs


def contrastive(model: Any, x: Any, *_: Any) -> Any:
    """SimCLR: two views of each row in one batch of twice as many rows, and a loss of all pairs (Chen et al., 2020)."""
    model.steps.assign_add(1.0)
    views = tf.concat([x + 0.1 * tf.sin(9 * x), x * (1 + 0.1 * tf.cos(7 * x))], 0)
    projected = tf.math.l2_normalize(model.head(model.encoder(views, training=True)), 1)
    scores = tf.matmul(projected, projected, transpose_b=True) - 9.0 * tf.eye(tf.shape(projected)[0])
    others = tf.roll(tf.range(tf.shape(projected)[0]), tf.shape(x)[0], 0)
    return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(others, 5.0 * scores)) + model.steps


def partly(model: Any, x: Any, y: Any) -> Any:
    """Calls layers with fewer rows than the batch, and without rows."""
    known = x[: (tf.shape(x)[0] + 1) // 2]
    hidden = model.norm(model.hidden(known), training=True)
    loss = tf.reduce_mean((model.out(hidden) - y[: tf.shape(known)[0]]) ** 2) + tf.add_n(model.losses)
    if tf.reduce_sum(x) > 0:  # by autograph
        loss += model.scale(tf.reduce_mean(model.out(model.hidden(x[-1:]))))
    return model.scale(x[:, 0], by=1 + loss)[0] * loss / x[0, 0]


class Decorated(Stepping):
    """The step is a `tf.function`, and layers are not built."""

    train_step = tf.function(Stepping.train_step)

    def __init__(self) -> None:
        hidden = lambda: layers.Dense(8, "tanh", activity_regularizer="l2")
        norm = lambda: layers.BatchNormalization(momentum=0.8, activity_regularizer="l2")
        super().__init__(partly, hidden=hidden, norm=norm, out=lambda: layers.Dense(2), scale=Scaled)


class Scaled(layers.Layer):
    """Scales rows, or a scalar, by a scalar."""

    def build(self, *_: Any) -> None:
        self.weight = self.add_weight(name="weight", initializer="ones")

    def call(self, x: Any, by: Any = None) -> Any:
        return x * self.weight if by is None else x * self.weight / tf.stop_gradient(by)


class Unmasked(layers.Layer):
    """Takes the mask of its input from where Keras keeps it, and the phase from around it."""

    def __init__(self) -> None:
        super().__init__()
        self.pooling, self.norm = layers.GlobalAveragePooling1D(), layers.BatchNormalization(momentum=0.8)
        self.built = self.supports_masking = True
        self.norm.build([None, 4])

    def call(self, x: Any) -> Any:
        return self.norm(self.pooling(x))


def words(model: Any, x: Any, y: Any) -> Any:
    """Layers hand on masks, with dynamic loss scaling."""
    outputs = model.out(model.pool(model.embed(x), training=True))
    return model.optimizer.scale_loss(tf.reduce_mean((outputs - y) ** 2))


class Varied(layers.Layer):
    """Does something else by rank and by an attribute, and returns more than tensors. It adds a loss for rank 2 only."""

    factor = 1.0

    def build(self, *_: Any) -> None:
        self.weight = self.add_weight(name="weight", initializer="ones")

    def call(self, x: Any, memory: Any = None) -> Any:
        if x.shape.rank == 2:
            self.add_loss(0.1 * ops.mean(ops.square(self.weight * x)))
        scores = 0.0 if memory is None else ops.mean(ops.matmul(x, ops.transpose(memory)), 1, keepdims=True)
        return {"x": self.factor * self.weight * x + scores, "memory": None, "factor": self.factor}


class Halved(layers.Layer):
    """Halves rows in training mode, which may be a tensor."""

    def call(self, x: Any, training: Any = None) -> Any:
        return tf.where(tf.cast(training, tf.bool), x / 2, x)


class Inconstant(keras.Model):
    """A step that changes a layer, gives it a weight, draws numbers, and reads the losses of a layer inside another.

    Whether a layer is in training mode depends on the step.
    """

    def __init__(self) -> None:
        super().__init__()
        self.varied, self.halved, self.seeds = Varied(), Halved(), keras.random.SeedGenerator(3)
        self.norm, self.out = layers.BatchNormalization(momentum=0.8), layers.Dense(2)
        self.queue = self.add_weight(shape=[5, 6], name="queue", trainable=False, initializer="ones")
        self.around = keras.Sequential([keras.Input([6]), layers.Dense(6), AddsLosses()])

    def train_step(self, data: Any) -> Any:
        x, y = data
        with tf.GradientTape() as tape:
            noise = 0.1 * keras.random.normal(tf.shape(x), seed=self.seeds)
            self.varied.factor = 0.5
            first = self.halved(self.varied(x + noise)["x"], training=self.optimizer.iterations % 2 == 0)
            loss = tf.add_n(self.varied.losses)
            self.varied.factor = 0.2
            second = self.varied(self.around(x)[:, None])["x"][:, 0] + self.varied(x, self.queue)["x"]
            loss += tf.add_n(self.around.layers[-1].losses)
            loss += tf.reduce_mean((self.out(self.norm(first, training=True) + second) - y) ** 2)
            slopes = tf.reduce_mean(inner_slopes(self.out, first) ** 2)
            loss = 0.1 * (loss + slopes)
        descend(self, tape, loss)
        self.queue.assign(0.9 * self.queue + 0.1 * tf.reduce_mean(first))
        return {"cost": loss, "slopes": slopes}


def inner_slopes(layer: Any, x: Any) -> Any:
    """The derivatives of outputs by inputs of each row."""
    with tf.GradientTape() as tape:
        tape.watch(x)
        outputs = tf.tanh(layer(x))
    return tape.batch_jacobian(outputs, x)


class InTurn(keras.Model):
    """Trains one output after the other, and counts the variables that have no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.norm = layers.Dense(4, "tanh"), layers.BatchNormalization(momentum=0.8)
        self.heads = [layers.Dense(2) for _ in range(2)]

    def call(self, x: Any, training: bool = False) -> Any:
        hidden = self.norm(self.hidden(x), training=training)
        outputs = [head(hidden) for head in self.heads]
        self.add_loss(0.1 * tf.reduce_mean(outputs[0] ** 2))
        return [*outputs, tf.round(outputs[1])]

    def train_step(self, data: Any) -> Any:
        x, y = data
        missing = []
        for weights in ([1, 0, 0, 1], [0, 1, 0, 0], [0, 0, 1, 0], [1, -1, 0, 0]):
            with tf.GradientTape() as tape:
                losses = [tf.reduce_mean((output - y) ** 2) for output in self(x, training=True)]
                terms = zip(weights, [*losses, self.losses[0]])
                loss = tf.add_n([weight * term for weight, term in terms if weight])
            gradients = tape.gradient(loss, self.trainable_variables)
            missing.append(sum(gradient is None for gradient in gradients))
            for variable, gradient in zip(self.trainable_variables, gradients):
                if gradient is not None:
                    variable.assign_sub(0.1 * gradient)
        return {"cost": losses[1], "missing": sum(float(20**i * count) for i, count in enumerate(missing))}


class Centred(layers.Layer):
    """Adds a loss, and returns nothing."""

    def call(self, x: Any) -> None:
        self.add_loss(0.1 * tf.reduce_mean(x**2))


def transitions(model: Any, before: Any, actions: Any, rewards: Any, after: Any) -> Any:
    """Learns values of actions from batches of four tensors (Mnih et al., 2013)."""
    wanted = rewards + 0.9 * tf.reduce_max(model.values(after), -1)
    values = model.values(before)
    model.centred(values)
    loss = tf.reduce_mean((tf.gather(values, actions, batch_dims=1) - wanted) ** 2)
    return loss + tf.add_n(model.centred.losses)


class Untracked(keras.Model):
    """Trains a variable that Keras does not track, which a layer uses."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix, self.out = tf.Variable(tf.ones([6, 3])), layers.Dense(2)
        self.product = layers.Lambda(lambda x: tf.tanh(x @ self.matrix))

    def call(self, x: Any) -> Any:
        return self.out(self.product(x))

    def train_step(self, data: Any) -> Any:
        with tf.GradientTape() as tape:
            cost = tf.reduce_mean((self(data[0]) - data[1]) ** 2)
        self.matrix.assign_sub(0.1 * tape.gradient(cost, self.matrix))
        return {"cost": cost}


SHIFT = ContextVar("SHIFT", default=0.0)


class Shifted(layers.Layer):
    """Changes its input before `call`, adds a loss and noise, of which `draw` makes the numbers."""

    def __init__(self, draw: Any) -> None:
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
        distinct = tf.size(tf.unique(tf.reshape(outputs, [-1]))[0])
        return {"cost": loss, "slope": other.gradient(loss, self.shifted.scale.value), "different": distinct}


class Elsewhere(Stepping):
    """A layer looks up rows of a table of the model, the same for all rows."""

    def __init__(self) -> None:
        super().__init__(lambda model, x, y: tf.reduce_mean((tf.reduce_sum(model.placed(x), 1, True) - y) ** 2))
        self.table = self.add_weight(shape=[6], name="table", initializer="ones")
        self.placed = layers.Lambda(lambda x: x * tf.gather(tf.convert_to_tensor(self.table), [0, 1, 1, 5, 5, 3]))


def two_outputs() -> keras.Model:
    inputs = keras.Input([6])
    return keras.Model(inputs, [layers.Dense(3, "tanh")(inputs), layers.Dense(2, "tanh")(inputs)])


def penalty(model: Any, x: Any, y: Any) -> Any:
    """The loss of one output, and the size of the gradient of the other."""
    with tf.GradientTape() as tape:
        tape.watch(x)
        one, other = model.net(x)
    return tf.reduce_mean(tape.gradient(one, x) ** 2) + tf.reduce_mean((other - y) ** 2)


def eagerly() -> dict[str, Any]:
    return {"optimizer": keras.optimizers.SGD(0.5), "run_eagerly": True}


TRANSITIONS = tf.data.Dataset.from_tensor_slices((X, np.arange(len(X)) % 3, X[:, 0], X[::-1])).batch(11)
NOISE = {"x": X, "y": np.cos(13 * Y)}
ADDED_MEANS = {"added_losses": "mean"}


def case(model: Any, **options: Any) -> Case:
    return Case(model, **{"compile": using("SGD", 0.05), "forward": False} | options)


def scaled_losses() -> dict[str, Any]:
    return {"optimizer": keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.05), dynamic_growth_steps=2)}


MODELS = {
    "two forward passes": case(TwoPasses, forward=True),
    "adversarial": case(Adversarial, data=NOISE),
    "opposed": case(Opposed, data=NOISE, options=ADDED_MEANS),
    "smooth": case(stepping(smooth, net=lambda: dense(8, 2, norm=True))),
    "variational autoencoder": case(
        stepping(autoencoder, encoder=lambda: dense(8, 4), sampling=Sampling, decoder=lambda: dense(8, 6, inputs=2))
    ),
    "distillation": case(Distilled),
    "contrastive": case(
        stepping(
            contrastive,
            encoder=lambda: dense(8, 5, norm=True),
            head=lambda: layers.Dense(4),
            steps=lambda: tf.Variable(0.0, trainable=False),
        )
    ),
    "decorated": case(Decorated, options={"added_losses": ACTIVITY}),
    "masks": case(
        stepping(
            words,
            embed=lambda: layers.Embedding(9, 4, mask_zero=True),
            pool=Unmasked,
            out=lambda: layers.Dense(2),
        ),
        compile=scaled_losses,
        data={"x": WORDS, "y": Y},
    ),
    "inconstant": case(Inconstant, options=ADDED_MEANS),
    "in turn": case(InTurn, options=ADDED_MEANS),
    "transitions": case(
        stepping(transitions, values=lambda: dense(8, 3), centred=Centred),
        data={"x": TRANSITIONS, "batch_size": None},
        options=ADDED_MEANS,
    ),
    "calls in a step": case(Twice, options=ADDED_MEANS),
    "calls in a step, normalized": case(lambda: Twice(layers.BatchNormalization()), options=ADDED_MEANS),
    "variables that are not Keras's own": case(Untracked),
    "a table of the model": case(Elsewhere, compile=using("SGD", 0.1, clipnorm=0.05)),
    "gradients of one of two outputs, eagerly": case(stepping(penalty, net=two_outputs), compile=eagerly),
}
