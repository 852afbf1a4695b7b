"""Functions of one row as users write them, each with data: what `vectorize="auto"` is for.

`test_vectorizable_ops.py` draws calls of each op. These functions combine ops, gradients, loops, layers and structures. The
functions of a field run as one (`laws/test_functions.py`), because one trace takes less time than many.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
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


def nested_loops(row: Any) -> Any:
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
    "nested loops": (nested_loops, TRIPLES),
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


# Lists, kernels that are wrong for stacked rows, and loops of variables

LEVEL = tf.Variable(0.8)
SCALES = tf.lookup.StaticHashTable(tf.lookup.KeyValueTensorInitializer([0, 1], [0.5, 0.8]), 1.5)
SHARED_MATRIX = shared(3, 3)
ROWS = normal(3)
SQUARES = normal(3, 3, dtype=tf.float64)


def shared_list(row: Any) -> Any:
    """A loop that rows leave at different times takes and returns it."""
    values = tf.TensorArray(tf.float32, 2, element_shape=[], clear_after_read=False).unstack(tf.constant([2.0, 3.0]))
    step = lambda i, values, state: (i + 1, values, state * values.read(i % 2))
    goes_on = lambda i, values, state: tf.cast(i, tf.float32) < 5 * tf.abs(row[0])
    _, values, state = tf.while_loop(goes_on, step, (0, values, row))
    return state + values.read(1)


def written_until_small(row: Any) -> Any:
    places, lengths = tf.TensorArray(tf.float32, 4, element_shape=[3]), tf.TensorArray(tf.int32, 4, element_shape=[])
    for i in tf.range(4):
        places, lengths = places.write(i, row), lengths.write(i, 2 * i)
        row *= LEVEL
        if tf.reduce_sum(row**2) < 0.5:
            break
    return places.stack(), lengths.stack()


def repeated_variables(row: Any) -> Any:
    def body(a: Any, b: Any, c: Any, y: Any) -> Any:
        return a, b + 1, a, y * 2.0 + tf.cast(c, tf.float32)

    return tf.while_loop(lambda a, b, c, y: b < 3, body, (0, 0, 0, row))[3]


def repeated(step: Any, steps: int | None, row: Any) -> Any:
    """Without a number of steps, rows leave the loop at different times."""
    end = tf.cast(tf.abs(row[0]) * 3, tf.int32) if steps is None else steps
    return tf.while_loop(lambda i, _: i < end, lambda i, state: (i + 1, step(state)), (0, row))[1]


def added_twice(fn: Any, matrix: Any) -> Any:
    add = lambda i, total: (i + 1, total + tf.reduce_sum(fn(matrix) ** 2))
    return tf.while_loop(lambda i, _: i < 2, add, (0, tf.zeros([], tf.float64)))[1]


LISTS = {
    "a list that rows share": (shared_list, ROWS),
    "written until small": (written_until_small, ROWS),
    "repeated loop variables": (repeated_variables, ROWS),
    "gathered list": (lambda r: tf.TensorArray(tf.float32, 3, element_shape=[]).unstack(r).gather([2, 0]), ROWS),
    "list that is never written": (lambda r: tf.TensorArray(tf.float32, 3, element_shape=[2]).stack() + r[:2], ROWS),
}
KERNELS = {
    "many axes of equal lengths": (
        lambda r: tf.transpose(tf.maximum(r, -r * tf.ones([2] * 6)) * tf.reduce_max(r) + 1.0), normal(*[2] * 6)),
    # TensorFlow's converter of the cast drops an attribute, and would round.
    "a cast that truncates": (
        lambda r: tf.cast(tf.raw_ops.Cast(x=r, DstT=tf.bfloat16, Truncate=True), tf.float32), ROWS),
    # Some kernels of products are wrong for a shard of one row.
    "a shared matrix times that of the row": (lambda r: tf.matmul(SHARED_MATRIX, r), normal(3, 1)),
    "a transposed one times that of the row": (lambda r: tf.matmul(SHARED_MATRIX, r, transpose_a=True), normal(3, 2)),
    "a shared matrix times the transposed one": (lambda r: tf.matmul(SHARED_MATRIX, r, transpose_b=True), normal(1, 3)),
}  # fmt: skip
LOOP_STEPS = {
    "a variable": lambda state: tf.tanh(state * LEVEL),
    "the shape of a variable": lambda state: state**2 + tf.zeros_like(tf.convert_to_tensor(LEVEL)),
    "a table": lambda state: state * SCALES.lookup(tf.cast(state[0] > 0, tf.int32)),
}
VARIABLE_LOOPS = {
    f"loop of {name}, {steps} steps": (partial(repeated, step, steps), ROWS)
    for name, step in LOOP_STEPS.items()
    for steps in (2, None)
}
VARIABLE_LOOPS["loop of a variable alone"] = (lambda r: r * repeated(tf.tanh, 2, LEVEL.read_value()), ROWS)
norm = tf.function(lambda row: tf.reduce_sum(tf.linalg.svd(row, compute_uv=False)))
VALUES_ALONE = {
    "singular values": lambda m: tf.linalg.svd(m, compute_uv=False),
    "norm": lambda m: norm(m) ** 2,
    "eigenvalues of a symmetric matrix": lambda m: tf.linalg.eigvalsh(m + tf.transpose(m)),
    "eigenvalues": lambda m: tf.abs(tf.linalg.eigvals(m)),
    "Euclidean norm": lambda m: tf.raw_ops.EuclideanNorm(input=m, axis=tf.constant([-1], tf.int64)),
}
"""The gradients of some need vectors that the function does not compute."""

# What rows share, at indices of the row

TENSOR = tf.Variable(tf.reshape(tf.range(60, dtype=tf.float32), [3, 4, 5]))
LONG = tf.Variable(tf.sort(shared(40)))
PICTURE, SYSTEM = tf.Variable(shared(9, 8, 3)), tf.Variable(shared(5, 5) + 5 * tf.eye(5))
STEPS, NAME = tf.Variable(3), tf.Variable("ab")
NAMES = tf.lookup.StaticHashTable(tf.lookup.KeyValueTensorInitializer(["ab"], [2.0]), 0.0)
DENSE = tf.lookup.experimental.DenseHashTable(tf.int64, tf.float32, 0.5, empty_key=-1, deleted_key=-2)
DENSE.insert(tf.constant([0, 1], tf.int64), [2.0, 3.0])
PLACES, FIRST, TILES = tf.constant([0, 2, 1, 1, 2]), tf.constant([6, 0, 3, 1, 2]), normal(6, 5, 3)


def in_steps(row: Any) -> Any:
    for _ in tf.range(STEPS):
        row = tf.tanh(tf.linalg.matvec(SYSTEM, row) / 5.0)
    return row


def embedded(x: Any, i: Any) -> Any:
    return tf.gather(PICTURE, i) * tf.gather(PICTURE, i + 1) * x[0, :1]


SHARED = {
    "an index, then a range": (lambda x, i: x[i, :2] + x[i, -2:], (TILES, PLACES)),
    "an index after a range": (lambda x, i: x[::-1, i] * x[1:, i][0], (TILES, PLACES)),
    "two indices": (lambda i: TENSOR[i, 1:3, i], PLACES),
    "an ellipsis": (lambda i: TENSOR[..., i] * TENSOR[i, ..., i], PLACES - 1),
    "a new axis": (lambda x, i: TENSOR[i, None, :, 1] * x[None, i, :4, 0], (TILES, PLACES)),
    "an index that rows share": (lambda x, i: TENSOR[1, i, tf.size(x) // 80 :], (TILES, PLACES)),
    "window of a vector": (lambda i: tf.slice(LONG, [4 * i], [5]), FIRST),
    "window of a picture": (lambda i: tf.slice(PICTURE, [i, i // 2, 1], [3, 2, 2]), FIRST),
    "window beside a shared index": (lambda i: tf.slice(PICTURE, [2, i, 1], [-1, 2, -1]), FIRST),
    "all after a shared index": (lambda i: tf.slice(SHARED_MATRIX, [1, i], [-1, 1]), PLACES),
    "window of each row": (lambda i, x: tf.slice(x, [i // 2, i // 4, 0], [2, 3, 3]), (FIRST, TILES)),
    "window of whole axes": (lambda i, x: tf.slice(x, [0 * i, i // 2, 0 * i], [6, 2, 3]), (FIRST, TILES)),
    "window of all axes": (
        lambda i, x: tf.slice(PICTURE, tf.repeat(0 * i, 3), [9, 8, 3]) + x[0, 0, 0], (FIRST, TILES)),
    "window without elements": (lambda i, x: tf.slice(x, [i // 2, i // 4, 0], [2, 0, 3]), (FIRST, TILES)),
    "solution": (lambda x: tf.linalg.solve(SYSTEM, x[0], adjoint=True), TILES),
    "solution by a triangle": (lambda x: tf.linalg.triangular_solve(SYSTEM, x[0], lower=False), TILES),
    "search for a number": (lambda x: tf.gather(LONG, tf.minimum(tf.searchsorted(LONG, x[0, 0, :1])[0], 39)), TILES),
    "search for several": (lambda x: tf.gather(LONG, tf.minimum(tf.searchsorted(LONG, x[0, 0], side="right"), 39)), TILES),
    "embedding": (embedded, (TILES, FIRST)),
    "steps of an integer variable": (in_steps, normal(5)),
    "vectors of keys": (lambda r: r * DENSE.lookup(tf.cast(tf.abs(2 * r), tf.int64)), ROWS),
    "a name": (lambda r: tf.where(tf.strings.length(NAME) == 2, r * LEVEL, r) * NAMES.lookup(NAME), ROWS),
}  # fmt: skip
"""None of it is copied for each row."""

# Functions of which some ops, or all, run row by row

SIXES = normal(6)
ROW_WEIGHTS = tf.Variable(shared(6, 6))
SMALL_IMAGES = normal(6, 6, 2)


def features(row: Any) -> Any:
    """So many ops that a loop over rows with a few others takes less time than one with all."""
    for _ in range(8):
        row = tf.tanh(tf.linalg.matvec(ROW_WEIGHTS, row)) + 0.1 * row
    return row


def positive(row: Any) -> Any:
    return tf.boolean_mask(row, row > 0.0)


def mean_and_deviation(row: Any) -> Any:
    loud = tf.boolean_mask(features(row), row > tf.reduce_min(row))
    return tf.reduce_mean(loud), tf.math.reduce_std(loud), tf.cast(tf.size(loud), tf.float32)


def padded(row: Any) -> Any:
    row = features(row)
    kept = positive(row)
    return tf.ensure_shape(tf.pad(kept, [[0, 6 - tf.size(kept)]]), [6]) - row


traced_positive = tf.function(positive)
squares = tf.function(lambda kept: tf.reduce_sum(kept**2))


def in_a_branch(row: Any) -> Any:
    row = features(row)
    return tf.cond(row[0] > 0.0, lambda: squares(traced_positive(row)), lambda: tf.reduce_sum(row[: tf.argmax(row)]))


def in_loops(row: Any) -> Any:
    row = features(row)
    for _ in tf.range(2):
        row -= 0.1 * tf.reduce_max(positive(tf.abs(row)))
    while tf.reduce_sum(row**2) > 0.1:
        row *= 0.5 + 0.2 * tf.tanh(squares(positive(row)))
    return row


def cut_twice(row: Any) -> Any:
    row = features(row)
    kept = positive(row)
    above = tf.boolean_mask(row, row > tf.reduce_mean(kept))
    some = kept[: tf.size(kept) // 2]
    return tf.reduce_sum(above) * tf.reduce_max(kept), tf.reduce_sum(tf.concat([some, kept - squares(above)], 0))


def sliced(row: Any) -> Any:
    row = features(row)
    kept = positive(row)
    begin = tf.stack([tf.size(kept) // 2])
    return tf.reduce_sum(tf.concat([tf.cast(begin, tf.float32), kept], 0)), tf.slice(row, begin, [2])


def checked(row: Any) -> Any:
    kept = positive(features(row))
    with tf.control_dependencies([tf.debugging.assert_less(tf.size(kept), 7)]):
        return tf.reduce_sum(kept) / tf.cast(tf.size(kept), tf.float32)


def checked_twice(row: Any) -> Any:
    """The second check waits for the first, in a function whose result is never stacked."""

    @tf.function
    def kept(row: Any) -> Any:
        tf.debugging.assert_less(row, 99.0)
        return positive(row)

    found = kept(features(row))
    tf.debugging.assert_less(tf.size(found), 7)
    return tf.reduce_sum(found)


def stopped(row: Any) -> Any:
    """The logarithm of 0, of which the gradient of a list without a gradient would be 0 * inf."""
    kept = tf.boolean_mask(row - tf.reduce_min(row), row > -9.0)
    mean = tf.exp(tf.reduce_mean(tf.math.log(kept)))
    return tf.reduce_sum(kept) * tf.stop_gradient(mean) + tf.reduce_sum(features(row))


def spectrum(row: Any) -> Any:
    """An op without a gradient, and one with a gradient, which share a loop."""
    power = tf.raw_ops.AudioSpectrogram(input=row[:, None], window_size=4, stride=2)
    crop = tf.image.crop_and_resize(tf.reshape(row, [1, 2, 3, 1]), [[0.1, 0.0, 0.8, 0.7]], [0], [2, 2])
    return tf.reduce_sum(crop) * tf.stop_gradient(tf.reduce_mean(power)) + tf.reduce_sum(features(row))


def two_results(image: Any) -> Any:
    """An op of which the first loop stacks one result, and the second one takes another."""
    moments = tf.raw_ops.FusedBatchNormGradV3(
        y_backprop=image[None], x=SMALL_IMAGES[:1], scale=[1.0, 2.0], reserve_space_1=[0.1, 0.2],
        reserve_space_2=[1.0, 2.0], reserve_space_3=tf.zeros([0]), is_training=False,
    )  # fmt: skip
    found = tf.raw_ops.Where(condition=moments.scale_backprop)
    size = tf.cast(tf.size(found), tf.float32)
    result = features(tf.tile(moments.offset_backprop / 99.0, [3]) + size)
    return result, tf.reduce_sum(tf.cast(found, tf.float32) * result[0])


BOXES = tf.constant([[0.1, 0.0, 0.8, 0.7], [0.0, 0.2, 0.9, 0.9]])


def crop_in_loop(image: Any) -> Any:
    total = tf.zeros([2, 3, 3, 2])
    while tf.reduce_sum(total) < 5.0:
        crop = tf.image.crop_and_resize(image[None], BOXES * image[0, 0, 0] ** 2, [0, 0], [3, 3])
        total += tf.abs(crop) + 0.1
    return total


TOGETHER = "these ops run row by row, and those that take their results: "
ALONE = "these ops alone run row by row: "
PARTLY: dict[str, tuple[Callable[..., Any], Any, str]] = {
    "moments": (mean_and_deviation, SIXES, TOGETHER),
    "padded": (padded, SIXES, TOGETHER),
    "in a branch": (in_a_branch, SIXES, TOGETHER),
    "in loops": (in_loops, SIXES, TOGETHER),
    "cut twice": (cut_twice, SIXES, TOGETHER),
    "sliced": (sliced, SIXES, TOGETHER),
    "checked": (checked, SIXES, TOGETHER),
    "checked twice": (checked_twice, SIXES, TOGETHER),
    "a stopped logarithm": (stopped, SIXES, TOGETHER),
    "no gradient of an op": (spectrum, SIXES, "these ops"),
    "two results": (two_results, SMALL_IMAGES, TOGETHER),
    "alone in a loop": (crop_in_loop, SMALL_IMAGES, f"{ALONE}CropAndResize has no vectorised form (`crop = tf.image."),
    "augmentation of a seed": (augmented, (PICTURES, integers(2, high=99)), f"{ALONE}StatelessRandomGetKeyCounter"),
}


def chosen(row: Any) -> Any:
    kept = positive(features(row))
    return tf.cond(row[0] > 0.0, lambda: tf.reduce_sum(kept), lambda: 1.0)


@tf.function(input_signature=[tf.TensorSpec([None])])
def growing_from_unknown_length(row: Any) -> Any:
    while tf.reduce_sum(row) < 9.0:
        row = tf.concat([row, tf.abs(row[:1]) + 1.0], 0)
    return tf.reduce_sum(row)


def branch_of_a_number(row: Any) -> Any:
    sine, cosine = (tf.function(fn).get_concrete_function(row) for fn in (tf.sin, tf.cos))
    branches = {"then_branch": sine, "else_branch": cosine}
    return tf.raw_ops.StatelessIf(cond=tf.abs(row[0]) / 9.0, input=[row], Tout=[tf.float32], **branches)[0]


def list_of_branches(row: Any) -> Any:
    signs = tf.TensorArray(tf.float32, 3, element_shape=[])
    for i in tf.range(3):
        signs = signs.write(i, 1.0) if row[i] > 0 else signs.write(i, -1.0)
    return signs.stack()


def joined(row: Any) -> Any:
    array = tf.TensorArray(tf.float32, 2, infer_shape=False).write(0, row[:1]).write(1, row[1:])
    return tf.reduce_sum(array.concat())


def list_that_grows(row: Any) -> Any:
    steps, level = tf.TensorArray(tf.float32, 0, dynamic_size=True, element_shape=[]), tf.abs(row[0])
    while level > 0.1:
        steps = steps.write(steps.size(), level)
        level /= 2.0
    return tf.reduce_sum(steps.stack())


def called(row: Any) -> Any:
    return tf.sin(tf.ensure_shape(tf.numpy_function(np.sin, [row], tf.float32, stateful=False), [3]))


@tf.function(input_signature=[tf.TensorSpec([6, None]), tf.TensorSpec([], tf.int32)])
def rest(row: Any, i: Any) -> Any:
    """The last length is unknown, and its index is part of a vector that differs between rows."""
    return tf.slice(row, tf.concat([[i], [1]], 0), [2, -1])


def cross_entropy(row: Any) -> Any:
    return tf.stop_gradient(tf.nn.softmax_cross_entropy_with_logits(tf.ones([2, 1]), tf.stack([row, row])))


def top_few(row: Any) -> Any:
    return tf.reduce_sum(tf.math.top_k(row, tf.argmax(row, output_type=tf.int32))[0])


def clipped(row: Any) -> Any:
    return tf.raw_ops.ClipByValue(t=row, clip_value_min=-(ROWS[0] ** 2), clip_value_max=ROWS[0] ** 2)


def imported() -> Any:
    sine = tf.function(lambda x: tf.sin(x))
    graph = tf.function(lambda x: sine(x) * 2.0).get_concrete_function(tf.TensorSpec([3])).graph
    given, result = graph.inputs[0].op.name, graph.outputs[0].name
    return tf.function(lambda row: tf.graph_util.import_graph_def(graph.as_graph_def(), {given: row}, [result])[0])


def loop_of_tensorflow_1() -> Any:
    tf.compat.v1.disable_control_flow_v2()
    try:
        with tf.Graph().as_default() as graph:
            tf.compat.v1.while_loop(lambda i: i < 3, lambda i: i + 1, [tf.constant(0)], name="loop")
    finally:
        tf.compat.v1.enable_control_flow_v2()
    return tf.compat.v1.wrap_function(
        lambda: tf.graph_util.import_graph_def(graph.as_graph_def(), {}, ["loop/Exit:0"])[0], []
    )


OLD_LOOP = loop_of_tensorflow_1()
TEXT = tf.constant(["abcd"])
RAGGED = tf.ragged.constant([[1.0], []])
SHORTS = tf.cast(tf.range(10) % 7, tf.uint16)
OF_AXES = {axes: normal(*[2] * axes) for axes in (5, 6, 7, 8)}
FEW_AXES = "its kernel accepts"
ROW_BY_ROW: dict[str, tuple[Callable[..., Any], Any, str]] = {
    "unknown shapes": (cross_entropy, ROWS, "inputs that may have different shapes"),
    "16 bits": (lambda r: tf.stack([r, SHORTS[1]]) + tf.concat([[r], SHORTS[:1]], 0), SHORTS, "uint16"),
    "slices to the end": (rest, (TILES[:, :, :, 0], PLACES), "slices that may differ in size"),
    "a vector that grows": (growing_from_unknown_length, ROWS, "a tensor whose shape may change in it"),
    "pad": (lambda r: tf.pad(r, [[1, 1]] * 6), OF_AXES[6], FEW_AXES),
    "slice": (lambda r: tf.slice(r, [1] * 6, [1] * 6), OF_AXES[6], FEW_AXES),
    "top k of each row": (top_few, ROWS, "TopKV2 has another k for each row"),
    "slice of each row": (lambda r: tf.reduce_sum(tf.slice(r, [tf.argmax(r)], [-1])), ROWS, "Slice"),
    "range of each row": (
        lambda r: tf.reduce_sum(r[: tf.argmax(r)]), ROWS, "StridedSlice takes another range of each row"),
    "clip": (clipped, ROWS, "ClipByValue"),
    "unlike branches": (
        lambda r: tf.reduce_sum(tf.cond(r[0] > 0, lambda: r[:2], lambda: r)), ROWS, "a branch whose results may differ"),
    "list that grows": (list_that_grows, ROWS, "a loop that rows leave at different times, with a list that may grow"),
    "list of branches": (list_of_branches, ROWS, "a branch that writes to a list"),
    "joined list": (joined, ROWS, "TensorListConcatV2 has no tested vectorised form"),
    "imported": (imported(), ROWS, "fn calls a function of TensorFlow 1"),
    "imported loop": (lambda r: r + tf.cast(OLD_LOOP(), tf.float32), ROWS, "fn has a loop of TensorFlow 1"),
    "tokens": (tokens, tf.constant(["ant bee", "cat", "dog ant cat"]), "StringSplitV2 has no vectorised form"),
    "few ops": (lambda r: tf.size(tf.unique(r)[0]), SIXES, "Unique has no vectorised form"),
    "argument of a branch": (chosen, SIXES, "Where has no vectorised form"),
}  # fmt: skip
MANY_AXES: dict[str, tuple[Callable[..., Any], Any, str]] = {
    "pad with a reflection": (lambda r: tf.pad(r, [[1, 1]] * 5, "REFLECT"), OF_AXES[5], FEW_AXES),
    "broadcast": (lambda r: r + tf.ones([2, 1, 2, 1, 2]), OF_AXES[5], FEW_AXES),
    "softmax": (tf.nn.softmax, OF_AXES[5], FEW_AXES),
    "argmax": (lambda r: tf.cast(tf.argmax(r, 1), tf.float32), OF_AXES[7], FEW_AXES),
    "index": (lambda r: r[1], OF_AXES[8], FEW_AXES),
    "slice of eight axes": (lambda r: tf.slice(r, [1] * 8, [1] * 8), OF_AXES[8], FEW_AXES),
    "where": (lambda r: tf.where(r > 0.0, r, 0.0), OF_AXES[8], FEW_AXES),
    "gather": (lambda r: tf.gather_nd(r, [[1] * 7]), OF_AXES[7], FEW_AXES),
    "scatter": (lambda r: tf.tensor_scatter_nd_add(r, [[1] * 7], [1.0]), OF_AXES[7], FEW_AXES),
}
NOT_COMPARED: dict[str, tuple[Callable[..., Any], Any, str]] = {
    "result of unknown shape": (lambda r: positive(features(r)), SIXES, "Where has no vectorised form"),
    "split": (lambda s: tf.unique(tf.strings.bytes_split(s))[0], TEXT, "StringSplit has no vectorised form"),
    "branch of a number": (branch_of_a_number, ROWS, "a branch whose condition is not one bool"),
    "NumPy": (lambda r: tf.numpy_function(np.sin, [r], tf.float32), ROWS, "PyFunc acts once per row"),
    "NumPy without state": (called, ROWS, "PyFunc"),
    "ragged out": (lambda r: tf.RaggedTensor.from_tensor(r[None]), ROWS, "ragged or sparse"),
    "ragged in": (lambda r: tf.reduce_sum(r), RAGGED, "differ in shape"),
    "random": (lambda r: tf.sin(tf.random.shuffle(r)), ROWS, "RandomShuffle"),
}

# Loops and branches in each other, and in gradients; loops and branches depend on `k`, because rounding cannot change it

BLOCK_ROWS, K = uniform(3, low=-1.0), tf.constant([0, 3, 2, 1, 3])


def for_k(body: Any, v: Any, k: Any) -> Any:
    for _ in tf.range(k):
        v = body(v)
    return v


def break_at_k(body: Any, v: Any, k: Any) -> Any:
    for i in tf.range(4):
        if i == k:
            break
        v = body(v)
    return v


def if_even(body: Any, v: Any, k: Any) -> Any:
    if k % 2 == 0:
        v = body(v)
    else:
        v = 0.5 * v
    return v


def mean_of_list(body: Any, v: Any, k: Any) -> Any:
    found = tf.TensorArray(tf.float32, 3, element_shape=[3])
    for i in tf.range(3):
        v = body(v)
        found = found.write(i, v)
    return tf.reduce_mean(found.stack(), 0)


def gradient(body: Any, v: Any, k: Any) -> Any:
    with tf.GradientTape() as tape:
        tape.watch(v)
        result = body(v)
    return tape.gradient(result, v, unconnected_gradients="zero")


BLOCKS: dict[str, Callable[[Any, Any, Any], Any]] = {
    "for": for_k,
    "break": break_at_k,
    "if": if_even,
    "list": mean_of_list,
    "gradient": gradient,
    "while": lambda body, v, k: tf.while_loop(lambda i, v: i < k, lambda i, v: (i + 2, body(v)), (0, v))[1],
    "case": lambda body, v, k: tf.switch_case(k, [lambda: body(v), lambda: v, lambda: body(-v)]),
    "function": lambda body, v, k: tf.function(body)(v),
}


def step_of_k(k: Any, v: Any) -> Any:
    return tf.linalg.matvec(SHARED_MATRIX, tf.sin(v)) * LEVEL + tf.gather(PICTURE[0], k) + v[::-1] * v[k % 3]


def nested(outer: str, inner: str, v: Any, k: Any) -> Any:
    return BLOCKS[outer](lambda v: BLOCKS[inner](partial(step_of_k, k), v, k), v, k)


NESTED = {
    f"in {outer}": {f"{inner} in {outer}": (partial(nested, outer, inner), (BLOCK_ROWS, K)) for inner in BLOCKS}
    for outer in BLOCKS
}

Functions = dict[str, tuple[Callable[..., Any], Any]]
VECTORIZED: dict[str, Functions] = {
    "calculus": CALCULUS,
    "samples": SAMPLES,
    "networks": NETWORKS,
    "structures": STRUCTURES,
    "control flow": CONTROL_FLOW,
    "lists and kernels": LISTS | KERNELS,
    "loops of variables": VARIABLE_LOOPS,
    "values alone": {name: (partial(added_twice, fn), SQUARES) for name, fn in VALUES_ALONE.items()},
    "shared": SHARED,
}
"""Field -> name -> function and data; a tuple is several arguments."""

NOT_VECTORIZED = {"partly": PARTLY, "row by row": ROW_BY_ROW, "many axes": MANY_AXES}
FIELDS: dict[str, Functions] = {
    **VECTORIZED,
    **{field: {name: row[:2] for name, row in rows.items()} for field, rows in NOT_VECTORIZED.items()},
    **NESTED,
}
VARIABLES = LEVEL, TENSOR, LONG, PICTURE, SYSTEM, ROW_WEIGHTS, WEIGHTS
