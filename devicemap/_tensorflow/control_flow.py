"""Converters of control flow: loops and branches for all rows at once."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import tensorflow as tf

from devicemap._tensorflow.functions import functions_within
from devicemap._tensorflow.pfor import (
    Converter,
    NotVectorizableError,
    convert_as_tensorflow,
    pfor,
    with_own_inputs,
    wrap_stacked,
)


def convert_loop(given: Any) -> list[Any]:
    """Convert a loop whose condition is the same for all rows into one plain loop.

    TensorFlow's converter allows rows to finish at different steps. Each step checks whether rows remain, and passes on a
    TensorArray for each variable. That takes up to half of the time of a loop with short steps.
    """
    loop = pfor.WhileV2(given)
    differ = _differ_between_rows(given, loop)
    if differ is not None:
        with contextlib.suppress(_Parting):
            return _shared_loop(given, loop, differ)
    if not _keeps_lengths(given, loop):
        raise NotVectorizableError(
            "fn has a loop that rows leave at different times, with a list that may grow",
            "give the tf.TensorArray a fixed size and element_shape",
        )
    # TensorFlow calls a function that returns the table, whose handle has no gradient (test_what_runs_row_by_row).
    if any(op.type.startswith("LookupTable") for graph in _graphs_of(loop) for op in graph.get_operations()):
        raise NotVectorizableError("fn has a loop that rows leave at different times, with a lookup table")
    if _has_unread_variable(loop):
        raise NotVectorizableError(
            "fn has a loop that rows leave at different times, with a tf.Variable whose value it does not use",
            "read the tf.Variable before the loop",
        )
    if any(start.shape.is_fully_defined() > end.shape.is_fully_defined() for start, end in _variables(given.op)):
        raise NotVectorizableError(
            "fn has a loop that rows leave at different times, with a tensor whose shape may change in it",
            "keep its shape with tf.ensure_shape",
        )
    # TensorFlow would lose the elements of a shared list when rows leave (test_a_list_that_rows_share).
    parted, pairs = with_own_inputs(given), zip(loop._body_func.graph.inputs, loop._body_func.graph.outputs)
    lists = [i for i, (before, after) in enumerate(pairs) if before.dtype == tf.variant and after is not before]
    parted.stack_inputs(lists, tile_variants=True)
    return list(_with_rare_partitions(parted)())


def _with_rare_partitions(given: Any) -> Any:
    """Return TensorFlow's converter of a loop that rows leave at different times.

    TensorFlow partitions each variable in each step, with a loop over the elements of each list. Here, it does so only in
    steps in which rows leave, if the loop has a list.
    """
    if not any(each.dtype == tf.variant for each in given.op.inputs):
        return pfor.WhileV2(given)

    class Loop(pfor.WhileV2):  # type: ignore[name-defined]
        def _process_cond_stacked(self, goes_on: Any, indices: Any, inputs: Any, stacked: Any, results: Any) -> Any:
            partition = super()._process_cond_stacked
            return tf.cond(
                tf.reduce_all(goes_on) & (tf.size(goes_on) > 0),
                lambda: (tf.constant(True), indices, list(inputs), list(results)),
                lambda: partition(goes_on, indices, inputs, stacked, results),
            )

    return Loop(given)


class _Parting(Exception):
    """A variable or the condition differs between rows, although the ops of the loop do not show it, as for random numbers."""


def _shared_loop(given: Any, loop: Any, differ: Iterable[int]) -> list[Any]:
    """Return the results of one loop for all rows. The variables in `differ` are stacked."""
    started = with_own_inputs(given)
    started.stack_inputs(differ, tile_variants=True)
    stacked = [each.is_stacked for each in started.inputs]
    shapes = pfor.WhileV2(started)._output_shapes()
    condition, body = _over_rows(given, loop._cond_func), _over_rows(given, loop._body_func)
    # The loop captures what it does not change, if it reads it. TensorFlow fails for gradients of a loop that does not read a
    # tf.Variable that it has (test_loops_that_do_not_read_a_variable).
    graph = loop._body_func.graph
    changing = [i for i, (before, after) in enumerate(zip(graph.inputs, graph.outputs)) if after is not before]

    def wrapped(variables: Sequence[Any]) -> list[Any]:
        tensors = [each.t for each in started.inputs]
        for i, variable in zip(changing, variables):
            tensors[i] = variable
        return [pfor.wrap(tensor, each) for tensor, each in zip(tensors, stacked)]

    def goes_on(*variables: Any) -> Any:
        result, *_ = condition(wrapped(variables))
        if result.is_stacked:
            raise _Parting
        return tf.reshape(result.t, [])

    def step(*variables: Any) -> list[Any]:
        converted, results = body(wrapped(variables)), []
        for i in changing:
            if converted[i].is_stacked > stacked[i]:
                raise _Parting
            results.append(_alike(converted[i], stacked[i], given.pfor.loop_len_vector))
            results[-1].set_shape(shapes[i])
        return results

    results = tf.while_loop(
        goes_on,
        step,
        [started.inputs[i].t for i in changing],
        shape_invariants=[shapes[i] for i in changing],
        parallel_iterations=given.get_attr("parallel_iterations"),
    )
    return wrapped(results)


def _alike(result: Any, stacked: bool, rows: Any) -> Any:
    """Return the tensor of a result, repeated for each row if it is shared and `stacked` is true."""
    return pfor._stack(result.t, rows).t if stacked and not result.is_stacked else result.t


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


def _has_unread_variable(loop: Any) -> bool:
    """Whether a loop has a `tf.Variable` whose value it does not use, as for `tf.zeros_like`.

    TensorFlow fails for gradients of such a loop (test_loops_that_do_not_read_a_variable).
    """
    body, condition = loop._body_func.graph, loop._cond_func.graph

    def is_used(place: int) -> bool:
        if condition.outputs[0].name in _depending(condition, {place}):
            return True
        reached = _depending(body, {place})
        asserts = (op for op in body.get_operations() if not op.outputs)
        used = [*(t for t in body.outputs if t is not body.inputs[place]), *(t for op in asserts for t in op.inputs)]
        return any(tensor.name in reached for tensor in used)

    return not all(is_used(i) for i, each in enumerate(body.inputs) if each.dtype == tf.resource)


def _keeps_lengths(given: Any, loop: Any) -> bool:
    """Whether all lists of a loop have elements of known shape, and keep their lengths.

    TensorFlow's converter reads each element when rows leave the loop, also elements that are not written yet.
    """
    lists = [each for each in given.op.inputs if each.dtype == tf.variant]
    if not lists:
        return True
    if not all(
        tf.TensorShape(pfor._parse_variant_shapes_and_types(each)[0].shape).is_fully_defined() for each in lists
    ):
        return False
    for each in _graphs_of(loop):
        if any(output.op.type in _OF_NEW_LISTS for output in each.outputs):
            return False
        if any(op.type in _OF_LENGTHS or _resizes(op) for op in each.get_operations()):
            return False
    return True


def _graphs_of(loop: Any) -> list[Any]:
    """Return the graphs of a loop's body and of the functions that it calls."""
    graph = loop._body_func.graph
    return [graph, *functions_within(graph)]


_OF_NEW_LISTS = {
    "EmptyTensorList",
    "TensorListFromTensor",
    "TensorListReserve",
    "TensorListScatterV2",
    "TensorListSplit",
}
"""Types of ops that make a list, whose length a body that returns it does not keep."""

_OF_LENGTHS = {
    "TensorListConcatLists",
    "TensorListPopBack",
    "TensorListPushBack",
    "TensorListPushBackBatch",
    "TensorListResize",
    "TensorListScatterIntoExistingList",
}
"""Types of ops that may change the length of a list."""


def _resizes(op: Any) -> bool:
    """Whether an op may write an element after the end of a list, as in `tf.TensorArray(..., dynamic_size=True)`."""
    return op.type == "TensorListSetItem" and bool(op.get_attr("resize_if_index_out_of_bounds"))


def _variables(op: Any) -> list[tuple[Any, Any]]:
    """Return the initial and the final tensor of each loop variable that is a dense tensor."""
    pairs = zip(op.inputs, op.outputs)
    return [(start, end) for start, end in pairs if end.dtype not in (tf.variant, tf.resource)]


def _differ_between_rows(given: Any, loop: Any) -> set[int] | None:
    """Return the indices of the loop variables that depend on the row, or `None` if the condition does."""
    body, condition = loop._body_func.graph, loop._cond_func.graph
    differ = {i for i, each in enumerate(given.inputs) if each.is_stacked}
    while True:
        reached = _depending(body, differ)
        more = {i for i, result in enumerate(body.outputs) if result.name in reached}
        if more <= differ:
            return None if condition.outputs[0].name in _depending(condition, differ) else differ
        differ |= more


def _depending(graph: Any, inputs: Iterable[int]) -> set[str]:
    """Return the names of the tensors in a function's graph whose values depend on these inputs."""
    reached = {graph.inputs[i].name for i in inputs}
    for op in graph.get_operations():
        if op.type not in _OF_SHAPES and any(tensor.name in reached for tensor in op.inputs):
            reached |= {result.name for result in op.outputs}
    return reached


_OF_SHAPES = {"Shape", "ShapeN", "Size", "Rank", "TensorListLength", "TensorListElementShape"}


def _over_rows(given: Any, function: Any) -> Any:
    """Convert a function of the graph for one row into a function for all rows, which adds its ops to the current graph.

    TensorFlow would call a function that returns all loop variables. The handle of a lookup table among them has no gradient.
    """
    rows, graph = given.pfor, function.graph

    def run(inputs: Sequence[Any]) -> list[Any]:
        converter = pfor.PFor(
            loop_var=rows.loop_var,
            loop_len=rows.loop_len_vector[0],
            pfor_ops=graph.get_operations(),
            fallback_to_while_loop=rows.fallback_to_while_loop,
            all_indices=rows.all_indices,
            all_indices_partitioned=rows.all_indices_partitioned,
            pfor_config=rows.pfor_config,
        )
        for placeholder, taken in zip(graph.inputs, inputs):
            converter._add_conversion(placeholder, taken)
        return [converter._convert_helper(output) for output in graph.outputs]

    return run


def _branch(given: Any, index: Any, names: Sequence[str]) -> list[Any]:
    """Run each row through the function that `index` (int32 `[rows]`) selects in `names`."""
    rows, inputs, outputs = given.pfor, given.inputs[1:], given.op.outputs
    of_branches = tf.dynamic_partition(rows.all_indices, index, len(names))
    places = of_branches
    if rows.all_indices_partitioned:
        places = tf.dynamic_partition(tf.range(rows.loop_len_vector[0]), index, len(names))

    def run(name: str, indices: Any, place: Any) -> list[Any]:
        taken = pfor._partition_inputs_for_indices(inputs, place)
        return list(pfor._outputs_for_branch(name, indices, given, taken))

    def skip() -> list[Any]:
        return [tf.zeros([0, *output.shape], output.dtype) for output in outputs]

    if any(output.dtype == tf.variant or not output.shape.is_fully_defined() for output in outputs):
        raise NotVectorizableError(
            "fn has a branch whose results may differ in shape between rows",
            "give the results of both branches the same shape, with tf.ensure_shape if TensorFlow does not know it",
        )
    results = []
    for name, indices, place in zip(names, of_branches, places):
        results.append(tf.cond(tf.size(indices) > 0, partial(run, name, indices, place), skip))
    return wrap_stacked(tf.dynamic_stitch(places, parts) for parts in zip(*results))


CONTROL_FLOW: dict[str, Converter] = {
    "While": convert_loop,
    "StatelessWhile": convert_loop,
    "If": convert_if,
    "StatelessIf": convert_if,
    "Case": convert_case,
    "StatelessCase": convert_case,
}
"""By type of op."""
