"""Functions of one row as users write them, each with data: what `vectorize="auto"` is for.

`test_vectorizable_ops.py` draws calls of each op. These functions combine ops, gradients, loops, layers and structures.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf


def normal(*shape: int, dtype: Any = tf.float32, seed: int = 0) -> tf.Tensor:
    """Standard normal numbers, `[rows, *shape]`."""
    return tf.constant(np.random.default_rng(seed).normal(size=[5, *shape]), dtype)


def uniform(*shape: int, low: float = 0.0, high: float = 1.0, seed: int = 0) -> tf.Tensor:
    """Uniform numbers between `low` and `high`, `[rows, *shape]`."""
    return tf.constant(np.random.default_rng(seed).uniform(low, high, [5, *shape]), tf.float32)


def integers(*shape: int, high: int, seed: int = 0) -> tf.Tensor:
    """Integers below `high`, `[rows, *shape]`."""
    return tf.constant(np.random.default_rng(seed).integers(0, high, [5, *shape]), tf.int32)


def shared(*shape: int, dtype: Any = tf.float32) -> tf.Tensor:
    """Standard normal numbers of any shape, which a function captures: the same for each row."""
    return normal(*shape, dtype=dtype, seed=9)[0]


# Linear algebra and calculus: gradients, Jacobians and Hessians inside the function

MATRIX = shared(4, 4)


def jacobian(x: Any) -> Any:
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = tf.nn.softmax(tf.linalg.matvec(MATRIX, tf.sin(x)))
    return tape.jacobian(y, x)


def hessian_vector_product(x: Any) -> Any:
    with tf.autodiff.ForwardAccumulator(x, tf.ones([4])) as accumulator:
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = tf.reduce_prod(1.0 + tf.square(x))
        gradient = tape.gradient(y, x)
    return accumulator.jvp(gradient)


def gradient_descent(x: Any) -> Any:
    for _ in tf.range(10):
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = tf.reduce_sum(tf.math.softplus(tf.linalg.matvec(MATRIX, x)) ** 2) + x[0] * x[1]
        x -= 0.05 * tape.gradient(loss, x)
    return x


VECTORS = normal(4)
CALCULUS = {
    "pseudo-inverse": (lambda m: tf.linalg.pinv(m) @ m, normal(6, 3)),
    "quadratic form": (lambda a: tf.einsum("ij,jk,lk->il", a, MATRIX, a), normal(4, 4)),
    "Jacobian": (jacobian, VECTORS),
    "Hessian times a vector": (hessian_vector_product, VECTORS),
    "gradient descent": (gradient_descent, VECTORS),
}

# Signals, images and statistics

MEL = tf.signal.linear_to_mel_weight_matrix(8, 17, 8000, 50.0, 3500.0)


def mfcc(signal: Any) -> Any:
    spectrum = tf.abs(tf.signal.stft(signal, frame_length=32, frame_step=16, fft_length=32))
    return tf.signal.mfccs_from_log_mel_spectrograms(tf.math.log(tf.matmul(spectrum, MEL) + 1e-6))[..., :4]


def augmented(image: Any, seed: Any) -> Any:
    image = tf.image.stateless_random_flip_left_right(image, seed)
    return tf.image.stateless_random_brightness(image, 0.2, seed)


PICTURES = uniform(12, 12, 3)
SAMPLES = {
    "MFCC": (mfcc, normal(256)),
    "median filter": (lambda s: tf.sort(tf.signal.frame(tf.pad(s, [[2, 2]], "REFLECT"), 5, 1))[:, 2], normal(64)),
    "augmentation of a seed": (augmented, (PICTURES, integers(2, high=99))),
    "structural similarity": (lambda i: tf.image.ssim(i, i**2, 1.0, filter_size=5), PICTURES),
    "resized and scaled": (lambda i: tf.image.resize(i, [5, 7]) / tf.constant([0.2, 0.3, 0.4]), PICTURES),
    "Huber loss": (lambda p, t: tf.keras.losses.huber(t, p), (VECTORS, VECTORS * 0.2)),
}

# Keras layers, and networks of plain TensorFlow

K = tf.keras.layers


def layer(made: Any, *shape: int | None) -> Any:
    """A Keras layer with weights, as a function of one sample of the shape."""
    made.build([None, *shape])
    random = np.random.default_rng(0)
    made.set_weights([0.1 + 0.3 * np.abs(random.normal(size=weight.shape)) for weight in made.get_weights()])
    return lambda x: made(x[None])[0]


tf.keras.utils.set_random_seed(0)
CNN = tf.keras.Sequential(
    [
        tf.keras.Input([8, 8, 3]),
        *(K.Conv2D(4, 3, activation="relu"), K.BatchNormalization(), K.MaxPooling2D(), K.Flatten(), K.Dropout(0.5)),
        K.Dense(5, activation="softmax"),
    ]
)
ENCODER = tf.keras.Sequential([tf.keras.Input([6]), K.Dense(8, "tanh"), K.Dense(2)])
ATTENTION = K.MultiHeadAttention(2, 4)
ATTENTION.build([None, 5, 6], [None, 5, 6])


def padded_attention(tokens: Any, length: Any) -> Any:
    mask = tf.sequence_mask(length, 5)
    return ATTENTION(tokens[None], tokens[None], attention_mask=mask[None, None])[0]


def saliency(image: Any) -> Any:
    with tf.GradientTape() as tape:
        tape.watch(image)
        best = tf.reduce_max(CNN(image[None], training=False)[0])
    return tf.reduce_max(tf.abs(tape.gradient(best, image)), axis=-1)


def gradient_of_weights(x: Any, target: Any) -> Any:
    """Gradients of one sample, as for differential privacy."""
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean((ENCODER(x[None])[0] - target) ** 2)
    gradients = tape.gradient(loss, ENCODER.trainable_variables)
    return tf.linalg.global_norm(gradients), gradients[-1]


SEQUENCES, IMAGES = normal(5, 6), uniform(8, 8, 3)
NETWORKS = {
    "multi-head attention with padding": (padded_attention, (SEQUENCES, integers(high=5) + 1)),
    "saliency": (saliency, IMAGES),
    "gradient of weights": (gradient_of_weights, (normal(6), normal(2))),
    "Conv2DTranspose": (layer(K.Conv2DTranspose(2, 3, strides=2, activation="elu"), 8, 8, 3), IMAGES),
    "GroupNormalization": (layer(K.GroupNormalization(3), 5, 6), SEQUENCES),
    "LSTM": (layer(K.LSTM(4, return_sequences=True, use_cudnn=False), 5, 6), SEQUENCES),
    "whole network": (lambda i: CNN(i[None], training=False)[0], IMAGES),
}

# Indices, nested structures, strings and dtypes

VOCABULARY = tf.lookup.StaticHashTable(
    tf.lookup.KeyValueTensorInitializer(["ant", "bee", "cat"], tf.constant([1, 2, 3], tf.int64)), 0
)


def particles(state: Any) -> Any:
    bounced = state["v"] * tf.where(state["x"] > 1.0, -1.0, 1.0)
    energy = tf.reduce_sum(state["v"] ** 2) / 2.0
    return {"x": state["x"] + 0.1 * state["v"], "v": bounced}, (energy, tf.reduce_any(state["x"] > 1.0))


def tokens(text: Any) -> Any:
    words = tf.strings.split(tf.strings.lower(text[None]), " ").to_tensor("", shape=[1, 3])[0]
    return VOCABULARY.lookup(words), tf.strings.length(text)


STRUCTURES = {
    "particles in a dict": (particles, {"x": normal(3), "v": normal(3, seed=1)}),
    "tf.vectorized_map inside": (lambda x: tf.vectorized_map(lambda p: tf.tensordot(p, p, 0), x), normal(4, 3)),
    "tokens": (tokens, tf.constant(["ant bee", "cat", "dog ant cat", "bee", "bee bee"])),
}

# Loops that rows leave at once or one by one, branches that some rows or none take, and lists

WEIGHTS = tf.Variable(shared(3, 3, dtype=tf.float64))
LEVELS = tf.lookup.StaticHashTable(
    tf.lookup.KeyValueTensorInitializer(tf.range(3), tf.constant([0.9, 0.8, 0.7], tf.float64)), 0.5
)
NEVER = 1e3


def power(row: Any) -> Any:
    state = row
    for _ in tf.range(5):
        state = tf.sin(tf.linalg.matvec(WEIGHTS, state) + row[0])
    return state


def shared_start(row: Any) -> Any:
    """Variables that rows share at first, and that differ after one and two steps."""
    first, second, scale = tf.zeros([3], tf.float64), tf.zeros([3], tf.float64), tf.constant(1.0, tf.float64)
    for _ in tf.range(4):
        second = second + first * scale
        first = first + row
        scale = scale * 1.1
    return second + scale


def lookups(row: Any) -> Any:
    for k in tf.range(3):
        row = row * LEVELS.lookup(k) + LEVELS.lookup(tf.cast(row[0], tf.int32))
    return row


def grown(row: Any) -> Any:
    """`tf.vectorized_map` converts this, too, and fails when it runs."""
    array = tf.TensorArray(tf.float64, 0, dynamic_size=True)
    for i in tf.range(4):
        array = array.write(i, row)
        row *= 2.0
    return array.stack()


def nested(row: Any) -> Any:
    total = tf.zeros([3], tf.float64)
    for i in tf.range(3):
        for j in tf.range(i + 1):
            total += row * tf.cast(i + j, tf.float64)
        while tf.norm(total) > 2.0:
            total *= 0.7
    return total


def until_small(row: Any) -> Any:
    while tf.norm(row) > 0.5:
        row = row * 0.6
    return row


def until_an_element(row: Any) -> Any:
    total = tf.zeros([], tf.float64)
    for element in row:
        if element > 1.0:
            break
        if element < -1.0:
            continue
        total += element
    return total


def elements_that_some_read(row: Any) -> Any:
    elements = tf.TensorArray(tf.float64, 3, element_shape=[], clear_after_read=False).unstack(row)
    total = elements.read(0)
    for i in tf.range(3):
        if row[0] > 0:
            total += elements.read(i) * total
    return total


def branch_in_loop(row: Any) -> Any:
    for i in tf.range(4):
        if row[0] > 0.2:
            row = tf.linalg.matvec(WEIGHTS, row[::-1]) / 3.0
        elif i > 2:
            row = row + 1.0
        else:
            row = row - row[1] * 0.1
    return row


def refused(row: Any) -> Any:
    tf.debugging.assert_equal(WEIGHTS[0, 0] > NEVER, True)
    return row


def cases_of_pairs(row: Any) -> Any:
    pairs = [lambda: (row, row), lambda: (row[::-1], row * 2.0)]
    return tf.add_n(tf.switch_case(tf.cast(row[0], tf.int32), pairs))


TRIPLES = normal(3, dtype=tf.float64)
CONTROL_FLOW = {
    "power iteration": (power, TRIPLES),
    "shared start": (shared_start, TRIPLES),
    "grown list": (grown, TRIPLES),
    "nested loops": (nested, TRIPLES),
    "until small": (until_small, TRIPLES),
    "branch in a loop": (branch_in_loop, TRIPLES),
    "until an element": (until_an_element, TRIPLES),
    "elements that some rows read": (elements_that_some_read, TRIPLES),
    "assertion that no row takes": (lambda r: tf.cond(r[0] < NEVER, lambda: r, lambda: refused(r)), TRIPLES),
    "branch that all rows share": (
        lambda r: tf.cond(WEIGHTS[0, 0] > NEVER, lambda: tf.linalg.matvec(WEIGHTS, r), lambda: r), TRIPLES),
    "cases of pairs": (cases_of_pairs, TRIPLES),
    "lookups in a loop": (lookups, TRIPLES),
    "tf.scan": (lambda r: tf.scan(lambda s, e: tf.sin(s) * 0.5 + e, r), normal(3)),
}  # fmt: skip

FIELDS: dict[str, dict[str, tuple[Callable[..., Any], Any]]] = {
    "calculus": CALCULUS,
    "samples": SAMPLES,
    "networks": NETWORKS,
    "structures": STRUCTURES,
    "control flow": CONTROL_FLOW,
}
"""Field -> name -> function and data; a tuple is several arguments."""

CASES = {name: case for functions in FIELDS.values() for name, case in functions.items()}
