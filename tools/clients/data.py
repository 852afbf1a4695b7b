"""Rows that the functions of others are mapped over: few, of every dtype, and the same in every run."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

ROWS = 9
_random = np.random.default_rng(0)


def normal(*shape: int, dtype: Any = tf.float32) -> Any:
    """Rows `[ROWS, *shape]` of normal numbers; of complex ones where the dtype is."""
    numbers = _random.normal(size=[ROWS, *shape])
    return tf.constant(numbers + 1j * _random.normal(size=numbers.shape) if dtype.is_complex else numbers, dtype)


def uniform(low: float, high: float, *shape: int, dtype: Any = tf.float32) -> Any:
    return tf.constant(_random.uniform(low, high, size=[ROWS, *shape]), dtype)


def integers(low: int, high: int, *shape: int, dtype: Any = tf.int32) -> Any:
    """Whole numbers from `low` to `high - 1`."""
    return tf.cast(tf.constant(_random.integers(low, high, size=[ROWS, *shape])), dtype)


def bools(*shape: int) -> Any:
    return integers(0, 2, *shape, dtype=tf.bool)


def texts(*choices: str | bytes) -> Any:
    """A text per row, of these in turn."""
    return tf.constant([choices[i % len(choices)] for i in range(ROWS)])


def seeds() -> Any:
    """A seed `[2]` per row, for `tf.random.stateless_*`."""
    return tf.stack([tf.range(ROWS), 7 + tf.range(ROWS)], 1)


VECTORS = normal(4)
PAIRS = (normal(4), normal(4))
POSITIVE = uniform(0.2, 3.0, 4)
WITHIN_ONE = uniform(-0.9, 0.9, 4)
ABOVE_ONE = uniform(1.1, 3.0, 4)
SHARES = uniform(0.05, 0.95, 4)
NUMBERS = integers(-5, 6, 4)
MATRICES = normal(3, 3)
DEFINITE = tf.linalg.matmul(MATRICES, MATRICES, transpose_b=True) + 2.0 * tf.eye(3)
SYMMETRIC = MATRICES + tf.linalg.matrix_transpose(MATRICES)
TRIANGULAR = tf.linalg.band_part(MATRICES, -1, 0) + 3.0 * tf.eye(3)
WIDE = normal(3, 5)
TALL = normal(5, 3)
SIDES = normal(3, 2)
COMPLEX = normal(4, dtype=tf.complex64)
WAVES = normal(32)
IMAGES = uniform(0.0, 1.0, 8, 8, 3)
BYTES = integers(0, 256, 8, 8, 3, dtype=tf.uint8)
BOXES = tf.constant([[0.1, 0.1, 0.6, 0.6], [0.12, 0.1, 0.62, 0.6], [0.5, 0.5, 0.9, 0.9]])
COUNTS = tf.range(ROWS)
