"""Sets, sparse and ragged tensors in a row and as rows, and `tf.TensorArray`."""

from __future__ import annotations

from typing import Any

import tensorflow as tf
from clients.data import COUNTS, NUMBERS, ROWS, VECTORS, integers, normal

_SETS = (integers(0, 6, 1, 4), integers(0, 6, 1, 4))
_RAGGED = tf.RaggedTensor.from_row_lengths(tf.range(36.0) / 7.0, tf.range(ROWS))
_RAGGED_OF_RAGGED = tf.RaggedTensor.from_row_lengths(
    _RAGGED.with_row_splits_dtype(tf.int64), [2, 0, 1, 1, 2, 0, 0, 3, 0]
)
_SPARSE = tf.sparse.from_dense(tf.cast(integers(0, 3, 5), tf.float32))
_A_RAGGED = tf.RaggedTensorSpec([None], tf.float32)
_SOME_RAGGED = tf.RaggedTensorSpec([None, None], tf.float32, ragged_rank=1)


def _array(values: Any, **options: Any) -> Any:
    return tf.TensorArray(values.dtype, values.shape[0], element_shape=values.shape[1:], **options).unstack(values)


def _written(row: Any) -> Any:
    array = tf.TensorArray(tf.float32, 3)
    for i in range(3):
        array = array.write(i, row[i] * tf.ones([2]))
    return array.stack()


def _written_in_a_loop(row: Any) -> Any:
    array = tf.TensorArray(tf.float32, 5, element_shape=[])
    total = 0.0
    for i in tf.range(5):
        total += row[i % 4]
        array = array.write(i, total)
    return array.stack()


def _written_backwards(row: Any) -> Any:
    array = tf.TensorArray(tf.float32, 4, element_shape=[], clear_after_read=False)
    for i in tf.range(4):
        array = array.write(3 - i, row[i])
    return array.stack() + array.read(0)


def _grown(row: Any) -> Any:
    array = tf.TensorArray(tf.float32, 0, dynamic_size=True, element_shape=[])
    for i in tf.range(tf.cast(tf.abs(row[0]) * 3, tf.int32) + 1):
        array = array.write(i, row[1] + tf.cast(i, tf.float32))
    return tf.reduce_sum(array.stack())


def _written_where_the_row_says(row: Any, place: Any) -> Any:
    array = tf.TensorArray(tf.float32, 4, element_shape=[]).unstack(tf.zeros([4]))
    return tf.TensorArray(tf.float32, 4, element_shape=[]).write(place, row[0]).stack() + array.stack()


_SETS_AND_SPARSE = {
    "sets, union": (
        lambda a, b: tf.sparse.to_dense(tf.sets.union(a, b), -1)[0],
        _SETS,
        tf.RaggedTensorSpec([None], tf.int32),
    ),
    "sets, union, counted": (lambda a, b: tf.sets.size(tf.sets.union(a, b))[0], _SETS),
    "sets, intersection": (lambda a, b: tf.reduce_sum(tf.sets.intersection(a, b).values), _SETS),
    "sets, difference": (lambda a, b: tf.size(tf.sets.difference(a, b, aminusb=False).values), _SETS),
    "sparse, add": (
        lambda x: tf.sparse.to_dense(tf.sparse.add(tf.sparse.from_dense(x), tf.sparse.eye(3))),
        normal(3, 3),
    ),
    "sparse, bincount": (
        lambda n: tf.sparse.to_dense(tf.sparse.bincount(n, maxlength=6, minlength=6)),
        integers(0, 6, 4),
    ),
    "sparse, concat": (
        lambda x: tf.sparse.to_dense(tf.sparse.concat(0, [tf.sparse.from_dense(x)] * 2)),
        normal(2, 3),
    ),
    "sparse, from_dense, counted": (lambda x: tf.size(tf.sparse.from_dense(tf.nn.relu(x)).values), VECTORS),
    "sparse, map_values": (
        lambda x: tf.sparse.reduce_sum(tf.sparse.map_values(tf.square, tf.sparse.from_dense(x))),
        VECTORS,
    ),
    "sparse, mask": (lambda x: tf.reduce_sum(tf.boolean_mask(x, x > 0)), VECTORS),
    "sparse, minimum": (  # its gradient fails
        lambda x: tf.stop_gradient(
            tf.sparse.to_dense(tf.sparse.minimum(tf.sparse.from_dense(x), tf.sparse.from_dense(-x)))
        ),
        VECTORS,
    ),
    "sparse, reduce_max": (lambda x: tf.sparse.reduce_max(tf.sparse.from_dense(x), 1), normal(2, 3)),
    "sparse, reorder": (
        lambda x: tf.sparse.to_dense(
            tf.sparse.reorder(tf.SparseTensor([[2], [0]], x[:2], [4])), validate_indices=False
        ),
        VECTORS,
    ),
    "sparse, reset_shape": (lambda x: tf.sparse.to_dense(tf.sparse.reset_shape(tf.sparse.from_dense(x), [6])), VECTORS),
    "sparse, reshape": (lambda x: tf.sparse.to_dense(tf.sparse.reshape(tf.sparse.from_dense(x), [2, 2])), VECTORS),
    "sparse, retain": (  # in a loop, its gradient fails
        lambda x: tf.stop_gradient(
            tf.sparse.reduce_sum(tf.sparse.retain(tf.sparse.from_dense(x), [True, False, True, True]))
        ),
        VECTORS,
    ),
    "sparse, slice": (lambda x: tf.sparse.to_dense(tf.sparse.slice(tf.sparse.from_dense(x), [1], [2])), VECTORS),
    "sparse, softmax": (lambda x: tf.sparse.to_dense(tf.sparse.softmax(tf.sparse.from_dense(x))), normal(2, 3)),
    "sparse, split": (
        lambda x: tf.sparse.to_dense(tf.sparse.split(tf.sparse.from_dense(x), 2, 0)[1]),
        VECTORS,
    ),
    "sparse, to_dense of the row's indices": (
        lambda n, x: tf.sparse.to_dense(tf.SparseTensor(tf.cast(tf.sort(n)[:, None], tf.int64), x, [6])),
        (tf.tile([[1, 4]], [ROWS, 1]), normal(2)),
    ),
    "sparse, to_indicator": (
        lambda n: tf.sparse.to_indicator(tf.sparse.from_dense(n[None]), 6)[0],
        integers(0, 6, 4, dtype=tf.int64),
    ),
    "sparse, transpose": (lambda x: tf.sparse.to_dense(tf.sparse.transpose(tf.sparse.from_dense(x))), normal(2, 3)),
    "sparse, segment_sum": (
        lambda x: tf.sparse.segment_sum(x, [0, 2, 3], [0, 0, 1], num_segments=3),
        normal(4, 2),
    ),
    "sparse, segment_mean of the row's rows": (
        lambda n: tf.sparse.segment_mean(tf.constant([[1.0], [2.0], [3.0]]), n, [0, 0, 1], num_segments=2),
        integers(0, 3, 3),
    ),
    "sparse, segment_sqrt_n": (lambda x: tf.sparse.segment_sqrt_n(x, [0, 2, 3], [0, 0, 1]), normal(4, 2)),
    "sparse, fill_empty_rows": (
        lambda x: tf.sparse.to_dense(tf.sparse.fill_empty_rows(tf.sparse.from_dense(x), 7.0)[0]),
        tf.nn.relu(normal(3, 2)),
    ),
    "sparse, cross": (
        lambda s: tf.size(tf.sparse.cross([s[None, None], s[None, None]]).values),
        tf.strings.as_string(COUNTS),
    ),
    "sparse rows": (lambda row: tf.sparse.reduce_sum(row) * 2, _SPARSE, tf.float32),
    "sparse rows made dense": (lambda row: tf.sparse.to_dense(row) * 2, _SPARSE, tf.TensorSpec([5], tf.float32)),
}
_RAGGED_TENSORS = {
    "ragged, boolean_mask": (lambda x: tf.ragged.boolean_mask(x, x > 0), VECTORS, _A_RAGGED),
    "ragged, constant of the row": (
        lambda x: tf.reduce_sum(tf.RaggedTensor.from_row_splits(x, [0, 1, 4]), 1),
        VECTORS,
    ),
    "ragged, cross": (
        lambda n: tf.size(tf.ragged.cross([n[None], n[None]]).flat_values),
        NUMBERS,
    ),
    "ragged, from_tensor": (
        lambda x: tf.reduce_mean(tf.RaggedTensor.from_tensor(x, lengths=[1, 3]), 1),
        normal(2, 4),
    ),
    "ragged, from_row_lengths of the row": (
        lambda n: tf.reduce_sum(
            tf.RaggedTensor.from_row_lengths(tf.range(tf.reduce_sum(n)), n).to_tensor(shape=[2, 5]), 1
        ),
        integers(0, 5, 2),
    ),
    "ragged, map_flat_values": (
        lambda x: tf.ragged.map_flat_values(tf.square, tf.RaggedTensor.from_row_splits(x, [0, 1, 4])).to_tensor(),
        VECTORS,
    ),
    "ragged, range": (lambda n: tf.reduce_sum(tf.ragged.range(n).to_tensor(shape=[3, 5]), 1), integers(0, 5, 3)),
    "ragged, stack": (lambda x: tf.ragged.stack([x, x[:2]]).to_tensor(), VECTORS),
    "ragged, to_tensor": (
        lambda x: tf.RaggedTensor.from_row_splits(x, [0, 1, 4]).to_tensor(-1.0),
        VECTORS,
    ),
    "ragged, to_sparse": (
        lambda x: tf.sparse.to_dense(tf.RaggedTensor.from_row_splits(x, [0, 1, 4]).to_sparse()),
        VECTORS,
    ),
    "ragged, softmax by segments": (
        lambda x: tf.nn.softmax(tf.RaggedTensor.from_row_splits(x, [0, 1, 4]).to_tensor(-1e9)),
        VECTORS,
    ),
    "ragged, matmul": (
        lambda x: tf.matmul(tf.RaggedTensor.from_row_splits(x, [0, 1, 2]).to_tensor(), tf.ones([4, 2])),
        normal(2, 4),
    ),
    "ragged rows, reduced": (tf.reduce_sum, _RAGGED, tf.float32),
    "ragged rows, twice": (lambda row: row * 2, _RAGGED, _A_RAGGED),
    "ragged rows, sorted": (lambda row: tf.stop_gradient(tf.sort(row)), _RAGGED, _A_RAGGED),  # fails without elements
    "ragged rows, padded": (
        lambda row: tf.ensure_shape(tf.pad(row, [[0, 8 - tf.size(row)]]), [8]),
        _RAGGED,
        tf.TensorSpec([8], tf.float32),
    ),
    "ragged rows of ragged, reduced": (
        lambda row: tf.reduce_sum(row),
        _RAGGED_OF_RAGGED,
        tf.float32,
    ),
    "ragged rows of ragged": (lambda row: row + 1, _RAGGED_OF_RAGGED, _SOME_RAGGED),
    "ragged out": (lambda n: tf.range(tf.cast(n, tf.float32)), COUNTS, _A_RAGGED),
}
_ARRAYS = {
    "TensorArray, concat": (lambda x: _array(x).concat(), normal(3, 2)),
    "TensorArray, gather": (lambda x: _array(x).gather([2, 0, 0]), normal(3, 2)),
    "TensorArray, gather of the row": (lambda x, n: _array(x).gather(n), (normal(3, 2), integers(0, 3, 4))),
    "TensorArray, grown": (_grown, VECTORS),
    "TensorArray, read": (lambda x: _array(x).read(1), normal(3, 2)),
    "TensorArray, read where the row says": (lambda x, n: _array(x).read(n), (normal(3, 2), integers(0, 3))),
    "TensorArray, scatter": (
        lambda x: tf.TensorArray(tf.float32, 4, element_shape=[2]).scatter([3, 0, 1], x).stack(),
        normal(3, 2),
    ),
    "TensorArray, split": (
        lambda x: tf.TensorArray(tf.float32, 2, element_shape=[None], infer_shape=False).split(x, [1, 3]).read(1),
        VECTORS,
    ),
    "TensorArray, split and concat": (
        lambda x: tf.TensorArray(tf.float32, 2, element_shape=[None], infer_shape=False).split(x, [1, 3]).concat() * 2,
        VECTORS,
    ),
    "TensorArray, size": (lambda x: _array(x).size() + tf.cast(x[0, 0], tf.int32), normal(3, 2)),
    "TensorArray, unstack and stack": (lambda x: _array(x).stack()[::-1], normal(3, 2)),
    "TensorArray, written": (_written, VECTORS),
    "TensorArray, written backwards": (_written_backwards, VECTORS),
    "TensorArray, written in a loop": (_written_in_a_loop, VECTORS),
    "TensorArray, written where the row says": (_written_where_the_row_says, (VECTORS, integers(0, 4))),
}
OPS = {**_SETS_AND_SPARSE, **_RAGGED_TENSORS, **_ARRAYS}
