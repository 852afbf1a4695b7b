"""Calculus: one vector in; gradients, Jacobians and second derivatives inside the function."""

from __future__ import annotations

from typing import Any

import tensorflow as tf
from compile.corpus.samples import normal, shared

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
FUNCTIONS = {
    "Jacobian": (jacobian, VECTORS),
    "Hessian times a vector": (hessian_vector_product, VECTORS),
    "gradient descent": (gradient_descent, VECTORS),
}
