"""Calls of ops that run row by row inside a vectorised function, because they have no vectorised form.

If rows get results of the same shape, an op runs alone. Otherwise its results cannot be stacked, so the ops that take them run
row by row, too, until shapes are known:

    mask ──> Where ──> Squeeze ──> GatherV2 ──> Sum ──> one number per row
             └──────── in one loop over rows ────┘
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from devicemap._tensorflow.pfor import run_again, wrap_stacked
from devicemap.compile.graph_walker import GraphWalker, node_name
from devicemap.compile.row_loop import row_by_row

_RESULT = "_devicemap_result"
"""Attribute of a tensor that stands for a result of a `RowCall`: the call, and the index of the result."""

_PLACEHOLDER = "devicemap_placeholder"
"""A part of the names of these tensors."""

_OPS_PER_LOOP = 5
"""The time that a row takes in a loop over rows, beside its ops, as a number of small ops."""

_FREE = frozenset("Const Identity NoOp Placeholder".split())
"""Types of ops that take no time."""


class RowCall:
    """A call of an op that runs row by row."""

    def __init__(self, given: Any, reason: Exception):
        """`given` describes the op and its inputs, of which some are results of other calls."""
        self._given = given
        self.reason = reason
        """Why it runs row by row."""
        results = (result_of(each.t) for each in given.inputs)
        before = (each for result in results if result for each in result[0].calls)
        self.calls: Sequence[RowCall] = [*dict.fromkeys(before), self]
        """The calls that a loop over rows has to run for the results of this one, in this order."""

    def results(self) -> list[Any]:
        """Run the calls in a loop over rows, and return the results of this one."""
        inputs = (each for call in self.calls for each in call._given.inputs)
        differing = {id(each.t): each.t for each in inputs if each.is_stacked and not result_of(each.t)}

        def of_row(row: Sequence[Any]) -> list[Any]:
            taken, done = dict(zip(differing, row)), dict[RowCall, list[Any]]()

            def input_of(each: Any) -> Any:
                if result := result_of(each.t):
                    call, index = result
                    return done[call][index]
                return taken[id(each.t)] if each.is_stacked else each.t

            for call in self.calls:
                done[call] = run_again(call._given.op, map(input_of, call._given.inputs))
            return done[self]

        rows = self._given.pfor.loop_len_vector[0]
        return wrap_stacked(row_by_row(of_row, [*differing.values()], rows, self._given.op.outputs))

    def placeholders(self) -> list[Any]:
        """Return tensors that stand for the results, for further calls. Ops may wait for them, but not take their values."""
        tensors = []
        for i, output in enumerate(self._given.op.outputs):
            tensors.append(tf.compat.v1.placeholder_with_default(tf.zeros([0], output.dtype), None, _PLACEHOLDER))
            setattr(tensors[i], _RESULT, (self, i))
        return wrap_stacked(tensors)


def result_of(tensor: Any) -> tuple[RowCall, int] | None:
    """Return the call that a tensor stands for a result of, and the index of the result; `None` for other tensors."""
    return getattr(tensor, _RESULT, None)


def needs_placeholders(vectorized: Any) -> bool:
    """Whether a vectorised `ConcreteFunction` needs the value of a placeholder, because something else than a call takes it."""
    for body in GraphWalker(vectorized).bodies():
        taken = [name for node in body.live.values() for name in node.input if not name.startswith("^")]
        returned = [name for name in body.results if ":" in name]  # others run for their effects
        if any(_PLACEHOLDER in node_name(name) for name in taken + returned):
            return True
    return False


def saves_time(loops: Sequence[RowCall], row_fn: Any) -> bool:
    """Whether loops over rows run fewer ops for a row than the function of one row."""
    repeated = sum(len(call.calls) + _OPS_PER_LOOP for call in loops)
    nodes = (node for body in GraphWalker(row_fn).bodies() for node in body.live.values())
    return repeated < sum(node.op not in _FREE for node in nodes)
