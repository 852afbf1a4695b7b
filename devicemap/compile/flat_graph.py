"""The ops of a traced graph and of the graphs that it calls, as those of one graph without calls."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from devicemap._tensorflow.functions import functions_by_name
from devicemap.compile.graph_walker import CALLS


@dataclass(eq=False, repr=False)
class Node:
    """An op of a graph. A graph that is called twice has two nodes for each of its ops."""

    op: Any
    inputs: list[tuple[Node, int]] = field(default_factory=list)
    """For each input, the node that produces it, and the index of the result."""

    control_inputs: list[Node] = field(default_factory=list)
    """The other nodes that run before: those of the op, and those of the calls around it."""

    @property
    def before(self) -> list[Node]:
        """All nodes that run before."""
        return [*(node for node, _ in self.inputs), *self.control_inputs]


class FlatGraph:
    """The nodes of a graph, in the order in which their ops were created. Other calls than those in it are not replaced."""

    def __init__(self, graph: Any, inputs: Sequence[tuple[Node, int]] = (), before: Sequence[Node] = ()):
        """`inputs` and `before`: those of the call of this graph; empty for the outermost graph."""
        self.inputs = inputs or [(Node(tensor.op), 0) for tensor in graph.inputs]
        """The nodes of the inputs, which are not among the others, and the indices of their results."""
        self.nodes: list[Node] = []
        arguments, functions = {tensor.op for tensor in graph.inputs}, functions_by_name(graph)
        own = {op: Node(op) for op in graph.get_operations() if op not in arguments}
        sources = {output.ref(): (node, i) for op, node in own.items() for i, output in enumerate(op.outputs)}
        sources |= {tensor.ref(): source for tensor, source in zip(graph.inputs, self.inputs)}
        ends: dict[Any, list[Node]] = {op: [node] for op, node in own.items()}
        ends |= {tensor.op: [node] for tensor, (node, _) in zip(graph.inputs, self.inputs)}
        for op, node in own.items():
            node.inputs = [sources[tensor.ref()] for tensor in op.inputs]
            node.control_inputs = [*before, *(end for each in op.control_inputs for end in ends[each])]
            called = functions.get(op.get_attr("f").name) if op.type in CALLS else None
            if called is None:
                self.nodes.append(node)
                continue
            inner = FlatGraph(called, node.inputs, node.control_inputs)
            self.nodes += inner.nodes
            sources |= {output.ref(): source for output, source in zip(op.outputs, inner.outputs)}
            ends[op] = inner.ends
        self.outputs: list[tuple[Node, int]] = [sources[tensor.ref()] for tensor in graph.outputs]
        """The nodes of the outputs, and the indices of their results."""
        self.ends: list[Node] = [node for node, _ in self.outputs]
        self.ends += [end for op in graph.control_outputs for end in ends[op]]
        """The nodes after which the graph has run."""
