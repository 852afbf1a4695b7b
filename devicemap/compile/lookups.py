"""How a function looks up rows of a table, which decides how gradients of several calls are added.

The gradient of a lookup is a `tf.IndexedSlices`. Most optimizers of Keras square each slice, and clipping takes a norm of the
slices. So a sum over calls needs the slices of one call for all rows. If a call looks up the position of each word, for
instance, it has one slice for each position, whatever its number of rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from devicemap._tensorflow.functions import functions_by_name
from devicemap._tensorflow.gradient_links import Lookups
from devicemap.compile.graph_walker import BRANCHES, CALLS, called_names
from devicemap.errors import failure

_PASSED_ON = frozenset("Identity IdentityN ReadVariableOp Cast".split())
_GATHERED = frozenset("Gather GatherV2 GatherNd ResourceGather ResourceGatherNd".split())
_SAME_ELEMENTS = frozenset("Identity Cast Reshape ExpandDims Squeeze".split())


@dataclass(frozen=True, eq=False)
class _Body:
    """A graph that is called by another one, or the outermost graph."""

    inputs: Sequence[Any]
    outer: _Body | None = None
    given: Sequence[Any] = ()
    """For each of the inputs, the tensor of the outer graph."""


class _Function:
    """A traced function, some of whose inputs differ from call to call."""

    def __init__(self, graph: Any, varying: Sequence[Any], rows: int | None):
        self._functions, self._varying, self._rows = functions_by_name(graph), varying, rows
        self._root = _Body(graph.inputs)

    def kinds(self, table: Any) -> list[Lookups]:
        """Return the kind of each lookup in an input."""
        found = {op: body for body, op in self._gathers(self._root, table)}
        return [self._kind(body, op.inputs[1]) for op, body in found.items()]

    def _gathers(self, body: _Body, table: Any) -> Iterator[tuple[_Body, Any]]:
        """Yield each op that looks up rows of a table, perhaps several times. Gradients of lookups in loops are dense."""
        for op in table.consumers():
            for i in (i for i, taken in enumerate(op.inputs) if taken is table):
                if op.type in _PASSED_ON:
                    yield from self._gathers(body, op.outputs[i])
                elif op.type in CALLS | BRANCHES:
                    for graph in self._called(op):
                        first = int(op.type in BRANCHES)
                        inner = _Body(graph.inputs, body, op.inputs[first:])
                        yield from self._gathers(inner, graph.inputs[i - first])
                elif op.type in _GATHERED and i == 0:
                    yield body, op

    def _called(self, op: Any) -> list[Any]:
        return [self._functions[name] for name in called_names(op.node_def) if name in self._functions]

    def _kind(self, body: _Body, indices: Any) -> Lookups:
        while True:
            if self._rows is not None and indices.shape.rank and indices.shape[0] == self._rows:
                return Lookups.OF_ROWS
            if indices.op.type not in _SAME_ELEMENTS:
                break
            indices = indices.op.inputs[0]
        if not self._varies(body, indices):
            return Lookups.SHARED
        return Lookups.DISTINCT if indices.op.type.startswith("Unique") else Lookups.OF_ROWS

    def _varies(self, body: _Body, tensor: Any) -> bool:
        """Whether a tensor may depend on the varying inputs, apart from the shape of a row."""
        seen, left = set[Any](), [(body, tensor)]
        while left:
            body, tensor = left.pop()
            if (body, tensor.ref()) in seen:
                continue
            seen.add((body, tensor.ref()))
            op = tensor.op
            if any(tensor is each for each in self._varying) or (op.op_def.is_stateful and op.type != "ReadVariableOp"):
                return True
            if body.outer is not None and op.type == "Placeholder":
                left += [(body.outer, given) for inner, given in zip(body.inputs, body.given) if inner is tensor]
            elif not _is_of_inner_axes(op):
                left += [(body, each) for each in op.inputs]
        return False


def _is_of_inner_axes(op: Any) -> bool:
    """Whether an op is a slice of a shape that leaves out the first axis."""
    if op.type != "StridedSlice" or op.inputs[0].op.type != "Shape":
        return False
    rank, first = op.inputs[0].op.inputs[0].shape.rank, tf.get_static_value(op.inputs[1])
    if first is None or op.get_attr("begin_mask") or op.get_attr("ellipsis_mask"):
        return False
    return bool(first[0] > 0 or (rank is not None and -rank < first[0] < 0))


def lookups(graph: Any, table: Any, varying: Sequence[Any], rows: int | None = None) -> Lookups:
    """Return how a traced function looks up rows of one of its inputs.

    Args:
        graph: the function's graph.
        table: one of its inputs, a tensor or the handle of a variable.
        varying: the inputs that differ between the calls whose gradients are added: rows and seeds.
        rows: the static number of rows, `None` if it is unknown.
    """
    kinds = _Function(graph, varying, rows).kinds(table)
    if len({*kinds}) > 1 or kinds.count(Lookups.DISTINCT) > 1:
        return Lookups.MIXED
    return kinds[0] if kinds else Lookups.NONE


def mixed_lookups(variable: str) -> Exception:
    """Return the error for a variable with mixed lookups."""
    return failure(
        f"{variable} is looked up in several ways, for instance by the rows and by indices that are the same for all rows. Its "
        "gradient would have other slices than that of one device; use a variable for each of them"
    )


def lookups_in(concrete: Any, seeds: Sequence[Any], rows: int | None = None) -> dict[Any, Lookups]:
    """Return the lookups in the captures of a `ConcreteFunction`, by `Tensor.ref()`.

    Args:
        concrete: the function, whose arguments are rows.
        seeds: captures that differ between calls.
        rows: as for `lookups`.
    """
    inputs, captured = concrete.graph.inputs, concrete.captured_inputs
    leaves = len(inputs) - len(captured)
    inner = dict(zip((tensor.ref() for tensor in captured), inputs[leaves:]))
    varying = [*inputs[:leaves], *(inner[seed.ref()] for seed in seeds if seed.ref() in inner)]
    return {key: lookups(concrete.graph, table, varying, rows) for key, table in inner.items()}
