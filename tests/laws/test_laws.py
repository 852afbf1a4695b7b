"""Law 1: every case, on every device set, in every way of running, equals the serial map."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from cases import CASES, IN_CI, ROWS, Case
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import assert_same, first_rows

import devicemap


def _in_memory(mapper: Any, case: Case, data: Any) -> Any:
    return mapper(data)


def _unknown_rows(mapper: Any, case: Case, data: Any) -> Any:
    """Inside the user's `tf.function`, which does not know the number of rows."""

    def relax(leaf: Any) -> Any:
        shape = [None, *leaf.shape[1:]]
        if isinstance(leaf, tf.RaggedTensor):
            return tf.RaggedTensorSpec(shape, leaf.dtype, leaf.ragged_rank, leaf.row_splits.dtype)
        return (tf.SparseTensorSpec if isinstance(leaf, tf.SparseTensor) else tf.TensorSpec)(shape, leaf.dtype)

    if case.name not in _functions:
        signature = [tf.nest.map_structure(relax, data)]
        _functions[case.name] = tf.function(lambda data: mapper(data), input_signature=signature)
    return _functions[case.name](data)


def _known_rows(mapper: Any, case: Case, data: Any) -> Any:
    """Inside the user's `tf.function`, which knows: the static shape must survive."""
    function = tf.function(lambda: mapper(data))
    for leaf in tf.nest.flatten(function.get_concrete_function().structured_outputs):
        assert not (case.shape_known and isinstance(leaf, tf.Tensor)) or leaf.shape.is_fully_defined()
    return function()


def _dataset(mapper: Any, case: Case, data: Any) -> Any:
    dataset = tf.data.Dataset.from_tensor_slices(data)
    return mapper(dataset.batch(4) if case.batched else dataset)


_functions: dict[str, Callable[[Any], Any]] = {}
WAYS = {
    _in_memory: (0, 1, ROWS),
    _known_rows: (0, ROWS),
    _unknown_rows: (0, 2, ROWS),
}
IN_MOST_WAYS_LIKE_ANOTHER = {_in_memory: (0, ROWS), _unknown_rows: (2,)}


def _wanted(case: Case, rows: int) -> Any:
    """The serial map's first rows, where as many rows alone have the same shapes."""
    return first_rows(case.serial(), rows) if rows and case.shape_known else case.serial(rows)


def _counts(case: Case, rows: tuple[int, ...]) -> list[int]:
    return [n for n in rows if n or case.shape_known]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_same_answer(case: Case, devices: list[str]) -> None:
    if case.name.startswith("compiled") and devices[0].startswith("GPU"):
        pytest.skip("not applicable: XLA does not compile for emulated GPUs")
    mapper = devicemap.DeviceMap(case.fn, devices=devices, batched=case.batched, **case.options)
    _functions.clear()
    for way, counts in (WAYS if case in IN_CI else IN_MOST_WAYS_LIKE_ANOTHER).items():
        for rows in _counts(case, counts):
            assert_same(way(mapper, case, first_rows(case.data, rows)), _wanted(case, rows))


@pytest.mark.in_ci(8)
@pytest.mark.parametrize("batch_size", [1, 5, 100, None])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_same_answer_in_chunks(case: Case, batch_size: int | None, devices: list[str]) -> None:
    if case.name.startswith("compiled") and devices[0].startswith("GPU"):
        pytest.skip("not applicable: XLA does not compile for emulated GPUs")
    mapper = devicemap.DeviceMap(case.fn, devices=devices, batched=case.batched, batch_size=batch_size, **case.options)
    for rows in _counts(case, (0, 1, ROWS)):
        data = first_rows(case.data, rows)
        if batch_size is not None:
            assert_same(mapper(data), _wanted(case, rows))
        assert_same(_dataset(mapper, case, data), _wanted(case, rows))


def test_same_answer_on_a_plain_cpu() -> None:
    """One CPU device takes a shard per core."""
    mapper = devicemap.DeviceMap(lambda row: (row * 2, tf.reduce_sum(row)), devices=["CPU:2"])
    for rows in (1, 15, 16, 64, 1000):
        data = tf.random.normal([rows, 3])
        assert_same(mapper(data), (data * 2, tf.reduce_sum(data, 1)))


@pytest.mark.in_ci(1)
@pytest.mark.parametrize("vectorize", ["auto", False])
def test_shapes_of_ragged_and_sparse_results_are_those_of_the_serial_map(devices: list[str], vectorize: Any) -> None:
    x = tf.reshape(tf.range(20.0), [5, 4])
    for fn, signature in (
        (lambda row: tf.RaggedTensor.from_row_lengths(row, [1, 3]), tf.RaggedTensorSpec([2, None], tf.float32)),
        (lambda row: tf.sparse.from_dense(row), tf.SparseTensorSpec([4], tf.float32)),
    ):
        serial = _serial_of(fn, signature)
        mapper = devicemap.DeviceMap(fn, devices=devices, vectorize=vectorize)
        wanted = serial.get_concrete_function(x).structured_outputs.shape
        assert tf.function(lambda x: mapper(x)).get_concrete_function(x).structured_outputs.shape == wanted
        in_chunks = devicemap.DeviceMap(fn, devices=devices, vectorize=vectorize, batch_size=2)(x)
        for got in (mapper(x), in_chunks):
            assert got.shape == wanted
            assert_same(got, serial(x))


def _serial_of(fn: Any, signature: Any) -> Any:
    return tf.function(lambda x: tf.map_fn(fn, x, fn_output_signature=signature))


@pytest.mark.parametrize("batched", [False, True])
@pytest.mark.parametrize("dtype", [tf.dtypes.experimental.float8_e4m3fn, tf.dtypes.experimental.float8_e5m2], ids=str)
def test_results_of_8_bit_floats_are_refused(dtype: Any, batched: bool) -> None:
    with pytest.raises(
        devicemap.errors.FunctionError, match=f"{dtype.name}, which TensorFlow cannot gather; cast it to"
    ):
        devicemap.parallel_map(lambda row: tf.cast(row, dtype), tf.ones([4, 2]), batched=batched)


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
