"""The converter of loops. It returns one loop for all rows, which rows leave at the same time or at different times."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from devicemap._tensorflow.functions import graphs_within
from devicemap._tensorflow.indexing import StackedList
from devicemap._tensorflow.pfor import NotVectorizableError, as_stacked, graph_of, pfor


def convert_loop(given: Any) -> list[Any]:
    """Convert a loop into one loop for all rows, which captures what it does not change.

    TensorFlow's converter passes a TensorArray for each variable through each step, even if no row can leave before the others,
    which takes up to half of the time of a loop with short steps. It also passes on the handle of each `tf.Variable`, for which
    the gradient fails on GPUs (test_functions.py, "loops of variables").
    """
    condition = _condition_of(given)
    varying = {i for i, each in enumerate(given.inputs) if each.is_stacked}
    diverges = False
    while True:
        varying = _propagate_varying(_body_of(given), varying)
        diverges |= condition.outputs[0].name in _dependent_tensors(condition, varying)
        try:
            return (_diverging_loop if diverges else _shared_loop)(given, varying)
        except _VaryingError as found:  # the ops of the loop do not show it, as for random numbers
            varying |= found.variables
            diverges |= not found.variables


def _condition_of(given: Any) -> Any:
    """Return the graph of a loop's condition."""
    return graph_of(given, given.get_attr("cond"))


def _body_of(given: Any) -> Any:
    """Return the graph of a loop's body."""
    return graph_of(given, given.get_attr("body"))


class _VaryingError(Exception):
    """Loop variables, or the condition if there are none, differ between rows, unlike assumed."""

    def __init__(self, variables: Iterable[int]):
        super().__init__()
        self.variables = set(variables)


class _LoopVariables:
    """The variables of a loop, and the functions of its condition and body for all rows or some of them."""

    def __init__(self, given: Any, varying: Iterable[int]):
        """The variables `varying` are stacked."""
        self._given = given
        self._started = pfor._PforInput(given.pfor, given.op, list(given.inputs))
        self._started.stack_inputs(varying, tile_variants=True)
        self.stacked = [each.is_stacked for each in self._started.inputs]
        self.shapes = pfor.WhileV2(self._started)._output_shapes()
        body = _body_of(given)
        self.changing = [i for i, (old, new) in enumerate(zip(body.inputs, body.outputs)) if new is not old]

    def started(self, indices: Iterable[int]) -> list[Any]:
        """Return the initial tensors of some variables."""
        return [self._started.inputs[i].t for i in indices]

    def wrapped(self, changed: Mapping[int, Any]) -> list[Any]:
        """Return all variables, some of which have changed."""
        tensors = [changed.get(i, each.t) for i, each in enumerate(self._started.inputs)]
        return [pfor.wrap(tensor, stacked) for tensor, stacked in zip(tensors, self.stacked)]

    def condition(self, changed: Mapping[int, Any], rows: Any = None) -> Any:
        """Return the condition, of all rows or of those given by their indices, wrapped."""
        given = self._given
        return given.pfor.convert_called(given, _condition_of(given), self.wrapped(changed), rows)[0]

    def step(self, changed: Mapping[int, Any], rows: Any = None) -> dict[int, Any]:
        """Return the changing variables after a step."""
        given = self._given
        converted = given.pfor.convert_called(given, _body_of(given), self.wrapped(changed), rows)
        varying = [i for i in self.changing if converted[i].is_stacked > self.stacked[i]]
        if varying:
            raise _VaryingError(varying)
        count = given.pfor.loop_len_vector if rows is None else [tf.size(rows)]
        results = {i: as_stacked(converted[i], count) if self.stacked[i] else converted[i].t for i in self.changing}
        for i, result in results.items():
            result.set_shape(self.shapes[i])
        return results

    def run(self, keeps_running: Any, step: Any, state: Sequence[Any], shapes: Sequence[Any]) -> Any:
        """Run a loop with the options of this one."""
        parallel = self._given.get_attr("parallel_iterations")
        return tf.while_loop(keeps_running, step, state, shape_invariants=shapes, parallel_iterations=parallel)


def _shared_loop(given: Any, varying: Iterable[int]) -> list[Any]:
    """Return the results of a loop that all rows leave at the same time."""
    variables = _LoopVariables(given, varying)
    changing = variables.changing

    def keeps_running(*state: Any) -> Any:
        condition = variables.condition(dict(zip(changing, state)))
        if condition.is_stacked:
            raise _VaryingError([])
        return tf.reshape(condition.t, [])

    def step(*state: Any) -> list[Any]:
        return [*variables.step(dict(zip(changing, state))).values()]

    shapes = [variables.shapes[i] for i in changing]
    results = variables.run(keeps_running, step, variables.started(changing), shapes)
    return variables.wrapped(dict(zip(changing, results)))


def _diverging_loop(given: Any, varying: set[int]) -> list[Any]:
    """Return the results of a loop that rows leave at different times.

    Each step runs for the rows that remain. A TensorArray for each changing variable takes the values of the rows that leave in
    a step, as one tensor, because a tensor for each row would take longer than short steps.
    """
    _check_diverging_loop(given)
    graph, given_lists = _body_of(given), _lists(given.op)
    changed_lists = {i for i in given_lists if graph.outputs[i] is not graph.inputs[i]}
    variables = _LoopVariables(given, varying | changed_lists)
    changing, stacked = variables.changing, variables.stacked
    carried = [i for i in range(len(stacked)) if stacked[i] or i in changing]
    lists = {i: StackedList(each) for i, each in given_lists.items() if i in carried}
    count = given.pfor.loop_len_vector[0]

    def retire_rows(rows: Any, values: dict[int, Any], finished: dict[int, Any]) -> list[Any]:
        """Return the rows that remain, their values, and `finished` with those of the rows that leave."""
        keeps_running = tf.reshape(as_stacked(variables.condition(values, rows), [tf.size(rows)]), [-1])

        def split() -> list[Any]:
            choice = tf.cast(keeps_running, tf.int32)
            gone, remaining = tf.dynamic_partition(rows, choice, 2)
            staying, arrays = dict(values), {_ROWS: finished[_ROWS].write(step := finished[_ROWS].size(), gone)}
            for i in carried:
                if stacked[i]:
                    each = lists[i].to_rows(values[i], tf.size(rows)) if i in lists else values[i]
                    leaving, left = tf.dynamic_partition(each, choice, 2)
                    staying[i] = lists[i].of_rows(left) if i in lists else left
                else:
                    leaving = as_stacked(pfor.wrap(values[i], False), [tf.size(gone)])
                if i in finished:
                    arrays[i] = finished[i].write(step, leaving)
            return [remaining, *staying.values(), *arrays.values()]

        # Without this condition, each step would copy each variable.
        unchanged = [rows, *values.values(), *finished.values()]
        return list(tf.cond(tf.reduce_all(keeps_running) & (tf.size(rows) > 0), lambda: unchanged, split))

    def unpacked(state: Sequence[Any]) -> tuple[Any, dict[int, Any], dict[int, Any]]:
        rows, *others = state
        return rows, dict(zip(carried, others)), dict(zip([_ROWS, *changing], others[len(carried) :]))

    def step(*state: Any) -> list[Any]:
        rows, values, finished = unpacked(state)
        return retire_rows(rows, values | variables.step(values, rows), finished)

    arrays = {_ROWS: _array(tf.int32, [])} | {
        i: _array(lists[i].dtype, [None, *lists[i].shape])
        if i in lists
        else _array(graph.inputs[i].dtype, variables.shapes[i][int(stacked[i]) :])
        for i in changing
    }
    begun = retire_rows(tf.range(count), dict(zip(carried, variables.started(carried))), arrays)
    shapes = [tf.TensorShape([None]), *(variables.shapes[i] for i in carried), *[tf.TensorShape([])] * len(arrays)]
    _, _, finished = unpacked(variables.run(lambda rows, *_: tf.size(rows) > 0, step, begun, shapes))
    results, order = variables.wrapped({}), finished.pop(_ROWS).concat()
    for i, array in finished.items():
        values = tf.dynamic_stitch([order], [array.concat()])
        results[i] = pfor.wrap(lists[i].of_rows(values) if i in lists else values, True)
    return results


_ROWS = -1
"""The key of the array of the rows that have left, beside those of variables."""


def _array(dtype: Any, shape: Any) -> Any:
    """Return an array that takes a tensor `[rows, *shape]` of the rows that leave in each step."""
    return tf.TensorArray(dtype, 0, dynamic_size=True, infer_shape=False, element_shape=[None, *shape])


def _check_diverging_loop(given: Any) -> None:
    """Raise `NotVectorizableError` for a loop whose rows would have results of different shapes."""
    if not _keeps_lengths(given):
        raise NotVectorizableError(
            "fn has a loop that rows leave at different times, with a list that may grow",
            "give the tf.TensorArray a fixed size and element_shape",
        )
    dense = (each for each in given.op.outputs if each.dtype not in (tf.variant, tf.resource))
    if not all(each.shape.is_fully_defined() for each in dense):
        raise NotVectorizableError(
            "fn has a loop that rows leave at different times, with a tensor whose shape may change in it",
            "keep its shape with tf.ensure_shape",
        )


def _lists(op: Any) -> dict[int, Any]:
    """Return the inputs of a loop that are TensorLists, by index."""
    return {i: each for i, each in enumerate(op.inputs) if each.dtype == tf.variant}


def _keeps_lengths(given: Any) -> bool:
    """Whether all lists of a loop keep their lengths, so that rows can leave with theirs."""
    if not _lists(given.op):
        return True
    body = _body_of(given)
    for each in graphs_within(body):
        if any(output.op.type in _LIST_CREATORS for output in each.outputs):
            return False
        if any(op.type in _LIST_RESIZERS or _resizes(op) for op in each.get_operations()):
            return False
    return True


_LIST_CREATORS = {
    "EmptyTensorList",
    "TensorListFromTensor",
    "TensorListReserve",
    "TensorListScatterV2",
    "TensorListSplit",
}
"""Types of ops that make a list, whose length a body that returns it does not keep."""

_LIST_RESIZERS = {
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


def _propagate_varying(body: Any, varying: set[int]) -> set[int]:
    """Return the indices of the loop variables that depend on the row in some step, if these do at the start."""
    while True:
        reached = _dependent_tensors(body, varying)
        more = varying | {i for i, result in enumerate(body.outputs) if result.name in reached}
        if more == varying:
            return varying
        varying = more


def _dependent_tensors(graph: Any, inputs: Iterable[int]) -> set[str]:
    """Return the names of the tensors in a function's graph whose values depend on these inputs."""
    reached = {graph.inputs[i].name for i in inputs}
    for op in graph.get_operations():
        if op.type not in _SHAPE_OPS and any(tensor.name in reached for tensor in op.inputs):
            reached |= {result.name for result in op.outputs}
    return reached


_SHAPE_OPS = {"Shape", "ShapeN", "Size", "Rank", "TensorListLength", "TensorListElementShape"}
