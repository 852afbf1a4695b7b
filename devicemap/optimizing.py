"""A traced function, optimised once for all the devices it runs on.

TensorFlow's optimiser (Grappler) works on the whole graph of a call, in which every tower is a copy of the same function:
16 devices take 16 times as long, and until the first result that is most of the time
(`benchmarks/test_first_result.py`). Here it works on the function alone; the graph of the towers is then run without it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from devicemap.auditing import variable_of
from devicemap.devices import kind_of
from devicemap.hoisting import hoist, node_of, remove_nodes
from devicemap.internals.functions import UNCHAINED, optimized_graph
from devicemap.tracing import Traced

_KEPT = {"_XlaMustCompile", "_noinline", "api_implements"}
"""The attributes of functions that TensorFlow does not inline."""

_ANY_CPU = "/job:tower/device:CPU:0"
"""What stands for the device of a tower while its function is optimised."""


def can_be_optimized_once(traced: Traced, places: Sequence[str]) -> bool:
    """Whether one optimised function serves all places, for calls without gradients.

    It needs several places, and all of kind CPU: for a GPU, the optimiser wants to know the device. Functions that act
    outside of the graph or write state are left alone; so are those with results that are not plain tensors, and those that
    call what is compiled or kept as a function of its own: the optimiser loses sight of it in loops.
    """
    leaves = [*tf.nest.flatten(traced.concrete.structured_input_signature), *traced.specs]
    return (
        len(places) > 1
        and all(kind_of(place) == "CPU" for place in places)
        and not (traced.audit.effects or traced.audit.writes)
        and all(isinstance(leaf, tf.TensorSpec) for leaf in leaves)
        and not any(_KEPT & {*function.attr} for function in traced.graph_def.library.function)
    )


@dataclass(frozen=True)
class Runnable:
    """What runs on a place: the traced function as it is, or optimised."""

    concrete: Any
    """`ConcreteFunction`: `(*passed values, *leaves) -> list of result leaves`."""

    passed: tuple[int, ...]
    """The captured variables, by index among the traced function's captures, whose values it takes as arguments."""

    captures: tuple[int, ...]
    """Which of the traced function's captures its own ones are, by index."""

    optimized: bool
    """Whether TensorFlow need not optimise what calls it. It then has no gradients."""


def as_traced(traced: Traced) -> Runnable:
    """`traced.concrete`, left to TensorFlow to optimise."""
    return Runnable(traced.concrete, (), tuple(range(len(traced.concrete.captured_inputs))), False)


def optimize(traced: Traced) -> Runnable:
    """`traced.concrete` as TensorFlow would run it. It has no gradients: the optimiser fuses ops into others without.

    A captured variable that nothing but a `ReadVariableOp` touches becomes an argument, so that no tower needs a copy.
    """
    concrete = traced.concrete
    captured = list(concrete.captured_inputs)
    tensors = concrete.inputs[: len(concrete.inputs) - len(captured)]
    names = [tensor.op.name for tensor in concrete.inputs]
    outputs = list(concrete.outputs[: len(traced.specs)])
    try:
        graph_def = _optimized_for_cpus(traced.graph_def, [tensor.name for tensor in outputs])
    except tf.errors.UnimplementedError:  # for float8_e5m2: TensorFlow runs such graphs as they are
        return as_traced(traced)
    hoist(graph_def)
    # A handle that fn uses without its variable stays a capture: its shape and device are not known here.
    variables = {name: variable_of(concrete, handle) for name, handle in zip(names[len(tensors) :], captured)}
    reads = _reads(graph_def, [name for name, variable in variables.items() if variable is not None])
    replaced = {name for of_one in reads.values() for name in of_one}
    used = {name.partition(":")[0] for node in graph_def.node if node.name not in replaced for name in node.input}
    used |= {tensor.op.name for tensor in outputs}
    remove_nodes(graph_def, replaced | {*names})  # what is fed
    passed = tuple(i for i, name in enumerate(names[len(tensors) :]) if name in reads)
    captures = tuple(i for i in range(len(captured)) if i not in passed)

    @tf.function(autograph=False, experimental_attributes=UNCHAINED)
    def optimized(*inputs: Any) -> list[Any]:
        capture = tf.compat.v1.get_default_graph().capture
        values, leaves = inputs[: len(passed)], inputs[len(passed) :]
        fed = dict(zip(names, leaves))
        fed |= {names[len(tensors) + i]: capture(captured[i]) for i in captures}
        for i, value in zip(passed, values):
            fed |= dict.fromkeys(reads[names[len(tensors) + i]], value)
        fed |= {f"^{name}": tensor for name, tensor in fed.items()}  # control edges from them too
        fed = {name: tensor for name, tensor in fed.items() if name in used}
        results = tf.graph_util.import_graph_def(graph_def, fed, [tensor.name for tensor in outputs], name="")
        for result, output in zip(results, outputs):
            result.set_shape(output.shape)
        return list(results)

    of_passed = [variables[names[len(tensors) + i]] for i in passed]
    specs = [tf.TensorSpec(variable.shape, variable.dtype) for variable in of_passed]
    specs += [tf.TensorSpec(t.shape, t.dtype) for t in tensors]
    return Runnable(optimized.get_concrete_function(*specs), passed, captures, True)


def _optimized_for_cpus(graph_def: Any, outputs: Sequence[str]) -> Any:
    """The optimised graph, for any CPU: ops are fused only where it is known that they will run on one."""
    if any(node.device for node in _nodes(graph_def)):  # of fn's own choice; TensorFlow fuses across devices
        return optimized_graph(graph_def, outputs)
    placed = tf.compat.v1.GraphDef()
    placed.CopyFrom(graph_def)
    for node in _nodes(placed):
        node.device = _ANY_CPU
    optimized = optimized_graph(placed, outputs)
    for node in _nodes(optimized):
        node.device = ""
    return optimized


def _nodes(graph_def: Any) -> Iterator[Any]:
    """All of a graph, those of its functions too."""
    return itertools.chain(graph_def.node, *(function.node_def for function in graph_def.library.function))


def _reads(graph_def: Any, names: Sequence[str]) -> dict[str, list[str]]:
    """The `ReadVariableOp`s of each captured handle that has no other consumers."""
    consumers: dict[str, list[Any]] = {name: [] for name in names}
    for node in graph_def.node:
        for name in node.input:
            if (source := node_of(name)) in consumers:
                consumers[source].append(node)
    return {
        name: [node.name for node in nodes]
        for name, nodes in consumers.items()
        if nodes and all(node.op == "ReadVariableOp" for node in nodes)
    }
