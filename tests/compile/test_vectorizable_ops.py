"""Each vectorised op gives the values and gradients of `tf.map_fn`, in calls that hypothesis draws.

An example is a list of calls, traced in one function of one row, because a trace costs more than the calls. If their results
are wrong, each call is run alone.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from graphs import traced
from hypothesis import HealthCheck, Phase, assume, find, given, settings
from hypothesis import strategies as st
from op_calls import CALLS, PLACEMENTS, ROWS, RUNS_ROW_BY_ROW, Call, Operand, calls_of

import devicemap
from devicemap._tensorflow.converters import CONVERTERS
from devicemap.compile.vectorizable_ops import EXCEPTIONS, OPS

NIGHTLY_MINUTES = float(os.environ.get("DEVICEMAP_OP_CALLS_MINUTES", "60"))
CALLS_PER_FUNCTION = 16
OWN = [op for op in CALLS if op in CONVERTERS or op in EXCEPTIONS]
"""Ops with a converter or a rule of this package."""
OTHERS = [op for op in CALLS if op not in OWN]
"""Ops with a converter of TensorFlow's."""


def _groups(ops: Sequence[str], *marks: Any) -> list[Any]:
    firsts = range(0, len(ops), CALLS_PER_FUNCTION)
    groups = [ops[first : first + CALLS_PER_FUNCTION] for first in firsts]
    return [pytest.param(group, marks=marks, id=f"{group[0]} to {group[-1]}") for group in groups]


DRAWN_BY_PLACEMENTS = frozenset(
    "Case If PartitionedCall StatefulPartitionedCall StatelessCase StatelessIf StatelessWhile While".split()
)
"""Ops that `PLACEMENTS` make."""

drawn = settings(
    deadline=None,
    database=None,
    phases=[Phase.generate],  # a smaller example would need many traces; `_check` finds the wrong call
    suppress_health_check=list(HealthCheck),
)


class Function:
    """Calls in a function of one row, and its sources."""

    def __init__(self, calls: Sequence[Call]) -> None:
        operands = {id(operand): operand for call in calls for operand in call.operands}.values()
        self.calls = calls
        self.differentiable = [_is_differentiable(call) for call in calls]
        self.stacked = [operand for operand in operands if operand.source == "stacked"]
        self.shared = {id(each): _shared(each) for each in operands if each.source != "stacked"}
        self.mapper = devicemap.DeviceMap(self, devices=["CPU:1"])
        self.specs = (
            tf.TensorSpec([None], tf.int32),
            *(tf.TensorSpec([None, *each.static_shape], each.dtype) for each in self.stacked),
        )

    def __call__(self, row: Any, *elements: Any) -> tuple[Any, ...]:
        """The results of all calls for one row."""
        known = {id(operand): element for operand, element in zip(self.stacked, elements)}

        def tensor_of(operand: Operand) -> Any:
            if operand.source == "stacked":
                return known[id(operand)]
            shared = self.shared[id(operand)]
            return tf.constant(shared) if operand.source == "constant" else tf.convert_to_tensor(shared)

        results = []
        for call, differentiable in zip(self.calls, self.differentiable):
            placed = PLACEMENTS[call.placement](lambda call=call: call.run(tensor_of), row)
            results += placed if differentiable else map(tf.stop_gradient, placed)
        return tuple(results)

    def data(self, rows: int) -> tuple[Any, ...]:
        """The first rows of the stacked operands."""
        return (tf.range(rows), *(tf.constant(each.values[:rows], each.dtype) for each in self.stacked))


def _shared(operand: Operand) -> Any:
    if operand.source == "variable":
        return tf.Variable(operand.values, dtype=operand.dtype, shape=operand.static_shape)
    return operand.values if operand.source == "constant" else tf.constant(operand.values, operand.dtype)


def _of_first_row(operand: Operand) -> Any:
    return tf.constant(operand.values[0] if operand.source == "stacked" else operand.values, operand.dtype)


def _is_differentiable(call: Call) -> bool:
    """Whether TensorFlow has a gradient of this call, and computes it right."""
    if call.op in ("MaxPoolGrad", "MaxPoolGradV2", "MaxPool3DGrad"):  # their gradients are zeros in many `tf.function`s
        return False
    # TensorFlow 2.16 fails for the gradient in a loop. A constant without elements is all ones there, and its axes are lost.
    if call.op == "Xdivy" and any(
        operand.source == "constant" and not operand.values.size for operand in call.operands
    ):
        return False
    inputs = {id(operand): _of_first_row(operand) for operand in call.operands}
    with tf.GradientTape() as tape:
        tape.watch([*inputs.values()])
        results = [each for each in call.run(lambda operand: inputs[id(operand)]) if _has_gradient(each)]
    try:
        tape.gradient(results, [*inputs.values()])
    except (LookupError, ValueError, NotImplementedError, tf.errors.OpError):
        return False
    return True


def _has_gradient(tensor: Any) -> bool:
    return tensor.dtype.is_floating or tensor.dtype.is_complex


def _is_defined(call: Call) -> bool:
    """Whether TensorFlow runs this call for one row, and does not infer a wrong shape."""
    if call.op == "MatrixDiagV3" and any(any(operand.unknown) for operand in call.operands):
        return False  # with num_rows and an unknown length, it has no columns
    try:
        call.run(_of_first_row)
    except (tf.errors.OpError, ValueError):
        return False
    return True


Outcome = tuple[list[Any], list[Any]]
"""Results, and gradients of their weighted sum."""


def _outcome(function: Function, mapped: Callable[..., Any], rows: int) -> Outcome:
    """What all calls give for the first rows."""
    data = function.data(rows)
    shared = [each for each in function.shared.values() if tf.is_tensor(each) or isinstance(each, tf.Variable)]
    sources = [each for each in [*data, *shared] if _has_gradient(each)]
    with tf.GradientTape() as tape:
        tape.watch(sources)
        results = [*mapped(*data)]
        targets = [result for result in results if _has_gradient(result)]
    if not (targets and sources):
        return results, []
    weights = [tf.cast(tf.reshape(np.cos(np.arange(np.size(each))), each.shape), each.dtype) for each in targets]
    gradients = tape.gradient(targets, sources, weights, unconnected_gradients="zero")
    return results, [tf.convert_to_tensor(gradient) for gradient in gradients]


def _difference(function: Function) -> str | None:
    """How the mapped function differs from the function of one row, for several counts of rows."""

    @tf.function(autograph=False, input_signature=function.specs)
    def mapped(*data: Any) -> Any:
        return function.mapper(data)

    def serial(*data: Any) -> list[Any]:
        rows = [function(*row) for row in zip(*map(tf.unstack, data))]
        return [tf.stack(result) for result in zip(*rows)]

    for rows in (1, ROWS):
        wanted = _outcome(function, serial, rows)
        try:
            got = _outcome(function, mapped, rows)
        except Exception as error:
            if _fails_row_by_row(function):
                return None
            lines = [
                line for line in str(error).splitlines() if line and not line.startswith(("  File", "Detected at"))
            ]
            return f"{type(error).__name__}: " + " ".join(lines)
        for kind, ours, theirs in zip(("result", "gradient"), got, wanted):
            for place, (one, other) in enumerate(zip(ours, theirs)):
                if not _same(one, other):
                    return f"{kind} {place} of {rows} rows is {one}\nbut must be {other}"
    return None


def _fails_row_by_row(function: Function) -> bool:
    """Whether `tf.map_fn` fails, too: some gradients lack the lengths that eager rows have."""

    @tf.function(autograph=False, input_signature=function.specs)
    def serial(*data: Any) -> Any:
        row_specs = [tf.TensorSpec(spec.shape[1:], spec.dtype) for spec in function.specs]
        results = tf.function(function, autograph=False).get_concrete_function(*row_specs).outputs
        dtypes = tuple(result.dtype for result in results)
        return tf.map_fn(lambda row: function(*row), data, fn_output_signature=dtypes)

    try:
        _outcome(function, serial, 1)
    except Exception:
        return True
    return False


def _same(got: Any, wanted: Any) -> bool:
    if got.dtype != wanted.dtype or got.shape != wanted.shape:
        return False
    if got.dtype == tf.bfloat16:
        got, wanted = tf.cast(got, tf.float32), tf.cast(wanted, tf.float32)
    if not _has_gradient(got):
        return np.array_equal(got, wanted)
    size = np.max(np.abs(wanted), initial=1.0, where=np.isfinite(wanted))
    return np.allclose(got, wanted, rtol=1e-3, atol=1e-4 * size, equal_nan=True)


def _plan(function: Function) -> Any:
    """How a function of calls is traced for all rows."""
    return traced(function.mapper, function.specs)


def _vectorised(calls: Sequence[Call]) -> Function:
    """A function of the calls without those that make the whole function run row by row."""
    function = Function(calls)
    try:
        plan = _plan(function)
    except devicemap.errors.FunctionError:
        others = [call for call in calls if _can_be_traced(call)]
        if len(others) == len(calls):
            raise
        return _vectorised(others)
    if plan.vectorized:
        return function
    others = [call for call in calls if not re.search(rf"\b{call.op}\b", plan.reason)]
    if len(others) == len(calls):
        others = [call for call in calls if _plan(Function([call])).vectorized]
    return _vectorised(others)


def _can_be_traced(call: Call) -> bool:
    """Whether TensorFlow can trace the call for one row: it runs eagerly, but lengths may be missing."""
    function = Function([call])
    specs = [tf.TensorSpec(spec.shape[1:], spec.dtype) for spec in function.specs]
    try:
        tf.function(function, autograph=False).get_concrete_function(*specs)
    except (ValueError, TypeError):
        return False
    return True


def _check(calls: Sequence[Call]) -> None:
    """Fail with each call that is wrong alone, or with all calls if only their combination is."""
    function = _vectorised([call for call in calls if _is_defined(call)])
    difference = _difference(function)
    if difference is not None:
        alone = {call: _difference(Function([call])) for call in function.calls}
        wrong = [f"{call!r}\n{reason}" for call, reason in alone.items() if reason]
        pytest.fail("\n\n".join(wrong or [f"{function.calls}\n{difference}"]), pytrace=False)


NOT_SIMPLEST = st.sampled_from([False, *[True] * 9])
"""Hypothesis begins with the simplest example, which `test_simple_calls_are_vectorised` has."""


@pytest.mark.parametrize("ops", [*_groups(OWN), *_groups(OTHERS, pytest.mark.nightly)])
def test_calls_of_each_op(ops: list[str]) -> None:
    @settings(drawn, max_examples=1, derandomize=True)
    @given(NOT_SIMPLEST, st.tuples(*map(calls_of, ops)))
    def check(not_simplest: bool, calls: tuple[Call, ...]) -> None:
        assume(not_simplest)
        _check(calls)

    check()


@pytest.mark.nightly
@pytest.mark.timeout(NIGHTLY_MINUTES * 60 + 600)
def test_random_calls() -> None:
    @settings(drawn, max_examples=20)
    @given(st.lists(st.sampled_from([*CALLS]).flatmap(calls_of), min_size=12, max_size=20))
    def check(calls: list[Call]) -> None:
        _check(calls)

    end = time.monotonic() + NIGHTLY_MINUTES * 60
    while time.monotonic() < end:
        check()


def _simplest(op: str) -> Call:
    return find(calls_of(op), lambda call: True, settings=settings(drawn, max_examples=1))


@pytest.mark.parametrize("ops", [*_groups(OWN), *_groups(OTHERS)])
def test_simple_calls_are_vectorised(ops: list[str]) -> None:
    calls = [_simplest(op) for op in ops if op not in RUNS_ROW_BY_ROW]
    if not _has_vectorised_form(calls):
        assert [call for call in calls if not _has_vectorised_form([call])] == []


def _has_vectorised_form(calls: Sequence[Call]) -> bool:
    return bool(_plan(Function(calls)).reason == "every op of fn has a vectorised form")


def test_each_op_of_the_table_is_drawn() -> None:
    assert {*CALLS} - RUNS_ROW_BY_ROW | DRAWN_BY_PLACEMENTS == {*OPS}
