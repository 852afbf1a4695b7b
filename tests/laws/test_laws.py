"""Law 1: every case, on every device set, in every way of running, equals the serial map."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from cases import CASES, ROWS, Case
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import assert_same, first_rows, gradients_of, one_by_one
from ways import CALLS

import devicemap

WAYS = {"eager": (0, 1, ROWS), "known rows": (0, ROWS), "unknown rows": (0, 2, ROWS)}
"""How a map is called, and with how many rows."""


def _wanted(case: Case, rows: int) -> Any:
    """The serial map's first rows, where as many rows alone have the same shapes."""
    return first_rows(case.serial(), rows) if rows and case.shape_known else case.serial(rows)


def _counts(case: Case, rows: tuple[int, ...]) -> list[int]:
    return [n for n in rows if n or case.shape_known]


def _skip_xla_on_gpus(devices: list[str]) -> None:
    if devices[0].startswith("GPU"):
        pytest.skip("not applicable: XLA does not compile for emulated GPUs")


@pytest.mark.parametrize("case", CASES, ids=str)
def test_same_answer(case: Case, devices: list[str]) -> None:
    """The static shape survives in a `tf.function` that knows the number of rows."""
    if case.name.startswith("compiled"):
        _skip_xla_on_gpus(devices)
    mapper = devicemap.DeviceMap(case.fn, devices=devices, batched=case.batched, **case.options)
    for how, counts in WAYS.items():
        called = CALLS[how](mapper, case.data)
        for rows in _counts(case, counts):
            data, wanted = first_rows(case.data, rows), _wanted(case, rows)
            assert_same(called(data), wanted)
            if how == "known rows":
                for leaf in tf.nest.flatten(called.get_concrete_function(data).structured_outputs):
                    assert leaf.shape.is_fully_defined() or not (case.shape_known and isinstance(leaf, tf.Tensor))


@pytest.mark.in_ci(8)
@pytest.mark.parametrize("batch_size", [1, 5, 100, None])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_same_answer_in_chunks(case: Case, batch_size: int | None, devices: list[str]) -> None:
    if case.name.startswith("compiled"):
        _skip_xla_on_gpus(devices)
    mapper = devicemap.DeviceMap(case.fn, devices=devices, batched=case.batched, batch_size=batch_size, **case.options)
    for rows in _counts(case, (0, 1, ROWS)):
        data = first_rows(case.data, rows)
        if batch_size is not None:
            assert_same(mapper(data), _wanted(case, rows))
        dataset = tf.data.Dataset.from_tensor_slices(data)
        assert_same(mapper(dataset.batch(4) if case.batched else dataset), _wanted(case, rows))


@pytest.mark.in_ci(1)
@pytest.mark.parametrize("vectorize", ["auto", False])
def test_shapes_of_ragged_and_sparse_results_are_those_of_the_serial_map(devices: list[str], vectorize: Any) -> None:
    x = tf.reshape(tf.range(20.0), [5, 4])
    for fn, signature in (
        (lambda row: tf.RaggedTensor.from_row_lengths(row, [1, 3]), tf.RaggedTensorSpec([2, None], tf.float32)),
        (lambda row: tf.sparse.from_dense(row), tf.SparseTensorSpec([4], tf.float32)),
    ):
        serial = tf.function(lambda x: tf.map_fn(fn, x, fn_output_signature=signature))
        mapper = devicemap.DeviceMap(fn, devices=devices, vectorize=vectorize)
        wanted = serial.get_concrete_function(x).structured_outputs.shape
        assert tf.function(lambda x: mapper(x)).get_concrete_function(x).structured_outputs.shape == wanted
        in_chunks = devicemap.DeviceMap(fn, devices=devices, vectorize=vectorize, batch_size=2)(x)
        for got in (mapper(x), in_chunks):
            assert got.shape == wanted
            assert_same(got, serial(x))


def test_results_of_8_bit_floats_are_refused() -> None:
    with pytest.raises(devicemap.errors.FunctionError, match="e5m2, which TensorFlow cannot gather; cast it to"):
        devicemap.parallel_map(lambda row: tf.cast(row, tf.dtypes.experimental.float8_e5m2), tf.ones([4, 2]))


def test_lists_that_the_signature_does_not_have_become_tensors(devices: list[str]) -> None:
    rows = tf.range(1, 6)
    signature = {"results": [tf.int32, tf.int32], "pair": tf.int32}
    got = devicemap.parallel_map(
        lambda n: {"results": [n, n], "pair": [n, n]}, rows, devices=devices, fn_output_signature=signature
    )
    assert_same(got, {"results": [rows, rows], "pair": tf.stack([rows, rows], 1)})


def test_lists_are_tuples_in_datasets_and_files(devices: list[str], tmp_path: Path) -> None:
    rows = tf.range(1, 6)
    mapper = devicemap.DeviceMap(
        lambda n: [n, 2 * n], devices=devices, batch_size=2, fn_output_signature=[tf.int32, tf.int32]
    )
    chunks = list(mapper.stream(rows))
    assert [type(chunk) for chunk in chunks] == [list] * 3
    for chunk, element in zip(chunks, mapper.as_dataset(rows), strict=True):
        assert_same(tuple(chunk), element)
    mapper.write(rows, tmp_path)
    assert_same(tuple(map(tf.constant, devicemap.open_results(tmp_path).load())), (rows, 2 * rows))


DTYPES = [np.float16, np.float32, np.float64, np.int8, np.int32, np.int64, np.uint8, np.complex64]


@settings(max_examples=10, deadline=None)
@given(
    shape=st.lists(st.integers(0, 4), max_size=3).flatmap(
        lambda inner: st.integers(0, 40).map(lambda rows: (rows, *inner))
    ),
    dtype=st.sampled_from(DTYPES),
    devices=st.lists(st.sampled_from([f"CPU:{i}" for i in range(8)]), min_size=1, unique=True),
    options=st.fixed_dictionaries({"batched": st.booleans(), "batch_size": st.none() | st.integers(1, 10)}),
    sizes=st.none() | st.integers(1, 10),
    seed=st.integers(0, 2**16),
)
def test_any_map_is_the_serial_one(
    shape: tuple[int, ...], dtype: Any, devices: list[str], options: dict[str, Any], sizes: int | None, seed: int
) -> None:
    """In memory, or a dataset of samples or of batches of `sizes` rows."""
    x = np.random.default_rng(seed).integers(0, 50, size=shape).astype(dtype)  # no dtype rounds or overflows on them
    data = x
    if sizes is not None:
        data = tf.data.Dataset.from_tensor_slices(x)
        data = data.batch(sizes) if options["batched"] else data
    y = devicemap.parallel_map(lambda row: row * 2 + 1, data, devices=devices, **options)
    assert (y.dtype, y.shape) == (dtype, x.shape)
    np.testing.assert_array_equal(y, x * dtype(2) + dtype(1))


WEIGHTS = tf.Variable([[0.5, -0.2, 0.1], [0.3, 0.2, -0.4], [-0.1, 0.6, 0.2]])
X = tf.reshape(tf.range(21.0), [7, 3]) / 10.0 - 1.0
_compare = partial(assert_same, rtol=1e-3, atol=1e-4)


def _in_a_loop(row: Any) -> Any:
    return tf.while_loop(lambda i, x: i < 3, lambda i, x: (i + 1, tf.tanh(tf.linalg.matvec(WEIGHTS, x))), (0, row))[1]


@pytest.mark.in_ci(1)
@pytest.mark.parametrize("vectorize", ["auto", False])
def test_a_map_inside_of_a_map(devices: list[str], vectorize: Any) -> None:
    inner = devicemap.DeviceMap(_in_a_loop, devices=devices, vectorize=vectorize)
    mapper = devicemap.DeviceMap(lambda r: inner(tf.stack([r, r * 2])), devices=devices, vectorize=vectorize)
    serial = lambda x: one_by_one(lambda r: one_by_one(_in_a_loop, tf.stack([r, r * 2])), x)
    assert not mapper.explain(X).ordered  # assigning replicas would be a write of the outer function
    _compare(mapper(X), serial(X))
    _compare(gradients_of(mapper, X, WEIGHTS), gradients_of(serial, X, WEIGHTS))
    for run in (tf.vectorized_map, tf.function(lambda fn, x: tf.vectorized_map(fn, x))):
        _compare(run(lambda rows: inner(rows), X[None]), one_by_one(_in_a_loop, X)[None])


def _in_a_branch(row: Any) -> Any:
    return tf.cond(WEIGHTS[0, 0] < 9.0, lambda: tf.linalg.matvec(WEIGHTS, row), lambda: row)


def _writing(count: Any, generator: Any, row: Any) -> Any:
    count.assign_add(1.0)
    return row * 2.0, generator.normal([3])


@pytest.mark.in_ci(2)
@pytest.mark.parametrize("options", [{}, {"vectorize": False}], ids=str)
@pytest.mark.parametrize(
    "fn",
    [lambda r: tf.tanh(tf.linalg.matvec(WEIGHTS, r)) * r, _in_a_loop, _in_a_branch],
    ids=["straight", "loop", "branch"],
)
def test_compiled_functions(devices: list[str], fn: Any, options: dict[str, Any]) -> None:
    """XLA takes variables of its own device alone, and hands nothing that a loop or branch keeps to its gradient."""
    _skip_xla_on_gpus(devices)
    serial = partial(one_by_one, fn)
    mapper = devicemap.DeviceMap(fn, devices=devices, jit_compile=True, **options)
    _compare(gradients_of(mapper, X, WEIGHTS), gradients_of(serial, X, WEIGHTS))
    mapper = devicemap.DeviceMap(fn, devices=devices, **options)
    around = tf.function(lambda x: mapper(x) + 1.0, jit_compile=True)
    for function in (around, tf.function(lambda x: around(x))) if options == {} else ():
        _compare(function(X), serial(X) + 1.0)
    count, generator = tf.Variable(0.0), tf.random.Generator.from_seed(1)
    writing = devicemap.DeviceMap(partial(_writing, count, generator), devices=devices, jit_compile=True, **options)
    doubled, drawn = writing(tf.ones([9, 3]))
    np.testing.assert_array_equal(doubled, 2 * np.ones([9, 3]))
    assert count.numpy() == 9
    assert len(np.unique(drawn)) == 27


@pytest.mark.private("knowing that XLA compiles")
def test_what_xla_compiles_after_gradients(devices: list[str]) -> None:
    """TensorFlow changes loops for their gradients, so that XLA refuses them, or ends the process."""
    _skip_xla_on_gpus(devices)
    mapper = devicemap.DeviceMap(_in_a_loop, devices=devices)
    with tf.GradientTape(), tf.GradientTape() as tape:
        total = tf.reduce_sum(mapper(X))
    tape.gradient(total, WEIGHTS)
    _compare(tf.function(lambda x: mapper(x), jit_compile=True)(X), one_by_one(_in_a_loop, X))


@pytest.mark.private("another gradient for an op, where TensorFlow's own fails in a loop")
def test_what_the_user_passes_in_is_not_changed(devices: list[str]) -> None:
    @tf.function
    def inner(row: Any) -> Any:
        counts = tf.histogram_fixed_width(row, [-1.0, 1.0], 2)  # has no vectorised form
        values = tf.linalg.svd(tf.stack([row, row]), compute_uv=False)
        return tf.gather(row, [2, 0]) * WEIGHTS[0, 0] + values + tf.cast(counts, tf.float32)

    concrete = inner.get_concrete_function(tf.TensorSpec([3], tf.float32))
    before = concrete.graph.as_graph_def().SerializeToString(deterministic=True)
    wanted = gradients_of(inner, X[0])[0]
    for options in ({}, {"vectorize": False}, {"batch_size": 2}):
        mapper = devicemap.DeviceMap(lambda row: inner(row) * 2.0, devices=devices, **options)
        np.testing.assert_allclose(mapper(X)[0], inner(X[0]) * 2.0, rtol=1e-4)
        if "batch_size" not in options:
            np.testing.assert_allclose(gradients_of(mapper, X)[0][0], 4 * wanted, rtol=1e-3)
    np.testing.assert_allclose(devicemap.DeviceMap(concrete, devices=devices)(X)[0], inner(X[0]), rtol=1e-4)
    assert inner.get_concrete_function(tf.TensorSpec([3], tf.float32)) is concrete
    assert concrete.graph.as_graph_def().SerializeToString(deterministic=True) == before
    assert not any(hasattr(op, "pfor_converter") for op in concrete.graph.get_operations())
    np.testing.assert_allclose(gradients_of(inner, X[0])[0], wanted, rtol=1e-6)
