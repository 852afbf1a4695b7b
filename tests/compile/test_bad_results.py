"""Results that cannot be gathered, which only the run shows. See also tests/test_messages.py."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from ways import ONE, SEVERAL, WAYS, X

import devicemap
from devicemap.errors import FunctionError

WRONG_ROWS: list[Any] = [
    lambda b: tf.boolean_mask(b, b[:, 0] > 3.0),
    lambda b: {"a": b[tf.shape(b)[0] :], "b": b},
    lambda b: (b, tf.RaggedTensor.from_tensor(b)[1:]),
    lambda b: tf.sparse.from_dense(b[1:]),
]
OTHER_ROWS = "fn with batched=True returned another number of rows than it was given; expected one row for each row"


@pytest.mark.parametrize("fn", WRONG_ROWS, ids=range(len(WRONG_ROWS)))
def test_wrong_number_of_rows(fn: Any) -> None:
    for way in WAYS.values():
        mapper = devicemap.DeviceMap(fn, **way, batched=True)
        with pytest.raises(
            FunctionError, match=rf"^<lambda> failed on .*{OTHER_ROWS}.* \[\d\] \[\d\]\. Set batched=False for"
        ) as caught:
            mapper(X[:5])
        (shard,) = caught.value.shards
        assert f"<lambda> failed on {shard}: " in str(caught.value)
        assert f" [{len(shard)}]" in str(caught.value)
    mapper = devicemap.DeviceMap(fn, **SEVERAL, batched=True)
    function = tf.function(lambda x: mapper(x), input_signature=[tf.TensorSpec([None, 2])], autograph=False)
    with pytest.raises(tf.errors.InvalidArgumentError, match=OTHER_ROWS):
        function(X[:5])


@pytest.mark.parametrize("options", [{}, {"batch_size": 4}, {"batch_size": 4, "on_error": "skip"}])
def test_a_scalar_of_unknown_shape(options: Any) -> None:
    with pytest.raises(FunctionError, match=OTHER_ROWS + r".* \[0\] \[\d\]"):
        devicemap.parallel_map(lambda b: tf.numpy_function(np.sum, [b], tf.float32), X, **ONE, batched=True, **options)


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
