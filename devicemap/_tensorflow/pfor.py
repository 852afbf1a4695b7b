"""TensorFlow's `pfor`, behind `tf.vectorized_map`, with converters of our own.

`pfor` turns a function of one row into a function of all rows, op by op. It uses the attribute `pfor_converter` of an op, or
otherwise the converter of its type. A converter takes the op and its inputs, which are stacked (`[rows, ...]`) or shared by
all rows. It returns results in the same form.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import tensorflow as tf

from devicemap._tensorflow import Private, usable
from devicemap._tensorflow.functions import NO_AUTO_CONTROL_DEPS, functions_by_name

pfor = Private(
    "tensorflow.python.ops.parallel_for.pfor",
    *(
        "ConversionNotImplementedError",
        "PFor",
        "WhileV2",
        "_PforInput",
        "_parse_variant_shapes_and_types",
        "_pfor_converter_registry",
        "_stack",
        "wrap",
    ),
)

_func_graph = Private("tensorflow.python.framework.func_graph", "FuncGraph.capture", "FuncGraph.watch_variable")

Converter = Callable[[Any], Any]
"""`pfor`'s description of an op and its inputs -> its results, each wrapped."""

Policy = Callable[[Any, Converter | None], Any]
"""`(given, converter)` -> the results of an op. `converter` is the one of its type, or `None`."""

NO_TILE = "needs a tensor of uint16 for each row, and TensorFlow cannot repeat it"
"""Why calls that take a tensor of uint16 which rows share run row by row: the op Tile has no kernel."""

_converting = threading.RLock()
"""Held while ops have converters of devicemap."""


class NotVectorizableError(Exception):
    """An op cannot run for all rows at once. The message is the reason; `remedies`: what to try, if it is not another op."""

    def __init__(self, reason: str, *remedies: str):
        super().__init__(reason)
        self.remedies = remedies


def checks_ops() -> bool:
    """Whether `convert_by` checks each op. Otherwise, `tf.vectorized_map` vectorises without checks."""
    return usable(pfor, _func_graph)


def map_all_rows(concrete: Any, leaves: Sequence[Any]) -> list[Any]:
    """Return the results of a function of one row for all rows of the leaves, in the graph that is being traced.

    `tf.vectorized_map` would gather each row (test_rows_are_taken_without_a_copy), and leave a call for one row in the graph.
    """
    if not checks_ops():
        # Automatic control dependencies would run the call for one row (test_nothing_runs_for_one_row_beside_all_rows).
        @tf.function(autograph=False, experimental_attributes=NO_AUTO_CONTROL_DEPS)
        def mapped(*leaves: Any) -> Any:
            return tf.vectorized_map(lambda row: concrete(*row), leaves, fallback_to_while_loop=False)

        return list(mapped(*leaves))
    graph = tf.compat.v1.get_default_graph()
    captures = map(graph.capture, concrete.captured_inputs)
    for variable in concrete.graph.variables:
        graph.watch_variable(variable)
    inputs = [*(pfor.wrap(leaf, True) for leaf in leaves), *(pfor.wrap(capture, False) for capture in captures)]
    converter = pfor.PFor(
        loop_var=tf.compat.v1.placeholder_with_default(0, []),  # the function has no number of the row
        loop_len=tf.shape(leaves[0])[0],
        pfor_ops=concrete.graph.get_operations(),
        fallback_to_while_loop=False,
    )
    results = _converted(converter, concrete.graph, inputs, len(concrete.structured_outputs))
    return [as_stacked(result, converter.loop_len_vector) for result in results]


@contextlib.contextmanager
def convert_by(policy: Policy, graphs: Iterable[Any], converters: Mapping[str, Converter]) -> Iterator[None]:
    """Convert each op of these graphs by a policy, in this thread and context. Otherwise, TensorFlow converts them as before.

    Args:
        policy: converts an op.
        graphs: the graphs of the function of one row and of the functions that it calls.
        converters: converters by type of op, in place of TensorFlow's.
    """
    if not checks_ops():
        yield
        return
    ops = {op for graph in graphs for op in graph.get_operations()}  # several functions may share a graph
    with _converting:  # several threads may convert a function that users traced
        for op in ops:
            op.pfor_converter = partial(_convert, policy, threading.get_ident(), converters.get(op.type))
        try:
            yield
        finally:
            for op in ops:
                del op.pfor_converter


def _convert(policy: Policy, thread: int, own: Converter | None, given: Any) -> Any:
    converter = pfor._pfor_converter_registry.get(given.op.type)
    if threading.get_ident() == thread:
        return policy(given, own or converter)
    if converter is None:  # TensorFlow then runs the op in a loop over rows, if it may
        raise pfor.ConversionNotImplementedError(f"No pfor vectorization defined for {given.op.type}")
    return converter(given)


def convert_as_tensorflow(given: Any) -> Any:
    """Convert an op by TensorFlow's converter."""
    return pfor._pfor_converter_registry[given.op_type](given)


def with_own_inputs(given: Any) -> Any:
    """Return an op with a copy of its list of inputs, which a converter may change."""
    return pfor._PforInput(given.pfor, given.op, list(given.inputs))


def convert(converter: Any, tensor: Any) -> Any:
    """Return a tensor of a graph for all rows, by the conversion of that graph."""
    return converter._convert_helper(tensor)


def for_all_rows(given: Any, index: int) -> Any:
    """Return an input as a tensor `[rows, ...]`, repeated if all rows share it."""
    return as_stacked(given.input(index), given.pfor.loop_len_vector)


def as_stacked(result: Any, count: Any) -> Any:
    """Return a wrapped result as a tensor `[rows, ...]`, repeated if all rows share it. `count`: the number of rows, `[1]`."""
    if result.is_stacked:
        return result.t
    if result.t.dtype == tf.uint16:
        raise NotVectorizableError(NO_TILE)
    return pfor._stack(result.t, count).t


def convert_graph(given: Any, graph: Any, inputs: Iterable[Any], rows: Any = None) -> list[Any]:
    """Return the wrapped results of a function's graph for one row, for the rows of these indices, or for all if `None`.

    Its ops are added to the current graph. TensorFlow would call a function that returns these results, but it does not find
    the results of a function of a SavedModel, and the handle of a lookup table among them has no gradient. A graph gets
    further results when TensorFlow builds its gradient.
    """
    return _converted(_for_graph(given, graph, rows), graph, inputs, len(given.op.outputs))


def convert_effects(given: Any, graph: Any) -> Any:
    """Return an op that runs the effects of a function's graph, which has no results."""
    converter = _for_graph(given, graph, None)
    _converted(converter, graph, given.inputs, 0)
    ends = [
        convert(converter, op.outputs[0]).t if op.outputs else convert(converter, op) for op in graph.control_outputs
    ]
    with tf.control_dependencies(ends):
        return tf.no_op()


def _for_graph(given: Any, graph: Any, rows: Any) -> Any:
    """Return a converter of a function's graph, for the rows of these indices, or for all if `None`."""
    outer = given.pfor
    return pfor.PFor(
        loop_var=outer.loop_var,
        loop_len=outer.loop_len_vector[0] if rows is None else tf.size(rows),
        pfor_ops=graph.get_operations(),
        fallback_to_while_loop=outer.fallback_to_while_loop,
        all_indices=outer.all_indices if rows is None else tf.gather(outer.all_indices, rows),
        all_indices_partitioned=outer.all_indices_partitioned or rows is not None,
        pfor_config=outer.pfor_config,
    )


def _converted(converter: Any, graph: Any, inputs: Iterable[Any], count: int) -> list[Any]:
    """Return the first wrapped results of a graph."""
    for placeholder, taken in zip(graph.inputs, inputs):
        converter._add_conversion(placeholder, taken)
    return [converter._convert_helper(output) for output in graph.outputs[:count]]


def graph_of(given: Any, function: Any) -> Any:
    """Return the graph of a function that an op calls, by the attribute of the op."""
    graph = functions_by_name(given.op.graph).get(function.name)
    if graph is None:
        raise NotVectorizableError("fn calls a function of TensorFlow 1")
    return graph


def run_again(op: Any, inputs: Iterable[Any]) -> list[Any]:
    """Run an op with the same attributes on other inputs."""
    dtypes = [output.dtype for output in op.outputs]
    return list(
        tf.compat.v1.get_default_graph().create_op(op.type, list(inputs), dtypes, attrs=op.node_def.attr).outputs
    )


def merge_axes(tensor: Any, count: int) -> Any:
    """Merge the first `count` axes. Reshaping to -1 takes fewer ops, but fails for tensors without elements."""
    if count == 1:
        return tensor
    others = tensor.shape[count:]
    if others.num_elements():
        return tf.reshape(tensor, [-1, *others])
    shape = tf.shape(tensor)
    return tf.reshape(tensor, tf.concat([[tf.reduce_prod(shape[:count])], shape[count:]], 0))


def split_axis(tensor: Any, like: Any, count: int) -> Any:
    """Split the first axis into the first `count` axes of another tensor."""
    if count == 1:
        return tensor
    others = like.shape[1:count].concatenate(tensor.shape[1:])
    lengths = [-1, *others] if others.num_elements() else tf.concat([tf.shape(like)[:count], tf.shape(tensor)[1:]], 0)
    result = tf.reshape(tensor, lengths)
    result.set_shape(like.shape[:1].concatenate(others))
    return result


def wrap_stacked(results: Iterable[Any]) -> list[Any]:
    """Wrap results `[rows, ...]`."""
    return [pfor.wrap(result, True) for result in results]
