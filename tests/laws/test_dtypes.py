"""Dtypes that TensorFlow knows for some ops only, and its NumPy mode."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import processes
import pytest
import tensorflow as tf

import devicemap
from devicemap.compile.random import row_seeds
from devicemap.errors import FunctionError

FLOAT8 = [tf.dtypes.experimental.float8_e4m3fn, tf.dtypes.experimental.float8_e5m2]


@pytest.mark.parametrize("options", [{}, {"batched": True}])
@pytest.mark.parametrize("dtype", FLOAT8, ids=lambda dtype: dtype.name)
def test_results_of_8_bit_floats_are_refused(dtype: Any, options: dict[str, Any]) -> None:
    with pytest.raises(
        FunctionError, match=f"is of {dtype.name}, which TensorFlow cannot gather; cast it to tf.float16"
    ):
        devicemap.parallel_map(lambda row: tf.cast(row, dtype), tf.ones([4, 2]), **options)


def test_seeds_of_many_rows() -> None:
    """Words of 32 bits: the seed, and the lower one of the row's index."""
    seeds = row_seeds(2**32 - 1, 2**40 + 2**32 - 2, 3).numpy().view(np.uint32)
    assert seeds.tolist() == [[2**32 - 1, 2**32 - 2], [2**32 - 1, 2**32 - 1], [2**32 - 1, 0]]


_NUMPY_MODE = """
import json, sys
import numpy as np, tensorflow as tf
tf.experimental.numpy.experimental_enable_numpy_behavior(**json.loads(sys.argv[1]))
import devicemap
devicemap.simulate_devices(3)
x = tf.reshape(tf.range(10, dtype=tf.float32), [5, 2])
ragged = tf.RaggedTensor.from_row_lengths(tf.range(6), [1, 2, 0, 3, 0])
sparse = tf.sparse.from_dense(tf.reshape(tf.range(10), [5, 2]))
def count(row):
    steps = tf.zeros_like(row)
    while row > 0.5:
        row, steps = row / 2, steps + 1
    return steps
for options in ({"devices": ["CPU:0"]}, {"devices": ["CPU:2", "CPU:0"]}, {"batch_size": 2}):
    call = lambda fn, data, **more: devicemap.parallel_map(fn, data, **options, **more)
    for more in ({}, {"vectorize": False}, {"batched": True}):
        np.testing.assert_array_equal(call(lambda row: row + 1, x, **more), x + 1)
    np.testing.assert_array_equal(call(count, x[:, 0]), [count(float(n)) for n in x[:, 0]])
    assert call(lambda row: row, ragged).to_list() == ragged.to_list()
    dense = call(lambda row: tf.sparse.to_dense(row), sparse)
    np.testing.assert_array_equal(dense, tf.sparse.to_dense(sparse))
    for seed in (0, 2**31, 2**32 - 1):
        seeds = call(lambda row, seed: seed, x, seed=seed)
        assert seeds.dtype == tf.int32
        assert seeds.numpy().view(np.uint32).tolist() == [[seed, row] for row in range(5)]
    empty = call(lambda row: row, x[:0], seed=None)
    assert empty.shape == [0, 2]
    dataset = tf.data.Dataset.from_tensor_slices(x)
    np.testing.assert_array_equal(call(lambda row, seed: row, dataset, seed=7), x)
    if "devices" in options:
        for spec in (x.shape, [None, 2]):
            inside = tf.function(lambda x: call(lambda row, seed: (row, seed), x, seed=2**32 - 1), autograph=False,
                                 input_signature=[tf.TensorSpec(spec, tf.float32)])
            np.testing.assert_array_equal(inside(x)[1].numpy().view(np.uint32)[:, 1], range(5))
"""


@pytest.mark.nightly
@pytest.mark.parametrize("mode", [{}, {"dtype_conversion_mode": "all"}, {"dtype_conversion_mode": "safe"}], ids=str)
def test_numpy_behaviour(mode: dict[str, str]) -> None:
    """It is switched on for good, so in a process of its own."""
    processes.run(_NUMPY_MODE, json.dumps(mode))
