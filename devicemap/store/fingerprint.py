"""The fingerprint of a function: a digest of its traced graph and of the values that it captures.

The graph is walked from its outputs and effects, and nodes are numbered in that order. So the fingerprint is the same in each
process and on each machine. Names, devices and counters are left out, as in `pyfunc_12` and `__inference_fn_34`. Python code
that the graph calls is not part of it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from devicemap.compile.audit import Treatment, variable_of
from devicemap.compile.reduction import BoundReduction
from devicemap.compile.trace import Traced
from devicemap.store.encoding import encode_array
from devicemap.store.storage import checksum

_NO_MATTER = frozenset("config config_proto executor_type shared_name container token metadata".split())
"""Attributes that say where and how an op runs, or what it is called in this process; with those that begin with `_`."""

_COMPILED = "_XlaMustCompile"

_LONGEST_WORD = 80
_MOST_PARTS = 2000
"""What is kept of a function in words is some 100 kB at most."""


def fingerprint(traced: Traced) -> tuple[dict[str, Any], list[str]]:
    """Return the fingerprint of a function and of its reduction, and what it does not cover, in words.

    Variables that the function writes count by shape and dtype only: their values change in each run.
    """
    functions = [traced.function]
    if isinstance(traced.reduction, BoundReduction):
        functions += traced.reduction.functions()
    read = None, Treatment.READ, Treatment.STAYS
    treatments = zip(traced.concrete.captured_inputs, traced.audit.treatments)
    written = {id(handle) for handle, treatment in treatments if treatment not in read}
    graphs: list[str] = []
    parts: list[str] = []
    variables: list[str] = []
    uncovered: list[str] = []
    for function in functions:
        walk = _Walk(function.graph.as_graph_def())
        arguments = [tensor.op.name for tensor in function.inputs]
        graph = walk.digest_graph(arguments, [tensor.name for tensor in function.outputs])
        captured = []
        for i, tensor in enumerate(function.captured_inputs):
            variable = variable_of(function, tensor)
            if variable is not None:
                values = "" if id(tensor) in written else f" {_digest(variable.numpy())}"
                variables.append(f"variable {variable.dtype.name}{variable.shape}{values}")
                captured.append(f"captured {i}: {variables[-1]}")
            elif tensor.dtype in (tf.resource, tf.variant):
                captured.append(f"captured {i}: {tensor.dtype.name}")
                uncovered.append("lookup tables, datasets or iterators")
            else:
                captured.append(f"captured {i}: tensor {_constant(tensor.numpy())}")
        graphs += [graph, *captured]
        parts += [*captured, *(f"{count} x {op}" for op, count in sorted(walk.ops.items()))]
        uncovered += ["Python code"] * walk.calls_python
    found = {
        "graph": checksum("\n".join(graphs).encode()),
        "variables": checksum("\n".join(variables).encode()),
        "parts": parts[:_MOST_PARTS],
        "jit_compile": traced.with_xla is not None,
        "vectorized": traced.vectorized if traced.audit.random_ops else None,
        "tensorflow": tf.__version__,
    }
    return found, sorted({*uncovered})


class _Walk:
    """Walks graphs, and the functions that they call."""

    def __init__(self, graph_def: Any):
        self.ops: Counter[str] = Counter()
        """How many there are of each op with the same attributes, in words."""
        self.calls_python = False
        """Whether an op calls a Python function."""
        self._nodes = [node for node in graph_def.node if node.op != "Placeholder"]
        self._library = {function.signature.name: function for function in graph_def.library.function}
        self._digests: dict[str, str] = {}

    def digest_graph(self, arguments: Sequence[str], outputs: Sequence[str]) -> str:
        """The digest of the graph itself: of what its outputs need, and of all that it does besides."""
        return self._digest(self._nodes, arguments, [*outputs, *(node.name for node in self._nodes)])

    def _digest(self, nodes: Sequence[Any], arguments: Sequence[str], roots: Sequence[str]) -> str:
        """The digest of a graph: of `nodes` that the `roots` need, with `arguments` from outside."""
        numbers = {name: f"argument {i}" for i, name in enumerate(arguments)}
        lines: list[str] = []
        for node in _in_order(nodes, roots):
            words, called = self._words(node)
            self.ops[words] += 1
            inputs = [numbers.get(_node(name), "?") + name.partition(":")[2] for name in node.input if name[0] != "^"]
            controls = sorted(numbers.get(_node(name), "?") for name in node.input if name[0] == "^")
            numbers[node.name] = f"{len(lines)}:"
            lines.append(f"{words} {called} {inputs} {controls}")
        ends = [numbers.get(_node(root), "?") + root.partition(":")[2] for root in roots]
        return checksum("\n".join([*lines, *ends]).encode())

    def _words(self, node: Any) -> tuple[str, list[str]]:
        """An op and its attributes in words, and the digests of the functions that it calls."""
        words, called = [node.op], []
        if node.op in self._library:  # TensorFlow 1 calls a function by the type of an op
            words, called = ["call"], [self._function(node.op)]
        for name, value in sorted(node.attr.items()):
            kind = value.WhichOneof("value")
            functions = [value.func] if kind == "func" else value.list.func
            called += [self._function(function.name) for function in functions]
            if not (functions or name in _NO_MATTER or (name.startswith("_") and name != _COMPILED)):
                words.append(f"{name}={_word(kind, value)}")
        self.calls_python |= "token" in node.attr
        return " ".join(words), called

    def _function(self, name: str) -> str:
        if name not in self._library:  # a gradient's, perhaps: it is nowhere to be seen
            return "?"
        if name not in self._digests:
            function = self._library[name]
            places = {node.name: i for i, node in enumerate(function.node_def)}
            effects = sorted(function.control_ret.values(), key=lambda node: places.get(node, -1))
            results = [function.ret[result.name] for result in function.signature.output_arg]
            arguments = [argument.name for argument in function.signature.input_arg]
            compiled = function.attr[_COMPILED].b if _COMPILED in function.attr else False
            self._digests[name] = f"{compiled} {self._digest(function.node_def, arguments, [*results, *effects])}"
        return self._digests[name]


def _word(kind: str | None, value: Any) -> str:
    if kind == "type":
        return str(tf.as_dtype(value.type).name)
    if kind == "tensor":
        return _constant(tf.make_ndarray(value.tensor))
    plain = repr(getattr(value, kind)) if kind in ("s", "i", "f", "b") else " ".join(str(value).split())
    return _short(plain)


def _in_order(nodes: Sequence[Any], roots: Iterable[str]) -> Iterator[Any]:
    """The nodes that the roots need, each behind its inputs; names and the order of the nodes make no difference."""
    by_name = {node.name: node for node in nodes}
    places = {node.name: i for i, node in enumerate(nodes)}
    begun: set[str] = set()
    done: set[str] = set()
    for root in roots:
        stack = [_node(root)]
        while stack:
            name = stack[-1]
            if name in done or name not in by_name:
                stack.pop()
            elif name in begun:
                stack.pop()
                done.add(name)
                yield by_name[name]
            else:
                begun.add(name)
                inputs = by_name[name].input
                controls = sorted((_node(i) for i in inputs if i[0] == "^"), key=lambda i: places.get(i, -1))
                needed = [*(_node(i) for i in inputs if i[0] != "^"), *controls]
                stack += [name for name in reversed(needed) if name not in begun]  # loops of TensorFlow 1 are circles


def _node(name: str) -> str:
    return name.removeprefix("^").partition(":")[0]


def _constant(array: Any) -> str:
    array = np.asarray(array)
    values = _short(str(array.tolist())) if array.size <= 8 else _digest(array)
    return f"{array.dtype.name}{[*array.shape]} {values}"


def _digest(array: Any) -> str:
    parts = encode_array(np.asarray(array))
    return checksum(b"".join(f"{part.dtype} {part.shape}\n".encode() + part.tobytes() for part in parts.values()))


def _short(text: str) -> str:
    return text if len(text) <= _LONGEST_WORD else f"{text[: _LONGEST_WORD // 2]}... {checksum(text.encode())}"
