"""Calls of ops that run row by row inside a vectorised function, because they have no vectorised form.

If rows get results of the same shape, an op runs alone. Otherwise its results cannot be stacked, so the ops that take them run
row by row, too, until shapes are known:

    mask ──> Where ──> Squeeze ──> GatherV2 ──> Sum ──> one number per row
             └──────── in one loop over rows ────┘

Ops that take the same results share a loop. Otherwise, each loop would run the ops before it again.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from devicemap._tensorflow.functions import graphs_within, reachable
from devicemap._tensorflow.pfor import convert, run_again, wrap_stacked
from devicemap.compile.graph_walker import CALLS, GraphWalker, node_name
from devicemap.compile.row_loop import row_by_row
from devicemap.compile.vectorizable_ops import runs_row_by_row

_RESULT = "_devicemap_result"
"""Attribute of a placeholder: the `CallResult` that it stands for."""

_PLACEHOLDER = "devicemap_placeholder"
"""A part of the names of these tensors."""

_OPS_PER_LOOP = 5
"""The time that a row takes in a loop over rows, beside its ops, as a number of small ops."""

_MOST_ELEMENTS = 64
"""The largest tensors for which an op takes no longer than one of a loop."""

_FREE = frozenset("Const Identity NoOp Placeholder".split())
"""Types of ops that take no time."""

_BEFORE_OTHERS = frozenset(["StatelessRandomGetKeyCounter"])
"""Types of ops whose results other ops without a vectorised form take. They run in the same loop over rows."""


@dataclass(frozen=True)
class CallResult:
    """A result of a call, as an input of another."""

    call: RowCall
    index: int


class RowCall:
    """A call of an op that runs row by row."""

    def __init__(self, converter: Any, op: Any, inputs: Sequence[Any], reason: Exception):
        """`inputs`: converted tensors, and results of other calls."""
        self.converter, self.op, self.inputs = converter, op, inputs
        self.reason = reason
        """Why it runs row by row."""
        before = (each for taken in inputs if isinstance(taken, CallResult) for each in taken.call.calls)
        self.calls: Sequence[RowCall] = [*dict.fromkeys(before), self]
        """The calls that a loop over rows has to run for the results of this one, in this order."""

    def placeholders(self) -> list[Any]:
        """Return tensors that stand for the results, for further calls. Ops may wait for them, but not take their values."""
        tensors = []
        for i, output in enumerate(self.op.outputs):
            tensors.append(tf.compat.v1.placeholder_with_default(tf.zeros([0], output.dtype), None, _PLACEHOLDER))
            setattr(tensors[i], _RESULT, CallResult(self, i))
        return wrap_stacked(tensors)


class RowCalls:
    """The calls that run row by row inside a function that is vectorised otherwise."""

    def __init__(self) -> None:
        self.loops: list[list[RowCall]] = []
        """For each loop over rows, the calls whose results are stacked."""
        self.unstacked: Exception | None = None
        """Why the first op with results of unknown shape runs row by row."""
        self._calls: dict[tuple[Any, Any], RowCall] = {}
        """The calls by the conversion of a graph, and op."""
        self._results: dict[RowCall, list[Any]] = {}
        self._collecting = False
        """Whether inputs of the calls of a loop are being converted. Loops that they need do not wait for others."""

    def results(self, given: Any) -> list[Any] | None:
        """Return the results of an op, if it was called."""
        call = self._calls.get((given.pfor, given.op))
        return self._results.get(call) if call else None

    def add(self, given: Any, reason: Exception) -> list[Any]:
        """Call an op row by row, and return the results, or placeholders if they cannot be stacked."""
        inputs = [_as_input(each) for each in given.inputs]
        call = RowCall(given.pfor, given.op, inputs, reason)
        call = self._calls.setdefault((given.pfor, given.op), call)
        if not _is_stackable(call.op):
            self.unstacked = self.unstacked or reason
            self._results[call] = call.placeholders()
        elif len(call.calls) == 1:
            self._run_in_loop([call])
        else:
            self._run_with_others(call)
        return self._results[call]

    def _run_with_others(self, call: RowCall) -> None:
        """Run a call in a loop over rows, together with the others that the loop can run."""
        graph, needed = call.op.graph, _needed_ops(call.op.graph)
        inside = {call.op} if self._collecting else self._ops_of_loop(call, needed)
        collecting, self._collecting = self._collecting, True
        calls = [self._call_in_loop(call, op, inside) for op in graph.get_operations() if op in inside]
        self._collecting = collecting
        outputs, last = {tensor.op for tensor in graph.outputs}, []
        for each in calls:
            if each in self._results:
                continue
            if _is_stackable(each.op) and (each.op in outputs or needed & {*_consumers([each.op])} - inside):
                last.append(each)
            else:
                self._results[each] = each.placeholders()
        if last:
            self._run_in_loop(last)

    def _run_in_loop(self, last: list[RowCall]) -> None:
        """Run these calls in a loop over rows, and keep their results."""
        self.loops.append(last)
        self._results |= _in_one_loop(last)

    def _call_in_loop(self, call: RowCall, op: Any, inside: set[Any]) -> RowCall:
        """Return the call of an op in the loop for `call`. Calls for the ops `inside` before it exist."""
        if (call.converter, op) not in self._calls:
            inputs = [
                CallResult(self._calls[call.converter, tensor.op], tensor.value_index)
                if tensor.op in inside
                else _as_input(convert(call.converter, tensor))
                for tensor in op.inputs
            ]
            self._calls[call.converter, op] = RowCall(call.converter, op, inputs, call.reason)
        return self._calls[call.converter, op]

    def _ops_of_loop(self, call: RowCall, needed: set[Any]) -> set[Any]:
        """Return the ops that a loop for `call` can run: those that take results of unknown shape that it has.

        If some of them need such results as numbers, the ops between are among them, unless these are many or slow.
        """
        done = {each.op for each in self._results if each.converter is call.converter and _is_stackable(each.op)}
        taken = [tensor for tensor, each in zip(call.op.inputs, call.inputs) if isinstance(each, CallResult)]
        taken += [output for each in call.calls[:-1] if each.converter is call.converter for output in each.op.outputs]
        draws = self._draws(call, needed)
        taken += [output for op in draws for output in op.outputs]

        def possible(ops: Iterable[Any]) -> list[Any]:
            return [
                op for op in ops if op in needed and op not in done and op.type not in CALLS and runs_row_by_row(op)
            ]

        def with_users(ops: Iterable[Any]) -> set[Any]:
            return {*reachable(possible(ops), lambda op: [] if _is_stackable(op) else possible(_consumers([op])))}

        inside = draws | with_users(user for tensor in taken for user in tensor.consumers())
        while True:
            after = {*reachable(_consumers(filter(_is_stackable, inside)), lambda op: _consumers([op]))}
            between = after & _ancestors(inside) - inside
            if not between:
                return inside
            if len(between) > _OPS_PER_LOOP or not all(map(_is_small, between)):
                return {op for op in inside if not _ancestors([op]) & between}
            inside |= with_users(between)

    def _draws(self, call: RowCall, needed: set[Any]) -> set[Any]:
        """Return the ops that begin draws which the loop for `call` can make, too: their seeds depend on no later draw."""
        if not any(each.op.type in _BEFORE_OTHERS for each in call.calls):
            return set()
        begins = {op for op in needed if op.type in _BEFORE_OTHERS and (call.converter, op) not in self._calls}
        return {op for op in begins if not _ancestors([op]) & begins - {op}}


def result_of(tensor: Any) -> CallResult | None:
    """Return the result that a placeholder stands for; `None` for other tensors."""
    return getattr(tensor, _RESULT, None)


def _as_input(converted: Any) -> Any:
    return result_of(converted.t) or converted


def _in_one_loop(last: Sequence[RowCall]) -> dict[RowCall, list[Any]]:
    """Run calls, and those that they need, in one loop over rows. Return the results of each."""
    calls = _calls_for(last)
    taken = (each for call in calls for each in call.inputs if not isinstance(each, CallResult))
    stacked = {id(each.t): each.t for each in taken if each.is_stacked}

    def of_row(row: Sequence[Any]) -> list[Any]:
        rows, done = dict(zip(stacked, row)), dict[RowCall, list[Any]]()

        def input_of(each: Any) -> Any:
            if isinstance(each, CallResult):
                return done[each.call][each.index]
            return rows.get(id(each.t), each.t)

        for call in calls:
            done[call] = run_again(call.op, map(input_of, call.inputs))
        return [result for call in last for result in done[call]]

    like = [output for call in last for output in call.op.outputs]
    count = last[0].converter.loop_len_vector[0]
    results = iter(wrap_stacked(row_by_row(of_row, [*stacked.values()], count, like)))
    return {call: [next(results) for _ in call.op.outputs] for call in last}


def _calls_for(last: Sequence[RowCall]) -> list[RowCall]:
    """Return the calls that a loop over rows has to run for the results of these, in this order."""
    return [*dict.fromkeys(each for call in last for each in call.calls)]


def _is_stackable(op: Any) -> bool:
    """Whether the results have the same shape for each row, so that other ops than those of the loop can take them."""
    return op.type not in _BEFORE_OTHERS and all(output.shape.is_fully_defined() for output in op.outputs)


def _is_small(op: Any) -> bool:
    """Whether an op takes little time for a row, or runs row by row in any case."""
    sizes = [tensor.shape.num_elements() for tensor in (*op.inputs, *op.outputs)]
    return runs_row_by_row(op) and (not _is_stackable(op) or all(size and size <= _MOST_ELEMENTS for size in sizes))


def _needed_ops(graph: Any) -> set[Any]:
    return _ancestors([*(tensor.op for tensor in graph.outputs), *graph.control_outputs])


def _consumers(ops: Iterable[Any]) -> list[Any]:
    return [user for op in ops for output in op.outputs for user in output.consumers()]


def _ancestors(ops: Iterable[Any]) -> set[Any]:
    """Return these ops, and all that run before them."""
    return {*reachable(ops, lambda op: [*(tensor.op for tensor in op.inputs), *op.control_inputs])}


def needs_placeholders(vectorized: Any) -> bool:
    """Whether a vectorised `ConcreteFunction` needs the value of a placeholder, because something else than a call takes it."""
    for body in GraphWalker(vectorized).bodies():
        taken = [name for node in body.live.values() for name in node.input if not name.startswith("^")]
        returned = [name for name in body.results if ":" in name]  # others run for their effects
        if any(_PLACEHOLDER in node_name(name) for name in taken + returned):
            return True
    return False


def is_short(row_fn: Any) -> bool:
    """Whether each op of the function of one row takes little time, so that the loop over rows takes most of it."""
    ops = (op for graph in graphs_within(row_fn.graph) for op in graph.get_operations() if op.type not in _FREE)
    results = (result for op in ops for result in op.outputs if result.dtype not in (tf.resource, tf.variant))
    return all(result.shape.is_fully_defined() and result.shape.num_elements() <= _MOST_ELEMENTS for result in results)


def saves_time(loops: Sequence[Sequence[RowCall]], row_fn: Any) -> bool:
    """Whether loops over rows run fewer ops for a row than the function of one row. `loops`: the last calls of each."""
    repeated = sum(len(_calls_for(last)) + _OPS_PER_LOOP for last in loops)
    nodes = (node for body in GraphWalker(row_fn).bodies() for node in body.live.values())
    return repeated < sum(node.op not in _FREE for node in nodes)
