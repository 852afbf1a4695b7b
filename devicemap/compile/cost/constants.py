"""What one op gives, told without running the graph that it is in: integers that depend on shapes alone, and views."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import tensorflow as tf

from devicemap.compile.cost.walk import called_by
from devicemap.compile.kernels import are_named

LARGEST_CONSTANT = 2**22
"""Integers beyond so many elements are not computed."""

_VIEWS = frozenset(
    "Identity IdentityN StopGradient PreventGradient Snapshot Reshape ExpandDims Squeeze EnsureShape CheckNumerics Bitcast "
    "PlaceholderWithDefault TensorListResize".split()
)
"""Ops that give what they take."""

_PARTS = frozenset("Slice StridedSlice Split SplitV Unpack".split())
"""Ops that give what they take, or neighbouring rows of it, where they do not cut through rows."""

_WHOLE = frozenset("Slice StridedSlice Tile BroadcastTo Sum Mean Max Min Prod All Any Cast Pad PadV2 ConcatV2".split())
"""Ops that give what they take where they change nothing about it."""


@dataclass
class TensorList:
    """What is known of the elements of a list of tensors."""

    length: int | None
    shape: Any = None
    """Of an element, as a `tf.TensorShape`."""

    element_bytes: int = 0

    lengths: list[Any] = field(default_factory=list)
    """Of what was written into it, element by element outside of loops."""

    known: Any = None
    """The elements of each that was written into it, where they are the same and depend on no row."""

    shrinks: bool = False
    """Whether elements are taken out of it."""


@dataclass(frozen=True)
class Value:
    """A tensor of the function, in the sketch."""

    number: int
    """By which `liveness` knows it: views of a tensor have its own."""

    tensor: Any
    on_host: bool = False
    """Whether it is in the host's memory, which is not that of the device."""

    known: Any = None
    """Its elements, where they depend on no row."""

    maker: str = ""
    """What made it."""

    constant: bool = False
    """Whether it is the same in each call."""

    listed: TensorList | None = None

    lent: bool = False
    """Whether it lies where a variable does, which counts its bytes."""

    wrapped: Value | None = None
    """Of an optional: what it holds."""

    home: str | None = None
    """Of the handle of a variable: the device that it lives on."""


def is_view(op: Any, taken: Sequence[Value], results: Sequence[Any]) -> bool:
    """Whether what an op gives lies where what it takes does."""
    if op.type in _VIEWS:
        return True
    if not taken or not results:
        return False
    before, after = taken[-1 if op.type == "Split" else 0].tensor, results[0]
    if not (before.shape.is_fully_defined() and after.shape.is_fully_defined() and before.dtype == after.dtype):
        return False
    if op.type == "Transpose":
        order = taken[1].known
        return order is not None and [*(i for i in order if before.shape[i] != 1)] == sorted(
            i for i in order if before.shape[i] != 1
        )
    if op.type in _WHOLE and before.shape.num_elements() == after.shape.num_elements():
        return True
    if op.type not in _PARTS or before.shape[1:] != (after.shape if op.type == "Unpack" else after.shape[1:]):
        return False
    if op.type not in ("Slice", "StridedSlice"):
        offset = int(after.shape.num_elements())
    elif taken[1].known is None:
        return True
    else:
        offset = int(taken[1].known[0]) * int(before.shape[1:].num_elements())
    return offset * int(after.dtype.size) % 64 == 0


def folded(op: Any, taken: Sequence[Value]) -> list[Any] | None:
    """What an op gives, if that is integers or truth values which depend on shapes and constants alone, or constant text."""
    if op.type == "Const" and op.outputs[0].dtype == tf.string:
        return [tf.make_ndarray(op.get_attr("value"))]
    if op.op_def.is_stateful or not all(t.dtype.is_integer or t.dtype == tf.bool for t in op.outputs) or not op.outputs:
        return None
    if op.type == "Const":
        return [tf.make_ndarray(op.get_attr("value"))]
    if op.type in ("Shape", "ShapeN", "Size", "Rank") and all(v.tensor.shape.is_fully_defined() for v in taken):
        shapes = [np.array(value.tensor.shape.as_list()) for value in taken]
        of: dict[str, Callable[[Any], Any]] = {"Size": np.prod, "Rank": len}
        return [np.array(of.get(op.type, np.array)(s), t.dtype.as_numpy_dtype) for s, t in zip(shapes, op.outputs)]
    if op.type == "TensorListLength" and taken[0].listed and taken[0].listed.length is not None:
        return [np.array(taken[0].listed.length, np.int32)]
    if not taken or any(v.known is None or v.known.size > LARGEST_CONSTANT for v in taken) or called_by(op):
        return None
    results = run_now(op, [value.known for value in taken])
    return None if results is None else [result.numpy() for result in results]


def shaped(tensor: Any, shape: Any) -> Any:
    """The tensor, of a shape that is known to be its own, where the two agree."""
    if shape is not None and tensor.shape.is_compatible_with(shape):
        tensor.set_shape(shape)
    return tensor


def zeros(tensor: Any) -> Any:
    """Zeros of the shape of a tensor of numbers with a fraction, `None` for others."""
    known = tensor.shape.is_fully_defined() and (tensor.dtype.is_floating or tensor.dtype.is_complex)
    return np.zeros(tensor.shape, tensor.dtype.as_numpy_dtype) if known else None


def run_now(op: Any, given: Sequence[Any]) -> list[Any] | None:
    """What an op gives on the host, `None` where it cannot be run by itself."""
    run = getattr(tf.raw_ops, op.type, None)
    if run is None:
        return None
    accepted = [*inspect.signature(run).parameters]
    values, inputs = iter(given), {}
    for i, argument in enumerate(op.op_def.input_arg):
        name = argument.name if argument.name in accepted else accepted[i]  # Where calls its input another name
        several = argument.number_attr or argument.type_list_attr
        count = len(are_named(op, [argument], frozenset()))
        inputs[name] = [next(values) for _ in range(count)] if several else next(values)
    attributes = {each.name: op.get_attr(each.name) for each in op.op_def.attr if each.name in accepted}
    try:
        with tf.device("/device:CPU:0"):
            return list(tf.nest.flatten(run(**inputs, **attributes)))
    except (tf.errors.OpError, ValueError, TypeError):
        return None
