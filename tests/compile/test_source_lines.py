"""source_line: the user's line that made an op, through autograph, lambdas, library functions and Keras."""

from __future__ import annotations

import linecache
from collections.abc import Callable
from typing import Any

import pytest
import tensorflow as tf

from devicemap._tensorflow.functions import own_functions
from devicemap.compile.source_lines import source_line
from devicemap.compile.trace import trace
from devicemap.options import Options

X = tf.TensorSpec([4])
HERE = "of test_source_lines.py"


def line_of(fn: Callable[..., Any], op_type: str) -> str | None:
    """The line of the first op of a type in a function or in the functions that it calls."""
    graph = tf.function(fn).get_concrete_function(X).graph
    ops = [op for each in (graph, *own_functions(graph)[0]) for op in each.get_operations()]
    return source_line(next(op for op in ops if op.type == op_type))


def number_of(fn: Callable[..., Any], offset: int) -> int:
    return fn.__code__.co_firstlineno + offset


def loops(row: Any) -> Any:
    total = row
    while tf.reduce_sum(total) < 10.0:
        total = tf.math.cumsum(total)
    for _ in tf.range(3):
        if total[0] > 0:
            total = tf.roll(total, 1, 0)
    return total


@pytest.mark.parametrize(
    ("op_type", "text", "offset"),
    [
        ("Less", "while tf.reduce_sum(total) < 10.0:", 2),
        ("Cumsum", "total = tf.math.cumsum(total)", 3),
        ("Roll", "total = tf.roll(total, 1, 0)", 6),
        ("StatelessIf", "if total[0] > 0:", 5),
    ],
)
def test_autograph(op_type: str, text: str, offset: int) -> None:
    assert line_of(loops, op_type) == f"`{text}`, line {number_of(loops, offset)} {HERE}"


def test_lambdas_and_nested_functions() -> None:
    def outer(row: Any) -> Any:
        def inner(x: Any) -> Any:
            return tf.math.top_k(x, 2).values

        return inner(row)

    double = lambda row: tf.nn.l2_loss(row)
    assert line_of(outer, "TopKV2") == f"`return tf.math.top_k(x, 2).values`, line {number_of(outer, 2)} {HERE}"
    assert line_of(double, "L2Loss") == (
        f"`double = lambda row: tf.nn.l2_loss(row)`, line {number_of(double, 0)} {HERE}"
    )


def test_library_functions_and_keras_layers() -> None:
    layer = tf.keras.layers.Dense(2)
    layer.build([None, 4])

    def fn(row: Any) -> Any:
        mean = tf.nn.moments(row, 0)[0]
        return mean, layer(row[None])

    assert line_of(fn, "Mean") == f"`mean = tf.nn.moments(row, 0)[0]`, line {number_of(fn, 1)} {HERE}"
    assert line_of(fn, "MatMul") == f"`return mean, layer(row[None])`, line {number_of(fn, 2)} {HERE}"


def test_a_function_of_keras_alone_has_no_line_of_the_caller() -> None:
    layer = tf.keras.layers.Dense(2)
    traced = trace(layer, tf.TensorSpec([None, 4]), Options(batched=True))
    graph = traced.concrete.graph
    ops = [op for each in (graph, *own_functions(graph)[0]) for op in each.get_operations()]
    assert [source_line(op) for op in ops if op.type == "MatMul"] == [None]


@pytest.mark.parametrize(
    ("name", "stored", "expected"),
    [
        ("<stdin>", False, "line 1"),
        ("/tmp/ipykernel_7/8.py", True, "`fn = lambda row: tf.sin(row)`, line 1"),
        ("/gone/ode.py", False, "line 1 of ode.py"),
    ],
)
def test_code_without_a_file(name: str, stored: bool, expected: str) -> None:
    code, scope = "fn = lambda row: tf.sin(row)\n", {"tf": tf}
    exec(compile(code, name, "exec"), scope)
    fn: Any = scope["fn"]
    if stored:
        linecache.cache[name] = len(code), None, [code], name
    assert line_of(fn, "Sin") == expected


def test_long_lines_are_shortened() -> None:
    line = line_of(
        lambda row: tf.math.bessel_i0e(tf.math.bessel_i1e(tf.math.bessel_i0e(tf.math.bessel_i1e(row)))), "BesselI0e"
    )
    assert line is not None
    assert line.startswith("`lambda row: tf.math.bessel_i0e(tf.math.bessel_i1e(tf.math...`, line ")
