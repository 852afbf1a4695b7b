"""A function of one row -> a function of a shard's rows: vectorised where every op is proven to be, a `tf.map_fn` otherwise.

Both call the same traced row function.
"""

from __future__ import annotations

import contextlib
import logging
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from devicemap._tensorflow.converters import NotProvenError, checks_ops, convert_own, take_all_rows
from devicemap._tensorflow.functions import UNCHAINED, own_functions, shows_functions
from devicemap.base.options import Options
from devicemap.compile.audit import Audit, audit
from devicemap.compile.forms import Form, form_of, is_flow, is_proven, why_unproven
from devicemap.compile.row_loop import mapped, row_by_row
from devicemap.errors import failure

_BY_HAND = "Use vectorize='auto' or False to map row by row"


@dataclass(frozen=True)
class RowLoop:
    """A function of a shard's rows that calls the function of one row for each."""

    concrete: Any
    """`tf.types.experimental.ConcreteFunction`: leaves of a shard, each `[rows, ...]` -> list of result leaves."""

    vectorized: bool
    """Whether all rows run as one call."""

    reason: str
    """Why they do, or do not."""


def loops_over_rows(row_fn: Any, specs: list[Any], options: Options, structure: Any) -> list[RowLoop]:
    """The fastest loop over a shard's rows; and behind it, where that one lacks right gradients, one that has them.

    Raises:
        FunctionError: the options ask for what cannot be.
    """
    wanted = options.vectorize
    found = audit(row_fn, row_fn.graph.as_graph_def())
    # Each call of Python holds a thread that those of the others may wait for; numbers are drawn in the order of rows.
    at_once = 1 if found.python or found.seeded else None

    def one_by_one(reason: str) -> RowLoop:
        return RowLoop(mapped(row_fn, specs, options, structure, at_once), False, reason)

    obstacle = "vectorize=False" if wanted is False else _obstacle(row_fn, found, specs, options)
    unproven: list[Form] = []
    if obstacle is None:
        try:
            vectorized = vectorize(row_fn, specs, lambda form, op: _check(form, op, unproven, wanted is True))
            if options.jit_compile and _parts_rows(vectorized):
                obstacle = "fn has a branch or a loop whose condition differs between rows, and jit_compile=True"
        except Exception as error:  # pfor raises ValueError, NotImplementedError, TypeError and more for what it lacks
            obstacle = _why(error)
            if wanted is True:
                raise failure(f"vectorize=True: {obstacle}. {_BY_HAND}") from error
    if obstacle is not None:
        if wanted is True:
            raise failure(f"vectorize=True: {obstacle}. {_BY_HAND}")
        return [one_by_one(obstacle)]
    reason = f"every op of fn {'has a vectorised form' if wanted is True else 'is proven to give the same vectorised'}"
    lost = None
    if found.custom_gradients:
        lost = "a custom gradient (tf.custom_gradient, tf.nn.silu, ...), which vectorising would drop"
    elif unproven and wanted is not True:
        lost = f"{unproven[0].op}, whose gradient vectorised is not proven to be the same"
    if lost is None:
        return [RowLoop(vectorized, True, reason)]
    return [
        RowLoop(vectorized, True, f"{reason}; one by one where a GradientTape may record, because fn has {lost}"),
        one_by_one(f"fn has {lost}"),
    ]


def vectorize(row_fn: Any, specs: Sequence[Any], check: Callable[[Form, Any], None]) -> Any:
    """The `ConcreteFunction` of a shard's leaves that runs that of one row for all of them at once.

    `check` is called with the form of each op that is vectorised, and the op, and raises `NotProvenError` for one not to be.
    """

    def of_op(op: Any, stacked: Sequence[bool]) -> None:
        if not is_flow(op):
            check(form_of(op, stacked), op)

    own, _ = own_functions(row_fn.graph)

    def run(rows: Sequence[Any]) -> Any:
        for row in rows:
            take_all_rows(row.op)
        return row_fn(*rows)

    # Without control dependencies, or what is called for one row, and then vectorised, would also run as it is. In another
    # function with them, or TensorFlow brings what a loop gives to where its variables are, and back.
    @tf.function(autograph=False, experimental_attributes=UNCHAINED)
    def vectorized(*leaves: Any) -> list[Any]:
        return list(tf.vectorized_map(run, leaves, fallback_to_while_loop=False))

    with convert_own([row_fn.graph, *own], of_op, row_by_row), _without_conversion_log():
        concrete = vectorized.get_concrete_function(*specs)

    @tf.function(autograph=False)
    def kept(*leaves: Any) -> Any:
        return concrete(*leaves)

    return kept.get_concrete_function(*specs)


def _check(form: Form, op: Any, unproven: list[Form], wanted: bool) -> None:
    """Raise for an op that is not proven to vectorise right, unless it is `wanted`; note one whose gradients are not."""
    if not is_proven(form, differentiable=False):
        if not wanted:
            raise NotProvenError(why_unproven(form, [argument.name for argument in op.op_def.input_arg]))
    elif not is_proven(form, differentiable=True):
        unproven.append(form)


def _parts_rows(vectorized: Any) -> bool:
    """Whether rows go different ways in it: sizes that XLA does not know then."""
    graph_def = vectorized.graph.as_graph_def()
    return any(
        node.op == "DynamicPartition"
        for nodes in (graph_def.node, *(function.node_def for function in graph_def.library.function))
        for node in nodes
    )


def _obstacle(row_fn: Any, found: Audit, specs: list[Any], options: Options) -> str | None:
    """What can be told to stand in the way of vectorising before trying it."""
    if options.vectorize is not True:
        if not (checks_ops() and shows_functions(row_fn.graph)):
            return "only with what this TensorFlow does not make public could each op be checked"
        if own_functions(row_fn.graph)[1]:
            return "fn calls a function that was traced before, which is left as it is"
    if options.fn_output_signature is not None:
        return "fn_output_signature is given, which is for tf.map_fn"
    if not all(isinstance(spec, tf.TensorSpec) for spec in specs):
        return "the data holds ragged or sparse tensors"
    if not all(isinstance(leaf, tf.Tensor) for leaf in row_fn.structured_outputs):
        return "fn returns ragged or sparse tensors"
    if found.effects:
        return f"{found.effects[0]} acts once per row"
    if found.writes:
        return "fn writes a variable or another resource, once per row"
    return None


@contextlib.contextmanager
def _without_conversion_log() -> Iterator[None]:
    """Drop what TensorFlow logs, in this thread, about an op without a vectorised form: the reason is kept instead."""
    thread = threading.get_ident()

    def other_thread(record: logging.LogRecord) -> bool:
        return record.thread != thread

    logger = tf.get_logger()
    logger.addFilter(other_thread)
    try:
        yield
    finally:
        logger.removeFilter(other_thread)


def _why(error: Exception) -> str:
    text = str(error)
    if match := re.search(r"No pfor vectorization defined for (\w+)", text):
        return f"{match[1]} has no vectorised form"
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    named = [line for line in lines if re.match(r"\w+(Error|Exception): ", line)]
    if "in user code:" in lines and named:  # as autograph tells of an error, below where it came from
        return named[-1].partition(": ")[2]
    return lines[0] if lines else type(error).__name__
