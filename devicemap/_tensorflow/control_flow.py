"""Converters of control flow: calls, branches and loops for all rows at once."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import tensorflow as tf

from devicemap._tensorflow.indexing import StackedList
from devicemap._tensorflow.loops import convert_loop
from devicemap._tensorflow.pfor import (
    Converter,
    NotVectorizableError,
    as_stacked,
    convert_effects,
    convert_graph,
    graph_of,
    pfor,
    wrap_stacked,
)


def convert_call(given: Any) -> Any:
    """Convert the ops of a function that is called."""
    graph = graph_of(given, given.get_attr("f"))
    return convert_graph(given, graph, given.inputs) if given.op.outputs else convert_effects(given, graph)


def convert_if(given: Any) -> list[Any]:
    """Convert `tf.cond`."""
    branches = [graph_of(given, given.get_attr(branch)) for branch in ("else_branch", "then_branch")]
    condition = given.op.inputs[0]
    if condition.dtype != tf.bool or condition.shape.rank != 0:
        raise NotVectorizableError("fn has a branch whose condition is not one bool")
    if given.input(0).is_stacked:
        return _parting_branches(given, tf.cast(given.stacked_input(0), tf.int32), branches)
    return _shared_branch(given, tf.cast(given.unstacked_input(0), tf.int32), branches)


def convert_case(given: Any) -> list[Any]:
    """Convert `tf.switch_case`. An index out of range selects the last branch, as TensorFlow does."""
    branches = [graph_of(given, branch) for branch in given.get_attr("branches")]
    if not given.input(0).is_stacked:
        return _shared_branch(given, given.unstacked_input(0), branches)
    index = given.stacked_input(0)
    known = (index >= 0) & (index < len(branches))
    return _parting_branches(given, tf.where(known, index, len(branches) - 1), branches)


def _shared_branch(given: Any, index: Any, branches: Sequence[Any]) -> list[Any]:
    """Run all rows through the branch that `index` (an int32 scalar) selects."""

    def run(branch: Any) -> list[Any]:
        return [
            as_stacked(result, given.pfor.loop_len_vector) for result in convert_graph(given, branch, given.inputs[1:])
        ]

    return wrap_stacked(tf.switch_case(index, [partial(run, branch) for branch in branches]))


def _parting_branches(given: Any, index: Any, branches: Sequence[Any]) -> list[Any]:
    """Run each row through the branch that `index` (int32 `[rows]`) selects.

    TensorFlow's converter also runs a branch for zero rows, for which ops that reshape to -1 fail.
    """
    inputs, outputs, count = given.inputs[1:], given.op.outputs, given.pfor.loop_len_vector[0]

    def run(branch: Any, rows: Any) -> list[Any]:
        taken = [_taken(each, of_row, rows, count) for each, of_row in zip(inputs, given.op.inputs[1:])]
        return [as_stacked(result, [tf.size(rows)]) for result in convert_graph(given, branch, taken, rows)]

    def skip() -> list[Any]:
        return [tf.zeros([0, *output.shape], output.dtype) for output in outputs]

    if any(output.dtype == tf.variant for output in outputs):
        raise NotVectorizableError(
            "fn has a branch that writes to a list, such as a tf.TensorArray",
            "write to it after the branch, as in array.write(i, tf.where(condition, x, y))",
        )
    if not all(output.shape.is_fully_defined() for output in outputs):
        raise NotVectorizableError(
            "fn has a branch whose results may differ in shape between rows",
            "give the results of both branches the same shape, with tf.ensure_shape if TensorFlow does not know it",
        )
    of_branches = tf.dynamic_partition(tf.range(count), index, len(branches))
    results = [
        tf.cond(tf.size(rows) > 0, partial(run, branch, rows), skip) for branch, rows in zip(branches, of_branches)
    ]
    return wrap_stacked(tf.dynamic_stitch(of_branches, parts) for parts in zip(*results))


def _taken(given: Any, of_row: Any, indices: Any, count: Any) -> Any:
    """Return an input for the rows of these indices, out of `count`. `of_row` is the input for one row."""
    if not given.is_stacked:
        return given
    if given.t.dtype != tf.variant:
        return pfor.wrap(tf.gather(given.t, indices), True)
    elements = StackedList(of_row)

    def some() -> Any:
        return elements.of_rows(tf.gather(elements.to_rows(given.t, count), indices))

    return pfor.wrap(tf.cond(tf.size(indices) == count, lambda: given.t, some), True)


CONTROL_FLOW: dict[str, Converter] = {
    "PartitionedCall": convert_call,
    "StatefulPartitionedCall": convert_call,
    "While": convert_loop,
    "StatelessWhile": convert_loop,
    "If": convert_if,
    "StatelessIf": convert_if,
    "Case": convert_case,
    "StatelessCase": convert_case,
}
"""By type of op."""
