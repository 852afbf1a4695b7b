"""Every dtype, rows without elements, and random numbers of the row's seed."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf
from clients.data import ROWS, integers, normal, seeds, uniform

_INTEGERS = (tf.uint8, tf.uint16, tf.uint32, tf.uint64, tf.int8, tf.int16, tf.int64)
_HALVES = (tf.float16, tf.bfloat16)
_COMPLEX = (tf.complex64, tf.complex128)


def _arithmetic(x: Any) -> Any:
    return x * x + x[0], tf.reduce_max(x), tf.cast(x, tf.float32) / 2, x[::-1]


def _of_floats(x: Any) -> Any:
    return tf.exp(-x * x), tf.reduce_sum(x), tf.nn.softmax(x), tf.cast(x, tf.int32)


def _of_complex(x: Any) -> Any:
    return x * tf.math.conj(x) + x[0], tf.reduce_sum(x), tf.abs(x), tf.exp(x)


def _dtypes() -> dict[str, Any]:
    table: dict[str, Any] = {}
    for dtype in _INTEGERS:
        table[f"{dtype.name}, arithmetic"] = (_arithmetic, integers(0, 9, 4, dtype=dtype))
        table[f"{dtype.name}, gathered"] = (lambda x: tf.gather(x, [3, 0]), integers(0, 9, 4, dtype=dtype))
        table[f"{dtype.name}, in a loop"] = (lambda x: tf.foldl(lambda a, e: a + e, x), integers(0, 9, 4, dtype=dtype))
    for dtype in (*_HALVES, tf.float64):
        table[f"{dtype.name}, arithmetic"] = (_of_floats, uniform(-1.0, 1.0, 4, dtype=dtype))
        table[f"{dtype.name}, matmul"] = (lambda m: tf.matmul(m, m), uniform(-1.0, 1.0, 3, 3, dtype=dtype))
        table[f"{dtype.name}, cond"] = (
            lambda x: tf.cond(x[0] > 0, lambda: x, lambda: -x),
            uniform(-1.0, 1.0, 4, dtype=dtype),
        )
    for dtype in _COMPLEX:
        table[f"{dtype.name}, arithmetic"] = (_of_complex, normal(4, dtype=dtype))
        table[f"{dtype.name}, matmul"] = (lambda m: tf.matmul(m, m, adjoint_b=True), normal(3, 2, dtype=dtype))
        table[f"{dtype.name}, fft"] = (tf.signal.fft, normal(4, dtype=dtype))
        table[f"{dtype.name}, solve"] = (lambda m: tf.linalg.solve(m, m[:, :1]), normal(3, 3, dtype=dtype))
    return table


_SIZES = {
    "no elements, summed": (lambda x: (tf.reduce_sum(x), x * 2), normal(0)),
    "no elements of an inner axis": (lambda x: (tf.reduce_sum(x, 1), tf.reduce_max(x, 1)), normal(2, 0)),
    "no elements, matmul": (lambda x: tf.matmul(x, x, transpose_b=True), normal(2, 0)),
    "no elements, concat": (lambda x: tf.concat([x, tf.ones([2])], 0), normal(0)),
    "no elements, gathered": (lambda x: tf.gather(x, tf.zeros([0], tf.int32)), normal(4)),
    "no elements, sorted": (lambda x: tf.sort(tf.stop_gradient(x)), normal(0)),  # its gradient fails
    "no elements, in a loop": (lambda x: tf.map_fn(lambda e: e * 2, x), normal(0)),
    "no elements, einsum": (lambda x: tf.einsum("ij,kj->ik", x, x), normal(2, 0)),
    "no elements, solve": (lambda x: tf.linalg.solve(x, x), normal(0, 0)),
    "no elements, reshaped": (lambda x: tf.reshape(x, [0, 7]), normal(0, 3)),
    "no elements, cast": (lambda x: tf.cast(x, tf.int64), normal(0)),
    "one element": (lambda x: (x[0], tf.squeeze(x), tf.reduce_sum(x)), normal(1)),
    "one by one": (lambda x: (tf.squeeze(x), tf.linalg.inv(x), tf.matmul(x, x)), normal(1, 1)),
    "scalars": (lambda x: (x * 2, x[None], tf.reduce_sum(x)), normal()),
    "many axes": (lambda x: tf.transpose(x, [3, 1, 4, 0, 2]), normal(1, 2, 1, 3, 2)),
    "NaN and infinity": (
        lambda x: (tf.reduce_max(x), tf.sort(x), tf.where(tf.math.is_nan(x), 0.0, x)),
        tf.constant([[np.nan, np.inf, -np.inf, 1.0]] * ROWS, tf.float32),
    ),
}
_DRAWN = {
    "stateless_binomial": (
        lambda s: tf.random.stateless_binomial([3], s, 5.0, 0.5),
        seeds(),
    ),
    "stateless_categorical": (lambda s: tf.random.stateless_categorical([[0.0, 1.0, 2.0]], 4, s), seeds()),
    "stateless_gamma": (lambda s, x: tf.random.stateless_gamma([4], s, x), (seeds(), uniform(0.5, 2.0, 4))),
    "stateless_normal": (lambda s: tf.random.stateless_normal([3], s), seeds()),
    "stateless_parameterized_truncated_normal": (
        lambda s, x: tf.random.stateless_parameterized_truncated_normal([4], s, x, 1.0, -1.0, 2.0),
        (seeds(), uniform(0.0, 1.0, 4)),
    ),
    "stateless_poisson": (lambda s: tf.random.stateless_poisson([3], s, 2.0), seeds()),
    "stateless_shuffle": (lambda s: tf.random.experimental.stateless_shuffle(tf.range(6), s), seeds()),
    "stateless_truncated_normal": (lambda s: tf.random.stateless_truncated_normal([3], s), seeds()),
    "stateless_uniform": (lambda s: tf.random.stateless_uniform([3], s, 1, 9, tf.int32), seeds()),
    "stateless_uniform of any bits": (
        lambda s: tf.random.stateless_uniform([3], s, None, None, tf.uint32),
        seeds(),
    ),
    "stateless split and fold_in": (
        lambda s, n: (tf.random.split(s), tf.random.fold_in(s, n)),
        (seeds(), integers(0, 9)),
    ),
    "stateless, algorithm": (lambda s: tf.random.stateless_normal([3], s, alg="philox"), seeds()),
}
OPS = {**_dtypes(), **_SIZES, **_DRAWN}
