"""A traced function, optimised once for all the devices it runs on.

TensorFlow's optimiser (Grappler) works on the whole graph of a call, in which every tower is a copy of the same function:
16 devices take 16 times as long, and until the first result that is most of the time (`benchmarks/first_result.py`). Here it
works on the function alone; the graph of the towers is then run without it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from devicemap.devices import kind_of
from devicemap.internals import UNCHAINED, optimized_graph
from devicemap.tracing import Traced


def can_be_optimized_once(traced: Traced, places: Sequence[str]) -> bool:
    """Whether one optimised function serves all places, for calls without gradients.

    It needs several places, and all of kind CPU: for a GPU, the optimiser wants to know the device. Functions that act
    outside of the graph or write state are left alone; so are those with their own compiler, or with results that are
    not plain tensors.
    """
    graph = traced.concrete.graph
    leaves = [*tf.nest.flatten(traced.concrete.structured_input_signature), *traced.specs]
    return (
        len(places) > 1
        and all(kind_of(place) == "CPU" for place in places)
        and not (traced.audit.effects or traced.audit.writes or traced.audit.seeded)
        and all(isinstance(leaf, tf.TensorSpec) for leaf in leaves)
        and not any("_XlaMustCompile" in function.attr for function in graph.as_graph_def().library.function)
    )


def optimize(traced: Traced) -> Any:
    """`traced.concrete` as a `ConcreteFunction` of the optimised graph: same inputs, captures and list of results.

    It has no gradients: the optimiser fuses ops into others that have none.
    """
    concrete = traced.concrete
    captured = list(concrete.captured_inputs)
    names = [tensor.op.name for tensor in concrete.inputs]
    outputs = list(concrete.outputs)
    graph_def = optimized_graph(concrete)
    kept = {node.name for node in graph_def.node}

    @tf.function(autograph=False, experimental_attributes=UNCHAINED)
    def optimized(*tensors: Any) -> list[Any]:
        capture = tf.compat.v1.get_default_graph().capture
        fed = {name: tensor for name, tensor in zip(names, [*tensors, *map(capture, captured)]) if name in kept}
        inputs = {**fed, **{f"^{name}": tensor for name, tensor in fed.items()}}  # control edges from them too
        results = tf.graph_util.import_graph_def(graph_def, inputs, [tensor.name for tensor in outputs], name="")
        for result, output in zip(results, outputs):
            result.set_shape(output.shape)
        return list(results)

    specs = [tf.TensorSpec(t.shape, t.dtype) for t in concrete.inputs[: len(names) - len(captured)]]
    function = optimized.get_concrete_function(*specs)
    assert [*map(id, function.captured_inputs)] == [*map(id, captured)]
    return function
