"""Law 1 as a property: whatever the rows, dtype, devices and chunks, the answer is NumPy's to the last bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

import devicemap

DTYPES = [np.float16, np.float32, np.float64, np.int8, np.int32, np.int64, np.uint8, np.complex64]

row_counts = st.integers(0, 40)
inner_shapes = st.lists(st.integers(0, 4), max_size=3).map(tuple)
device_lists = st.permutations([f"CPU:{i}" for i in range(8)]).flatmap(
    lambda names: st.integers(1, 8).map(lambda count: names[:count])
)
batch_sizes = st.none() | st.integers(1, 10)
few = settings(max_examples=10, deadline=None)


def _affine(row: Any) -> Any:
    return row * 2 + 1


def _numbers(shape: tuple[int, ...], dtype: Any, seed: int) -> Any:
    """Small integers: no dtype rounds or overflows on them."""
    return np.random.default_rng(seed).integers(0, 50, size=shape).astype(dtype)


@few
@given(
    rows=row_counts,
    inner=inner_shapes,
    dtype=st.sampled_from(DTYPES),
    devices=device_lists,
    batched=st.booleans(),
    batch_size=batch_sizes,
    seed=st.integers(0, 2**16),
)
def test_any_map_is_the_serial_one(
    rows: int,
    inner: tuple[int, ...],
    dtype: Any,
    devices: list[str],
    batched: bool,
    batch_size: int | None,
    seed: int,
) -> None:
    x = _numbers((rows, *inner), dtype, seed)
    y = devicemap.parallel_map(_affine, x, devices=devices, batched=batched, batch_size=batch_size)
    assert y.dtype == dtype
    assert y.shape == x.shape
    np.testing.assert_array_equal(y, x * dtype(2) + dtype(1))


@few
@given(rows=row_counts, sizes=st.integers(1, 10), devices=device_lists, batch_size=batch_sizes, batched=st.booleans())
def test_any_dataset_is_its_rows(
    rows: int, sizes: int, devices: list[str], batch_size: int | None, batched: bool
) -> None:
    x = np.arange(rows * 2, dtype=np.float32).reshape(rows, 2)
    dataset = tf.data.Dataset.from_tensor_slices(x)
    if batched:
        dataset = dataset.batch(sizes)
    y = devicemap.parallel_map(_affine, dataset, devices=devices, batched=batched, batch_size=batch_size)
    np.testing.assert_array_equal(y, x * 2 + 1)
