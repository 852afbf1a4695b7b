"""Converters of lookups, slices, segments and TensorLists, whose indices may differ between rows."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from devicemap._tensorflow.pfor import (
    NotVectorizableError,
    convert_as_tensorflow,
    for_all_rows,
    merge_axes,
    pfor,
    run_again,
    split_axis,
    wrap_stacked,
)


def convert_lookup(given: Any) -> Any:
    """Look up the indices or keys of all rows at once, in a variable or table that all rows share."""
    wanted, *others = given.inputs[1:]
    defaults = [given.unstacked_input(i) for i in range(2, 2 + len(others))]
    # A `DenseHashTable` takes a vector of keys, but other tables and variables take any shape.
    in_table = given.op_type == "LookupTableFindV2" and given.op.inputs[1].shape.rank != 0
    axes = 2 if wanted.is_stacked and in_table else 1
    (found,) = run_again(given.op, [given.unstacked_input(0), merge_axes(wanted.t, axes), *defaults])
    return [pfor.wrap(split_axis(found, wanted.t, axes), wanted.is_stacked)]


def convert_shared(given: Any) -> Any:
    """Run an op once whose inputs all rows share."""
    results = run_again(given.op, [given.unstacked_input(i) for i in range(given.num_inputs)])
    return [pfor.wrap(result, False) for result in results]


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
    results = run_again(given.op, [swap_axes(given.stacked_input(0)), given.unstacked_input(1)])
    return wrap_stacked(map(swap_axes, results))


def convert_slice(given: Any) -> Any:
    """Slice, or gather slices of one size that begin at a different index in each row.

    TensorFlow's converter gathers with an index for each element. It also copies a tensor that rows share for each row.
    """
    if not given.input(1).is_stacked:
        return convert_as_tensorflow(given)
    part, stacked, _ = given.input(0)
    shape, wanted = given.op.inputs[0].shape, given.op.outputs[0].shape
    begins = _elements(given, 1, wanted.rank)
    first, lengths = tf.cast(given.input(1).t, tf.int64), tf.cast(given.unstacked_input(2), tf.int64)
    # The gather kernel on GPUs returns zeros for an index out of bounds, for which a slice must raise an error.
    ends = first + tf.maximum(lengths, 0)  # a size of -1 ends with the axis
    first = _checked(first, (first >= 0) & (ends <= tf.shape(part, tf.int64)[int(stacked) :]))
    whole = [shape[axis] == length is not None for axis, length in enumerate(wanted)]  # these slices begin at 0
    varying = [axis for axis, each in enumerate(begins) if each.is_stacked and not whole[axis]]
    starts = [tf.zeros([], tf.int64) if each.is_stacked else tf.cast(each.t, tf.int64) for each in begins]
    counts = [tf.constant(-1, tf.int64) if each.is_stacked else lengths[axis] for axis, each in enumerate(begins)]
    with tf.control_dependencies([first]):
        part = tf.slice(part, tf.stack([0] * stacked + starts), tf.stack([-1] * stacked + counts))
    result, stacked = (_windows(part, stacked, first, varying, wanted), True) if varying else (part, stacked)
    result.set_shape([*[None] * stacked, *wanted])
    return [pfor.wrap(result, stacked)]


def _windows(part: Any, stacked: bool, first: Any, varying: list[int], wanted: tf.TensorShape) -> Any:
    """Gather windows, `[rows, *wanted]`, that begin at the index `first` of each row, `[rows, rank]`, along some axes.

    The axes up to the last of these are merged into one, of which the gather takes whole blocks.
    """
    merged = varying[-1] + 1
    lengths = tf.shape(part, tf.int64)[int(stacked) :]
    index = tf.zeros_like(first[:, 0])
    for axis in range(merged):
        positions = tf.range(tf.constant(wanted[axis], tf.int64) if axis in varying else lengths[axis])[tf.newaxis]
        if axis in varying:
            positions += first[:, axis, tf.newaxis]
        for _ in range(axis):
            positions = tf.expand_dims(positions, 1)
        index = index[..., tf.newaxis] * lengths[axis] + positions
    rows = tf.shape(part, tf.int64)[: int(stacked)]
    blocks = tf.reshape(part, tf.concat([rows, [tf.reduce_prod(lengths[:merged])], lengths[merged:]], 0))
    if stacked:
        return tf.gather(blocks, index, axis=1, batch_dims=1)
    return tf.gather_nd(blocks, index[..., tf.newaxis])  # its gradient is dense, as that of a slice


def convert_strided_slice(given: Any) -> Any:
    """Slice, or gather what is at indices that differ between rows, as in `x[i]` and `x[:, i, :2]`."""
    if not any(given.input(i).is_stacked for i in (1, 2, 3)):
        return convert_as_tensorflow(given)
    params = given.input(0)
    result, stacked = params.t, params.is_stacked
    spec, indices = _parts_of_slice(given, with_shared=not stacked)
    if not stacked and not _are_adjacent(indices):
        spec, indices = _parts_of_slice(given, with_shared=False)
    if not stacked and (result.dtype.is_floating or result.dtype.is_complex):
        # The gradient of a reshaped tensor is dense, as that of a slice (test_gradients_of_slices_are_dense). A gather has
        # slices, which optimizers square one by one.
        result = tf.reshape(result, tf.shape(result))
    checked = {axis: _checked_index(params, axis, index) for axis, index in indices.items()}
    if not spec and [*indices] == [*range(len(indices))]:  # only indices of the first axes
        return wrap_stacked([tf.gather_nd(result, tf.stack([*checked.values()], -1), batch_dims=int(stacked))])
    if not stacked and len(checked) > 1 and _are_adjacent(checked):
        result, checked = _merge_indices(result, checked)
    for axis in sorted(checked, reverse=True):
        result = tf.gather(result, checked[axis], axis=axis + stacked, batch_dims=int(stacked))
        if not stacked:
            result = tf.transpose(result, [axis, *(each for each in range(result.shape.rank) if each != axis)])
        stacked = True
    parts = slice(None), *spec
    return wrap_stacked([result[parts]])


def _are_adjacent(indices: dict[int, Any]) -> bool:
    return max(indices) - min(indices) + 1 == len(indices)


def _merge_indices(shared: Any, indices: dict[int, Any]) -> tuple[Any, dict[int, Any]]:
    """Merge adjacent axes of a tensor, and the indices into them. Gathers of one axis each would repeat the others."""
    start, stop, lengths = min(indices), max(indices) + 1, tf.shape(shared, tf.int64)
    index = tf.zeros([], tf.int64)
    for axis in range(start, stop):
        index = index * lengths[axis] + tf.cast(indices[axis], tf.int64)
    merged = [lengths[:start], [tf.reduce_prod(lengths[start:stop])], lengths[stop:]]
    return tf.reshape(shared, tf.concat(merged, 0)), {start: index}


def _parts_of_slice(given: Any, with_shared: bool) -> tuple[list[Any], dict[int, Any]]:
    """Return the slice of the axes whose part all rows share, and the index into each other axis, `[rows]`.

    `with_shared`: whether indices that all rows share are among the latter.
    """
    rank, depth = given.op.inputs[0].shape.rank, given.op.inputs[1].shape[0]
    if rank is None or depth is None:
        raise NotVectorizableError("takes another part of each row, of a tensor of unknown rank")
    begins, ends, strides = (_elements(given, i, depth) for i in (1, 2, 3))
    kinds = "new_axis", "ellipsis", "shrink_axis", "begin", "end"
    masks = {kind: [bool(given.get_attr(f"{kind}_mask") >> i & 1) for i in range(depth)] for kind in kinds}
    spec: list[Any] = []
    indices: dict[int, Any] = {}
    axis = 0
    for i in range(depth):
        if masks["ellipsis"][i]:
            spec.append(...)
            axis = rank - masks["new_axis"][i + 1 :].count(False)
            continue
        if masks["new_axis"][i]:
            spec.append(tf.newaxis)
            continue
        if masks["shrink_axis"][i]:
            if begins[i].is_stacked:
                indices[axis] = begins[i].t
            elif with_shared:
                indices[axis] = tf.fill(given.pfor.loop_len_vector, begins[i].t)
            else:
                spec.append(begins[i].t)
        else:
            ranges = [(begins[i], masks["begin"][i]), (ends[i], masks["end"][i]), (strides[i], False)]
            if any(each.is_stacked and not masked for each, masked in ranges):
                raise NotVectorizableError(
                    "takes another range of each row",
                    "take ranges of one size by tf.slice(x, begin, size), or the whole axis with a mask (tf.sequence_mask)",
                )
            spec.append(slice(*(None if masked else each.t for each, masked in ranges)))
        axis += 1
    return spec, indices


_PACKED = "_devicemap_packed"
"""Attribute of a tensor: the wrapped scalars that it was packed from."""


def convert_pack(given: Any) -> Any:
    """Pack tensors. If they are scalars, slices use those that all rows share as such."""
    packed = list(given.inputs)
    result = convert_as_tensorflow(given)
    if given.op.outputs[0].shape.rank == 1:
        setattr(result.t, _PACKED, packed)
    return result


def _elements(given: Any, i: int, length: int) -> list[Any]:
    """Return the elements of an input `[length]`, wrapped. Elements that all rows share are not stacked."""
    vector = given.input(i)
    if hasattr(vector.t, _PACKED):
        return list(getattr(vector.t, _PACKED))
    return [pfor.wrap(vector.t[..., i], vector.is_stacked) for i in range(length)]


def _checked_index(params: Any, axis: int, index: Any) -> Any:
    """Return indices into an axis that count from its start, or raise `InvalidArgumentError`."""
    length = tf.shape(params.t, index.dtype)[axis + params.is_stacked]
    index = tf.where(index < 0, index + length, index)
    return _checked(index, (index >= 0) & (index < length))


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
    results = run_again(given.op, [_for_elements(given, i, name) for i, name in enumerate(names)])
    tensor_of_list = given.op.type in ("TensorListStack", "TensorListGather")
    return wrap_stacked(map(swap_axes, results) if tensor_of_list else results)


def _for_elements(given: Any, i: int, name: str) -> Any:
    """Return an input of an op on a TensorList, with elements for all rows."""
    if name == "input_handle":
        return given.stacked_input(i)
    if name == "item" or given.op.type == "TensorListPushBack":
        return for_all_rows(given, i)
    if name == "tensor":
        return swap_axes(for_all_rows(given, i))
    value = given.unstacked_input(i)
    if name != "element_shape":
        return value
    shape = tf.get_static_value(value)
    if shape is None:
        raise NotVectorizableError("has elements of a shape that is only known when it runs")
    if shape.ndim == 0:  # -1: an unknown shape
        return tf.constant(shape)
    return tf.concat([tf.cast(given.pfor.loop_len_vector, shape.dtype), shape], 0)


def swap_axes(tensor: Any) -> Any:
    """Swap the first two axes."""
    rank = tensor.shape.rank
    order = [1, 0, *range(2, rank)] if rank else tf.concat([[1, 0], tf.range(2, tf.rank(tensor))], 0)
    return tf.transpose(tensor, order)


class StackedList:
    """A TensorList with elements of known shape, as it is converted: a list of elements `[rows, *shape]`."""

    def __init__(self, handle: Any):
        """`handle` is the list of one row."""
        try:
            found = pfor._parse_variant_shapes_and_types(handle)[0]
            self.dtype, shape = tf.as_dtype(found.dtype), tf.TensorShape(found.shape)
        except ValueError:  # TensorFlow does not save the shape for functions of a SavedModel
            shape = tf.TensorShape(None)
        if not shape.is_fully_defined():
            raise NotVectorizableError(
                "fn has a loop or a branch that only some rows run, with a list whose elements have an unknown shape",
                "give the tf.TensorArray an element_shape",
            )
        self.shape = shape.as_list()

    def to_rows(self, handle: Any, rows: Any) -> Any:
        """Return the elements as `[rows, length, *shape]`. Those that are not written are zeros, as when they are read."""
        shape = tf.concat([[rows], tf.constant(self.shape, tf.int32)], 0)
        elements = tf.raw_ops.TensorListStack(input_handle=handle, element_shape=shape, element_dtype=self.dtype)
        return swap_axes(elements)

    def of_rows(self, elements: Any) -> Any:
        """Return a list of elements that are given as `[rows, length, *shape]`."""
        shape = tf.constant([-1, *self.shape], tf.int32)
        return tf.raw_ops.TensorListFromTensor(tensor=swap_axes(elements), element_shape=shape)


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
