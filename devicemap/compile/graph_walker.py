"""The nodes of a `ConcreteFunction` and of the functions that it calls, read from its `GraphDef`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import tensorflow as tf

from devicemap._tensorflow.functions import reachable

_ALIASES = frozenset("Identity IdentityN".split())

CALLS = frozenset("PartitionedCall StatefulPartitionedCall".split())

BRANCHES = frozenset("If StatelessIf Case StatelessCase".split())
"""Ops whose first input selects a function. The other inputs are arguments of the function."""


@dataclass(frozen=True, eq=False)
class FunctionBody:
    """The body of a graph, or of a function in its library."""

    nodes: Mapping[str, Any]
    """`NodeDef`s by name."""

    arguments: Sequence[str]
    """Names of the arguments."""

    @cached_property
    def consumers(self) -> Mapping[str, list[tuple[Any, int]]]:
        """For each tensor, the nodes that take it, with the index of the input."""
        found = defaultdict(list)
        for node in self.nodes.values():
            for index, name in enumerate(node.input):
                found[_tensor_name(name)].append((node, index))
        return found


class GraphWalker:
    """A `ConcreteFunction` and the functions that it calls, at any depth."""

    def __init__(self, concrete: Any):
        graph = concrete.graph
        graph_def = graph.as_graph_def()
        self.root = FunctionBody(
            {node.name: node for node in graph_def.node},
            [tensor.op.name for tensor in concrete.inputs],
        )
        self._library = {
            function.signature.name: FunctionBody(
                {node.name: node for node in function.node_def},
                [argument.name for argument in function.signature.input_arg],
            )
            for function in graph_def.library.function
        }

    def called_by(self, node: Any) -> list[FunctionBody]:
        """Return the bodies of the functions that a node calls."""
        names = [node.op, *called_names(node)]  # TensorFlow 1 calls a function by the type of an op
        return [self._library[name] for name in names if name in self._library]

    def bodies(self) -> list[FunctionBody]:
        """Return the body of the graph and of each function that its nodes call, once."""
        return reachable(
            [self.root], lambda body: [each for node in body.nodes.values() for each in self.called_by(node)]
        )

    def op_types(self) -> set[str]:
        """Return the types of all ops except calls."""
        return {node.op for body in self.bodies() for node in body.nodes.values()} - {*self._library}

    def uses(self, argument: str, body: FunctionBody | None = None) -> Iterator[str]:
        """Yield the types of the ops that take an argument of the graph, also in functions to which it is passed."""
        body = body or self.root
        for node, index in body.consumers.get(argument, ()):
            called = self.called_by(node)
            if node.op in _ALIASES:
                yield from self.uses(_tensor_name(f"{node.name}:{index}"), body)
            elif not called:
                yield node.op
            for function in called:
                argument_index = index - (node.op in BRANCHES)
                if 0 <= argument_index < len(function.arguments):
                    yield from self.uses(function.arguments[argument_index], function)


def called_names(node: Any) -> list[str]:
    """Return the names of the functions in the attributes of a `NodeDef`."""
    functions = (each for value in node.attr.values() for each in (value.func, *value.list.func))
    return [function.name for function in functions]


def depends_on(tensor: Any, sources: Sequence[Any]) -> bool:
    """Return whether a tensor of a graph is computed from one of the `sources`, which are dense, ragged or sparse tensors."""
    ops = reachable([tensor.op], lambda op: [each.op for each in op.inputs])
    used = {each.ref() for each in (tensor, *(each for op in ops for each in op.inputs))}
    return any(each.ref() in used for each in tf.nest.flatten(list(sources), expand_composites=True))


def is_constant(tensor: Any) -> bool:
    """Return whether a tensor of a graph is computed from constants only."""
    ops = reachable([tensor.op], lambda op: [each.op for each in op.inputs])
    return all(op.inputs or op.type == "Const" for op in ops)


def _tensor_name(name: str) -> str:
    """Return `node:1` in a graph, or `node:output:1` in a function, as `node:1`, and output 0 as `node`."""
    node, _, rest = name.partition(":")
    index = rest.rpartition(":")[2]
    return node if index in ("", "0") else f"{node}:{index}"
