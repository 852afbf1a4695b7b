"""What TensorFlow really ran: the partitioned graphs of a call, and the edges between devices in them."""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import tensorflow as tf
from tensorflow.python.eager import context  # no public way to see the partitioned graphs of an eager call

from devicemap.compile.trace import Traced
from devicemap.tell.plan.request import ask


def traced(mapper: Any, data_or_spec: Any) -> Traced:
    """What the function of a map is traced to, vectorised or not; a plan says that too, and takes long to tell of memory."""
    program = mapper._program
    return program.compiled_for(ask(data_or_spec, program.options)).traced


@dataclass(frozen=True)
class Edge:
    """A tensor, or a control dependency, that goes from one device to another."""

    sender: str
    receiver: str
    source: str
    control: bool


def partitions(function: Callable[..., Any], *args: Any) -> list[Any]:
    """The `GraphDef` of each device's part of a call: of its first one, when TensorFlow cuts the graph up."""
    ctx = context.context()
    ctx.enable_run_metadata()
    ctx.export_run_metadata()  # what earlier calls left there
    ctx.clear_kernel_cache()  # of eager ops, which have graphs of their own when they are first run on a device
    try:
        function(*args)
        metadata = ctx.export_run_metadata()
    finally:
        ctx.disable_run_metadata()
    graphs = [graph for function_graphs in metadata.function_graphs for graph in function_graphs.partition_graphs]
    assert graphs, "no graph was built in this call: nothing would be checked"
    return graphs


def edges(graphs: list[Any]) -> list[Edge]:
    found = []
    for graph in graphs:
        nodes = {node.name: node for node in graph.node}
        for node in graph.node:
            if node.op in ("_Send", "_HostSend"):
                source = nodes[node.input[0].partition(":")[0]]
                # a control edge is sent as a constant that waits for the op
                control = source.op == "Const" and any(i.startswith("^") for i in source.input)
                sender, receiver = (_short(node.attr[f"{side}_device"].s.decode()) for side in ("send", "recv"))
                found.append(Edge(sender, receiver, node.attr["tensor_name"].s.decode(), control))
    return found


def between_devices(graphs: list[Any], host: str = "CPU:0") -> list[Edge]:
    """Edges that join two devices: neither end is the device where rows are cut and results are gathered."""
    return [edge for edge in edges(graphs) if host not in (edge.sender, edge.receiver)]


def placements(graphs: list[Any], op: str) -> Counter[str]:
    """How many ops of a type (or a fused or library form of it) run on each device."""
    return Counter(_short(node.device) for graph in graphs for node in graph.node if op in node.op)


def ops_on(graphs: list[Any]) -> dict[str, Counter[str]]:
    """How many ops of each type run on each device; constants and what comes in, goes out or is sent are not counted."""
    found: dict[str, Counter[str]] = defaultdict(Counter)
    for graph in graphs:
        for node in graph.node:
            if node.op not in ("Const", "NoOp", "Identity") and not re.match("_(?!Fused)", node.op):
                found[_short(node.device)][node.op] += 1
    return found


_INT32 = tf.compat.v1.AttrValue(type=tf.int32.as_datatype_enum)


def byte_edges(graphs: list[Any], arguments: dict[str, Any], rows: dict[str, int]) -> Counter[tuple[str, str]]:
    """Bytes of the tensors that go between devices in a call, by `(sender, receiver)`.

    The parts are put together again, and TensorFlow infers their shapes.

    Args:
        graphs: what `partitions` gave.
        arguments: values of arguments, by their names in the graph.
        rows: of each device; how many a loop over them ends with is not in its shapes.
    """
    graph_def, sent = _joined(graphs, arguments)
    graph = tf.Graph()
    with graph.as_default():
        tf.import_graph_def(graph_def, name="")
    found: Counter[tuple[str, str]] = Counter()
    for edge, name in sent:
        tensor = graph.get_tensor_by_name(name if ":" in name else f"{name}:0")
        assert tensor.shape.rank is not None, f"the shape of {name} is not known"
        dimensions = tensor.shape.as_list()
        if dimensions and dimensions[0] is None:
            dimensions[0] = rows[edge.sender]
        found[edge.sender, edge.receiver] += math.prod(dimensions) * tensor.dtype.size
    return found


def _joined(graphs: list[Any], arguments: dict[str, Any]) -> tuple[Any, list[tuple[Edge, str]]]:
    """One graph of all parts, and the tensors that were sent; each part's names get a prefix of their own."""
    sources = {
        node.attr["tensor_name"].s: f"part{i}/{node.input[0]}"
        for i, graph in enumerate(graphs)
        for node in graph.node
        if node.op == "_Send"
    }
    joined = tf.compat.v1.GraphDef()
    joined.versions.CopyFrom(graphs[0].versions)
    for i, graph in enumerate(graphs):
        joined.library.MergeFrom(graph.library)
        nodes = {node.name: node for node in graph.node}
        for node in graph.node:
            if node.op in ("_Send", "_Retval"):
                continue
            new = joined.node.add()
            new.CopyFrom(node)
            new.name, new.device = f"part{i}/{node.name}", ""
            new.attr.pop("_class", None)  # colocation with nodes that the optimiser has removed
            del new.input[:]
            if node.op == "_Recv":
                _become(new, "Identity", T=node.attr["tensor_type"])
                new.input.append(sources[node.attr["tensor_name"].s])
            elif node.op == "_Arg" and node.name in arguments:
                value = tf.compat.v1.AttrValue(tensor=tf.make_tensor_proto(arguments[node.name]))
                _become(new, "Const", dtype=node.attr["T"], value=value)
            elif node.op == "_Arg":
                _become(new, "Placeholder", dtype=node.attr["T"], shape=_shape(node, "_output_shapes"))
            elif node.op in ("ReadVariableOp", "ResourceGather"):
                handle = node
                while handle.op != "_Arg":
                    handle = nodes[handle.input[0].partition(":")[0]]
                value = new if node.op == "ReadVariableOp" else joined.node.add(name=f"{new.name}/value")
                _become(value, "Placeholder", dtype=node.attr["dtype"], shape=_shape(handle, "_handle_shapes"))
                if value is not new:
                    axis = joined.node.add(name=f"{new.name}/axis")
                    zero = tf.compat.v1.AttrValue(tensor=tf.make_tensor_proto(0))
                    _become(axis, "Const", dtype=_INT32, value=zero)
                    types = {"Tparams": node.attr["dtype"], "Tindices": node.attr["Tindices"], "Taxis": _INT32}
                    _become(new, "GatherV2", **types)
                    new.input.extend([value.name, f"part{i}/{node.input[1]}", axis.name])
            else:
                new.input.extend(f"^part{i}/{name[1:]}" if name[0] == "^" else f"part{i}/{name}" for name in node.input)
    kinds = {edge.source: edge for edge in edges(graphs)}
    return joined, [
        (kinds[name.decode()], tensor) for name, tensor in sources.items() if not kinds[name.decode()].control
    ]


def _become(node: Any, op: str, **attributes: Any) -> None:
    node.op = op
    node.attr.clear()
    for name, value in attributes.items():
        node.attr[name].CopyFrom(value)


def _shape(node: Any, attribute: str) -> Any:
    shapes = node.attr[attribute].list.shape
    return tf.compat.v1.AttrValue(shape=shapes[0] if shapes else tf.TensorShape(None).as_proto())


def _short(device: str) -> str:
    return device.rpartition("device:")[2]
