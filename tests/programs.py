"""Random functions of a row of three numbers, for hypothesis to draw.

A program is a list of steps. A step is the name of an op, or a block with steps of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import tensorflow as tf
from hypothesis import strategies as st

_random = np.random.default_rng(5)
MATRIX = tf.Variable(_random.uniform(-0.5, 0.5, [3, 3]), dtype=tf.float32)
TABLE = tf.Variable(_random.uniform(-1, 1, [4, 3]), dtype=tf.float32)
SHIFT = tf.constant(_random.uniform(-1, 1, [3]), tf.float32)
TOTAL, STATE = tf.Variable(tf.zeros([3])), tf.Variable(1.0)

X = tf.constant(_random.uniform(-1, 1, [7, 3]), tf.float32)
K = tf.constant([0, 1, 2, 3, 3, 0, 2])
"""Loops and branches depend on these numbers, because rounding cannot change them."""


def _add(v: Any, k: Any, seed: Any) -> Any:
    TOTAL.assign_add(v)
    return v


def _average(v: Any, k: Any, seed: Any) -> Any:
    STATE.assign(0.5 * STATE + tf.cast(k, tf.float32))
    return v + tf.tanh(STATE)


@tf.custom_gradient
def _doubled_gradient(v: Any) -> Any:
    return tf.sin(v), lambda upstream: 2.0 * upstream


PURE: dict[str, Callable[[Any, Any, Any], Any]] = {
    "sin": lambda v, k, seed: tf.sin(v),
    "softmax": lambda v, k, seed: tf.nn.softmax(v),
    "norm": lambda v, k, seed: v / (1.0 + tf.norm(v)),
    "cumsum": lambda v, k, seed: 0.3 * tf.cumsum(v),
    "roll": lambda v, k, seed: tf.concat([v[1:], v[:1]], 0),
    "reverse": lambda v, k, seed: v[::-1] * tf.constant([1.0, 0.5, -1.0]),
    "slice at k": lambda v, k, seed: tf.ensure_shape(tf.concat([v, v], 0)[k : k + 3], [3]),
    "gather at k": lambda v, k, seed: v + tf.gather(v, k % 3),
    "scatter at k": lambda v, k, seed: tf.tensor_scatter_nd_update(v, [[k % 3]], [0.5]),
    "where": lambda v, k, seed: tf.where(k > 1, v, 0.5 * v),
    "one hot": lambda v, k, seed: v * tf.one_hot(k, 3) + 0.1,
    "constant": lambda v, k, seed: v * SHIFT,
    "variable": lambda v, k, seed: tf.linalg.matvec(MATRIX, v),
    "row of a variable": lambda v, k, seed: v + tf.gather(TABLE, k),
    "stop": lambda v, k, seed: v + tf.stop_gradient(tf.cos(v)),
    "custom gradient": lambda v, k, seed: _doubled_gradient(v),
    "random": lambda v, k, seed: v + 0.0 * tf.random.normal([3]),
    "seeded random": lambda v, k, seed: v + tf.random.stateless_uniform([3], seed),
    "map_fn": lambda v, k, seed: tf.map_fn(lambda e: tf.sin(e) * v[0], v),
    "scan": lambda v, k, seed: tf.scan(lambda a, e: 0.5 * a + e, v),
}
WRITES = {"assign_add": _add, "assign": _average}
STEPS = {**PURE, **WRITES}


def _for_k(body: Any, v: Any, k: Any) -> Any:
    for _ in tf.range(k):
        v = body(v)
    return v


def _break(body: Any, v: Any, k: Any) -> Any:
    for i in tf.range(4):
        if i == k:
            break
        v = body(v)
    return v


def _if(body: Any, v: Any, k: Any) -> Any:
    if k % 2 == 0:
        v = body(v)
    else:
        v = 0.5 * v
    return v


def _list(body: Any, v: Any, k: Any) -> Any:
    found = tf.TensorArray(tf.float32, 3, element_shape=[3])
    for i in tf.range(3):
        v = body(v)
        found = found.write(i, v)
    return tf.reduce_mean(found.stack(), 0)


def _gradient(body: Any, v: Any, k: Any) -> Any:
    with tf.GradientTape() as tape:
        tape.watch(v)
        result = body(v)
    return tape.gradient(result, v, unconnected_gradients="zero")


BLOCKS: dict[str, Callable[[Any, Any, Any], Any]] = {
    "for k": _for_k,
    "break at k": _break,
    "if": _if,
    "list": _list,
    "gradient": _gradient,
    "while": lambda body, v, k: tf.while_loop(lambda i, v: i < k, lambda i, v: (i + 2, body(v)), (0, v))[1],
    "case": lambda body, v, k: tf.switch_case(k, [lambda: body(v), lambda: v, lambda: body(-v)]),
    "function": lambda body, v, k: tf.function(body)(v),
}


def run(program: Any, v: Any, k: Any, seed: Any) -> Any:
    """Return what a program makes of a row `v` of three numbers, an index `k` from 0 to 3 and a seed."""
    for step in program:
        v = (
            STEPS[step](v, k, seed)
            if isinstance(step, str)
            else BLOCKS[step[0]](partial(_inner, step[1], k, seed), v, k)
        )
    return v


def _inner(program: Any, k: Any, seed: Any, v: Any) -> Any:
    return run(program, v, k, seed)


def programs(steps: Any) -> Any:
    """A strategy for programs of these steps."""
    inner = lambda step: st.tuples(st.sampled_from([*BLOCKS]), st.lists(step, min_size=1, max_size=3))
    return st.lists(st.recursive(st.sampled_from([*steps]), inner, max_leaves=4), min_size=1, max_size=3)
