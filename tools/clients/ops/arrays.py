"""Shapes, indices and segments."""

from __future__ import annotations

from typing import Any

import tensorflow as tf
from clients.data import NUMBERS, PAIRS, POSITIVE, VECTORS, bools, integers, normal, uniform

_TABLE = tf.constant([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
_IDS = integers(0, 3, 4)
_BEYOND = integers(-2, 5, 4)
_ORDERED = tf.sort(_IDS, 1)
_MATRICES = normal(3, 4)
_SEGMENTS = {
    "max": tf.math.segment_max,
    "mean": tf.math.segment_mean,
    "min": tf.math.segment_min,
    "prod": tf.math.segment_prod,
    "sum": tf.math.segment_sum,
}
_UNSORTED = {
    "max": tf.math.unsorted_segment_max,
    "mean": tf.math.unsorted_segment_mean,
    "min": tf.math.unsorted_segment_min,
    "prod": tf.math.unsorted_segment_prod,
    "sqrt_n": tf.math.unsorted_segment_sqrt_n,
    "sum": tf.math.unsorted_segment_sum,
}


def _segments() -> dict[str, Any]:
    table: dict[str, Any] = {}
    for name, op in _SEGMENTS.items():
        table[f"segment_{name}"] = (lambda x, op=op: op(x, [0, 0, 1, 3]), normal(4, 2))
    for name, op in _UNSORTED.items():
        table[f"unsorted_segment_{name}"] = (lambda x, op=op: op(x, [2, 0, 2, 3], 4), normal(4, 2))
        table[f"unsorted_segment_{name}, ids of the row"] = (lambda x, i, op=op: op(x, i, 3), (VECTORS, _IDS))
        table[f"unsorted_segment_{name}, ids out of range"] = (
            lambda x, i, op=op: op(x, tf.where(i > 2, -1, i), 3),
            (VECTORS, _BEYOND),
        )
    table["segment_sum, ids of the row"] = (lambda x, i: tf.reduce_sum(tf.math.segment_sum(x, i)), (VECTORS, _ORDERED))
    table["unsorted_segment_sum, segments of the row"] = (
        lambda x, n: tf.reduce_sum(tf.math.unsorted_segment_sum(x, [0, 1, 0, 1], n)),
        (VECTORS, integers(2, 5)),
    )
    return table


_SHAPES = {
    "broadcast_to": (lambda x: tf.broadcast_to(x, [3, 4]), VECTORS),
    "broadcast_to of a scalar": (lambda x: tf.broadcast_to(x[0], [3, 2]), VECTORS),
    "concat": (lambda x, y: tf.concat([x, y, tf.ones([2])], 0), PAIRS),
    "concat of the last axis": (lambda x: tf.concat([x, x], -1), _MATRICES),
    "ensure_shape": (lambda x: tf.ensure_shape(x, [4]), VECTORS),
    "expand_dims": (lambda x: (tf.expand_dims(x, 0), tf.expand_dims(x, -1)), VECTORS),
    "fill of the row": (lambda x: tf.fill([2, 3], x[0]), VECTORS),
    "identity": (lambda x: x, VECTORS),
    "identity_n": (lambda x, y: tuple(tf.identity_n([y, x])), PAIRS),
    "constants": (lambda x: (tf.constant([1, 2]), tf.zeros([0, 2])), VECTORS),
    "meshgrid": (lambda x, y: tuple(tf.meshgrid(x, y, indexing="ij")), PAIRS),
    "one_hot": (lambda n: tf.one_hot(n, 4), _BEYOND),
    "one_hot of another axis": (lambda n: tf.one_hot(n, 4, on_value=2.0, off_value=-1.0, axis=0), _BEYOND),
    "one_hot of scalars": (lambda n: tf.one_hot(n, 4), integers(0, 4)),
    "one_hot of values of the row": (lambda n, x: tf.one_hot(n, 4, on_value=x[0], off_value=x[1]), (_IDS, VECTORS)),
    "pad": (lambda x: tf.pad(x, [[1, 0], [2, 1]]), _MATRICES),
    "pad by the row": (lambda x, n: tf.reduce_sum(tf.pad(x, [[n, 1]], constant_values=2.0)), (VECTORS, integers(0, 3))),
    "pad with another value": (lambda x: tf.pad(x, [[1, 1]], constant_values=3.0), VECTORS),
    "pad with a value of the row": (lambda x: tf.pad(x, [[1, 1]], constant_values=x[0]), VECTORS),
    "pad, reflected": (lambda x: tf.pad(x, [[2, 1]], "REFLECT"), VECTORS),
    "pad, symmetric": (lambda x: tf.pad(x, [[2, 1]], "SYMMETRIC"), VECTORS),
    "rank, shape and size": (lambda x: (tf.rank(x), tf.shape(x), tf.size(x), tf.shape_n([x])[0]), _MATRICES),
    "repeat": (lambda x: tf.repeat(x, 2), VECTORS),
    "repeat as the row says": (lambda x, n: tf.reduce_sum(tf.repeat(x, n) ** 2), (VECTORS, integers(0, 3, 4))),
    "reshape": (lambda x: tf.reshape(x, [2, -1]), VECTORS),
    "reshape to a vector": (lambda x: tf.reshape(x, [-1]), _MATRICES),
    "reshape by the row": (lambda x, n: tf.reduce_sum(tf.reshape(x, [n, -1]), 1)[0], (VECTORS, 2 ** integers(0, 3))),
    "reverse": (lambda x: tf.reverse(x, [-1]), _MATRICES),
    "reverse of an axis of the row": (lambda m, n: tf.reverse(m, [n]), (normal(3, 3), integers(0, 2))),
    "reverse_sequence": (lambda x, n: tf.reverse_sequence(x, n, 1), (_MATRICES, integers(0, 5, 3))),
    "roll": (lambda x: tf.roll(x, [1, -2], [0, 1]), _MATRICES),
    "roll by the row": (lambda x, n: tf.roll(x, n, 0), (VECTORS, integers(-5, 6))),
    "sequence_mask": (lambda n: tf.sequence_mask(n, 5), integers(0, 6, 3)),
    "slice": (lambda x: tf.slice(x, [1, 0], [2, -1]), _MATRICES),
    "slice by the row": (lambda x, n: tf.slice(x, [n], [2]), (VECTORS, integers(0, 3))),
    "slice to where the row says": (lambda x, n: tf.reduce_sum(x[:n]), (VECTORS, integers(-3, 5))),
    "space and batch": (lambda x: tf.space_to_batch(x[None], [2], [[0, 0]]), _MATRICES[:, :2]),
    "split": (lambda x: tuple(tf.split(x, 2)), VECTORS),
    "split of sizes": (lambda x: tuple(tf.split(x, [1, -1], -1)), _MATRICES),
    "split of sizes of the row": (
        lambda x, n: tf.reduce_sum(tf.split(x, [n, 4 - n], num=2)[1]),
        (VECTORS, integers(0, 5)),
    ),
    "squeeze": (lambda x: tf.squeeze(x), normal(1, 4, 1)),
    "squeeze of an axis": (lambda x: tf.squeeze(x, [-1]), normal(1, 4, 1)),
    "stack": (lambda x, y: tf.stack([x, y], -1), PAIRS),
    "strided_slice": (lambda x: x[::2, tf.newaxis, ..., -1:0:-1], _MATRICES),
    "strided_slice of an ellipsis": (lambda x: x[..., 1], _MATRICES),
    "strided_slice by the row": (lambda x, n: x[n], (VECTORS, integers(-4, 4))),
    "tile": (lambda x: tf.tile(x, [2, 1]), _MATRICES),
    "tile by the row": (lambda x, n: tf.reduce_sum(tf.tile(x, [n])), (VECTORS, integers(0, 3))),
    "transpose": (tf.transpose, normal(2, 3, 4)),
    "transpose of axes": (lambda x: tf.transpose(tf.stop_gradient(x), [1, -1, 0]), normal(2, 3, 4)),
    "transpose, conjugate": (lambda x: tf.transpose(x, conjugate=True), normal(2, 3, dtype=tf.complex64)),
    "unravel_index": (lambda n: tf.unravel_index(n, [3, 4]), integers(0, 12, 2)),
    "unstack": (lambda x: tuple(tf.unstack(x, axis=1)), _MATRICES[..., :3]),
    "zeros_like and ones_like": (lambda x: (tf.zeros_like(x), tf.ones_like(x, tf.int32)), VECTORS),
}
_INDICES = {
    "boolean_mask": (lambda x, m: tf.reduce_sum(tf.boolean_mask(x, m)), (VECTORS, bools(4))),
    "boolean_mask of constants": (lambda x: tf.boolean_mask(x, [True, False, True, True]), VECTORS),
    "dynamic_partition": (
        lambda x, i: tuple(tf.reduce_sum(part) for part in tf.dynamic_partition(x, i, 3)),
        (VECTORS, _IDS),
    ),
    "dynamic_stitch": (lambda x: tf.dynamic_stitch([[0, 2], [1, 3]], [x[:2], x[2:]]), VECTORS),
    "gather": (lambda x: tf.gather(x, [2, 0, 0]), VECTORS),
    "gather by the row": (tf.gather, (VECTORS, _IDS)),
    "gather of a shared table": (lambda i: tf.gather(_TABLE, i), _IDS),
    "gather of a shared table, axis 1": (lambda i: tf.gather(_TABLE, i, axis=1), integers(0, 2, 4)),
    "gather of another axis": (lambda x, i: tf.gather(x, i, axis=-1), (_MATRICES, _IDS)),
    "gather of batch_dims": (lambda x, i: tf.gather(x, i, batch_dims=1), (_MATRICES, integers(0, 4, 3, 2))),
    "gather_nd": (lambda x, i: tf.gather_nd(x, i), (_MATRICES, integers(0, 3, 5, 2))),
    "gather_nd of a shared table": (lambda i: tf.gather_nd(_TABLE, i), integers(0, 2, 5, 2)),
    "gather_nd of batch_dims": (
        lambda x, i: tf.gather_nd(x, i, batch_dims=1),
        (_MATRICES, integers(0, 4, 3, 1)),
    ),
    "scatter_nd": (lambda i, x: tf.scatter_nd(i, x, [5]), (integers(0, 5, 4, 1), VECTORS)),
    "scatter_nd of shared indices": (lambda x: tf.scatter_nd([[0], [2], [2], [1]], x, [5]), VECTORS),
    "tensor_scatter_nd_add": (
        lambda x, i, y: tf.tensor_scatter_nd_add(x, i, y),
        (VECTORS, integers(0, 4, 4, 1), POSITIVE),
    ),
    "tensor_scatter_nd_max and min": (
        lambda x, i, y: (tf.tensor_scatter_nd_max(x, i, y), tf.tensor_scatter_nd_min(x, i, y)),
        (VECTORS, integers(0, 4, 4, 1), POSITIVE),
    ),
    "tensor_scatter_nd_sub": (
        lambda i, y: tf.tensor_scatter_nd_sub(tf.ones([4]), i, y),
        (integers(0, 4, 4, 1), POSITIVE),
    ),
    "tensor_scatter_nd_update": (
        lambda x, y: tf.tensor_scatter_nd_update(x, [[1], [3]], y),
        (VECTORS, normal(2)),
    ),
    "tensor_scatter_nd_update where the row says": (
        lambda x, i: tf.tensor_scatter_nd_update(x, [[i]], [9.0]),
        (VECTORS, integers(0, 4)),
    ),
    "random_index_shuffle": (
        lambda n: tf.random.experimental.index_shuffle(n, [1, 2], 8),
        integers(0, 9, dtype=tf.int32),
    ),
    "meshgrid of the row's ranges": (lambda n: tf.reduce_sum(tf.meshgrid(tf.range(n), tf.range(3))[0]), integers(1, 4)),
    "norm of gathered": (lambda x, i: tf.norm(tf.gather(x, i)), (VECTORS, _IDS)),
    "lower_bound": (lambda x: tf.searchsorted(tf.cumsum(x), [0.5, 1.0]), uniform(0.1, 1.0, 4)),
    "bools": (lambda x: (x > 0, tf.cast(x > 0, tf.int32)), NUMBERS),
}
OPS = {**_SHAPES, **_INDICES, **_segments()}
