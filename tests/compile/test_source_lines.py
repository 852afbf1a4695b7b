"""source_line: the user's line that made an op, through autograph, lambdas, library functions and Keras."""

from __future__ import annotations

import linecache
from collections.abc import Callable
from typing import Any

import pytest
import tensorflow as tf

from devicemap._tensorflow.functions import traced_graphs
from devicemap.compile.source_lines import source_line
from devicemap.compile.trace import trace
from devicemap.options import Options

X = tf.TensorSpec([4])
LAYER = tf.keras.layers.Dense(2)
LAYER.build([None, 4])


def lines_of(concrete: Any, op_type: str) -> list[str | None]:
    """The lines of all ops of a type in a function and in the functions that it calls."""
    ops = [op for each in traced_graphs(concrete.graph) for op in each.get_operations()]
    return [source_line(op) for op in ops if op.type == op_type]


def loops(row: Any) -> Any:
    total = row
    while tf.reduce_sum(total) < 10.0:
        total = tf.math.cumsum(total)
    for _ in tf.range(3):
        if total[0] > 0:
            total = tf.roll(total, 1, 0)
    return total


def library(row: Any) -> Any:
    return LAYER(row[None])


short = lambda row: tf.nn.l2_loss(row)
long = lambda row: tf.math.bessel_i0e(tf.math.bessel_i1e(tf.math.bessel_i0e(tf.math.bessel_i1e(row + 1.0))))


@pytest.mark.parametrize(
    ("fn", "op_type", "text", "offset"),
    [
        (loops, "Less", "while tf.reduce_sum(total) < 10.0:", 2),
        (loops, "Roll", "total = tf.roll(total, 1, 0)", 6),
        (loops, "StatelessIf", "if total[0] > 0:", 5),
        (library, "MatMul", "return LAYER(row[None])", 1),
        (short, "L2Loss", "short = lambda row: tf.nn.l2_loss(row)", 0),
        (long, "BesselI0e", "long = lambda row: tf.math.bessel_i0e(tf.math.bessel_i1e(...", 0),
    ],
)
def test_lines(fn: Callable[..., Any], op_type: str, text: str, offset: int) -> None:
    line = lines_of(tf.function(fn).get_concrete_function(X), op_type)[0]
    assert line == f"`{text}`, line {fn.__code__.co_firstlineno + offset} of test_source_lines.py"


def test_a_function_of_keras_alone_has_no_line_of_the_caller() -> None:
    traced = trace(tf.keras.layers.Dense(2), tf.TensorSpec([None, 4]), Options(batched=True))
    assert lines_of(traced.concrete, "MatMul") == [None]


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
    assert lines_of(tf.function(fn).get_concrete_function(X), "Sin")[0] == expected
