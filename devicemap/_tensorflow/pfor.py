"""TensorFlow's `pfor`, behind `tf.vectorized_map`, with converters of our own.

`pfor` turns a function of one row into one of all rows, op by op. An op may have a converter of its own (`pfor_converter`);
otherwise `pfor` uses the converter of its type. A converter takes the op and its inputs, each for all rows (stacked,
`[rows, ...]`) or shared by all rows, and returns the results in the same form.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import tensorflow as tf

from devicemap._tensorflow import Private, usable

pfor = Private(
    "tensorflow.python.ops.parallel_for.pfor",
    *(
        "PFor",
        "WhileV2",
        "_PforInput",
        "_convert_function_call",
        "_outputs_for_branch",
        "_partition_inputs_for_indices",
        "_pfor_converter_registry",
        "_stack",
        "wrap",
    ),
)

Converter = Callable[[Any], Any]
"""`pfor`'s description of an op and its inputs -> its results, each wrapped."""

Policy = Callable[[Any, Converter | None], Any]
"""`(given, converter)` converts an op, of whose type the converter is, if there is one."""

_converting = threading.local()


class NotVectorizableError(Exception):
    """An op cannot run for all rows at once."""


@functools.cache
def _asks_ops() -> bool:
    """Whether TensorFlow uses the converter of an op. If it does not, nothing checks that a converter is correct."""
    asked = []

    def convert(given: Any) -> Any:
        asked.append(given)
        return given.input(0)

    def run(row: Any) -> Any:
        same = tf.identity(row)
        same.op.pfor_converter = convert
        return same

    with tf.device(None):
        tf.function(lambda rows: tf.vectorized_map(run, rows)).get_concrete_function(tf.TensorSpec([2]))
    return bool(asked)


def checks_ops() -> bool:
    """Whether `convert_by` checks each op. Otherwise, `tf.vectorized_map` vectorises without checks."""
    return usable(pfor) and _asks_ops()


def take_all_rows(taken: Any) -> None:
    """Convert the op that takes row `i` of a tensor into that tensor, without a copy.

    If the number of rows is unknown, TensorFlow gathers the rows, so that their gradient is sparse
    (test_rows_are_taken_without_a_copy).
    """
    if checks_ops():
        taken.pfor_converter = lambda given: [pfor.wrap(given.input(0).t, True)]


@contextlib.contextmanager
def convert_by(policy: Policy, graphs: Iterable[Any], converters: Mapping[str, Converter]) -> Iterator[None]:
    """Convert each op of these graphs by a policy, in this thread.

    Args:
        policy: converts an op.
        graphs: those of the function of one row and of the functions that it calls.
        converters: converters of types of ops, in place of TensorFlow's.
    """
    if not checks_ops():
        yield
        return
    for graph in graphs:
        for op in graph.get_operations():
            op.pfor_converter = partial(_convert, converters.get(op.type))
    _converting.policy = policy
    try:
        yield
    finally:
        del _converting.policy


def _convert(own: Converter | None, given: Any) -> Any:
    converter = pfor._pfor_converter_registry.get(given.op.type)
    policy: Policy | None = getattr(_converting, "policy", None)
    if policy is not None:
        return policy(given, own or converter)
    # `fn` itself vectorises a function that was traced for it before.
    converter = converter or own
    if converter is None:
        raise ValueError(f"No pfor vectorization defined for {given.op.type}")
    return converter(with_own_inputs(given))


def convert_as_tensorflow(given: Any) -> Any:
    """Convert an op by TensorFlow's converter."""
    return pfor._pfor_converter_registry[given.op_type](given)


def with_own_inputs(given: Any) -> Any:
    """Copy the list of inputs of an op, so that a converter can change it."""
    return pfor._PforInput(given.pfor, given.op, list(given.inputs))


def for_all_rows(given: Any, place: int) -> Any:
    """Return an input as a tensor `[rows, ...]`, repeated if all rows share it."""
    taken = given.input(place)
    return taken.t if taken.is_stacked else pfor._stack(taken.t, given.pfor.loop_len_vector).t


def run_again(op: Any, inputs: Iterable[Any]) -> list[Any]:
    """Run an op with the same attributes on other inputs."""
    dtypes = [output.dtype for output in op.outputs]
    return list(
        tf.compat.v1.get_default_graph().create_op(op.type, list(inputs), dtypes, attrs=op.node_def.attr).outputs
    )


def wrap_stacked(results: Iterable[Any]) -> list[Any]:
    """Wrap results `[rows, ...]`."""
    return [pfor.wrap(result, True) for result in results]
