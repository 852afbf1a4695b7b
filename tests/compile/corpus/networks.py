"""Keras layers and networks of plain TensorFlow on one sample."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf
from compile.corpus.samples import integers, normal, shared, uniform

K = tf.keras.layers
W1, W2 = shared(6, 8) * 0.4, shared(8, 2) * 0.4
TABLE = tf.Variable(shared(10, 6) * 0.5)


def layer(made: Any, *shape: int | None) -> Any:
    """A layer of Keras with weights, as a function of one sample of the shape."""
    tf.keras.utils.set_random_seed(1)
    made.build([None, *shape])
    random = np.random.default_rng(0)
    made.set_weights([0.1 + 0.3 * np.abs(random.normal(size=weight.shape)) for weight in made.get_weights()])
    return lambda x: made(x[None])[0]


tf.keras.utils.set_random_seed(0)
CNN = tf.keras.Sequential(
    [
        tf.keras.Input([8, 8, 3]),
        K.Conv2D(4, 3, activation="relu"),
        K.BatchNormalization(),
        K.MaxPooling2D(),
        K.Flatten(),
        K.Dropout(0.5),
        K.Dense(5, activation="softmax"),
    ]
)
ENCODER = tf.keras.Sequential([tf.keras.Input([6]), K.Dense(8, "tanh"), K.Dense(2)])
ATTENTION = K.MultiHeadAttention(2, 4)
ATTENTION.build([None, 5, 6], [None, 5, 6])
GRU = K.GRU(4, use_cudnn=False)
GRU.build([None, 5, 6])
LSTM = K.LSTM(4, return_sequences=True, use_cudnn=False)
LSTM.build([None, 5, 6])


def perceptron(x: Any) -> Any:
    hidden = tf.nn.leaky_relu(tf.tensordot(x, W1, 1) + 0.1)
    return tf.nn.softmax(tf.squeeze(hidden[None] @ W2, 0))


def residual(x: Any) -> Any:
    hidden = tf.matmul(tf.nn.gelu(tf.matmul(x[None], W1)), W1, transpose_b=True)[0]
    return tf.nn.elu(x + hidden)


def attention(tokens: Any) -> Any:
    """Causal self-attention of tokens `[5, 6]`."""
    q, k, v = tf.unstack(tf.reshape(tokens @ (shared(6, 18) * 0.3), [5, 3, 6]), axis=1)
    scores = tf.matmul(q, k, transpose_b=True) / tf.sqrt(6.0)
    mask = tf.linalg.band_part(tf.ones([5, 5], tf.bool), -1, 0)
    return tf.nn.softmax(tf.where(mask, scores, -1e9)) @ v


def padded_attention(tokens: Any, length: Any) -> Any:
    mask = tf.sequence_mask(length, 5)
    return ATTENTION(tokens[None], tokens[None], attention_mask=mask[None, None])[0]


def rotary(tokens: Any) -> Any:
    angles = tf.range(5.0)[:, None] * 10.0 ** -tf.range(3.0)[None]
    even, odd = tokens[:, 0::2], tokens[:, 1::2]
    turned = [even * tf.cos(angles) - odd * tf.sin(angles), even * tf.sin(angles) + odd * tf.cos(angles)]
    return tf.reshape(tf.stack(turned, axis=-1), [5, 6])


def bag_of_words(words: Any) -> Any:
    vectors = tf.nn.embedding_lookup(TABLE, words)
    real = tf.cast(words > 0, tf.float32)[:, None]
    return tf.math.divide_no_nan(tf.reduce_sum(vectors * real, axis=0), tf.reduce_sum(real))


def elman(sequence: Any) -> Any:
    state = tf.zeros([8])
    for t in tf.range(5):
        state = tf.tanh(tf.linalg.matvec(W1, sequence[t], transpose_a=True) + 0.5 * state)
    return tf.linalg.matvec(W2, state, transpose_a=True)


def masked_recurrence(sequence: Any, length: Any) -> Any:
    """It ends after the length of the row."""
    state = tf.zeros([6])
    for t in tf.range(length):
        state = tf.sigmoid(sequence[t]) * state + sequence[t]
    return state


def greedy(start: Any) -> Any:
    """Tokens that follow the first, one at a time."""
    token, tokens = start, []
    for _ in range(4):
        logits = tf.linalg.matvec(tf.convert_to_tensor(TABLE), tf.gather(TABLE, token))
        token = tf.argmax(tf.tensor_scatter_nd_update(logits, [[token]], [-1e9]), output_type=tf.int32)
        tokens.append(token)
    return tf.stack(tokens)


def sequence_loss(logits: Any, labels: Any) -> Any:
    loss = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)
    mask = tf.cast(labels != 0, tf.float32)
    return tf.reduce_sum(loss * mask) / tf.maximum(tf.reduce_sum(mask), 1.0)


def saliency(image: Any) -> Any:
    with tf.GradientTape() as tape:
        tape.watch(image)
        best = tf.reduce_max(CNN(image[None], training=False)[0])
    return tf.reduce_max(tf.abs(tape.gradient(best, image)), axis=-1)


def gradient_of_weights(x: Any, target: Any) -> Any:
    """Of the loss of one sample, as for influence or privacy."""
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean((ENCODER(x[None])[0] - target) ** 2)
    gradients = tape.gradient(loss, ENCODER.trainable_variables)
    return tf.linalg.global_norm(gradients), gradients[-1]


def physics_informed(point: Any) -> Any:
    """The residual of a network in a differential equation."""
    with tf.GradientTape() as second:
        second.watch(point)
        with tf.GradientTape() as first:
            first.watch(point)
            u = ENCODER(point[None])[0, 0]
        slope = first.gradient(u, point)
    curvature = second.gradient(slope, point)
    return slope[0] + u * slope[1] - 0.01 * curvature[1]


def embedded(values: Any) -> Any:
    places = tf.range(5.0)[:, None] / 10.0 ** (tf.range(6.0)[None] / 3.0)
    return values + tf.where(tf.range(6) % 2 == 0, tf.sin(places), tf.cos(places))


VECTORS, SEQUENCES, IMAGES = normal(6), normal(5, 6), uniform(8, 8, 3)
FUNCTIONS = {
    "perceptron": (perceptron, VECTORS),
    "residual block": (residual, VECTORS),
    "causal attention": (attention, SEQUENCES),
    "multi-head attention with padding": (padded_attention, (SEQUENCES, integers(high=5) + 1)),
    "rotary embedding": (rotary, SEQUENCES),
    "sinusoidal positions": (embedded, SEQUENCES),
    "bag of words": (bag_of_words, integers(7, high=10)),
    "Elman network": (elman, SEQUENCES),
    "recurrence of a length": (masked_recurrence, (SEQUENCES, integers(high=6))),
    "greedy decoding": (greedy, integers(high=10)),
    "loss of a sequence": (sequence_loss, (normal(7, 4), integers(7, high=4))),
    "saliency": (saliency, IMAGES),
    "gradient of weights": (gradient_of_weights, (VECTORS, normal(2))),
    "physics-informed residual": (physics_informed, VECTORS),
    "Dense": (layer(K.Dense(3, activation="relu"), 6), VECTORS),
    "Dense on a sequence": (layer(K.Dense(3, activation="silu"), 5, 6), SEQUENCES),
    "Conv1D": (layer(K.Conv1D(4, 3, padding="causal"), 5, 6), SEQUENCES),
    "Conv2D": (layer(K.Conv2D(4, 3, strides=2, activation="gelu"), 8, 8, 3), IMAGES),
    "Conv2D dilated": (layer(K.Conv2D(2, 3, dilation_rate=2), 8, 8, 3), IMAGES),
    "Conv2DTranspose": (layer(K.Conv2DTranspose(2, 3, strides=2), 8, 8, 3), IMAGES),
    "Conv3D": (layer(K.Conv3D(2, 2), 4, 4, 4, 2), normal(4, 4, 4, 2)),
    "DepthwiseConv2D": (layer(K.DepthwiseConv2D(3), 8, 8, 3), IMAGES),
    "SeparableConv1D": (layer(K.SeparableConv1D(4, 3), 5, 6), SEQUENCES),
    "LayerNormalization": (layer(K.LayerNormalization(), 5, 6), SEQUENCES),
    "GroupNormalization": (layer(K.GroupNormalization(3), 5, 6), SEQUENCES),
    "BatchNormalization": (layer(K.BatchNormalization(), 8, 8, 3), IMAGES),
    "pooling": (lambda i: K.MaxPooling2D(2)(i[None])[0] + K.AveragePooling2D(2)(i[None])[0], IMAGES),
    "global pooling": (lambda i: K.GlobalAveragePooling2D()(i[None])[0] - K.GlobalMaxPooling2D()(i[None])[0], IMAGES),
    "UpSampling2D": (layer(K.UpSampling2D(2, interpolation="bilinear"), 8, 8, 3), IMAGES),
    "Embedding": (layer(K.Embedding(10, 4), 7), integers(7, high=10)),
    "PReLU": (layer(K.PReLU(), 8, 8, 3), IMAGES - 0.5),
    "GRU": (lambda s: GRU(s[None])[0], SEQUENCES),
    "LSTM": (lambda s: LSTM(s[None])[0], SEQUENCES),
    "whole network": (lambda i: CNN(i[None], training=False)[0], IMAGES),
}
