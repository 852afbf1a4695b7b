"""Functions that users map, with data: the laws are crossed with these."""

from __future__ import annotations

import functools
from collections import namedtuple
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from oracle import first_rows, serial

ROWS = 23
Point = namedtuple("Point", "x y")


@dataclass(frozen=True)
class Case:
    name: str
    fn: Any
    data: Any
    batched: bool = False
    options: dict[str, Any] = field(default_factory=dict)
    signature: Any = None
    shape_known: bool = True
    """Whether the inner shape of the results can be told without running: else no rows tell less than the serial map."""

    def __str__(self) -> str:
        return self.name

    @functools.cached_property
    def _serial(self) -> dict[int, Any]:
        return {}

    def serial(self, rows: int = ROWS) -> Any:
        """The serial map of its first rows, which is found once."""
        if rows not in self._serial:
            self._serial[rows] = serial(self.fn, first_rows(self.data, rows), self.batched, self.signature)
        return self._serial[rows]


def _steps(row: Any) -> Any:
    count = tf.constant(0)
    while tf.reduce_sum(row) < 20.0:
        row = row + 1.0
        count += 1
    if row[0] > 7.0:
        row = -row
    return {"row": row, "count": count}


def _python(row: Any) -> Any:
    return tf.ensure_shape(tf.py_function(lambda r: r.numpy()[::-1], [row], tf.float32), [3])


def _structure(row: Any) -> Any:
    return {"point": Point(row[0], [row[1], row[2]]), "more": (tf.reduce_sum(row), {"k": row[:, None] * row})}


def _several(x: Any, y: Any) -> Any:
    return x[0] * tf.cast(y["n"], tf.float32), y["text"]


def _point(point: Point) -> Any:
    return Point(point.y, point.x)


def _of_two(a: Any, b: Any) -> Any:
    return a + b


@functools.wraps(_of_two)
def _of_one(row: Any, scale: int = 2) -> Any:
    if tf.reduce_sum(row) > 0:
        row = -row
    return row * scale


def _sparse_of_unknown_rank(row: Any) -> Any:
    whole = tf.sparse.from_dense(row * 2)
    parts = (whole.indices, whole.values, whole.dense_shape)
    return tf.SparseTensor(*[tf.raw_ops.PlaceholderWithDefault(input=part, shape=None) for part in parts])


def of_signatures(numbers: Any) -> list[Case]:
    """Functions whose results need a `fn_output_signature`, and return what `tf.map_fn` returns for it."""
    of_row = tf.RaggedTensorSpec([None], tf.int32)
    deeper = tf.RaggedTensorSpec(dtype=tf.int32, ragged_rank=1)
    signatures: dict[str, tuple[Any, Any]] = {
        "ragged out": (tf.range, of_row),
        "ragged out, unknown shape": (lambda n: tf.range(n), tf.RaggedTensorSpec(dtype=tf.int32, ragged_rank=0)),
        "two ragged axes, unknown shape": (lambda n: tf.RaggedTensor.from_row_lengths(tf.range(n), [n]), deeper),
        "list of unlike results": (lambda n: [n, tf.range(n)], [tf.int32, of_row]),
        "lists in a nest": (
            lambda n: {"a": [n, (2 * n, [3 * n])], "b": n},
            {"a": [tf.int32, (tf.int32, [tf.int32])], "b": tf.int32},
        ),
    }
    return [
        Case(name, fn, numbers, options={"fn_output_signature": signature}, signature=signature)
        for name, (fn, signature) in signatures.items()
    ]


def cases() -> list[Case]:
    random = np.random.default_rng(0)
    x = tf.constant(random.normal(size=[ROWS, 3]), tf.float32)
    numbers = tf.range(ROWS, dtype=tf.int64)
    text = tf.strings.as_string(numbers)
    ragged = tf.RaggedTensor.from_row_lengths(tf.range(ROWS * (ROWS - 1) // 2), tf.range(ROWS))
    deeper = tf.RaggedTensor.from_row_lengths(ragged, [1] * ROWS)
    sparse = tf.sparse.from_dense(tf.cast(random.integers(0, 3, [ROWS, 5]), tf.int32))
    variable = tf.Variable(random.normal(size=[3, 4]), dtype=tf.float32)
    table = tf.lookup.StaticHashTable(
        tf.lookup.KeyValueTensorInitializer(numbers, numbers * 10), default_value=tf.constant(-1, tf.int64)
    )
    changing = tf.lookup.experimental.MutableHashTable(tf.int64, tf.float32, -1.0)
    changing.insert(numbers, tf.cast(numbers, tf.float32) / 2)
    whole = tf.constant(random.integers(0, 3, [ROWS, 4]), tf.int32)
    model = tf.keras.Sequential([tf.keras.Input([3]), tf.keras.layers.Dense(5, "relu"), tf.keras.layers.Dense(2)])
    compiled = tf.function(lambda row: tf.linalg.matvec(variable, row, transpose_a=True), jit_compile=True)
    no_vectorizing = {"vectorize": False}
    return [
        Case("vectorised", lambda row: tf.sin(row) * 2, x),
        Case("mapped", lambda row: tf.cos(row) * 2, x, options=no_vectorizing),
        Case("structure out", _structure, x),
        Case("tuple and dict in", _several, (x, {"n": numbers, "text": text})),
        Case("named tuple in", _point, Point(x, numbers)),
        Case("control flow", _steps, x),
        Case("py_function", _python, x),
        Case("strings", lambda s: tf.strings.join([s, "!"]), text),
        Case("complex and bool", lambda row: (tf.complex(row, row), row > 0), x),
        Case("captured variable", lambda row: tf.linalg.matvec(variable, row, transpose_a=True), x),
        Case("gather_nd of a variable", lambda row: tf.gather_nd(variable, row[:2, None]), whole),
        Case("lookup table", lambda n: table.lookup(n + 1), numbers),
        Case("Keras model", lambda b: model(b, training=False), x, batched=True),
        Case("batch of several", lambda a, n: {"p": a * tf.cast(n, tf.float32)[:, None]}, (x, numbers), batched=True),
        Case("ragged in", lambda row: tf.reduce_sum(row), ragged, signature=tf.int32),
        Case("ragged in and out, of int32 splits", lambda row: row * 2, ragged.with_row_splits_dtype(tf.int32)),
        Case("deeper ragged batch", lambda b: b + 1, deeper, batched=True),
        *of_signatures(tf.range(1, ROWS + 1)),
        Case(
            "sparse in and out",
            lambda row: tf.sparse.expand_dims(row * 2, 0),
            sparse,
            signature=tf.SparseTensorSpec([1, 5], tf.int32),
            shape_known=False,
        ),
        Case("sparse batch", lambda b: b * 2, sparse, batched=True, shape_known=False),
        Case("of unknown rank", lambda n: changing.lookup(n), numbers, shape_known=False),
        Case(
            "sparse of unknown rank",
            _sparse_of_unknown_rank,
            x,
            signature=tf.SparseTensorSpec(None, tf.float32),
            shape_known=False,
        ),
        Case(
            "sets",
            lambda row: tf.sets.intersection(row[None], row[None] % 2),
            whole,
            signature=tf.SparseTensorSpec([None, None], tf.int32),
            shape_known=False,
        ),
        Case("a partial of a decorated function", functools.partial(_of_one, scale=3), x),
        Case("compiled function of a variable", compiled, x),
        Case("compiled", _steps, x, options={"jit_compile": True}),
    ]


ALL = cases()

_IN_CI = (
    "mapped", "structure out", "tuple and dict in", "named tuple in", "strings", "complex and bool", "captured variable",
    "Keras model", "batch of several", "ragged in and out, of int32 splits", "deeper ragged batch", "ragged out",
    "list of unlike results",
    "sparse in and out", "sparse batch", "of unknown rank", "sparse of unknown rank", "sets", "compiled",
)  # fmt: skip
IN_CI = [case for case in ALL if case.name in _IN_CI]
"""Each differs from the others in its function, data or results; the rest are like one of these in most respects."""

CASES = [case if case in IN_CI else pytest.param(case, marks=pytest.mark.nightly) for case in ALL]
"""All cases as parameters, of which CI runs those in `IN_CI`."""
