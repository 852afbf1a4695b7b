"""Loops, branches and functions in a function of a row."""

from __future__ import annotations

from typing import Any

import tensorflow as tf
from clients.data import COUNTS, MATRICES, NUMBERS, PAIRS, VECTORS, integers, normal, seeds, uniform

_SCALARS = uniform(-1.0, 1.0)


def _while_by_autograph(x: Any) -> Any:
    while tf.reduce_sum(x) < 9.0:
        x = x + tf.abs(x) + 0.5
    return x


def _break_and_continue(x: Any) -> Any:
    total = tf.zeros([])
    for i in tf.range(10):
        if i % 3 == 1:
            continue
        total += tf.reduce_sum(x) * tf.cast(i, tf.float32)
        if total > 5.0:
            break
    return total


def _return_within(x: Any) -> Any:
    if x[0] > 0.5:
        return x * 2
    if x[1] < -0.5:
        return -x
    return tf.sin(x)


def _loops_within_loops(x: Any) -> Any:
    total = tf.zeros_like(x)
    for i in tf.range(3):
        for _ in tf.range(i + 1):
            total = tf.sin(total + x)
    return total


def _fibonacci(n: Any) -> Any:
    """Loop variables that change places."""
    return tf.while_loop(lambda i, a, b: i < n, lambda i, a, b: (i + 1, b, a + b), (0, 0, 1))[1]


def _swapped(x: Any, y: Any) -> Any:
    return tf.while_loop(lambda i, a, b, c: i < 3, lambda i, a, b, c: (i + 1, b, c, a), (0, x, y, x + y))[1:]


def _swapped_with_arithmetic(x: Any, y: Any) -> Any:
    return tf.while_loop(lambda i, a, b: i < 4, lambda i, a, b: (i + 1, b * 0.5, a + 1.0), (0, x, y))[1:]


def _repeated(x: Any) -> Any:
    """The same tensor for several loop variables, and as several results of a step."""

    def step(i: Any, a: Any, b: Any, c: Any) -> Any:
        d = tf.sin(a) + c
        return i + 1, d, d, b

    return tf.while_loop(lambda i, a, b, c: i < 3, step, (0, x, x, x))[1:]


def _unchanged(x: Any) -> Any:
    return tf.while_loop(lambda i, a, b: i < 3, lambda i, a, b: (i + 1, a * b, b), (0, x, x + 1.0))[1:]


def _never_entered(x: Any) -> Any:
    return tf.while_loop(lambda i, a: i < 0, lambda i, a: (i + 1, a * 2), (0, x))[1]


def _by_rows_or_not(x: Any) -> Any:
    """A condition on the row, and loop variables that do not depend on it."""
    return tf.while_loop(lambda i, a: tf.reduce_sum(a) < 6.0, lambda i, a: (i + 1, a + 1.0), (0, x))


def _growing(x: Any) -> Any:
    grown = tf.while_loop(
        lambda i, a: i < 3,
        lambda i, a: (i + 1, tf.concat([a, a[:1] * 2], 0)),
        (0, x),
        shape_invariants=(tf.TensorShape([]), tf.TensorShape([None])),
    )[1]
    return tf.reduce_sum(grown)


def _maximum_iterations(n: Any) -> Any:
    return tf.while_loop(lambda i: True, lambda i: (i + 1,), (0,), maximum_iterations=n)[0]


def _counter_of_the_row(x: Any, n: Any) -> Any:
    for _ in tf.range(n):
        x = tf.sin(x) + 1.0
    return x


def _a_structure(x: Any) -> Any:
    state = {"a": x, "b": (x * 2, tf.constant(0))}
    done = tf.while_loop(
        lambda s: s["b"][1] < 3, lambda s: ({"a": s["b"][0], "b": (s["a"] + 1, s["b"][1] + 1)},), (state,)
    )
    return done[0]


def _drawn_in_a_loop(x: Any, seed: Any) -> Any:
    for _ in tf.range(3):
        x += tf.random.stateless_normal([4], seed)
        seed = seed + 1
    return x


def _gradient_within(x: Any) -> Any:
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = tf.reduce_sum(tf.sin(x) * x)
    return tape.gradient(y, x)


def _jacobian_within(x: Any) -> Any:
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = tf.sin(x) * x[0]
    return tape.jacobian(y, x)


def _gradient_of_a_loop_within(x: Any) -> Any:
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = x
        for _ in tf.range(3):
            y = tf.sin(y) + x
        loss = tf.reduce_sum(y)
    return tape.gradient(loss, x)


def _forward_mode_within(x: Any) -> Any:
    with tf.autodiff.ForwardAccumulator(x, tf.ones_like(x)) as forward:
        y = tf.sin(x) * x
    return forward.jvp(y)


@tf.custom_gradient
def _custom(x: Any) -> Any:
    return tf.square(x), lambda upstream: upstream * 3.0


@tf.function
def _inner(x: Any) -> Any:
    return tf.cumsum(x) if x[0] > 0 else -x


@tf.function(jit_compile=True)
def _compiled(x: Any) -> Any:
    return tf.sin(x) * 2 + tf.reduce_sum(x)


def _asserted(x: Any) -> Any:
    tf.debugging.assert_less(x, 9.0, message="too large")
    return x * 2


_SWITCHED = [lambda: tf.constant(1.0), lambda: tf.constant(20.0), lambda: tf.constant(300.0)]

_LOOPS = {
    "while by autograph": (_while_by_autograph, VECTORS),
    "while, break and continue": (_break_and_continue, VECTORS),
    "while, loops within loops": (_loops_within_loops, VECTORS),
    "while, loop variables change places": (_fibonacci, integers(0, 9)),
    "while, three loop variables change places": (_swapped, PAIRS),
    "while, loop variables change places and values": (_swapped_with_arithmetic, PAIRS),
    "while, loop variables that repeat": (_repeated, VECTORS),
    "while, a loop variable that stays": (_unchanged, VECTORS),
    "while, never entered": (_never_entered, VECTORS),
    "while, rows leave at other times": (_by_rows_or_not, VECTORS),
    "while, a tensor that grows": (_growing, VECTORS),
    "while, maximum_iterations of the row": (_maximum_iterations, integers(0, 5)),
    "while, as often as the row says": (_counter_of_the_row, (VECTORS, integers(0, 4))),
    "while, a structure": (_a_structure, VECTORS),
    "while, drawn in a loop": (_drawn_in_a_loop, (VECTORS, seeds())),
    "foldl": (lambda x: tf.foldl(lambda a, e: a * 0.5 + tf.sin(e), x), VECTORS),
    "foldl with an initial value": (lambda x: tf.foldl(lambda a, e: a + e, x, initializer=x[0] * 2), normal(3, 2)),
    "foldr": (lambda x: tf.foldr(lambda a, e: a * 0.5 + tf.sin(e), x), VECTORS),
    "map_fn within": (lambda m: tf.map_fn(lambda v: v * tf.reduce_sum(m), m), MATRICES),
    "map_fn within, of a shared list": (lambda x: tf.map_fn(lambda v: v + x[0], tf.range(3.0)), VECTORS),
    "scan": (lambda x: tf.scan(lambda a, e: a * 0.5 + e, x), VECTORS),
    "scan, reversed, with an initial value": (
        lambda x: tf.scan(lambda a, e: a * 0.5 + e, x, initializer=1.0, reverse=True),
        VECTORS,
    ),
    "scan of two": (lambda x, y: tf.scan(lambda a, e: (a[0] + e[1], a[1] * e[0]), (x, y)), PAIRS),
    "scan, loop variables change places": (
        lambda x: tf.scan(lambda a, e: (a[1], a[0] + e), x, initializer=(0.0, 1.0)),
        VECTORS,
    ),
    "vectorized_map within": (lambda m: tf.vectorized_map(lambda v: v * tf.reduce_sum(v), m), MATRICES),
}
_BRANCHES = {
    "case": (
        lambda x: tf.case([(x < -0.3, lambda: x * 2), (x < 0.3, lambda: x * 3)], default=lambda: x * 4),
        _SCALARS,
    ),
    "cond": (lambda x: tf.cond(x[0] > 0, lambda: x * 2, lambda: tf.sin(x)), VECTORS),
    "cond of constants": (lambda x: tf.cond(x > 0, lambda: 1.0, lambda: 2.0), _SCALARS),
    "cond that no row takes": (lambda x: tf.cond(x > 9.0, lambda: x * 2, lambda: x), _SCALARS),
    "cond with an assertion": (
        lambda x: tf.cond(x > 0, lambda: tf.sqrt(tf.ensure_shape(x, [])), lambda: x),
        _SCALARS,
    ),
    "cond within a loop": (
        lambda x: tf.foldl(lambda a, e: tf.cond(e > 0, lambda: a + e, lambda: a), x, initializer=0.0),
        VECTORS,
    ),
    "return within": (_return_within, VECTORS),
    "switch_case": (lambda n: tf.switch_case(n, _SWITCHED), integers(0, 3)),
    "switch_case, out of range": (lambda n: tf.switch_case(n, _SWITCHED), NUMBERS[:, 0]),
    "switch_case with a default": (
        lambda n, x: tf.switch_case(n, [lambda: x, lambda: x * 2], default=lambda: -x),
        (integers(-1, 4), VECTORS),
    ),
    "group and control_dependencies": (
        lambda x: tf.tuple([x * 2, x + 1], control_inputs=[tf.reduce_sum(x)])[0],
        VECTORS,
    ),
    "assert": (_asserted, VECTORS),
    "check_numerics": (lambda x: tf.debugging.check_numerics(x, "x"), VECTORS),
}
_FUNCTIONS = {
    "custom gradient": (_custom, VECTORS),
    "forward mode within": (_forward_mode_within, VECTORS),
    "function within": (_inner, VECTORS),
    "function within, compiled": (_compiled, VECTORS),
    "gradient of a loop within": (_gradient_of_a_loop_within, VECTORS),
    "gradient within": (_gradient_within, VECTORS),
    "jacobian within": (_jacobian_within, VECTORS),
    "gradients stopped": (lambda x: tf.stop_gradient(x) * x, VECTORS),
    "grad_pass_through": (lambda x: tf.grad_pass_through(tf.sin)(x), VECTORS),
    "numpy_function": (
        lambda x: tf.ensure_shape(tf.numpy_function(lambda a: a * 2, [x], tf.float32, stateful=False), [4]),
        VECTORS,
    ),
    "py_function": (lambda x: tf.ensure_shape(tf.py_function(lambda a: a * 2, [x], tf.float32), [4]), VECTORS),
    "recompute_grad": (lambda x: tf.recompute_grad(lambda y: tf.sin(y) * y)(x), VECTORS),
    "nondifferentiable result": (lambda n: n * 2, COUNTS),
}
OPS = {**_LOOPS, **_BRANCHES, **_FUNCTIONS}
