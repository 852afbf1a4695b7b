"""The converters of TensorFlow's `pfor`, which is behind `tf.vectorized_map`.

A converter turns an op for one row into ops for all rows. It takes the op and its inputs, which are stacked (`[rows, ...]`) or
shared by all rows. It returns results in the same form. `compile/conversion.py` calls the converters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import tensorflow as tf

from devicemap._tensorflow import Private, usable
from devicemap._tensorflow.functions import NO_AUTO_CONTROL_DEPS, functions_by_name

pfor = Private(
    "tensorflow.python.ops.parallel_for.pfor",
    *(
        "WhileV2",
        "WrappedTensor",
        "_PforInput",
        "_is_stateful_pfor_op",
        "_is_variant_with_internal_stacking",
        "_parse_variant_shapes_and_types",
        "_pfor_converter_registry",
        "_stack",
        "handle_data_util.copy_handle_data",
        "wrap",
    ),
)

_func_graph = Private("tensorflow.python.framework.func_graph", "FuncGraph.capture", "FuncGraph.watch_variable")

Converter = Callable[[Any], Any]
"""`pfor`'s description of an op and its inputs -> its results, each wrapped."""

LOOPS = frozenset(["While", "StatelessWhile"])
"""The types of ops that are loops."""

NO_TILE = "needs a tensor of uint16 for each row, and TensorFlow cannot repeat it"
"""Why calls that take a tensor of uint16 which rows share run row by row: the op Tile has no kernel."""


class NotVectorizableError(Exception):
    """An op cannot run for all rows at once. The message is the reason; `remedies`: what to try, if it is not another op."""

    def __init__(self, reason: str, *remedies: str):
        super().__init__(reason)
        self.remedies = remedies


def checks_ops() -> bool:
    """Whether ops can be converted one by one. Otherwise, `tf.vectorized_map` vectorises without checks."""
    return usable(pfor, _func_graph)


def vectorized_map(concrete: Any, leaves: Sequence[Any]) -> list[Any]:
    """Return the results of a function of one row for all rows of the leaves, by `tf.vectorized_map`."""

    # Automatic control dependencies would run the call for one row (test_nothing_runs_for_one_row_beside_all_rows).
    @tf.function(autograph=False, experimental_attributes=NO_AUTO_CONTROL_DEPS)
    def mapped(*leaves: Any) -> Any:
        return tf.vectorized_map(lambda row: concrete(*row), leaves, fallback_to_while_loop=False)

    return list(mapped(*leaves))


def wrapped_inputs(concrete: Any, leaves: Sequence[Any]) -> list[Any]:
    """Return the inputs of a function of one row for all rows of the leaves: the leaves, and captures that rows share."""
    graph = tf.compat.v1.get_default_graph()
    captures = map(graph.capture, concrete.captured_inputs)
    for variable in concrete.graph.variables:
        graph.watch_variable(variable)
    return [*wrap_stacked(leaves), *(pfor.wrap(capture, False) for capture in captures)]


def convert_op(conversion: Any, op: Any, inputs: list[Any], converter: Converter) -> Any:
    """Return the wrapped results of an op for wrapped inputs, or an op that has none.

    The converter is not needed if all rows share the results: the op has no state, or reads it, and rows share its inputs.
    Loops need it, because the gradient of a copy would look for the functions of the loop in another graph
    (test_gradients_are_those_of_single_rows).
    """
    if op.type in LOOPS or pfor._is_stateful_pfor_op(op) or any(each.is_stacked for each in inputs):
        results = converter(pfor._PforInput(conversion, op, inputs))
        return [results] if isinstance(results, pfor.WrappedTensor) else results
    new = _run_again(op, [each.t for each in inputs])
    for old_output, output in zip(op.outputs, new.outputs):
        pfor.handle_data_util.copy_handle_data(old_output, output)
    return [pfor.wrap(output, False) for output in new.outputs] or new


def set_shape(result: Any, of_row: tf.TensorShape) -> None:
    """Set the static shape of a wrapped result. A TensorList of all rows is a scalar."""
    shape = tf.TensorShape([None] * result.is_stacked).concatenate(of_row)
    result.t.set_shape([] if pfor._is_variant_with_internal_stacking(result.t) else shape)


def tensorflow_converter(op_type: str) -> Converter | None:
    """Return TensorFlow's converter of a type of op, if there is one."""
    converter: Converter | None = pfor._pfor_converter_registry.get(op_type)
    return converter


def convert_as_tensorflow(given: Any) -> Any:
    """Convert an op by TensorFlow's converter."""
    return pfor._pfor_converter_registry[given.op_type](given)


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


def graph_of(given: Any, function: Any) -> Any:
    """Return the graph of a function that an op calls, by the attribute of the op."""
    graph = functions_by_name(given.op.graph).get(function.name)
    if graph is None:
        raise NotVectorizableError("fn calls a function of TensorFlow 1")
    return graph


def run_again(op: Any, inputs: Iterable[Any]) -> list[Any]:
    """Return the results of an op with the same attributes on other inputs."""
    return list(_run_again(op, inputs).outputs)


def _run_again(op: Any, inputs: Iterable[Any]) -> Any:
    dtypes = [output.dtype for output in op.outputs]
    return tf.compat.v1.get_default_graph().create_op(op.type, list(inputs), dtypes, attrs=op.node_def.attr)


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
