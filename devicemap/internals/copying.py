"""A traced function once more, from its graph: the same ops, which keep what they keep from call to call for themselves.

Random ops get other seeds, and so number streams of their own; the calls of Python functions get names of their own, by which
their gradients find what was recorded.

`fn` is not traced again for that, which would run the user's Python code, and would find the functions that keep their
traces with their seeds. `tf.saved_model` reads functions from `FunctionDef`s by the same means; here what they lack is at
hand: the graphs that they were made of, with static shapes and gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import tensorflow as tf
from tensorflow.python.eager.polymorphic_function import concrete_function
from tensorflow.python.framework import func_graph, function_def_to_graph, importer
from tensorflow.python.framework import ops as framework_ops
from tensorflow.python.ops import handle_data_util, script_ops

from devicemap.errors import failure
from devicemap.internals.functions import capturing
from devicemap.internals.gradients import differentiate_values_alone

_GRAPHS_OF_BRANCHES = {
    "While": {"cond": "_cond_graph", "body": "_body_graph"},
    "If": {"then_branch": "_true_graph", "else_branch": "_false_graph"},
}
"""Where gradients of control flow look for the graphs of its functions, by attribute."""

_UNSEEDED = (0, 0)

Mix = Callable[[int, int], tuple[int, int]]
"""The seeds of a random op -> those of its copy."""


def copied(concrete: Any, graph_def: Any, mix: Mix) -> Any:
    """A copy of a `ConcreteFunction`, of which `graph_def` is the graph as it was traced, with other seeds.

    It captures the same, has the same gradients, and can be told apart from the original by its numbers alone.
    """
    with tf.device(None):  # not the user's scope of the moment
        return _Copies(concrete, graph_def, mix).of_whole()


class _Copies:
    """The copies of a function and of those that it calls, at any depth."""

    def __init__(self, concrete: Any, graph_def: Any, mix: Mix):
        self._concrete = concrete
        self._graph_def = graph_def
        self._mix = mix
        self._definitions = {definition.signature.name: definition for definition in graph_def.library.function}
        self._functions = concrete.graph._functions
        self._made: dict[str, Any] = {}
        self._graphs: dict[int, tuple[Any, dict[str, str]]] = {}

    def of_whole(self) -> Any:
        """The copy of the outermost function."""
        original = self._concrete.graph
        graph = func_graph.FuncGraph(original.name, structured_input_signature=original.structured_input_signature)
        nodes = tf.compat.v1.GraphDef(node=self._graph_def.node, versions=self._graph_def.versions)
        with graph.as_default():
            self._change(nodes.node, graph)
            self._fill(graph, nodes, original, {op.name: op.name for op in original.get_operations()})
            graph.inputs = [graph.get_tensor_by_name(tensor.name) for tensor in self._concrete.inputs]
            graph.outputs = [graph.get_tensor_by_name(tensor.name) for tensor in self._concrete.outputs]
            graph.control_outputs = [graph.get_operation_by_name(op.name) for op in original.control_outputs]
            graph.structured_outputs = tf.nest.pack_sequence_as(
                original.structured_outputs, graph.outputs, expand_composites=True
            )
        graph.variables = original.variables
        captured = self._concrete.captured_inputs
        for outside, inside in zip(captured, graph.inputs[len(graph.inputs) - len(captured) :]):
            graph.replace_capture(outside, inside)
        copy = concrete_function.ConcreteFunction.from_func_graph(
            graph, self._concrete.function_type, self._concrete.function_def.attr
        )
        copy.set_external_captures(captured)
        differentiate_values_alone(graph)
        return copy

    def _of_function(self, name: str) -> Any:
        """The copy of a function that is called, within the graph of the moment."""
        if name not in self._made:
            function = self._functions[name]
            original = getattr(function, "graph", None)  # what was read from a definition has none
            inputs = original.inputs if original else ()
            definition = type(self._definitions[name])()
            definition.CopyFrom(self._definitions[name])
            shapes = [tensor.shape for tensor in inputs[: len(definition.signature.input_arg)]] or None
            # gradients of loops make functions that are called after it: no two may be the same
            graph = func_graph.FuncGraph(f"{original.name if original else name}_{framework_ops.uid()}")
            with graph.as_default():
                self._change(definition.node_def, graph)
                nodes, flat = function_def_to_graph.function_def_to_graph_def(definition, shapes)
                self._fill(graph, nodes, original, _names(original, definition) if original else {})
                graph.inputs = [graph.get_tensor_by_name(flat[each.name]) for each in definition.signature.input_arg]
                results = [flat[definition.ret[each.name]] for each in definition.signature.output_arg]
                graph.outputs = [graph.get_tensor_by_name(result) for result in results]
                graph.control_outputs = [
                    graph.get_operation_by_name(definition.control_ret[each])
                    for each in definition.signature.control_output
                ]
            self._made[name] = concrete_function.ConcreteFunction.from_func_graph(
                graph, getattr(function, "function_type", None), definition.attr
            )
        return self._made[name]

    def _change(self, nodes: Iterable[Any], graph: Any) -> None:
        """Give these nodes other seeds, and let them call copies, which `graph` gets to know."""
        for node in nodes:
            if (seeds := seeds_of(node)) not in (None, _UNSEEDED):
                node.attr["seed"].i, node.attr["seed2"].i = self._mix(*seeds)
            if node.op == "EagerPyFunc":  # the gradient finds the tape of a call by this
                token = script_ops._py_funcs.insert(script_ops._py_funcs.get(node.attr["token"].s.decode()))
                node.attr["token"].s = token.encode()
            for called in _called(node):
                if called.name in self._functions:
                    copy = self._of_function(called.name)
                    graph._add_function_recursive(copy.inference_fn)
                    called.name = _name(copy)
            if node.op in self._functions:
                self._share(node.op, graph)

    def _share(self, name: str, graph: Any) -> None:
        """Let `graph` call a function by the type of an op, as TensorFlow 1 does, as it is."""
        if self._draws(name):
            raise failure(
                "fn calls a function of TensorFlow 1 that holds random ops with a seed; it would draw the same numbers on "
                "every device. Use the option seed= with tf.random.stateless_* ops, or a tf.random.Generator"
            )
        graph._add_function(self._functions[name])

    def _draws(self, name: str) -> bool:
        """Whether a function holds seeds, in it or in those that it calls."""
        return name in self._definitions and any(
            seeds_of(node) not in (None, _UNSEEDED)
            or any(self._draws(called) for called in (node.op, *(each.name for each in _called(node))))
            for node in self._definitions[name].node_def
        )

    def _fill(self, graph: Any, graph_def: Any, original: Any, names: dict[str, str]) -> None:
        """Put nodes into `graph`, and what is known of the `original` ones, whose `names` stand beside theirs there."""
        importer.import_graph_def_for_function(graph_def, name="", propagate_device_spec=True)
        self._graphs[id(original)] = graph, names
        copies = {_name(copy): copy for copy in self._made.values()}
        for of_original, of_copy in names.items():
            op = original.get_operation_by_name(of_original)
            self._complete(graph.get_operation_by_name(of_copy), op, copies)

    def _complete(self, copy: Any, op: Any, functions: dict[str, Any]) -> None:
        """Tell the copy of an op what graphs do not hold of it."""
        for there, here in zip(op.outputs, copy.outputs):
            here.set_shape(there.shape)
            handle_data_util.copy_handle_data(there, here)
        if copy.type in ("PartitionedCall", "StatefulPartitionedCall"):
            called = functions.get(copy.get_attr("f").name)
            copy._gradient_function = called._get_gradient_function() if called else op._gradient_function
        elif op._gradient_function is not None:
            copy._gradient_function = op._gradient_function
        elif "_gradient_op_type" in copy.node_def.attr:
            copy._gradient_function = self._gradient_within(framework_ops.get_gradient_function(op))
        for attribute, graph_of in _GRAPHS_OF_BRANCHES.get(copy.type.removeprefix("Stateless"), {}).items():
            setattr(copy, graph_of, functions[copy.get_attr(attribute).name].graph)
        if copy.type in ("Case", "StatelessCase"):
            for i, branch in enumerate(copy.get_attr("branches")):
                setattr(copy, f"_branch_graph_{i}", functions[branch.name].graph)

    def _gradient_within(self, gradient: Callable[..., Any]) -> Callable[..., Any]:
        """A custom gradient, which may use tensors of the original graphs, using those of the copies.

        It is traced on its own, such that these are what it captures.
        """

        def of_copy(op: Any, *upstream: Any) -> list[Any]:
            given = [i for i, each in enumerate(upstream) if each is not None]
            found: list[Any] = []

            @tf.function(autograph=False)
            def traced(*tensors: Any) -> list[Any]:
                arguments = dict(zip(given, tensors))
                gradients = gradient(op, *(arguments.get(i) for i in range(len(upstream))))
                found[:] = gradients if isinstance(gradients, list | tuple) else [gradients]
                return [each for each in found if each is not None]

            function = traced.get_concrete_function(*(upstream[i] for i in given))
            replaced = {i: self._in_copy(tensor) for i, tensor in enumerate(function.captured_inputs)}
            with capturing(function, replaced):
                results = iter(function(*(upstream[i] for i in given)))
            return [None if each is None else next(results) for each in found]

        return of_copy

    def _in_copy(self, tensor: Any) -> Any:
        """What stands for a tensor in the copy of its graph."""
        graph, names = self._graphs.get(id(getattr(tensor, "graph", None)), (None, {}))
        return (
            tensor if graph is None else graph.get_operation_by_name(names[tensor.op.name]).outputs[tensor.value_index]
        )


def _names(original: Any, definition: Any) -> dict[str, str]:
    """The names of a graph's ops -> those in the definition that was made of it, where some were taken by arguments.

    Ops are in the same order in both. The graph may have got more since, for its gradients.
    """
    inputs = [tensor.op for tensor in original.inputs[: len(definition.signature.input_arg)]]
    ops = [op for op in original.get_operations() if op not in {*inputs}]
    names = {op.name: each.name for op, each in zip(inputs, definition.signature.input_arg)}
    if any(op.type != node.op for op, node in zip(ops, definition.node_def)):
        raise RuntimeError(
            f"the definition of {definition.signature.name} does not have the ops of its graph in their order"
        )
    return names | {op.name: node.name for op, node in zip(ops, definition.node_def)}


def seeds_of(node: Any) -> tuple[int, int] | None:
    """The seeds of an op that keeps a number stream of its own; `(0, 0)` where TensorFlow chooses some, each time others."""
    return (node.attr["seed"].i, node.attr["seed2"].i) if {"seed", "seed2"} <= {*node.attr} else None


def _called(node: Any) -> Iterator[Any]:
    """The `NameAttrList`s of a node: the functions that it calls."""
    for value in node.attr.values():
        if value.HasField("func"):
            yield value.func
        yield from value.list.func


def _name(function: Any) -> str:
    """What a `ConcreteFunction` is called by in graphs."""
    name: bytes = function.inference_fn.name
    return name.decode()
