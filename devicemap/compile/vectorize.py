"""Turn a function of one row into one of all rows of a shard: vectorised if possible, otherwise a loop over rows.

Both call the same traced row function.
"""

from __future__ import annotations

import contextlib
import logging
import re
import threading
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from devicemap._tensorflow.converters import CONVERTERS
from devicemap._tensorflow.functions import can_list_functions, graphs_within, in_xla_context, traced_graphs
from devicemap._tensorflow.gradients import differentiate_values_alone
from devicemap._tensorflow.pfor import (
    Converter,
    NotVectorizableError,
    checks_ops,
    convert_by,
    map_all_rows,
    with_own_inputs,
)
from devicemap.compile.audit import WRITES, Audit, audit, op_types, writing_line
from devicemap.compile.graph_walker import CALLS, called_names
from devicemap.compile.row_calls import RowCalls, is_short, needs_placeholders, result_of, saves_time
from devicemap.compile.row_loop import PARALLEL_ITERATIONS, map_rows, signature_of
from devicemap.compile.source_lines import source_line
from devicemap.compile.vectorizable_ops import OPS, is_control_flow, runs_row_by_row, why_not_vectorizable
from devicemap.data.rows import spec_of
from devicemap.errors import failure
from devicemap.options import Options

_BY_HAND = "Use vectorize='auto' or False to map row by row"

_HIDDEN = "this TensorFlow lacks non-public names that devicemap needs to check each op"

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
    convert = _Vectorizer(force, traced_graphs(row_fn.graph))

    @tf.function(autograph=False)
    def vectorized(*leaves: Any) -> list[Any]:
        return map_all_rows(row_fn, leaves)

    try:
        with convert_by(convert, graphs_within(row_fn.graph), CONVERTERS), _without_conversion_log():
            concrete = vectorized.get_concrete_function(*specs)
    except Exception as error:
        if convert.failure is None:
            raise
        raise convert.failure from error
    convert.check(concrete, row_fn)
    differentiate_values_alone(concrete.graph)
    return concrete, convert.sentences()


class _NotVectorizedError(NotVectorizableError):
    """The function of one row cannot be vectorised."""


class _Vectorizer:
    """Convert the ops of a function of one row. An op that cannot be vectorised runs row by row, if possible."""

    def __init__(self, force: bool, own: Collection[Any]):
        """`own`: the graphs that were traced for the function of one row."""
        self._force, self._own, self._asked = force, own, False
        self.calls = RowCalls()
        self.failure: _NotVectorizedError | None = None
        """Why an op can run neither way. pfor replaces the error itself if it fails to log an op of a SavedModel."""

    def __call__(self, given: Any, converter: Converter | None) -> Any:
        op, self._asked = given.op, True
        if results := self.calls.results(given):
            return results
        before = next((result.call for each in given.inputs if (result := result_of(each.t))), None)
        try:
            if before and op.type not in CALLS:
                raise before.reason
            return self._converted(given, converter)
        except Exception as error:  # pfor raises errors of several classes for unsupported ops
            reason = self._reason(op, converter, error)
            if not runs_row_by_row(op):
                self.failure = self.failure or reason
                raise
        return self.calls.add(given, reason)

    def _converted(self, given: Any, converter: Converter | None) -> Any:
        op = given.op
        if converter is None:
            raise NotVectorizableError("has no vectorised form")
        if op.type not in OPS and not self._force:
            raise NotVectorizableError("has no tested vectorised form")
        if reason := why_not_vectorizable(op, [each.is_stacked for each in given.inputs]):
            raise NotVectorizableError(reason)
        return converter(with_own_inputs(given))

    def _reason(self, op: Any, converter: Converter | None, error: Exception) -> _NotVectorizedError:
        if isinstance(error, _NotVectorizedError):
            return error
        if is_control_flow(op) and op.graph not in self._own and _was_differentiated(op):
            return _NotVectorizedError(
                f"fn calls a function whose gradient was taken before, which changes its loops and branches{_source_of(op)}",
                "map the function before its gradient is taken",
            )
        words = _first_line(error) if is_control_flow(op) else f"{op.type} {_reason_text(error)}"
        untested = converter is not None and op.type not in OPS
        remedies = getattr(error, "remedies", ()) or (_REPLACE,)
        return _NotVectorizedError(f"{words}{_source_of(op)}", *[_FORCE] * untested, *remedies)

    def sentences(self) -> list[str]:
        """Say which ops run row by row, and why."""
        kinds = {
            "these ops alone run row by row": lambda call: len(call.calls) == 1,
            "these ops run row by row, and those that take their results": lambda call: len(call.calls) > 1,
        }
        last = [call for loop in self.calls.loops for call in loop]
        return [
            f"{words}: {'; '.join(dict.fromkeys(str(call.reason) for call in calls))}"
            for words, is_of_kind in kinds.items()
            if (calls := [*filter(is_of_kind, last)])
        ]

    def check(self, vectorized: Any, row_fn: Any) -> None:
        """Raise `_NotVectorizedError` unless the vectorised function is right, and its loops over rows save time.

        Results of unknown shape must not be needed for all rows, and pfor must have asked this object for each op.
        """
        if not (self._asked or self._force):
            raise _NotVectorizedError(_HIDDEN, _FORCE)
        if self.calls.unstacked is None:
            others = self.calls.loops[1:]  # one loop over rows is needed in any case
            if others and is_short(row_fn) and not saves_time(others, row_fn):
                raise self.calls.loops[0][0].reason
            return
        if needs_placeholders(vectorized) or not saves_time(self.calls.loops, row_fn):
            raise self.calls.unstacked


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


@contextlib.contextmanager
def _without_conversion_log() -> Iterator[None]:
    """Drop pfor's log messages of this thread: it logs the whole NodeDef of an op that it cannot convert, as an error."""
    thread = threading.get_ident()

    def other_thread(record: logging.LogRecord) -> bool:
        return record.thread != thread

    logger = tf.get_logger()
    logger.addFilter(other_thread)
    try:
        yield
    finally:
        logger.removeFilter(other_thread)


def _first_line(error: Exception) -> str:
    text = str(error)
    if match := re.search(r"No pfor vectorization defined for (\w+)", text):  # without `checks_ops`
        return f"{match[1]} has no vectorised form"
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    named = [line for line in lines if re.match(r"\w+(Error|Exception): ", line)]
    if "in user code:" in lines and named:  # autograph puts the error below its traceback
        return named[-1].partition(": ")[2]
    return lines[0] if lines else type(error).__name__
