"""Loops that rows leave at once or one by one, branches that some rows or none take, lists, and rows of a variable."""

from __future__ import annotations

from typing import Any

import tensorflow as tf
from compile.corpus.samples import integers, normal, shared

WEIGHTS = tf.Variable(shared(3, 3, dtype=tf.float64))
TABLE = tf.Variable(shared(8, 3))
KERNEL = shared(2, 1, 2, dtype=tf.float64)
MATRIX = shared(3, 3)
LEVELS = tf.lookup.StaticHashTable(
    tf.lookup.KeyValueTensorInitializer(tf.range(3), tf.constant([0.9, 0.8, 0.7], tf.float64)), 0.5
)
NEVER = 1e3
VARIABLES = [WEIGHTS, TABLE]


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


def collected(row: Any) -> Any:
    array = tf.TensorArray(tf.float64, 4, clear_after_read=False)
    array = array.write(0, row)
    for i in tf.range(3):
        array = array.write(i + 1, array.read(i) * row)
    return array.stack()


def grown(row: Any) -> Any:
    """`tf.vectorized_map` converts this, too, and fails when it runs."""
    array = tf.TensorArray(tf.float64, 0, dynamic_size=True)
    for i in tf.range(4):
        array = array.write(i, row)
        row *= 2.0
    return array.stack()


def no_step(row: Any) -> Any:
    for _ in tf.range(tf.size(row) - 3):
        row *= 2.0
    return row


def nested(row: Any) -> Any:
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


def convolved(row: Any) -> Any:
    return tf.nn.conv1d(row[None, :, None], KERNEL, 1, "SAME")[0, :, 0]


def cases(row: Any) -> Any:
    branches = [lambda: row, lambda: row * 2.0, lambda: tf.linalg.matvec(WEIGHTS, row)]
    return tf.switch_case(tf.cast(tf.round(row[0] * 2.0), tf.int32), branches)


def cases_of_pairs(row: Any) -> Any:
    pairs = [lambda: (row, row), lambda: (row[::-1], row * 2.0)]
    return tf.add_n(tf.switch_case(tf.cast(row[0], tf.int32), pairs))


def walk(i: Any) -> Any:
    total = tf.zeros([3])
    for step in tf.range(3):
        total += tf.gather(TABLE, i + step)
    return total


looked_up = tf.function(lambda i: tf.gather(TABLE, i) * 2.0)
ROWS, VECTORS, INDICES = normal(3, dtype=tf.float64), normal(3), integers(high=6)
FUNCTIONS = {
    "power iteration": (power, ROWS),
    "shared start": (shared_start, ROWS),
    "collected": (collected, ROWS),
    "grown list": (grown, ROWS),
    "no step": (no_step, ROWS),
    "nested loops": (nested, ROWS),
    "until small": (until_small, ROWS),
    "branch in a loop": (branch_in_loop, ROWS),
    "until an element": (until_an_element, ROWS),
    "elements that some rows read": (elements_that_some_read, ROWS),
    "product that no row takes": (
        lambda r: tf.cond(r[0] > NEVER, lambda: tf.matmul(r[None], WEIGHTS)[0], lambda: r * 2.0), ROWS),
    "convolution that no row takes": (lambda r: tf.cond(r[0] > NEVER, lambda: convolved(r), lambda: r - 1.0), ROWS),
    "segments that no row takes": (
        lambda r: tf.cond(
            r[0] > NEVER, lambda: tf.math.unsorted_segment_sum(r, [0, 1, 0], 3), lambda: tf.reverse(r, [0])), ROWS),
    "slice that no row takes": (
        lambda r: tf.cond(r[0] < NEVER, lambda: r[:2], lambda: tf.slice(r, [tf.cast(r[1], tf.int32)], [2])), ROWS),
    "assertion that no row takes": (lambda r: tf.cond(r[0] < NEVER, lambda: r, lambda: refused(r)), ROWS),
    "branch of pairs": (lambda r: tf.add_n(tf.cond(r[0] > 0, lambda: (r, r * 2.0), lambda: (-r, r[::-1]))), ROWS),
    "branch that all rows share": (
        lambda r: tf.cond(WEIGHTS[0, 0] > NEVER, lambda: tf.linalg.matvec(WEIGHTS, r), lambda: r), ROWS),
    "cases": (cases, ROWS),
    "cases of pairs": (cases_of_pairs, ROWS),
    "row of a variable": (lambda i: tf.gather(TABLE, i), INDICES),
    "rows of a variable": (
        lambda i: tf.reduce_sum(tf.gather(TABLE, [[i, i + 1], [0, i]])) * tf.gather(TABLE, 0), INDICES),
    "row in a tf.function": (lambda i: looked_up(i), INDICES),
    "rows in a loop": (walk, INDICES),
    "lookups in a loop": (lookups, ROWS),
    "determinant of rows": (lambda i: tf.linalg.det(tf.gather(TABLE, [i, i + 1, 0])), INDICES),
    "tf.scan": (lambda r: tf.scan(lambda s, e: tf.sin(s) * 0.5 + e, r), VECTORS),
    "tf.scan of pairs": (lambda r: tf.scan(lambda s, e: (s[0] + e, s[1] * e), r, (tf.zeros([]), tf.ones([]))), VECTORS),
    "tf.map_fn of shared rows": (lambda r: tf.map_fn(lambda e: tf.reduce_sum(e * r), MATRIX), VECTORS),
    "scan of Keras": (lambda r: tf.keras.ops.scan(lambda s, e: (s + e, s * e), tf.zeros([]), r)[1], VECTORS),
}  # fmt: skip
