"""Keras layers, and networks of plain TensorFlow, on one sample."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf
from compile.corpus.samples import integers, normal, shared, uniform

K = tf.keras.layers
W1, W2 = shared(6, 8) * 0.4, shared(8, 2) * 0.4
QKV = shared(6, 18) * 0.3
TABLE = tf.Variable(shared(10, 6) * 0.5)


def layer(made: Any, *shape: int | None) -> Any:
    """A Keras layer with weights, as a function of one sample of the shape."""
    made.build([None, *shape])
    random = np.random.default_rng(0)
    made.set_weights([0.1 + 0.3 * np.abs(random.normal(size=weight.shape)) for weight in made.get_weights()])
    return lambda x: made(x[None])[0]


tf.keras.utils.set_random_seed(0)
CNN = tf.keras.Sequential([tf.keras.Input([8, 8, 3]), K.Conv2D(4, 3, activation="relu"), K.BatchNormalization()])
CNN.add(K.MaxPooling2D())
CNN.add(K.Flatten())
CNN.add(K.Dropout(0.5))
CNN.add(K.Dense(5, activation="softmax"))
ENCODER = tf.keras.Sequential([tf.keras.Input([6]), K.Dense(8, "tanh"), K.Dense(2)])
ATTENTION = K.MultiHeadAttention(2, 4)
ATTENTION.build([None, 5, 6], [None, 5, 6])


def causal_attention(tokens: Any) -> Any:
    q, k, v = tf.unstack(tf.reshape(tokens @ QKV, [5, 3, 6]), axis=1)
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


def greedy_decoding(token: Any) -> Any:
    tokens = []
    for _ in range(4):
        logits = tf.linalg.matvec(tf.convert_to_tensor(TABLE), tf.gather(TABLE, token))
        token = tf.argmax(tf.tensor_scatter_nd_update(logits, [[token]], [-1e9]), output_type=tf.int32)
        tokens.append(token)
    return tf.stack(tokens)


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


VECTORS, SEQUENCES, IMAGES = normal(6), normal(5, 6), uniform(8, 8, 3)
FUNCTIONS = {
    "perceptron": (lambda x: tf.nn.softmax(tf.squeeze(tf.nn.leaky_relu(x[None] @ W1) @ W2, 0)), VECTORS),
    "causal attention": (causal_attention, SEQUENCES),
    "multi-head attention with padding": (padded_attention, (SEQUENCES, integers(high=5) + 1)),
    "rotary embedding": (rotary, SEQUENCES),
    "bag of words": (bag_of_words, integers(7, high=10)),
    "greedy decoding": (greedy_decoding, integers(high=10)),
    "saliency": (saliency, IMAGES),
    "gradient of weights": (gradient_of_weights, (VECTORS, normal(2))),
    "Dense on a sequence": (layer(K.Dense(3, activation="silu"), 5, 6), SEQUENCES),
    "Conv1D": (layer(K.Conv1D(4, 3, padding="causal"), 5, 6), SEQUENCES),
    "Conv2D": (layer(K.Conv2D(4, 3, strides=2, activation="gelu"), 8, 8, 3), IMAGES),
    "Conv2DTranspose": (layer(K.Conv2DTranspose(2, 3, strides=2, activation="elu"), 8, 8, 3), IMAGES),
    "Conv3D": (layer(K.Conv3D(2, 2), 4, 4, 4, 2), normal(4, 4, 4, 2)),
    "SeparableConv1D": (layer(K.SeparableConv1D(4, 3), 5, 6), SEQUENCES),
    "LayerNormalization": (layer(K.LayerNormalization(), 5, 6), SEQUENCES),
    "GroupNormalization": (layer(K.GroupNormalization(3), 5, 6), SEQUENCES),
    "pooling": (lambda i: K.MaxPooling2D(2)(i[None])[0] + K.AveragePooling2D(2)(i[None])[0], IMAGES),
    "Embedding": (layer(K.Embedding(10, 4), 7), integers(7, high=10)),
    "PReLU": (layer(K.PReLU(), 8, 8, 3), IMAGES - 0.5),
    "LSTM": (layer(K.LSTM(4, return_sequences=True, use_cudnn=False), 5, 6), SEQUENCES),
    "whole network": (lambda i: CNN(i[None], training=False)[0], IMAGES),
}
