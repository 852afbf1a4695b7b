"""What travels between devices in a call, read from the graph that TensorFlow really ran."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from tests.graphs import partitions


@dataclass(frozen=True)
class Traffic:
    """Tensors that are sent from device to device in one call."""

    tensors: int
    """How many."""

    lists: int
    """How many of them are whole lists, as those of a `tf.TensorArray`."""

    variable_bytes: int
    """Bytes of those that are whole captured variables; how large the others are, rows and results, the graph does not
    tell."""


def between_devices(function: Callable[..., Any], *args: Any) -> Traffic:
    """The traffic of a call, which must be the first one: TensorFlow shows a graph when it cuts it up."""
    tensors = lists = variable_bytes = 0
    for graph in partitions(function, *args):
        nodes = {node.name: node for node in graph.node}
        for node in graph.node:
            if node.op in ("_Send", "_HostSend"):
                tensors += 1
                lists += node.attr["T"].type == tf.variant.as_datatype_enum
                variable_bytes += _variable_bytes(nodes, node)
    return Traffic(tensors, lists, variable_bytes)


def _variable_bytes(nodes: dict[str, Any], node: Any) -> int:
    """The size of the variable that is sent as it was read; 0 for anything else."""
    while node.op in ("_Send", "_HostSend", "Identity", "ReadVariableOp") and node.input:
        source = nodes[node.input[0].partition(":")[0]]
        if node.op == "ReadVariableOp" and (shapes := source.attr["_handle_shapes"].list.shape):
            dtype = tf.dtypes.as_dtype(node.attr["dtype"].type)
            return math.prod(dimension.size for dimension in shapes[0].dim) * dtype.size
        node = source
    return 0
