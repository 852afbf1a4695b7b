"""Results that cannot be gathered, which only the run shows. See also tests/test_messages.py."""

from __future__ import annotations

from typing import Any

import pytest
import tensorflow as tf
from ways import SEVERAL, WAYS, X

import devicemap
from devicemap.errors import FunctionError

WRONG_ROWS: list[tuple[Any, int]] = [
    (lambda b: tf.boolean_mask(b, b[:, 0] > 3.0), 0),
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
