"""A function of one row -> a function of a shard's rows: vectorised where every op converts, a `tf.map_fn` otherwise.

Both call the same traced row function.
"""

from __future__ import annotations

import contextlib
import logging
import re
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from devicemap.auditing import Audit, audit
from devicemap.errors import failure
from devicemap.internals.converting import take_all_rows
from devicemap.internals.functions import functions_within
from devicemap.internals.mending import mend
from devicemap.looping import mapped
from devicemap.options import Options


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
    """The fastest loop over a shard's rows; and behind it, where that one would drop a custom gradient, one that keeps it.

    Raises:
        FunctionError: the options ask for what cannot be.
    """
    wanted = options.vectorize
    found = audit(row_fn, row_fn.graph.as_graph_def())
    obstacle = "vectorize=False" if wanted is False else _obstacle(row_fn, found, specs, options)
    cause = None
    if obstacle is None:
        try:
            vectorized = _vectorized(row_fn, specs)
            if options.jit_compile and _parts_rows(vectorized):
                obstacle = "fn has a branch or a loop whose condition differs between rows, and jit_compile=True"
        except Exception as error:  # pfor raises ValueError, NotImplementedError, TypeError and more for what it lacks
            obstacle, cause = _why(error), error
    if obstacle is not None:
        if wanted is True:
            raise failure(f"vectorize=True: {obstacle}. Use vectorize='auto' or False to map row by row") from cause
        at_once = 1 if found.python else None  # each call of Python holds a thread that those of the others may wait for
        return [RowLoop(mapped(row_fn, specs, options, structure, at_once), False, obstacle)]
    reason = "every op of fn has a vectorised form"
    if not found.custom_gradients:
        return [RowLoop(vectorized, True, reason)]
    dropped = "a custom gradient (tf.custom_gradient, tf.nn.silu, ...), which vectorising would drop"
    return [
        RowLoop(vectorized, True, f"{reason}; one by one where a GradientTape may record, because fn has {dropped}"),
        RowLoop(mapped(row_fn, specs, options, structure), False, f"fn has {dropped}"),
    ]


def _vectorized(row_fn: Any, specs: list[Any]) -> Any:
    def run(rows: Sequence[Any]) -> Any:
        for row in rows:
            take_all_rows(row.op)
        return row_fn(*rows)

    @tf.function(autograph=False)
    def vectorized(*leaves: Any) -> list[Any]:
        return list(tf.vectorized_map(run, leaves, fallback_to_while_loop=False))

    with _without_conversion_log():
        return vectorized.get_concrete_function(*specs)


def _parts_rows(vectorized: Any) -> bool:
    """Whether rows go different ways in it: sizes that XLA does not know then."""
    return any(
        op.type == "DynamicPartition"
        for graph in (vectorized.graph, *(inner for inner, _ in functions_within(vectorized.graph).values()))
        for op in graph.get_operations()
    )


def _obstacle(row_fn: Any, found: Audit, specs: list[Any], options: Options) -> str | None:
    """What can be told to stand in the way of vectorising before trying it."""
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
    if found.growing_lists:  # pfor does not let them grow
        return "fn holds a TensorArray of dynamic size"
    return mend(row_fn.graph)


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
