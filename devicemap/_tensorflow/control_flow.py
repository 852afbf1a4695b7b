"""Converters of control flow: loops and branches for all rows at once."""

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
    convert_as_tensorflow,
    pfor,
    wrap_stacked,
)


def convert_if(given: Any) -> list[Any]:
    """Run each branch for the rows that take it, if there are any.

    TensorFlow's converter also runs a branch for zero rows, for which ops that reshape to -1 fail.
    """
    if not given.input(0).is_stacked:
        return list(convert_as_tensorflow(given))
    names = [given.get_attr(branch).name for branch in ("else_branch", "then_branch")]
    return _branch(given, tf.cast(given.stacked_input(0), tf.int32), names)


def convert_case(given: Any) -> list[Any]:
    """Convert `tf.switch_case` like `convert_if`. An index out of range selects the last branch, as TensorFlow does."""
    if not given.input(0).is_stacked:
        return list(convert_as_tensorflow(given))
    names = [branch.name for branch in given.get_attr("branches")]
    index = given.stacked_input(0)
    known = (index >= 0) & (index < len(names))
    return _branch(given, tf.where(known, index, len(names) - 1), names)


def _branch(given: Any, index: Any, names: Sequence[str]) -> list[Any]:
    """Run each row through the function that `index` (int32 `[rows]`) selects in `names`."""
    rows, inputs, outputs = given.pfor, given.inputs[1:], given.op.outputs
    of_branches = tf.dynamic_partition(rows.all_indices, index, len(names))
    places = of_branches
    if rows.all_indices_partitioned:
        places = tf.dynamic_partition(tf.range(rows.loop_len_vector[0]), index, len(names))

    def run(name: str, indices: Any, place: Any) -> list[Any]:
        taken = [_taken(each, row, place, rows.loop_len_vector[0]) for each, row in zip(inputs, given.op.inputs[1:])]
        return list(pfor._outputs_for_branch(name, indices, given, taken))

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
    results = []
    for name, indices, place in zip(names, of_branches, places):
        results.append(tf.cond(tf.size(indices) > 0, partial(run, name, indices, place), skip))
    return wrap_stacked(tf.dynamic_stitch(places, parts) for parts in zip(*results))


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
    "While": convert_loop,
    "StatelessWhile": convert_loop,
    "If": convert_if,
    "StatelessIf": convert_if,
    "Case": convert_case,
    "StatelessCase": convert_case,
}
"""By type of op."""
