"""The fingerprint of a function: a digest of its traced graph and of the values that it captures.

Names in the graph hold counters (`__inference_fn_34`), so nodes are numbered and functions replaced by their digests. The
fingerprint is therefore the same in each process and on each machine. Python functions that the graph calls count by name
and code.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Sequence
from types import CodeType
from typing import Any

import numpy as np
import tensorflow as tf

from devicemap._tensorflow.functions import python_function
from devicemap.compile.audit import Treatment, variable_of
from devicemap.compile.reduction import BoundReduction
from devicemap.compile.trace import Traced
from devicemap.store.encoding import encode_array

_IGNORED = frozenset("config config_proto executor_type shared_name container token metadata".split())
"""Attributes about where and how an op runs, or with names of this process; as those that begin with `_`."""

_COMPILED = "_XlaMustCompile"


def fingerprint(traced: Traced) -> tuple[dict[str, Any], list[str]]:
    """Return the fingerprint of a function and of its reduction as JSON, and what it does not cover, in words.

    Variables that the function writes count by shape and dtype only, because their values change in each run.
    """
    functions = [traced.function]
    if isinstance(traced.reduction, BoundReduction):
        functions += traced.reduction.functions()
    read_only = None, Treatment.READ, Treatment.STAYS
    treatments = zip(traced.concrete.captured_inputs, traced.audit.treatments)
    written = {id(handle) for handle, treatment in treatments if treatment not in read_only}
    graphs: list[str] = []
    ops: Counter[str] = Counter()
    variables: list[str] = []
    tensors: list[str] = []
    uncovered = {"Python code"} if traced.audit.python else set()
    for function in functions:
        walk = _Walk(function.graph.as_graph_def())
        arguments = [tensor.op.name for tensor in function.inputs]
        graphs.append(walk.digest(walk.nodes, arguments, [tensor.name for tensor in function.outputs]))
        ops += walk.ops
        for tensor in function.captured_inputs:
            variable = variable_of(function, tensor)
            if variable is not None:
                value = "written by fn" if id(tensor) in written else _digest_array(variable.numpy())
                variables.append(f"{variable.dtype.name}{variable.shape} {value}")
            elif tensor.dtype in (tf.resource, tf.variant):
                uncovered.add("lookup tables, datasets or iterators")
            else:
                tensors.append(f"{tensor.dtype.name}{tensor.shape} {_digest_array(tensor.numpy())}")
    vectorized = traced.vectorized if traced.audit.random_ops else None
    code = {"graph": graphs, "ops": ops, "tensors": tensors, "jit_compile": traced.with_xla is not None}
    return {"code": {**code, "vectorized": vectorized}, "variables": variables}, sorted(uncovered)


class _Walk:
    """Walks a graph and the functions that it calls."""

    def __init__(self, graph_def: Any):
        self.nodes = graph_def.node
        self.ops: Counter[str] = Counter()
        self._library = {function.signature.name: function for function in graph_def.library.function}
        self._digests: dict[str, str] = {}

    def digest(self, nodes: Sequence[Any], arguments: Sequence[str], results: Iterable[str]) -> str:
        """Return the digest of a graph with these nodes, with arguments and results by name."""
        numbers = {node.name: str(i) for i, node in enumerate(nodes)}
        numbers |= {name: f"argument {i}" for i, name in enumerate(arguments)}
        lines = []
        for node in nodes:
            if not numbers[node.name].startswith("argument"):
                op = "call" if node.op in self._library else node.op
                inputs = [_numbered(name, numbers) for name in node.input]
                inputs.sort(key=lambda name: name if name.startswith("^") else "")  # TensorFlow keeps controls in sets
                lines.append(f"{op} {inputs} {self._attributes(node)}")
                self.ops[op] += 1
                if "token" in node.attr:
                    lines.append(_describe_python(python_function(node.attr["token"].s.decode())))
        lines += [_numbered(name, numbers) for name in results]
        return _digest("\n".join(lines).encode())

    def _attributes(self, node: Any) -> list[Any]:
        called: list[Any] = [self._function(node.op)] if node.op in self._library else []  # by TensorFlow 1
        for name, value in sorted(node.attr.items()):
            if functions := [value.func] if value.HasField("func") else value.list.func:
                called += [self._function(function.name) for function in functions]
            elif name not in _IGNORED and (name == _COMPILED or not name.startswith("_")):
                called.append((name, _digest(value.SerializeToString(deterministic=True))))
        return called

    def _function(self, name: str) -> str:
        if name not in self._library:  # of a gradient
            return "?"
        if name not in self._digests:
            function = self._library[name]
            results = [function.ret[result.name] for result in function.signature.output_arg]
            arguments = [argument.name for argument in function.signature.input_arg]
            effects = sorted(function.control_ret.values(), key=[node.name for node in function.node_def].index)
            compiled = function.attr[_COMPILED].b if _COMPILED in function.attr else False
            self._digests[name] = f"{compiled} {self.digest(function.node_def, arguments, [*results, *effects])}"
        return self._digests[name]


def _describe_python(function: Any) -> str:
    """Return the name and the code of a Python function, without what it refers to."""
    return f"{getattr(function, '__name__', '')} {_describe_code(getattr(function, '__code__', None))}"


def _describe_code(code: Any) -> str:
    if isinstance(code, CodeType):
        return f"{code.co_code!r} {code.co_names} {[_describe_code(constant) for constant in code.co_consts]}"
    return str(sorted(map(repr, code))) if isinstance(code, frozenset) else repr(code)


def _numbered(name: str, numbers: dict[str, str]) -> str:
    node, *output = name.removeprefix("^").split(":")
    return ":".join(["^" * name.startswith("^") + numbers.get(node, "?"), *output])


def _digest_array(array: Any) -> str:
    parts = encode_array(np.asarray(array))
    return _digest(b"".join(f"{part.dtype} {part.shape}\n".encode() + part.tobytes() for part in parts.values()))


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()
