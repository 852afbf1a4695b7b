"""Results that cannot be gathered, which only the run shows, and results of unknown rank. See also tests/test_messages.py."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from ways import SEVERAL, WAYS, Options, X, ways

import devicemap
from devicemap.errors import FunctionError

WRONG_ROWS: list[tuple[Any, int]] = [
    (lambda b: tf.boolean_mask(b, b[:, 0] > 3.0), 0),
    (lambda b: tf.concat([b, b], 0), 0),
    (lambda b: (b, b[:0]), 1),
    (lambda b: {"a": b[tf.shape(b)[0] :], "b": b}, 0),
    (lambda b: (b, tf.RaggedTensor.from_tensor(b)[1:]), 1),
    (lambda b: tf.sparse.from_dense(b[1:]), 0),
]


@pytest.mark.parametrize(("fn", "leaf"), WRONG_ROWS, ids=range(len(WRONG_ROWS)))
def test_wrong_number_of_rows(fn: Any, leaf: int) -> None:
    for way in WAYS.values():
        mapper = devicemap.DeviceMap(fn, **way, batched=True)
        with pytest.raises(FunctionError, match=r"^fn returned \d+ row\(s\) for the \d+ row\(s\) it was") as caught:
            mapper(X[:5])
        (shard,) = caught.value.shards
        assert f"for the {len(shard)} row(s) it was given ({shard}; leaf {leaf} of its results)" in str(caught.value)
        assert shard.start == 0 or "batch_size" in way  # fn is right for the single row of the first chunk
    mapper = devicemap.DeviceMap(fn, **SEVERAL, batched=True)
    function = tf.function(lambda x: mapper(x), input_signature=[tf.TensorSpec([None, 2])], autograph=False)
    with pytest.raises(tf.errors.InvalidArgumentError, match="fn returned another number of rows than it was given"):
        function(X[:5])


def _square(batch: Any) -> Any:
    """As many columns as rows."""
    return tf.zeros([tf.shape(batch)[0], tf.shape(batch)[0]])


def _of_uneven_rank(batch: Any) -> Any:
    return tf.numpy_function(lambda rows: rows if len(rows) == 2 else rows[..., None], [batch], tf.float32)


@pytest.mark.parametrize(
    ("fn", "shapes"),
    [(_square, r"\(2,\), \(1,\)"), (lambda b: {"a": b, "b": _square(b)}, r"\(1,\)"), (_of_uneven_rank, r"\(2, 1\)")],
)
def test_different_inner_shapes(fn: Any, shapes: str) -> None:
    message = rf"^fn returned dense results of different inner shapes for different shards: .*{shapes}; "
    with pytest.raises(FunctionError, match=message):
        devicemap.DeviceMap(fn, **SEVERAL, batched=True)(X[:5])


def _dense(x: Any) -> Any:
    return tf.numpy_function(lambda array: array * 2, [x], tf.float32)


def _sparse(x: Any) -> Any:
    whole = tf.sparse.from_dense(x * 2)
    parts = (whole.indices, whole.values, whole.dense_shape)
    return tf.SparseTensor(*[tf.raw_ops.PlaceholderWithDefault(input=part, shape=None) for part in parts])


@pytest.mark.in_ci(4)
@ways
@pytest.mark.parametrize(("fn", "batched"), [(_dense, False), (_dense, True), (_sparse, False)])
@pytest.mark.parametrize("rows", [6, 5, 1, 0])
def test_results_of_unknown_rank(rows: int, fn: Any, batched: bool, way: Options) -> None:
    mapper = devicemap.DeviceMap(fn, **way, batched=batched)
    results = [mapper(X[:rows])]
    if "batch_size" not in way:
        for known in (rows, None):
            function = tf.function(lambda x: mapper(x), input_signature=[tf.TensorSpec([known, 2])], autograph=False)
            results.append(function(X[:rows]))
    for result in results:
        # The number of axes is unknown without rows.
        assert tf.shape(result).numpy().tolist() == ([rows, 2] if rows else [0])
        assert isinstance(result, tf.SparseTensor) is (fn is _sparse)
        if rows:
            dense = tf.sparse.to_dense(result) if fn is _sparse else result
            np.testing.assert_array_equal(dense, X[:rows] * 2, strict=True)
