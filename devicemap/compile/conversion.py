"""The conversion of a graph for one row into ops for all rows.

An op that has no vectorised form runs row by row, in a loop inside the converted graph. If rows get results of the same shape,
they are stacked. Otherwise, the ops that take them run in the same loop, until shapes are known:

    mask ──> Where ──> Squeeze ──> GatherV2 ──> Sum ──> one number per row
             └──────── in one loop over rows ────┘

The ops that have to run row by row wait until nothing else can be converted. One loop then runs all of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import tensorflow as tf

from devicemap._tensorflow.functions import reachable
from devicemap._tensorflow.gradient_links import has_gradient
from devicemap._tensorflow.pfor import NotVectorizableError, convert_op, run_again, set_shape, wrap_stacked
from devicemap.compile.flat_graph import FlatGraph, Node
from devicemap.compile.row_loop import row_by_row
from devicemap.compile.vectorizable_ops import runs_row_by_row

OPS_PER_LOOP = 5
"""The time that a row takes in a loop over rows, beside its ops, as a number of small ops."""

_MOST_ELEMENTS = 64
"""The largest tensors for which an op takes no longer than one of a loop."""


class Conversion:
    """The conversion of a graph for all rows of a shard, or for some of them.

    TensorFlow's converters use the attributes `loop_len_vector` and `all_indices`.
    """

    all_indices = None
    """A tensor with the indices of the rows, if the graph uses it. The function of one row does not have its index."""

    def __init__(self, vectorizer: Any, loop_len_vector: Any):
        """`vectorizer`: the `Vectorizer` of the function of one row. `loop_len_vector`: the number of rows, `[1]`."""
        self.loop_len_vector = loop_len_vector
        self._vectorizer = vectorizer
        self._results: dict[tuple[Node, int], Any] = {}
        """The wrapped results of nodes, by index."""
        self._ends: dict[Node, list[Any]] = {}
        """For each node with results for all rows, the ops after which it has run."""
        self._waiting: dict[Node, Exception] = {}
        """The nodes that run in the next loop over rows if its results depend on them, and why."""
        self._used: set[tuple[Node, int]] = set()
        """The results that are returned or that nodes take."""

    def convert_called(self, given: Any, graph: Any, inputs: Iterable[Any], rows: Any = None) -> list[Any]:
        """Return the wrapped results of a graph that a loop or branch calls, for rows of these indices, or for all if `None`.

        Its ops are added to the current graph. TensorFlow would call a function that returns these results, but it does not
        find the results of a function of a SavedModel, and the handle of a lookup table among them has no gradient. A graph
        gets further results when TensorFlow builds its gradient.
        """
        number = self.loop_len_vector if rows is None else tf.shape(rows)
        return Conversion(self._vectorizer, number).convert(graph, inputs, len(given.op.outputs))

    def convert(self, graph: Any, inputs: Iterable[Any], count: int) -> list[Any]:
        """Return the first `count` wrapped results of a graph for its wrapped inputs, in the graph that is being traced."""
        flat = FlatGraph(graph)
        for (node, index), each in zip(flat.inputs, inputs):
            self._results[node, index], self._ends[node] = each, [each.t.op]
        outputs = flat.outputs[:count]
        returned = {node for node, _ in outputs}
        needed = {*reachable(returned, lambda node: node.before)}
        left = [node for node in flat.nodes if node in needed]
        self._vectorizer.ops |= {node.op for node in left}
        self._differentiated = {*reachable(outputs, _differentiable_inputs)}
        self._used = {*outputs, *(each for node in left for each in node.inputs)}
        while left or not all(each in self._results for each in outputs):
            remaining = [node for node in left if not self._add(node)]
            joined = self._join(remaining)
            remaining = [node for node in remaining if node not in joined]
            taken = returned.union(*(node.before for node in remaining))
            if not joined and not self._run_waiting(taken) and len(remaining) == len(left):
                raise next(iter(self._waiting.values()), NotVectorizableError("fn has a loop of TensorFlow 1"))
            left = remaining
        return [self._results[each] for each in outputs]

    def _add(self, node: Node) -> bool:
        """Convert a node, or let it wait for a loop over rows. Return `False` if it takes a result of a later loop or node."""
        if not all(each in self._ends or each in self._waiting for each in node.before):
            return False
        reason = self._reason_to_wait(node)
        if not reason and any(each in self._waiting for each, _ in node.inputs):
            reason = self._vectorizer.refusal(node.op)
        # Nodes that wait have no effects, so that others need not wait for those whose results are never stacked.
        if not reason and any(each in self._waiting and is_stackable(each.op) for each in node.before):
            return False
        if reason:
            self._wait(node, reason)
        else:
            self._convert(node)
        return True

    def _convert(self, node: Node) -> None:
        inputs = [self._results[each] for each in node.inputs]
        with tf.control_dependencies(self._ends_of(node.control_inputs)), tf.name_scope(f"{node.op.name}/"):
            try:
                results = convert_op(self, node.op, inputs, self._vectorizer.convert)
            except Exception as error:  # TensorFlow's converters raise errors of several classes
                self._wait(node, self._vectorizer.reason(node.op, error))
                return
        if isinstance(results, tf.Operation):  # the op has no results
            self._ends[node] = [results]
        else:
            self._keep([(node, index) for index in range(len(results))], results)

    def _keep(self, keys: Iterable[tuple[Node, int]], results: Iterable[Any]) -> None:
        for (node, index), result in zip(keys, results):
            set_shape(result, node.op.outputs[index].shape)
            self._results[node, index] = result
            self._ends.setdefault(node, []).append(result.t.op)

    def _wait(self, node: Node, reason: Exception) -> None:
        """Let a node wait for the next loop over rows. Raise the reason if it cannot run in one."""
        if not runs_row_by_row(node.op):
            raise reason
        self._waiting[node] = reason

    def _reason_to_wait(self, node: Node) -> Exception | None:
        """Return why a loop over rows makes an input of a node that cannot be stacked; `None` if there is none."""
        inputs = (each for each, _ in node.inputs if each in self._waiting)
        return next((self._waiting[each] for each in inputs if not is_stackable(each.op)), None)

    def _join(self, left: Sequence[Node]) -> set[Node]:
        """Let nodes wait for the next loop that would otherwise need another loop with the same ops. Return these nodes.

        They take results that cannot be stacked, and others that depend on this loop. The ops between must be few and small.
        """
        staying, joined = {*left}, set[Node]()
        blocked = {node: reason for node in left if (reason := self._reason_to_wait(node))}
        for node in blocked:
            needed = {*reachable([node], lambda each: [other for other in each.before if other in staying])}
            between = needed - {*blocked}
            if len(between) <= OPS_PER_LOOP and all(_is_small(each.op) for each in between):
                joined |= needed
        for node in left:
            if node in joined:
                self._wait(node, blocked.get(node) or next(iter(blocked.values())))
        return joined

    def _run_waiting(self, taken: set[Node]) -> bool:
        """Run waiting nodes in a loop over rows, and stack the results of those that are taken. Return whether any are."""
        stacked = [node for node in self._waiting if node in taken and is_stackable(node.op)]
        needed = {*reachable(stacked, lambda node: [each for each in node.before if each in self._waiting])}
        nodes = {node: reason for node, reason in self._waiting.items() if node in needed}
        if stacked:
            wanted = [(node, index) for node in stacked for index in self._used_results(node)]
            self._vectorizer.loops.append({node.op: reason for node, reason in nodes.items()})
            self._keep(wanted, wrap_stacked(self._loop_over_rows(nodes, wanted)))
        self._waiting = {node: reason for node, reason in self._waiting.items() if node not in self._ends}
        return bool(stacked)

    def _loop_over_rows(self, nodes: Iterable[Node], wanted: Sequence[tuple[Node, int]]) -> list[Any]:
        """Run nodes for each row, and return the wanted results, stacked."""
        taken = {each: self._results[each] for node in nodes for each in node.inputs if each[0] not in nodes}
        rows = {key: each.t for key, each in taken.items() if each.is_stacked}

        def of_row(row: Sequence[Any]) -> list[Any]:
            tensors = {key: each.t for key, each in taken.items()} | dict(zip(rows, row))
            for node in nodes:
                before = [tensors[each, 0].op for each in node.control_inputs if each in nodes]
                with tf.control_dependencies(before):
                    results = run_again(node.op, [tensors[key] for key in node.inputs])
                tensors |= {(node, index): result for index, result in enumerate(results)}
            # TensorFlow computes the gradient of each array of a loop, of zeros if there is none.
            return [tensors[key] if key in self._differentiated else tf.stop_gradient(tensors[key]) for key in wanted]

        like = [node.op.outputs[index] for node, index in wanted]
        outside = [each for node in nodes for each in node.control_inputs if each not in nodes]
        with tf.control_dependencies(self._ends_of(outside)):
            return row_by_row(of_row, [*rows.values()], self.loop_len_vector[0], like)

    def _used_results(self, node: Node) -> list[int]:
        """Return the indices of the results that nodes take, or of one for which they wait.

        TensorFlow declares wrong shapes for unused results of FusedBatchNormGradV3, which cannot be stacked.
        """
        return [index for index in range(len(node.op.outputs)) if (node, index) in self._used] or [0]

    def _ends_of(self, nodes: Iterable[Node]) -> list[Any]:
        """Return ops after which these nodes have run."""
        return [*dict.fromkeys(end for node in nodes for end in self._ends.get(node, ()))]


def _differentiable_inputs(key: tuple[Node, int]) -> list[tuple[Node, int]]:
    """Return the inputs to which the gradient of a result may go."""
    node, index = key
    dtype = node.op.outputs[index].dtype
    passes = dtype.is_floating or dtype.is_complex or dtype in (tf.variant, tf.resource)
    return node.inputs if passes and has_gradient(node.op) else []


def is_stackable(op: Any) -> bool:
    """Whether the results have the same shape for each row."""
    return all(output.shape.is_fully_defined() for output in op.outputs)


def _is_small(op: Any) -> bool:
    """Whether an op takes little time for a row, or runs row by row in any case."""
    sizes = [tensor.shape.num_elements() for tensor in (*op.inputs, *op.outputs)]
    return runs_row_by_row(op) and (not is_stackable(op) or all(size and size <= _MOST_ELEMENTS for size in sizes))
