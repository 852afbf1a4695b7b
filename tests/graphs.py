"""What TensorFlow really ran: the partitioned graphs of a call, and the edges between devices in them."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tensorflow.python.eager import context  # no public way to see the partitioned graphs of an eager call

from devicemap.compile.trace import Traced
from devicemap.inspect.planner import specs_and_count


def traced(mapper: Any, data_or_spec: Any) -> Traced:
    """What the function of a map is traced to, vectorised or not; a plan contains this too, but takes longer."""
    program = mapper._program
    return program.compiled_for(specs_and_count(data_or_spec, program.options)[0]).traced


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


def _short(device: str) -> str:
    return device.rpartition("device:")[2]
