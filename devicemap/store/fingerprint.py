"""The fingerprint of a function: a digest of its traced graph and of the values that it captures.

Names in the graph contain counters (`__inference_fn_34`). So nodes are numbered, and functions are replaced by their digests.
The fingerprint is therefore the same in each process and on each machine. Python functions that the graph calls count by name
and code.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
from types import CodeType
from typing import Any

import numpy as np
import tensorflow as tf

from devicemap._tensorflow.functions import python_function
from devicemap.compile.audit import WRITES, op_types, variable_of
from devicemap.compile.trace import Traced
from devicemap.store.encoding import digest

_IGNORED = frozenset("config config_proto executor_type shared_name container token metadata".split())
"""Attributes that name devices, settings or objects of this process. Attributes that begin with `_` are ignored, too."""

_COMPILED = "_XlaMustCompile"

_READS_FILES = frozenset(
    "ReadFile MatchingFiles TextLineDataset FixedLengthRecordDataset FixedLengthRecordDatasetV2 TFRecordDataset "
    "TFRecordDatasetV2 CSVDataset CSVDatasetV2 LoadDataset SqlDataset RestoreV2".split()
)
"""Ops that read files."""

_NOT_CONVERTED = tf.autograph.experimental.do_not_convert(functools.partial(repr)).__code__
"""The code of the wrapper that `tf.py_function` puts around objects, without the attribute `__wrapped__`."""


def fingerprint(traced: Traced) -> tuple[dict[str, Any], list[str]]:
    """Return the fingerprint of a function and of its reduction as JSON, and a description of uncovered parts.

    Variables that the function writes count by shape and dtype only, because their values change in each run.
    """
    functions = [traced.user_function]
    if traced.reduction is not None:
        functions += traced.reduction.functions()
    treatments = zip(traced.concrete.captured_inputs, traced.audit.treatments)
    written = {id(handle) for handle, treatment in treatments if treatment in WRITES}
    graphs: list[str] = []
    variables: list[str] = []
    tensors: list[str] = []
    uncovered = {"Python code"} if traced.audit.python_ops else set()
    for function in functions:
        if op_types(function) & _READS_FILES:
            uncovered.add("files")
        library = {each.signature.name: each for each in function.graph.as_graph_def().library.function}
        graphs.append(_graph_digest(function.function_def, library, {}))
        for tensor in function.captured_inputs:
            variable = variable_of(function, tensor)
            if variable is not None:
                value = "written by fn" if id(tensor) in written else digest([variable])
                variables.append(f"{variable.dtype.name}{variable.shape} {value}")
            elif tensor.dtype in (tf.resource, tf.variant):
                uncovered.add("lookup tables, datasets or iterators")
            else:
                array = np.asarray(tensor, tensor.dtype.as_numpy_dtype)  # NumPy needs it for bfloat16
                tensors.append(f"{tensor.dtype.name}{tensor.shape} {digest([array])}")
    found: dict[str, Any] = {"code.jit_compile": traced.xla_variant is not None}
    found["code.vectorized"] = traced.vectorized if traced.audit.random_ops else None
    for what, values in {"code.graph": graphs, "code.tensor": tensors, "variable": variables}.items():
        found |= {f"{what}.{i}": value for i, value in enumerate(values)}
    return found, sorted(uncovered)


def _graph_digest(function: Any, library: dict[str, Any], known: dict[str, str]) -> str:
    """Return the digest of a `FunctionDef`. `known` collects the digests of functions in the library that it calls."""

    def called(name: str) -> str:
        if name in library and name not in known:
            known[name] = _graph_digest(library[name], library, known)
        return known.get(name, "?")  # "?" for a gradient function, which is not in the library

    nodes, signature = function.node_def, function.signature
    numbers = {named.name: str(i) for i, named in enumerate([*signature.input_arg, *nodes])}
    lines = [str(_COMPILED in function.attr and function.attr[_COMPILED].b)]
    for node in nodes:
        inputs = [_numbered(name, numbers) for name in node.input]
        inputs.sort(key=lambda name: name if name.startswith("^") else "")  # control inputs have no order
        attributes: list[Any] = []
        for name, value in sorted(node.attr.items()):
            if functions := [value.func] if value.HasField("func") else value.list.func:
                attributes += [called(each.name) for each in functions]
            elif name not in _IGNORED and (name == _COMPILED or not name.startswith("_")):
                attributes.append((name, _digest(value.SerializeToString(deterministic=True))))
        op = called(node.op) if node.op in library else node.op  # a call of TensorFlow 1
        lines.append(f"{op} {inputs} {attributes}")
        if "token" in node.attr:
            lines.append(_describe_python(python_function(node.attr["token"].s.decode())))
    lines += [_numbered(function.ret[result.name], numbers) for result in signature.output_arg]
    lines += sorted(numbers[name] for name in function.control_ret.values())
    return _digest("\n".join(lines).encode())


def _describe_python(function: Any) -> str:
    """Return the name and the code of a Python function, or of one inside a partial or an object that can be called."""
    if isinstance(function, functools.partial):
        return _describe_python(inspect.unwrap(function.func))
    if isinstance(function, np.vectorize):
        return _describe_python(inspect.unwrap(function.pyfunc))
    if getattr(function, "__code__", None) is _NOT_CONVERTED:
        return _describe_python(inspect.unwrap(function.__closure__[0].cell_contents))
    code = getattr(function, "__code__", None) or getattr(type(function).__call__, "__code__", None)
    return f"{getattr(function, '__name__', type(function).__name__)} {_describe_code(code)}"


def _describe_code(code: Any) -> str:
    """Return the code of a Python function, or a constant in it, without the objects to which it refers."""
    if isinstance(code, CodeType):
        return f"{code.co_code!r} {code.co_names} {[_describe_code(constant) for constant in code.co_consts]}"
    return str(sorted(map(repr, code))) if isinstance(code, frozenset) else repr(code)


def _numbered(name: str, numbers: dict[str, str]) -> str:
    node, *output = name.removeprefix("^").split(":")
    return ":".join(["^" * name.startswith("^") + numbers.get(node, "?"), *output])


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()
