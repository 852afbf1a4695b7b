"""Lists of tensors in the sketch of a graph: what ops on them hold, and give."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow as tf

from devicemap.compile.cost.constants import TensorList, Value, shaped

if TYPE_CHECKING:
    from devicemap.compile.cost.sketch import Sketch


def on_list(
    sketch: Sketch, op: Any, taken: Sequence[Value], results: Sequence[Any], hosted: Sequence[bool]
) -> Sequence[Value]:
    """An op on a list of tensors, which holds what is written into it, and gives it without a copy.

    A ragged tensor as one element is a list of one, too.
    """
    result, on_host = results[0], hosted[0]

    def made_list(listed: TensorList, size: int = 0) -> Sequence[Value]:
        return sketch.make(op, taken, [sketch.value(result, on_host=on_host, listed=listed)], [0 if on_host else size])

    if op.type in ("TensorListReserve", "EmptyTensorList"):
        length = None if op.type == "EmptyTensorList" else taken[1].known
        return made_list(TensorList(None if length is None else int(length)))
    if op.type in ("TensorListFromTensor", "TensorListSplit"):
        listed = _pieces(sketch, taken, op.type == "TensorListSplit")
        return made_list(listed, (listed.length or 0) * listed.element_bytes)
    if op.type == "RaggedTensorToVariant":
        return made_list(TensorList(1, taken[-1].tensor.shape, sum(map(sketch.bytes_of, taken))))
    if op.type == "OptionalNone":
        return [sketch.value(result, on_host=True)]
    if op.type == "OptionalFromValue":  # what a branch keeps for gradients
        return [replace(taken[0], tensor=result, wrapped=taken[0])]
    if op.type == "OptionalGetValue" and taken[0].wrapped is not None:
        return [taken[0].wrapped]
    listed = taken[0].listed or TensorList(None)
    if op.type in ("TensorListSetItem", "TensorListPushBack"):
        item = taken[-1]
        listed.shape = item.listed.shape if item.listed else item.tensor.shape
        listed.element_bytes = sketch.held(item)
        alike = not listed.lengths or (listed.known is not None and np.array_equal(listed.known, item.known))
        listed.known = item.known if alike else None
        listed.lengths.append(listed.shape[0] if listed.shape.rank else None)
        return made_list(listed)
    if op.type == "ZerosLike":
        return made_list(replace(listed, lengths=[]), sketch.held(taken[0]))
    if op.type == "TensorListPopBack":
        popped = replace(taken[0], tensor=result, listed=replace(listed, shrinks=True))
        item = shaped(results[1], listed.shape) if listed.known is None else sketch.constant(listed.known)
        return [popped, replace(taken[0], tensor=item, known=listed.known, listed=None)]
    if op.type == "TensorListGetItem":
        return [replace(taken[0], tensor=shaped(result, listed.shape), listed=None)]
    if op.type == "TensorListStack" and result.dtype == tf.variant:
        return [replace(taken[0], tensor=result)]
    shape = None if listed.shape is None or listed.shape.rank is None else [listed.length, *listed.shape]
    if shape is not None and op.type == "TensorListGather":
        shape[:1] = taken[1].tensor.shape
    elif shape is not None and op.type != "TensorListStack":  # they are joined
        shape[:2] = [_joined_length(listed)]
    shapes = [shape, *[None] * (len(results) - 1)]
    if op.type == "RaggedTensorFromVariant":
        shapes = [None if listed.length is None else [listed.length + 1], *shapes[1:-1], shape]
    parts = zip(results, shapes, hosted)
    return sketch.make(op, taken, [sketch.value(shaped(part, s), on_host=h) for part, s, h in parts])


def _joined_length(listed: TensorList) -> int | None:
    """Of the elements of a list one after the other."""
    lengths = listed.lengths
    if listed.length is None or None in lengths[-1:]:
        return None
    every = len(lengths) == listed.length and None not in lengths
    return sum(lengths) if every else listed.length * listed.shape[0]


def _pieces(sketch: Sketch, taken: Sequence[Value], of_lengths: bool) -> TensorList:
    """A list of copies of the rows of a tensor, or of pieces of many rows, of which the mean length counts."""
    shape = taken[0].tensor.shape
    lengths = taken[2].known if of_lengths else None
    if not shape.is_fully_defined():
        return TensorList(None)
    row_bytes = int(shape[1:].num_elements()) * int(taken[0].tensor.dtype.size)
    if not of_lengths:
        return TensorList(int(shape[0]), shape[1:], sketch.aligned(row_bytes))
    if lengths is None:
        return TensorList(None)
    size = sum(sketch.aligned(int(length) * row_bytes) for length in lengths)
    mean = tf.TensorShape([round(float(np.mean(lengths)))])
    return TensorList(len(lengths), mean.concatenate(shape[1:]), size // len(lengths))
