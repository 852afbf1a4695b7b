"""The converters of matrix products and of systems of linear equations."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from devicemap._tensorflow.pfor import (
    NotVectorizableError,
    convert_as_tensorflow,
    merge_axes,
    pfor,
    run_again,
    split_axis,
    wrap_stacked,
)


def convert_product(given: Any) -> Any:
    """Multiply matrices. A matrix that all rows share is multiplied once by the concatenated matrices of all rows.

    TensorFlow's kernel of Transpose does not copy matrices with one row or column.
    """
    (left, left_stacked, _), (right, right_stacked, _) = given.input(0), given.input(1)
    batched = given.op_type != "MatMul"
    left_adjoint, right_adjoint = (given.get_attr(name) for name in _FLAGS[batched])
    left_rank, right_rank = (each.shape.rank for each in given.op.inputs)
    if left_rank is None or right_rank is None:
        raise NotVectorizableError("has inputs of unknown rank")
    if not batched and left.dtype.is_complex:  # the transpose is not the adjoint
        left = tf.linalg.matrix_transpose(left) if left_adjoint else left
        right = tf.linalg.matrix_transpose(right) if right_adjoint else right
        left_adjoint = right_adjoint = False
    if left_stacked and not right_stacked and right_rank == 2:
        left = tf.linalg.adjoint(left) if left_adjoint else left
        return wrap_stacked([_times_shared(left, right, right_adjoint)])
    if right_stacked and not left_stacked and left_rank == 2:  # A B = (B* A*)*
        right = right if right_adjoint else tf.linalg.adjoint(right)
        return wrap_stacked([tf.linalg.adjoint(_times_shared(right, left, not left_adjoint))])
    rows = given.pfor.loop_len_vector
    left = left if left_stacked else pfor._stack(left, rows).t
    right = right if right_stacked else pfor._stack(right, rows).t
    left, right = _with_same_batch(left, right)
    axes = left.shape.rank - 2
    product = tf.matmul(
        merge_axes(left, axes), merge_axes(right, axes), adjoint_a=left_adjoint, adjoint_b=right_adjoint
    )
    return wrap_stacked([split_axis(product, left, axes)])


def convert_solve(given: Any) -> Any:
    """Solve systems of linear equations. A matrix that all rows share is factorised once, for the columns of all rows."""
    (matrix, matrix_stacked, _), (columns, _, _) = given.input(0), given.input(1)
    if matrix_stacked or any(each.shape.rank != 2 for each in given.op.inputs):
        return convert_as_tensorflow(given)
    of_all_rows = tf.transpose(columns, [1, 0, 2])
    length, rows, count = tf.unstack(tf.shape(of_all_rows))
    (solved,) = run_again(given.op, [matrix, tf.reshape(of_all_rows, [length, rows * count])])
    result = tf.transpose(tf.reshape(solved, tf.shape(of_all_rows)), [1, 0, 2])
    result.set_shape(columns.shape)
    return wrap_stacked([result])


_FLAGS = {False: ("transpose_a", "transpose_b"), True: ("adj_x", "adj_y")}


def _times_shared(rows: Any, matrix: Any, adjoint: bool) -> Any:
    """Multiply `[..., n, k]` by one matrix `[k, m]`, or by the adjoint of one `[m, k]`."""
    axes = rows.shape.rank - 1
    return split_axis(tf.matmul(merge_axes(rows, axes), matrix, adjoint_b=adjoint), rows, axes)


def _with_same_batch(left: Any, right: Any) -> tuple[Any, Any]:
    """Broadcast the batch axes of `[rows, ..., n, k]` and `[rows, ..., k, m]`.

    The oneDNN kernel of BatchMatMulV2, which TensorFlow's converter uses, is incorrect for more than four axes:
    https://github.com/tensorflow/tensorflow/issues/117700
    """
    ranks = left.shape.rank, right.shape.rank
    for _ in range(max(ranks) - ranks[0]):
        left = tf.expand_dims(left, 1)
    for _ in range(max(ranks) - ranks[1]):
        right = tf.expand_dims(right, 1)
    batches = left.shape[1:-2], right.shape[1:-2]
    if batches[0].is_fully_defined() and batches[0] == batches[1]:
        return left, right
    lengths = tf.broadcast_dynamic_shape(tf.shape(left)[:-2], tf.shape(right)[:-2])
    return tuple(tf.broadcast_to(each, tf.concat([lengths, tf.shape(each)[-2:]], 0)) for each in (left, right))
