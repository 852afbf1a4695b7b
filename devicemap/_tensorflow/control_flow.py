"""Converters of control flow: calls, branches and loops for all rows at once."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import tensorflow as tf

from devicemap._tensorflow.indexing import StackedList
from devicemap._tensorflow.loops import convert_loop
from devicemap._tensorflow.pfor import (
    LOOPS,
    Converter,
    NotVectorizableError,
    as_stacked,
    graph_of,
    pfor,
    wrap_stacked,
)


def refuse_call(given: Any) -> Any:
    """Refuse a call of a function without a graph. Conversions replace other calls by the ops of the function."""
    return graph_of(given, given.get_attr("f"))


def convert_branches(given: Any) -> list[Any]:
    """Convert `tf.cond` and `tf.switch_case`. An index out of range selects the last branch, as TensorFlow does."""
    if not given.op.outputs:
        raise NotVectorizableError("fn has a branch without results")
    if "branches" in given.op.node_def.attr:
        names = given.get_attr("branches")
    else:
        names = [given.get_attr(branch) for branch in ("else_branch", "then_branch")]
    branches = [graph_of(given, name) for name in names]
    selector = given.op.inputs[0]
    if selector.dtype not in (tf.bool, tf.int32) or selector.shape.rank != 0:
        raise NotVectorizableError("fn has a branch whose condition is not one bool")
    index, stacked = tf.cast(given.input(0).t, tf.int32), given.input(0).is_stacked
    if stacked:
        known = (index >= 0) & (index < len(branches))
        return _diverging_branches(given, tf.where(known, index, len(branches) - 1), branches)
    rows = given.pfor.loop_len_vector

    def run(branch: Any) -> list[Any]:
        return [as_stacked(result, rows) for result in given.pfor.convert_called(given, branch, given.inputs[1:])]

    return wrap_stacked(tf.switch_case(index, [partial(run, branch) for branch in branches]))


def _diverging_branches(given: Any, index: Any, branches: Sequence[Any]) -> list[Any]:
    """Run each row through the branch that `index` (int32 `[rows]`) selects.

    TensorFlow's converter also runs a branch for zero rows, for which ops that reshape to -1 fail.
    """
    inputs, outputs, count = given.inputs[1:], given.op.outputs, given.pfor.loop_len_vector[0]

    def run(branch: Any, rows: Any) -> list[Any]:
        taken = [_select_rows(each, of_row, rows, count) for each, of_row in zip(inputs, given.op.inputs[1:])]
        return [as_stacked(result, [tf.size(rows)]) for result in given.pfor.convert_called(given, branch, taken, rows)]

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


def _select_rows(given: Any, of_row: Any, indices: Any, count: Any) -> Any:
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
    **dict.fromkeys(("PartitionedCall", "StatefulPartitionedCall"), refuse_call),
    **dict.fromkeys(LOOPS, convert_loop),
    **dict.fromkeys(("If", "StatelessIf", "Case", "StatelessCase"), convert_branches),
}
"""By type of op."""
