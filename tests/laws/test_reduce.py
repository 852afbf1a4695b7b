"""Law 1 for reductions: what TensorFlow's op gives of the mapped rows, however these are spread."""

from __future__ import annotations

import functools
from functools import partial
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from cases import CASES, ROWS, Case
from graphs import between_devices, partitions
from oracle import assert_same, gradients_of

from devicemap import DeviceMap, Reducer, parallel_reduce
from devicemap._tensorflow.calls import Cancellation
from devicemap.compile.reduction import Reduction
from devicemap.data.rows import as_rows
from devicemap.errors import FunctionError

TWO = ["CPU:1", "CPU:0"]
OPS = {"sum": tf.reduce_sum, "mean": tf.reduce_mean, "min": tf.reduce_min, "max": tf.reduce_max}


@pytest.mark.in_ci(5)
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("way", ["one graph", "chunks", "tf.function"])
def test_same_as_the_op_over_all_rows(case: Case, op: str, way: str, devices: list[str]) -> None:
    if "jit_compile" in case.options and devices[0].startswith("GPU"):
        pytest.skip("not applicable: XLA does not compile for emulated GPUs")
    mapped = case.serial()
    options = {**case.options, "devices": devices, "batched": case.batched}
    mapper = DeviceMap(case.fn, **options, batch_size=4 if way == "chunks" else None)
    reduce = tf.function(mapper.reduce) if way == "tf.function" else mapper.reduce
    if all(isinstance(leaf, tf.Tensor) and leaf.dtype not in (tf.string, tf.bool) for leaf in tf.nest.flatten(mapped)):
        wanted = tf.nest.map_structure(lambda leaf: OPS[op](leaf, 0), mapped)
        assert_same(reduce(case.data, op), wanted, rtol=1e-4, atol=1e-4)
    else:
        with pytest.raises(FunctionError, match=r"reduced|no sum|no mean|no min|no max"):
            reduce(case.data, op)


def _numbers(dtype: str, rows: int) -> Any:
    return 2 * (tf.cast(tf.random.stateless_uniform([rows, 2], [1, 2], 0.0, 100.0), dtype) // 2)


DTYPES = "float16", "bfloat16", "float32", "float64", "int8", "uint8", "int32", "int64"
SPECIAL = {
    "float32": [1, np.nan, 3, -np.inf, np.inf],
    "float16": [-np.inf, 2, -np.inf, 5, 7],
    "uint8": [255, 255, 3, 250, 0],
    "int8": [127, 127, -128, 3, 100],
    "int64": [2**63 - 1, 5, -(2**63), 2**62, 9],
    "uint64": [2**63, 5, 2**62, 2**62 - 9, 1],
}
NUMBERS = {f"{rows} of {dtype}": _numbers(dtype, rows) for dtype in DTYPES for rows in (0, 1, 2, ROWS)}
NUMBERS |= {f"limits of {dtype}": tf.constant(values, dtype) for dtype, values in SPECIAL.items()}
NUMBERS["no complex64"] = tf.zeros([0], tf.complex64)


@pytest.mark.in_ci(8)
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_of_every_dtype(op: str, name: str, devices: list[str]) -> None:
    """Also infinities, what is no number, what wraps around, and the mean of nothing: as TensorFlow has it."""
    data = NUMBERS[name]
    if data.dtype.is_complex and op in ("min", "max"):
        pytest.skip("not applicable: complex numbers have no order")
    if "limits" in name:
        devices = TWO  # min and max of what is no number depend on the kernel
    wanted = OPS[op](data, 0)
    for options in ({}, {"batch_size": 3}):
        got = parallel_reduce(lambda row: row + tf.zeros_like(row), data, op, devices=devices, **options)
        assert got.dtype == wanted.dtype
        if data.dtype.is_complex or "limits" in name:
            np.testing.assert_array_equal(got, wanted)
        else:
            epsilon = {"float16": 2e-3, "bfloat16": 2e-2}.get(data.dtype.name, 1e-6)
            np.testing.assert_allclose(*(tf.cast(x, tf.float64) for x in (got, wanted)), rtol=epsilon)


def test_checks_of_numerics_see_the_numbers_of_the_user_only(devices: list[str]) -> None:
    tf.debugging.enable_check_numerics()
    try:
        for batch_size in (None, 2):
            for op in OPS:
                got = parallel_reduce(lambda x: x * 2.0, tf.range(5.0), op, devices=devices, batch_size=batch_size)
                assert got == OPS[op](tf.range(5.0) * 2.0)
    finally:
        tf.debugging.disable_check_numerics()


@pytest.mark.in_ci(1)
@pytest.mark.parametrize("batch_size", [None, 100_000])
def test_rounding_does_not_grow_with_the_rows(batch_size: int | None, devices: list[str]) -> None:
    rows = 2_000_000

    def fn(x: Any) -> Any:
        return x + 0.1, tf.stack([x, x + 1.0, x - 1.0]) * 0.1

    for op, times in (("sum", rows), ("mean", 1)):
        one, three = parallel_reduce(fn, tf.zeros([rows]), op, devices=devices, batch_size=batch_size)
        np.testing.assert_allclose(one, 0.1 * times, rtol=2e-6)
        np.testing.assert_allclose(three, np.array([0.0, 0.1, -0.1]) * times, rtol=2e-6)


def test_what_travels_has_the_size_of_the_result(devices: list[str]) -> None:
    """Rows give 400 kB each, of which a few are kept at a time."""
    mapper = DeviceMap(lambda n: tf.fill([100_000], tf.cast(n, tf.float32)), devices=devices)
    program = mapper._program.reducing(Reduction("mean"))
    compiled = program.compiled_for(as_rows(tf.range(64)))
    for built in compiled.chunk_functions(Cancellation()).values():
        state, rows = built()([tf.range(9)], 9)
        assert (state.shape, state.dtype, rows.numpy()) == ([1, 100_000], tf.float32, [9])
    np.testing.assert_allclose(mapper.reduce(tf.range(64), "mean")[:3], 31.5)


def test_no_device_waits_for_another() -> None:
    devices = ["CPU:1", "CPU:0", "CPU:2"]
    mapper = DeviceMap(lambda row: tf.sin(row), devices=devices)
    assert between_devices(partitions(lambda: mapper.reduce(tf.zeros([9, 2]), "sum"))) == []


@pytest.mark.in_ci(2)
@pytest.mark.parametrize("options", [{}, {"batch_size": 4}, {"batch_size": 1}], ids=str)
def test_a_reducer_of_ones_own_goes_in_the_order_of_rows(options: dict[str, Any], devices: list[str]) -> None:
    angles = tf.random.stateless_uniform([ROWS], [1, 2])
    later = tf.matmul  # associative and not commutative
    reducer = Reducer(np.eye(2, dtype="float32"), step=later, merge=later, finish=lambda m: {"first": m[0], "all": m})

    def fn(a: Any) -> Any:
        return tf.stack([[tf.cos(a), 1.0 + a], [0.1, tf.sin(a)]])

    wanted = np.linalg.multi_dot([fn(a).numpy() for a in angles])
    got = parallel_reduce(fn, angles, reducer, devices=devices, **options)
    np.testing.assert_allclose(got["all"], wanted, rtol=1e-4)
    np.testing.assert_allclose(got["first"], wanted[0], rtol=1e-4)
    np.testing.assert_array_equal(parallel_reduce(fn, angles[:0], reducer, devices=devices)["all"], np.eye(2))


def test_a_reducer_of_large_results_goes_in_the_order_of_rows(devices: list[str]) -> None:
    """Rows give 400 kB each, of which a few are kept at a time: affine maps, composed one after another."""
    composed = lambda first, second: (first[0] * second[0], first[1] * second[0] + second[1])
    reducer = Reducer((1.0, np.zeros(100_000, "float32")), step=composed, merge=composed)
    got = parallel_reduce(
        lambda n: (1.0 + 0.1 * n, tf.fill([100_000], n)), tf.range(31.0) % 7.0, reducer, devices=devices
    )
    wanted = functools.reduce(composed, [(1.0 + 0.1 * (i % 7), float(i % 7)) for i in range(31)])
    np.testing.assert_allclose([got[0], got[1][0], got[1][-1]], [*wanted, wanted[1]], rtol=1e-4)


class _Moments(tf.experimental.ExtensionType):
    total: tf.Tensor
    square: tf.Tensor


def _add(a: Any, b: Any) -> Any:
    return _Moments(a.total + b.total, a.square + b.square)


STATES: dict[str, tuple[Any, Reducer, Any]] = {
    "objects": (
        lambda n: _Moments(tf.cast(n, tf.float32), tf.cast(n * n, tf.float32)),
        Reducer(_Moments(0.0, 0.0), _add, _add),
        _Moments(45.0, 285.0),
    ),
    "a list, which is one tensor": (
        lambda n: n,
        Reducer([0, 0], lambda state, n: [state[0] + n, state[1] + 1], tf.add),
        tf.constant([45, 10]),
    ),
    "bfloat16": (
        lambda n: tf.cast(n, tf.bfloat16),
        Reducer(tf.constant(0, tf.bfloat16), tf.add, tf.add),
        tf.constant(45, tf.bfloat16),
    ),
    "text": (tf.strings.as_string, Reducer(tf.constant(""), tf.add, tf.add), tf.constant("0123456789")),
}


@pytest.mark.parametrize("name", STATES)
def test_states_of_any_structure_and_dtype(name: str) -> None:
    fn, reducer, wanted = STATES[name]
    for options in ({}, {"batch_size": 4}):
        got = parallel_reduce(fn, tf.range(10), reducer, devices=TWO, **options)
        assert_same(*(tf.nest.flatten(each, expand_composites=True) for each in (got, wanted)))
        assert type(got) is type(wanted)


def test_a_reducer_may_close_over_tensors_of_a_graph() -> None:
    """Those of the graph that is being built, whichever a kept mapper and reducer were traced in before."""
    scale: list[Any] = []
    reducer = Reducer(0.0, lambda a, b: a + b, lambda a, b: a + b, lambda total: total * scale[-1])
    mapper = DeviceMap(lambda x: x, devices=TWO)

    def scaled(by: Any) -> Any:
        scale.append(by)
        return mapper.reduce(tf.range(4.0), reducer)

    assert [float(tf.function(scaled)(tf.constant(by))) for by in (2.0, 3.0)] == [12.0, 18.0]


@pytest.mark.in_ci(1)
@pytest.mark.parametrize("batched", [False, True])
def test_gradients_are_those_of_one_device(batched: bool, devices: list[str]) -> None:
    variable, data = tf.Variable(3.0), tf.random.stateless_normal([ROWS, 2], [1, 2])
    mapper = DeviceMap(lambda row: tf.sin(variable * row), devices=devices, batched=batched)
    for op in ("sum", "mean"):
        reduce = partial(mapper.reduce, reducer=op)
        wanted = gradients_of(lambda x: OPS[op](tf.sin(variable * x), 0), data, variable)
        in_a_graph = tf.function(lambda: gradients_of(reduce, data, variable))
        for got in (gradients_of(reduce, data, variable), in_a_graph()):
            assert_same(got, wanted, rtol=1e-4)


def test_a_merge_that_fails_ends_the_call(no_thread_stays: None) -> None:
    def merge(state: Any, other: Any) -> Any:
        with tf.control_dependencies([tf.debugging.assert_less(other, 6.0, "large")]):
            return state + other

    reducer = Reducer(0.0, lambda state, row: state + row, merge)
    mapper = DeviceMap(tf.identity, devices=TWO, batch_size=1)
    with pytest.raises(FunctionError, match=r"merge of the reduction failed: .*large") as raised:
        mapper.reduce(tf.range(400.0), reducer)
    assert isinstance(raised.value, tf.errors.InvalidArgumentError)
    assert raised.value.__traceback__ is not None  # which refers to the frames of the call
    assert mapper.report.error is not None


@pytest.mark.parametrize("way", ["one graph", "chunks", "tf.function"])
def test_every_result_has_a_row_for_each_row(way: str, devices: list[str]) -> None:
    """The sum of the second result would count a row twice."""
    fn = lambda rows: (rows, tf.concat([rows, rows[:1]], 0))
    mapper = DeviceMap(fn, batched=True, devices=devices, batch_size=5 if way == "chunks" else None)
    for call in (mapper, partial(mapper.reduce, reducer="sum")):
        call = tf.function(call) if way == "tf.function" else call
        with pytest.raises((FunctionError, tf.errors.InvalidArgumentError), match="returned another number of rows"):
            call(tf.range(20.0))
