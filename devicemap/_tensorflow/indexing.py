"""Converters of lookups, slices, segments and TensorLists, whose indices may differ between rows."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from devicemap._tensorflow.pfor import (
    NotVectorizableError,
    convert_as_tensorflow,
    for_all_rows,
    pfor,
    run_again,
    wrap_stacked,
)


def convert_lookup(given: Any) -> Any:
    """Look up the indices or keys of all rows at once, in a variable or table that all rows share."""
    wanted, *others = given.inputs[1:]
    defaults = [given.unstacked_input(place) for place in range(2, 2 + len(others))]
    (found,) = run_again(given.op, [given.unstacked_input(0), wanted.t, *defaults])
    return [pfor.wrap(found, wanted.is_stacked)]


def convert_gather_nd(given: Any) -> Any:
    """Gather from a tensor of each row or from a shared one, for which TensorFlow has no converter."""
    params, indices = given.input(0), for_all_rows(given, 1)
    return wrap_stacked([tf.gather_nd(params.t, indices, batch_dims=int(params.is_stacked))])


def convert_segments(given: Any) -> Any:
    """Number the segments of all rows consecutively.

    TensorFlow's converter turns an id that is too large into a segment of the next row. Here, it stays too large, because the
    kernel raises an error on CPUs and drops the element on GPUs.
    """
    data, ids = for_all_rows(given, 0), tf.cast(for_all_rows(given, 1), tf.int64)
    segments = tf.cast(given.unstacked_input(2), tf.int64)
    rows = tf.cast(given.pfor.loop_len_vector, tf.int64)
    shape = tf.concat([rows, tf.ones_like(tf.shape(ids, tf.int64)[1:])], 0)
    offset = segments * tf.reshape(tf.range(rows[0]), shape)
    total = segments * rows[0]
    of_all = tf.where(ids < 0, ids, tf.where(ids < segments, ids + offset, ids + total))
    result = getattr(tf.raw_ops, given.op_type)(data=data, segment_ids=of_all, num_segments=total)
    shape = tf.shape(result, tf.int64)
    return wrap_stacked([tf.reshape(result, tf.concat([rows, [segments], shape[1:]], 0))])


def convert_shared_segments(given: Any) -> Any:
    """Reduce segments that all rows share: the rows become the second axis."""
    results = run_again(given.op, [swapped(given.stacked_input(0)), given.unstacked_input(1)])
    return wrap_stacked(map(swapped, results))


def convert_slice(given: Any) -> Any:
    """Slice. TensorFlow's converter gathers slices that begin at a different index in each row.

    The gather kernel on GPUs returns zeros for an index out of bounds, for which a slice must raise an error.
    """
    given.stack_inputs([0])
    begin, begin_stacked, _ = given.input(1)
    if begin_stacked:
        lengths, size = tf.shape(given.stacked_input(0), begin.dtype)[1:], given.unstacked_input(2)
        end = begin + tf.maximum(size, 0)  # a size of -1 ends with the axis
        given.inputs[1] = pfor.wrap(_checked(begin, (begin >= 0) & (end <= lengths)), True)
    return convert_as_tensorflow(given)


def convert_strided_slice(given: Any) -> Any:
    """Slice, or gather the element at an index that differs between rows, as in `x[i]`."""
    begin, begin_stacked, _ = given.input(1)
    if not begin_stacked:
        return convert_as_tensorflow(given)
    depth = given.op.inputs[1].shape[0]
    others = [given.get_attr(name) for name in ("begin_mask", "end_mask", "ellipsis_mask", "new_axis_mask")]
    if depth is None or given.get_attr("shrink_axis_mask") != 2**depth - 1 or any(others):
        raise NotVectorizableError("takes another range of each row")
    params = given.input(0)
    lengths = tf.shape(params.t, begin.dtype)[int(params.is_stacked) :][:depth]
    indices = tf.where(begin < 0, begin + lengths, begin)
    indices = _checked(indices, (indices >= 0) & (indices < lengths))
    return wrap_stacked([tf.gather_nd(params.t, indices, batch_dims=int(params.is_stacked))])


def _checked(indices: Any, valid: Any) -> Any:
    """Return the indices, or raise `InvalidArgumentError` when one of them is not valid."""
    message = "slice index out of bounds"
    with tf.control_dependencies([tf.debugging.Assert(tf.reduce_all(valid), [message, indices])]):
        return tf.identity(indices)


def convert_list(given: Any) -> Any:
    """Convert an op on a TensorList. Each element of the converted list has the elements of all rows.

    TensorFlow's converters lose the shape of elements that are not written yet, confuse axes in a gather, and do not let a
    write extend the list.
    """
    names = [argument.name for argument in given.op.op_def.input_arg]
    if "input_handle" in names and not given.input(0).is_stacked:
        return convert_as_tensorflow(given)
    results = run_again(given.op, [_for_elements(given, place, name) for place, name in enumerate(names)])
    tensor_of_list = given.op.type in ("TensorListStack", "TensorListGather")
    return wrap_stacked(map(swapped, results) if tensor_of_list else results)


def _for_elements(given: Any, place: int, name: str) -> Any:
    """Return an input of an op on a TensorList, with elements for all rows."""
    if name == "input_handle":
        return given.stacked_input(place)
    if name == "item" or given.op.type == "TensorListPushBack":
        return for_all_rows(given, place)
    if name == "tensor":
        return swapped(for_all_rows(given, place))
    value = given.unstacked_input(place)
    if name != "element_shape":
        return value
    shape = tf.get_static_value(value)
    if shape is None:
        raise NotVectorizableError("has elements of a shape that is only known when it runs")
    if shape.ndim == 0:  # -1: an unknown shape
        return tf.constant(shape)
    return tf.concat([tf.cast(given.pfor.loop_len_vector, shape.dtype), shape], 0)


def swapped(tensor: Any) -> Any:
    """Swap the first two axes."""
    rank = tensor.shape.rank
    order = [1, 0, *range(2, rank)] if rank else tf.concat([[1, 0], tf.range(2, tf.rank(tensor))], 0)
    return tf.transpose(tensor, order)


LISTS = (
    "TensorListReserve",
    "TensorListFromTensor",
    "TensorListStack",
    "TensorListGather",
    "TensorListGetItem",
    "TensorListSetItem",
    "TensorListPushBack",
    "TensorListScatterIntoExistingList",
)
