"""Turn a function of one row into one of all rows of a shard: vectorised if possible, otherwise a loop over rows.

Both call the same traced row function.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from devicemap._tensorflow.converters import CONVERTERS
from devicemap._tensorflow.functions import can_list_functions, graphs_within, in_xla_context, traced_graphs
from devicemap._tensorflow.gradients import differentiate_values_alone
from devicemap._tensorflow.pfor import (
    NotVectorizableError,
    as_stacked,
    checks_ops,
    tensorflow_converter,
    vectorized_map,
    wrapped_inputs,
)
from devicemap.compile.audit import WRITES, Audit, audit, op_types, writing_line
from devicemap.compile.conversion import OPS_PER_LOOP, Conversion, is_stackable
from devicemap.compile.graph_walker import called_names
from devicemap.compile.row_loop import PARALLEL_ITERATIONS, map_rows, signature_of
from devicemap.compile.source_lines import source_line
from devicemap.compile.vectorizable_ops import OPS, is_control_flow, why_not_vectorizable
from devicemap.data.rows import spec_of
from devicemap.errors import failure
from devicemap.options import Options

_BY_HAND = "Use vectorize='auto' or False to map row by row"

_HIDDEN = "this TensorFlow lacks non-public names that devicemap needs to check each op"

_FREE = frozenset("Const Identity NoOp Placeholder".split())
"""Types of ops that take no time."""

_FORCE = "pass vectorize=True, and compare the results with DeviceMap.verify"
_REPLACE = "use another op there"
_BATCH = "pass batched=True and a fn of a whole batch"


@dataclass(frozen=True)
class ShardFunction:
    """A function of all rows of a shard: the user's function of a batch, vectorised, or a loop that calls it for each row."""

    concrete: Any
    """`tf.types.experimental.ConcreteFunction`: leaves of a shard, each `[rows, ...]` -> list of result leaves."""

    vectorized: bool
    """Whether all rows run as one call."""

    reason: str
    """The reason for `vectorized`."""

    remedy: str = ""
    """What to try, in this order, so that rows do not run one by one; empty if they do not, or if that was asked for."""

    @property
    def specs(self) -> list[Any]:
        """`tf.TypeSpec` of each result leaf, of shape `[None, ...]`."""
        return [spec_of(leaf) for leaf in self.concrete.structured_outputs]


def loops_over_rows(row_fn: Any, specs: list[Any], options: Options, structure: Any) -> list[ShardFunction]:
    """Return the fastest loop over a shard's rows, followed by one with correct gradients if the first has none.

    Raises:
        FunctionError: `vectorize=True`, but `row_fn` cannot be vectorised; or `fn_output_signature` does not fit its results.
    """
    wanted, signature = options.vectorize, signature_of(row_fn, specs, options, structure)
    found = audit(row_fn)
    # Each call of Python holds a thread for which other calls may wait. Seeded ops draw numbers in the order of rows.
    at_once = 1 if found.python_ops or found.fixed_seeds else PARALLEL_ITERATIONS

    def one_by_one(reason: str, *remedies: str) -> ShardFunction:
        return ShardFunction(
            map_rows(row_fn, specs, options, signature, at_once), False, reason, "; or else ".join(remedies)
        )

    if wanted is False:
        return [one_by_one("vectorize=False")]
    try:
        _check_function(row_fn, found, specs, options, signature)
        vectorized, slow = vectorize(row_fn, specs, force=wanted is True)
        if (options.jit_compile or in_xla_context()) and _diverges(vectorized):
            raise _NotVectorizedError(
                "fn has a branch or a loop whose condition differs between rows, and jit_compile=True",
                "pass jit_compile=False",
            )
    except Exception as error:  # pfor raises errors of several classes for unsupported ops
        reason = _first_line(error)
        if wanted is True:
            raise failure(f"vectorize=True: {reason}. {_BY_HAND}") from error
        return [one_by_one(reason, *getattr(error, "remedies", ()), _BATCH)]
    reason = "; ".join(slow) or "every op of fn has a vectorised form"
    if not found.custom_gradients:
        return [ShardFunction(vectorized, True, reason)]
    lost = "fn has a custom gradient (tf.custom_gradient, tf.nn.silu, ...), which vectorising would drop"
    return [
        ShardFunction(vectorized, True, f"{reason}; one by one where a GradientTape may record, because {lost}"),
        one_by_one(lost, _BATCH),
    ]


def vectorize(row_fn: Any, specs: Sequence[Any], force: bool) -> tuple[Any, list[str]]:
    """Return a `ConcreteFunction` of all rows of a shard, with the results of `row_fn` for each row.

    Args:
        row_fn: the `ConcreteFunction` of one row.
        specs: `tf.TypeSpec`s of the leaves.
        force: whether to use TensorFlow's converters of ops that are not in the table.

    Returns:
        The function, and sentences about the ops that run row by row inside it: the reasons, and the user's lines.

    Raises:
        Exception: an op cannot be vectorised. The first line of the message is the reason.
    """
    vectorizer = Vectorizer(force, traced_graphs(row_fn.graph))

    @tf.function(autograph=False)
    def vectorized(*leaves: Any) -> list[Any]:
        if not checks_ops():
            return vectorized_map(row_fn, leaves)
        count = tf.shape(leaves[0])[:1]
        inputs, outputs = wrapped_inputs(row_fn, leaves), len(row_fn.structured_outputs)
        results = Conversion(vectorizer, count).convert(row_fn.graph, inputs, outputs)
        return [as_stacked(result, count) for result in results]

    concrete = vectorized.get_concrete_function(*specs)
    vectorizer.check_loops()
    differentiate_values_alone(concrete.graph)
    return concrete, vectorizer.sentences()


class _NotVectorizedError(NotVectorizableError):
    """The function of one row cannot be vectorised."""


class Vectorizer:
    """Converts the ops of a function of one row, and collects the loops over rows inside the vectorised function."""

    def __init__(self, force: bool, own: Collection[Any]):
        """`force`: whether to convert untested ops. `own`: the graphs that were traced for the function of one row."""
        self._force, self._own = force, own
        self.ops: set[Any] = set()
        """The ops of the function of one row."""
        self.loops: list[dict[Any, Exception]] = []
        """For each loop over rows, its ops, and why they run in it."""

    def refusal(self, op: Any) -> Exception | None:
        """Return why an op cannot be converted, whatever its inputs are; `None` if it may be."""
        if _converter(op) is None:
            return self.reason(op, NotVectorizableError("has no vectorised form"))
        if op.type not in OPS and not self._force:
            return self.reason(op, NotVectorizableError("has no tested vectorised form", _FORCE, _REPLACE))
        return None

    def convert(self, given: Any) -> Any:
        """Return the wrapped results of an op, or raise any error if it cannot be converted."""
        op = given.op
        if refusal := self.refusal(op):
            raise refusal
        if reason := why_not_vectorizable(op, [each.is_stacked for each in given.inputs]):
            raise NotVectorizableError(reason)
        return _converter(op)(given)

    def reason(self, op: Any, error: Exception) -> Exception:
        """Return the reason for an error of `convert`, with the user's line, and what to try."""
        if isinstance(error, _NotVectorizedError):
            return error
        if is_control_flow(op) and op.graph not in self._own and _was_differentiated(op):
            return _NotVectorizedError(
                f"fn calls a function whose gradient was taken before, which changes its loops and branches{_source_of(op)}",
                "map the function before its gradient is taken",
            )
        words = _first_line(error) if is_control_flow(op) else f"{op.type} {_reason_text(error)}"
        remedies = getattr(error, "remedies", ()) or (_REPLACE,)
        return _NotVectorizedError(f"{words}{_source_of(op)}", *remedies)

    def sentences(self) -> list[str]:
        """Say which ops run row by row, and why."""
        reasons = [(op, str(reason)) for loop in self.loops for op, reason in loop.items()]
        together = dict.fromkeys(reason for op, reason in reasons if not is_stackable(op))
        alone = dict.fromkeys(reason for _, reason in reasons if reason not in together)
        kinds = {
            "these ops alone run row by row": alone,
            "these ops run row by row, and those that take their results": together,
        }
        return [f"{words}: {'; '.join(each)}" for words, each in kinds.items() if each]

    def check_loops(self) -> None:
        """Raise the first reason for results that cannot be stacked if the loops take as much time as a loop with all ops."""
        reasons = [reason for loop in self.loops for op, reason in loop.items() if not is_stackable(op)]
        repeated = sum(len(loop) + OPS_PER_LOOP for loop in self.loops)
        if reasons and repeated >= sum(op.type not in _FREE for op in self.ops):
            raise reasons[0]


def _converter(op: Any) -> Any:
    return CONVERTERS.get(op.type) or tensorflow_converter(op.type)


def _was_differentiated(op: Any) -> bool:
    """Whether TensorFlow has changed a loop or a branch for its gradient. It then renames the functions of the op."""
    return any("_rewritten" in name for name in called_names(op.node_def))


def _reason_text(error: Exception) -> str:
    """Return the reason in words that follow the name of the op."""
    if isinstance(error, NotVectorizableError):
        return str(error)
    if match := re.match(r'Input "(\w+)" of op .* expected to be (not )?loop invariant', str(error)):
        return f"has {'the same' if match[2] else 'another'} {match[1]} for each row"
    return f"has no vectorised form for this call: {_first_line(error)}"


def _source_of(op: Any) -> str:
    """Return the user's line that created an op, in parentheses."""
    line = source_line(op)
    return f" ({line})" if line else ""


def _diverges(vectorized: Any) -> bool:
    """Whether rows take different branches or leave loops at different steps. XLA does not know the sizes of their groups."""
    return "DynamicPartition" in op_types(vectorized)


def _check_function(row_fn: Any, found: Audit, specs: list[Any], options: Options, signature: Sequence[Any]) -> None:
    """Raise `_NotVectorizedError` if the function as a whole cannot be vectorised."""
    if options.vectorize is not True and not (checks_ops() and can_list_functions(row_fn.graph)):
        raise _NotVectorizedError(_HIDDEN, _FORCE)
    if not all(isinstance(spec, tf.TensorSpec) for spec in specs):
        raise _NotVectorizedError("the rows of the data are sparse, or may differ in shape")
    if not all(isinstance(leaf, tf.Tensor) for leaf in row_fn.structured_outputs):
        raise _NotVectorizedError("fn returns ragged or sparse tensors")
    if not all(isinstance(spec, tf.TensorSpec | tf.DType) for spec in signature):
        raise _NotVectorizedError("fn_output_signature holds ragged or sparse tensors")
    if found.effects:
        effect = found.effects[0]
        lines = (
            _source_of(op)
            for graph in graphs_within(row_fn.graph)
            for op in graph.get_operations()
            if op.type == effect
        )
        raise _NotVectorizedError(f"{effect} acts once per row{next(lines, '')}", _REPLACE)
    if found.writes:
        written = (each for each, treatment in zip(row_fn.captured_inputs, found.treatments) if treatment in WRITES)
        line = next(filter(None, (writing_line(row_fn.graph, each) for each in written)), None)
        in_line = f" ({line})" if line else ""
        raise _NotVectorizedError(f"fn writes a variable or another resource, once per row{in_line}")


def _first_line(error: Exception) -> str:
    text = str(error)
    if match := re.search(r"No pfor vectorization defined for (\w+)", text):  # without `checks_ops`
        return f"{match[1]} has no vectorised form"
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    named = [line for line in lines if re.match(r"\w+(Error|Exception): ", line)]
    if "in user code:" in lines and named:  # autograph puts the error below its traceback
        return named[-1].partition(": ")[2]
    return lines[0] if lines else type(error).__name__
