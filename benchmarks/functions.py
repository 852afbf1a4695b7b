"""Expensive functions that people really map, each with data: one sample in, one result out (the Keras CNN takes batches)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf


@dataclass(frozen=True)
class Case:
    """A function to map and what to map it over."""

    fn: Callable[..., Any]
    """Takes one sample, or a batch where `batched`."""

    data: Any
    """A tensor of shape `[rows, ...]`."""

    batched: bool = False
    """Whether `fn` takes a batch."""

    by_hand: Callable[..., Any] | None = None
    """The same function of a batch, if a user would write it by hand."""


def runge_kutta(slope: Callable[[tf.Tensor], tf.Tensor], state: tf.Tensor, step: float) -> tf.Tensor:
    """200 steps of the classical Runge-Kutta method of order 4."""
    for _ in tf.range(200):
        k1 = slope(state)
        k2 = slope(state + step / 2 * k1)
        k3 = slope(state + step / 2 * k2)
        k4 = slope(state + step * k3)
        state = state + step / 6 * (k1 + 2 * k2 + 2 * k3 + k4)
    return state


def ode(parameters: tf.Tensor) -> tf.Tensor:
    """Lorenz system, 200 steps of Runge-Kutta 4, one parameter set `[3]` per sample -> end point `[3]`."""

    def slope(state: tf.Tensor) -> tf.Tensor:
        x, y, z = tf.unstack(state)
        return tf.stack([parameters[0] * (y - x), x * (parameters[1] - z) - y, x * y - parameters[2] * z])

    return runge_kutta(slope, tf.ones([3]), 0.01)


def oscillators(state: tf.Tensor) -> tf.Tensor:
    """Ring of six coupled oscillators (Fermi-Pasta-Ulam-Tsingou), 200 steps of Runge-Kutta 4, `[12]` -> `[12]`."""

    def slope(state: tf.Tensor) -> tf.Tensor:
        position, velocity = state[:6], state[6:]
        stretch = tf.concat([position[1:], position[:1]], 0) - position
        force = stretch + 0.25 * stretch**3
        return tf.concat([velocity, force - tf.concat([force[-1:], force[:-1]], 0)], 0)

    return runge_kutta(slope, state, 0.05)


def stencil(u: tf.Tensor) -> tf.Tensor:
    """Burgers' equation in two dimensions with fixed edges, 100 explicit steps, `[32, 32]` -> `[32, 32]`."""
    for _ in tf.range(100):
        inner = u[1:-1, 1:-1]
        along, across = u[2:, 1:-1] - u[:-2, 1:-1], u[1:-1, 2:] - u[1:-1, :-2]
        neighbors = u[2:, 1:-1] + u[:-2, 1:-1] + u[1:-1, 2:] + u[1:-1, :-2]
        inner = inner - 0.1 * inner * (along + across) + 0.2 * (neighbors - 4 * inner)
        u = tf.concat([u[:1], tf.concat([u[1:-1, :1], inner, u[1:-1, -1:]], 1), u[-1:]], 0)
    return u


def mel(signal: tf.Tensor) -> tf.Tensor:
    """Log mel spectrogram of a signal `[16000]` (one second at 16 kHz) -> `[frames, 64]`."""
    spectrum = tf.abs(tf.signal.stft(signal, frame_length=512, frame_step=160))
    weights = tf.signal.linear_to_mel_weight_matrix(64, 257, 16000, 80.0, 7600.0)
    return tf.math.log(spectrum @ weights + 1e-6)


def sinkhorn(images: tf.Tensor) -> tf.Tensor:
    """Entropic optimal transport cost between two 8 x 8 images `[2, 64]`, 50 Sinkhorn iterations (Cuturi, 2013)."""
    place = tf.cast(tf.stack(tf.meshgrid(tf.range(8), tf.range(8)), -1), tf.float32)
    place = tf.reshape(place, [64, 2]) / 8
    cost = tf.reduce_sum(tf.square(place[:, None] - place[None]), -1)
    kernel = tf.exp(-cost / 0.05)
    a, b = images[0] / tf.reduce_sum(images[0]), images[1] / tf.reduce_sum(images[1])
    u = tf.ones([64])
    v = tf.ones([64])
    for _ in tf.range(50):
        u = a / tf.linalg.matvec(kernel, v)
        v = b / tf.linalg.matvec(kernel, u, transpose_a=True)
    return tf.reduce_sum(u[:, None] * kernel * cost * v[None])


def augment(image: tf.Tensor) -> tf.Tensor:
    """Random crop, flip and brightness of an image `[32, 32, 3]`, with a seed of its own -> `[24, 24, 3]`."""
    seed = tf.cast(1e6 * image[0, 0, :2], tf.int32)
    image = tf.image.stateless_random_crop(image, [24, 24, 3], seed)
    image = tf.image.stateless_random_flip_left_right(image, seed + 1)
    return tf.image.stateless_random_brightness(image, 0.2, seed + 2)


def jpeg(encoded: tf.Tensor) -> tf.Tensor:
    """Decode a JPEG and shrink it to `[64, 64, 3]`."""
    image = tf.io.decode_jpeg(encoded, channels=3)
    return tf.image.resize(image, [64, 64])


def svd(matrix: tf.Tensor) -> tf.Tensor:
    """Singular values of a small matrix `[24, 16]`."""
    return tf.linalg.svd(matrix, compute_uv=False)


def scan(signal: tf.Tensor) -> tf.Tensor:
    """A long serial recurrence over `[2000]`: a leaky integrator with reset."""
    level, resets = tf.constant(0.0), tf.constant(0.0)
    for value in signal:
        level = 0.99 * level + value
        reset = tf.cast(level > 2.0, tf.float32)
        resets += reset
        level *= 1.0 - reset
    return resets + level


def attention_block(weights: dict[str, tf.Tensor]) -> Callable[[tf.Tensor], tf.Tensor]:
    """A transformer block with four heads, as a function of tokens `[..., tokens, channels]`: of one sample, or a batch."""

    def normalized(x: tf.Tensor) -> tf.Tensor:
        mean, variance = tf.nn.moments(x, [-1], keepdims=True)
        return (x - mean) * tf.math.rsqrt(variance + 1e-5)

    def block(tokens: tf.Tensor) -> tf.Tensor:
        x = normalized(tokens)
        query, key, value = (tf.einsum("...tc,chd->...htd", x, weights[name]) for name in ("query", "key", "value"))
        scores = tf.nn.softmax(tf.matmul(query, key, transpose_b=True) / query.shape[-1] ** 0.5)
        tokens = tokens + tf.einsum("...htd,hdc->...tc", scores @ value, weights["output"])
        hidden = tf.nn.gelu(tf.einsum("...tc,cf->...tf", normalized(tokens), weights["wide"]))
        return tokens + tf.einsum("...tf,fc->...tc", hidden, weights["narrow"])

    return block


def detector(model: Callable[[tf.Tensor], tf.Tensor]) -> Callable[[tf.Tensor], tf.Tensor]:
    """The best boxes in an image `[32, 32, 3]`, filled up with zeros: `[20, 4]`.

    `model`: images -> a score and a box for each place, `[images, 14, 14, 5]`.
    """

    def boxes_in(image: tf.Tensor) -> tf.Tensor:
        found = tf.reshape(model(image[None]), [14 * 14, 5])
        boxes = tf.concat([found[:, 1:3], found[:, 1:3] + tf.nn.softplus(found[:, 3:])], 1)
        kept = tf.image.non_max_suppression(boxes, found[:, 0], 20, 0.5)
        return tf.ensure_shape(tf.pad(tf.gather(boxes, kept), [[0, 20 - tf.size(kept)], [0, 0]]), [20, 4])

    return boxes_in


def cases() -> dict[str, Case]:
    """The functions by name; the same data each time, on the host."""
    random = np.random.default_rng(0)

    def normal(*shape: int) -> np.ndarray:
        return random.normal(size=shape).astype(np.float32)

    def constant(values: Any) -> Any:
        with tf.device("CPU:0"):
            return tf.constant(values, tf.float32)

    photos = tf.constant(
        [tf.io.encode_jpeg(tf.cast(random.integers(0, 255, [256, 256, 3]), tf.uint8)).numpy() for _ in range(64)]
    )
    cnn = tf.keras.Sequential(
        [
            tf.keras.Input([32, 32, 3]),
            tf.keras.layers.Conv2D(32, 3, activation="relu"),
            tf.keras.layers.Conv2D(64, 3, strides=2, activation="relu"),
            tf.keras.layers.GlobalAveragePooling2D(),
            tf.keras.layers.Dense(10),
        ]
    )
    pooled_cnn = tf.keras.Sequential(
        [
            tf.keras.Input([32, 32, 3]),
            tf.keras.layers.Conv2D(16, 3, activation="relu"),
            tf.keras.layers.MaxPooling2D(),
            tf.keras.layers.Conv2D(32, 3, activation="relu"),
            tf.keras.layers.MaxPooling2D(),
            tf.keras.layers.Flatten(),
            tf.keras.layers.Dense(10),
        ]
    )
    fully_convolutional = tf.keras.Sequential(
        [
            tf.keras.Input([32, 32, 3]),
            tf.keras.layers.Conv2D(16, 3, activation="relu"),
            tf.keras.layers.Conv2D(32, 3, strides=2, padding="valid", activation="relu"),
            tf.keras.layers.Conv2D(5, 1),
        ]
    )
    heads = {name: [64, 4, 16] for name in ("query", "key", "value")}
    shapes = heads | {"output": [4, 16, 64], "wide": [64, 256], "narrow": [256, 64]}
    block = attention_block({name: constant(0.1 * normal(*shape)) for name, shape in shapes.items()})
    parameters = np.abs(normal(256, 3)) * [1.0, 1.0, 0.2] + np.array([10.0, 20.0, 2.0])
    return {
        "ODE solver": Case(ode, constant(parameters)),
        "coupled oscillators": Case(oscillators, constant(normal(256, 12))),
        "stencil": Case(stencil, constant(normal(64, 32, 32))),
        "mel spectrogram": Case(mel, constant(normal(64, 16000))),
        "Sinkhorn": Case(sinkhorn, constant(np.abs(normal(256, 2, 64)) + 0.01)),
        "JPEG decoding": Case(jpeg, tf.repeat(photos, 4)),
        "small SVD": Case(svd, constant(normal(1024, 24, 16))),
        "serial scan": Case(scan, constant(np.abs(normal(32, 2000)) * 0.1)),
        "Keras CNN": Case(lambda images: cnn(images, training=False), constant(normal(256, 32, 32, 3)), batched=True),
        "CNN of one image": Case(
            lambda image: pooled_cnn(image[None], training=False)[0],
            constant(normal(256, 32, 32, 3)),
            by_hand=lambda images: pooled_cnn(images, training=False),
        ),
        "object detection": Case(
            detector(lambda images: fully_convolutional(images, training=False)), constant(normal(256, 32, 32, 3))
        ),
        "attention block": Case(block, constant(normal(256, 32, 64)), by_hand=block),
        "image augmentation": Case(augment, constant(random.random([256, 32, 32, 3]))),
    }
