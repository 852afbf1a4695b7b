"""Law 1 as a property: whatever the rows, dtype, devices and chunks, the answer is NumPy's to the last bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

import devicemap

DTYPES = [np.float16, np.float32, np.float64, np.int8, np.int32, np.int64, np.uint8, np.complex64]

few = settings(max_examples=20, deadline=None)


@few
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
