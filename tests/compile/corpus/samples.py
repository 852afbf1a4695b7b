"""Data of the corpus: five rows each, the same in every run."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

ROWS = 5


def normal(*shape: int, dtype: Any = tf.float32, seed: int = 0) -> tf.Tensor:
    """Standard normal numbers, `[rows, *shape]`."""
    return tf.constant(np.random.default_rng(seed).normal(size=[ROWS, *shape]), dtype)


def uniform(*shape: int, low: float = 0.0, high: float = 1.0, dtype: Any = tf.float32, seed: int = 0) -> tf.Tensor:
    """Uniform numbers between `low` and `high`, `[rows, *shape]`."""
    return tf.constant(np.random.default_rng(seed).uniform(low, high, [ROWS, *shape]), dtype)


def integers(*shape: int, high: int, dtype: Any = tf.int32, seed: int = 0) -> tf.Tensor:
    """Integers below `high`, `[rows, *shape]`."""
    return tf.constant(np.random.default_rng(seed).integers(0, high, [ROWS, *shape]), dtype)


def complexes(*shape: int, seed: int = 0) -> tf.Tensor:
    """Complex normal numbers, `[rows, *shape]`."""
    return tf.complex(normal(*shape, seed=seed), normal(*shape, seed=seed + 1))


def symmetric(size: int, dtype: Any = tf.float32, seed: int = 0) -> tf.Tensor:
    """Positive definite matrices, `[rows, size, size]`."""
    root = normal(size, size, dtype=dtype, seed=seed)
    return root @ tf.linalg.matrix_transpose(root) / size + tf.eye(size, dtype=dtype)


def shared(*shape: int, dtype: Any = tf.float32, seed: int = 9) -> tf.Tensor:
    """Standard normal numbers of any shape, which a function captures: the same for each row."""
    return tf.constant(np.random.default_rng(seed).normal(size=shape), dtype)
