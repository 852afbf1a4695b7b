"""The list of forms that vectorise right: a part of it tried anew, what it holds, and how forms are told apart."""

from __future__ import annotations

import json
from typing import Any

import pytest
import tensorflow as tf
from graphs import traced
from proving.families import FAMILIES
from proving.listing import pack
from proving.trials import outcomes

import devicemap
from benchmarks import functions
from devicemap.compile.forms import LIST, Form, form_of, is_proven, unpack

EVERY = {
    "unary": 80,
    "binary": 200,
    "comparing": 80,
    "every form": 160,
    "reductions": 180,
    "casts": 40,
    "selects": 80,
    "along an axis": 120,
    "shaping": 240,
    "transposing": 16,
    "gathering": 120,
    "matrix products": 80,
    "batch matrix products": 20,
    "contractions": 20,
    "linear algebra": 80,
    "transforms": 16,
    "neural": 120,
    "lists": 200,
    "draws": 3,
    "read parameters": 24,
    "others": 2,
}
"""Which part of a family is tried here: each so-manieth; `make forms` tries all of it."""


@pytest.mark.in_ci(2)
@pytest.mark.parametrize(
    ("family", "half"),
    [(family, 0) for family in EVERY] + [pytest.param(family, 1, marks=pytest.mark.nightly) for family in EVERY],
)
def test_what_is_on_the_list_gives_the_same(family: str, half: int) -> None:
    trials = list(FAMILIES[family]())[half * EVERY[family] :: 2 * EVERY[family]]
    listed = 0
    for form, (same, gradients) in outcomes(trials).items():
        if is_proven(form, differentiable=False):
            listed += 1
            assert same, form
        if is_proven(form, differentiable=True):
            assert gradients, form
    assert listed


@pytest.mark.in_ci(1)
@pytest.mark.parametrize("name", ["ODE solver", "mel spectrogram", "Sinkhorn", "serial scan"])
def test_real_functions_are_vectorised(name: str) -> None:
    case = functions.cases()[name]
    found = traced(devicemap.DeviceMap(case.fn), case.data)
    assert found.vectorized, found.reason


def _form(fn: Any, *specs: Any, stacked: list[bool]) -> Form:
    """Of the op that comes before the end of a function of such inputs."""
    graph = tf.function(fn, autograph=False).get_concrete_function(*specs).graph
    op = graph.outputs[0].op.inputs[0].op
    return form_of(op, stacked)


def test_how_forms_are_told_apart() -> None:
    x, y = tf.TensorSpec([3, 1]), tf.TensorSpec([None])
    assert _form(lambda x, y: x + y, x, y, stacked=[True, False]) == Form("AddV2", "T=float32", "s21 u1?")
    axes = _form(lambda x: tf.reduce_sum(x, [-1]), x, stacked=[True, False])
    assert axes == Form("Sum", "keep_dims=False T=float32 Tidx=int32", "s21 c1-")
    joined = _form(lambda x: tf.concat([x, x, x], 0), x, stacked=[True, True, False, False])
    assert joined == Form("ConcatV2", "T=float32 Tidx=int32", "s21+u21 c0")


def test_the_list_is_what_was_packed() -> None:
    forms = {
        Form("Sin", "T=float32", "s1"): True, Form("Sin", "T=float32", "s0"): False, Form("Cos", "T=float32", "s1"): True,
    }  # fmt: skip
    packed = json.loads(json.dumps(pack(forms, ["2.21.0"])))
    assert unpack(packed) == {
        ("Sin", "T=float32"): (frozenset({"s0", "s1"}), frozenset({"s1"})),
        ("Cos", "T=float32"): (frozenset({"s1"}), frozenset({"s1"})),
    }


def test_the_list_says_what_it_was_tried_with() -> None:
    listed = json.loads(LIST.read_text())
    assert listed["tensorflow"]
    assert len(listed["ops"]) > 100


@pytest.mark.in_ci(1)
@pytest.mark.parametrize(
    ("fn", "why"),
    [
        (lambda row: tf.pad(row, [[1, 1]], constant_values=3.0), "PadV2 is not {}, whatever it is given"),
        (lambda row: tf.cumsum(tf.cast(row, tf.bfloat16)), "Cumsum is not {} where T=bfloat16"),
        (
            lambda row: tf.nn.conv2d(
                tf.reshape(tf.cast(row, tf.float64), [1, 3, 1, 1]), tf.ones([1, 1, 1, 1], tf.float64), 1, "SAME"
            ),
            "Conv2D is not {} where filter is the same for all rows, of rank 4, with an axis of length 1",
        ),
    ],
    ids=["no form of the op", "a dtype", "an input"],
)
def test_an_op_that_is_not_listed_is_named_with_what_is_not_proven(fn: Any, why: str) -> None:
    plan = devicemap.DeviceMap(fn).explain(tf.ones([4, 3]))
    assert not plan.vectorized
    assert plan.reason == why.format("proven to give the same vectorised")
