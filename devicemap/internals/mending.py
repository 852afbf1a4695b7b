"""What `tf.vectorized_map` gets wrong, or has no form for, put another way in the graph that it is given.

Graphs are changed in place; they compute what they did.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf
from tensorflow.core.framework import attr_value_pb2

from devicemap.internals.converting import CONVERTERS
from devicemap.internals.functions import functions_within


def mend(graph: Any) -> str | None:
    """Change the graph of a function of one row, and those that it calls, so that it vectorises right.

    Returns:
        Why it cannot be vectorised, where that does not do.
    """
    for each in (graph, *(inner for inner, _ in functions_within(graph).values())):
        for op in each.get_operations():
            if op.type in CONVERTERS:
                op.pfor_converter = CONVERTERS[op.type]
            if op.type in _MENDS and (obstacle := _MENDS[op.type](each, op)) is not None:
                return obstacle
    return None


def _squeeze(graph: Any, op: Any) -> str | None:
    """Say which axes of length 1 are dropped: without a list, the row axis is, too, where there is one row."""
    if op.get_attr("squeeze_dims"):
        return None
    tensor = op.inputs[0]
    if not tensor.shape.is_fully_defined():
        return "fn squeezes a tensor whose shape is not known before it runs"
    axes = [axis for axis, length in enumerate(tensor.shape) if length == 1]
    if axes:
        op._set_attr("squeeze_dims", attr_value_pb2.AttrValue(list=attr_value_pb2.AttrValue.ListValue(i=axes)))
    else:
        _replace(op.outputs[0], tensor)  # it drops nothing, and has no way to say so
    return None


def _roll(graph: Any, op: Any) -> str | None:
    """Count axes from the front: from the end, they are off by one."""
    axes, rank = tf.get_static_value(op.inputs[2]), op.inputs[0].shape.rank
    if axes is None or rank is None:
        return "fn rolls a tensor along an axis that is not known before it runs"
    if (axes < 0).any():
        with graph.as_default():
            op._update_input(2, tf.constant(axes % rank, op.inputs[2].dtype))
    return None


def _transpose(graph: Any, op: Any) -> None:
    """The same."""
    axes = tf.get_static_value(op.inputs[1])
    if axes is not None and (axes < 0).any():
        with graph.as_default():
            op._update_input(1, tf.constant(axes % len(axes), op.inputs[1].dtype))


def _look_up(graph: Any, op: Any) -> str | None:
    if op.node_def.attr["bad_indices_policy"].s not in (b"", b"DEFAULT"):
        return "fn sets bad_indices_policy, which vectorising would drop"
    return None


def _concatenate(graph: Any, op: Any) -> str | None:
    shape = tf.get_static_value(op.inputs[1])
    if shape is None or (shape < 0).any():
        return "fn joins the tensors of a TensorArray, which may differ in length"
    return None


def _pad(graph: Any, op: Any) -> str | None:
    value = tf.get_static_value(op.inputs[2])
    if value is None or value != 0:
        return "fn pads with another value than 0, which vectorising would put there"
    return None


def _clip(graph: Any, op: Any) -> str | None:
    if any(limit.shape.rank != 0 for limit in op.inputs[1:]):
        return "fn clips by limits that are no scalars"
    return None


def _multiply(graph: Any, op: Any) -> str | None:
    """A batch of one matrix by one that all rows share: oneDNN writes where it should not for a batch of such batches."""
    one = any((tensor.shape.rank or 3) > 2 and tensor.shape[:1] in ([1], [None]) for tensor in op.inputs)
    left, right = op.inputs[0], op.inputs[-1]
    same = left.shape.rank == right.shape.rank and right.op.type not in ("Const", "ReadVariableOp", "Placeholder")
    if one and (op.type == "Einsum" or not same):
        return "fn multiplies a batch of one matrix by one that all rows share, which vectorising gets wrong on CPUs"
    return None


def _normalize(graph: Any, op: Any) -> None:
    """Where the mean and the variance are given, hand them on: they would become 0."""
    if not op.get_attr("is_training"):
        for moment, given in zip(op.outputs[1:3], op.inputs[3:5]):
            _replace(moment, given)


def _parse(graph: Any, op: Any) -> str | None:
    if not all(feature.shape.is_fully_defined() for feature in op.outputs):
        return "fn parses features of variable length, which vectorising would pad"
    return None


def _refuse(what: str) -> Callable[[Any, Any], str]:
    return lambda graph, op: f"fn {what}, which vectorising gets wrong"


def _gather(graph: Any, op: Any) -> None:
    """Look up rows in the value of a variable: through its handle, that is an op of its own without a vectorised form."""
    with graph.as_default(), tf.control_dependencies(op.control_inputs):
        value = tf.raw_ops.ReadVariableOp(resource=op.inputs[0], dtype=op.outputs[0].dtype)
        gathered = tf.gather(value, op.inputs[1], batch_dims=op.get_attr("batch_dims"))
    _replace(op.outputs[0], gathered)
    graph.control_outputs = [gathered.op if other is op else other for other in graph.control_outputs]
    for waiting in [other for other in graph.get_operations() if op in other.control_inputs]:
        before = [gathered.op if other is op else other for other in waiting.control_inputs]
        waiting._remove_all_control_inputs()
        waiting._add_control_inputs(before)


_MENDS: dict[str, Callable[[Any, Any], str | None]] = {
    "Squeeze": _squeeze,
    "Roll": _roll,
    "Transpose": _transpose,
    "GatherNd": _look_up,
    "TensorListConcatV2": _concatenate,
    "PadV2": _pad,
    "ClipByValue": _clip,
    "BatchMatMulV2": _multiply,
    "BatchMatMulV3": _multiply,
    "Einsum": _multiply,
    "FusedBatchNormV3": _normalize,
    "ParseExampleV2": _parse,
    "ParseSingleExample": _parse,
    "StringFormat": _refuse("formats strings"),
    "DecodeCSV": _refuse("decodes CSV"),
    "ResourceGather": _gather,
}


def _replace(tensor: Any, by: Any) -> None:
    """Give another tensor to all ops that take this one."""
    for consumer in tensor.consumers():
        for i in [i for i, used in enumerate(consumer.inputs) if used is tensor]:
            consumer._update_input(i, by)
