"""User function -> one traced function over the rows of a shard.

`fn` is traced once, for one row (`batched=False`) or for a batch of any size. The loop over a shard's rows is built from
that trace: vectorised where every op converts, a `tf.map_fn` otherwise; both call the same traced row function.
"""

from __future__ import annotations

import contextlib
import logging
import re
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from devicemap.auditing import Audit, audit
from devicemap.errors import FunctionError, failure, function_error
from devicemap.internals import differentiate_freely, retracing
from devicemap.options import Options
from devicemap.rows import map_nest, row_spec, spec_of

_POWERS_OF_TWO = 2 ** np.arange(31, dtype=np.int32)
_UNSEEDED = 87654321  # what TensorFlow itself mixes with the seed of an op where no global seed is set


@dataclass(frozen=True)
class Traced:
    """A function of a shard's rows, traced; callable on any device."""

    concrete: Any
    """`tf.types.experimental.ConcreteFunction`: leaves of a shard, each `[rows, ...]` -> list of result leaves."""

    graph_def: Any
    """`GraphDef` of it, as it was traced: gradients of loops make `concrete.graph` return what they need besides."""

    structure: Any
    """The nest that the result leaves are packed into; its own leaves say what results there are."""

    specs: tuple[Any, ...]
    """`tf.TypeSpec` of each result leaf, of shape `[None, ...]`."""

    vectorized: bool
    """Whether the rows of a shard run as one vectorised call."""

    reason: str
    """Why they are, or are not."""

    audit: Audit
    """The state that it touches."""


def trace(fn: Callable[..., Any], specs: Any, options: Options, stream: int | None = None) -> Traced:
    """Trace `fn` for data of these specs.

    Args:
        fn: the user's function, of one row or of a batch.
        specs: nest of `tf.TypeSpec`s of the data, of shapes `[None, ...]`.
        options: of which `batched`, `vectorize`, `seed`, `fn_output_signature` and `jit_compile` matter here.
        stream: for a function with seeded random ops, the number of the stream it draws from: another number, other
            draws. `None` leaves its seeds as they are.

    Raises:
        FunctionError: `fn` cannot be traced, or returns something that is not rows. It is an instance of the original
            error's class too.
    """
    leaf_specs = list(tf.nest.flatten(specs))
    if options.seed is not None:
        leaf_specs.append(tf.TensorSpec([None, 2], tf.int32))
    shape_of_results: list[Any] = []
    flat_fn = _flatten(fn, specs, options, shape_of_results, stream)
    try:
        with tf.device(None):  # not the user's scope of the moment: the trace serves every device
            if options.batched:
                over_rows = flat_fn.get_concrete_function(*leaf_specs)
                vectorized, reason = False, "fn takes a batch"
            else:
                row_fn = flat_fn.get_concrete_function(*map(row_spec, leaf_specs))
                structure = shape_of_results[-1]
                over_rows, vectorized, reason = _map_over_rows(row_fn, leaf_specs, options, structure)
            if options.jit_compile:
                over_rows = _compile_by_powers_of_two(over_rows, leaf_specs, options.batched)
    except FunctionError:
        raise
    except Exception as error:
        given = ", ".join(map(str, leaf_specs if options.batched else map(row_spec, leaf_specs)))
        what = "a batch" if options.batched else "one row (batched=False)"
        if type(specs) is tuple:
            what += f", as {len(specs)} arguments,"
        if options.seed is not None:
            what += " and the keyword seed"
        takes_batches = not options.batched and hasattr(fn, "built")  # Keras layers and models have that
        hint = ". A Keras layer or model takes batches: set batched=True" if takes_batches else ""
        if type(specs) is tuple and hasattr(fn, "built"):
            hint += ". A tuple is passed as several arguments: drop labels with dataset.map(lambda x, y: x)"
        raise function_error(
            f"fn could not be traced for {what} of {given}{hint}: {type(error).__name__}: {error}", error
        ) from error
    differentiate_freely(over_rows.graph)
    outputs = [spec_of(leaf) for leaf in over_rows.structured_outputs]
    graph_def = over_rows.graph.as_graph_def()
    found = audit(over_rows, graph_def)
    if found.colocated:
        over_rows = _kept_whole(over_rows, leaf_specs)
        graph_def = over_rows.graph.as_graph_def()
        found = audit(over_rows, graph_def)
    return Traced(over_rows, graph_def, shape_of_results[-1], tuple(outputs), vectorized, reason, found)


def row_seeds(seed: int, first_row: int, rows: Any) -> Any:
    """Stateless seeds, int32 `[rows, 2]`: the `seed` and the row's global index, so that no two rows share one."""
    index = tf.range(first_row, first_row + rows, dtype=tf.int64)
    seeds = tf.stack([tf.fill(tf.shape(index), tf.constant(seed, tf.int64)), index], axis=1)
    return tf.bitcast(tf.cast(seeds % 2**32, tf.uint32), tf.int32)


def _flatten(fn: Callable[..., Any], specs: Any, options: Options, structures: list[Any], stream: int | None) -> Any:
    """`fn` as a `tf.function` of leaves that returns a list of leaves; appends the nest of its results to `structures`.

    An inner `tf.function` gives it autograph and variables on first call, as TensorFlow defines them.
    """
    unpack = type(specs) is tuple  # as in tf.data: named tuples and dicts stay one argument
    count = len(tf.nest.flatten(specs))
    if isinstance(fn, tf.types.experimental.PolymorphicFunction | tf.types.experimental.ConcreteFunction):
        inner = fn
    elif hasattr(fn, "__code__"):
        inner = tf.function(fn)
    else:  # Keras layers, partials, objects: tf.function wants something with a signature of its own
        inner = tf.function(lambda *args, **kwargs: fn(*args, **kwargs))

    @tf.function(autograph=False)
    def flat_fn(*leaves: Any) -> list[Any]:
        with _streams(stream):
            arguments = tf.nest.pack_sequence_as(specs, leaves[:count])
            seeds = {} if options.seed is None else {"seed": leaves[count]}
            results = inner(*arguments, **seeds) if unpack else inner(arguments, **seeds)
        results = map_nest(lambda value, path: _result(value, path, options.batched), results, "the result")
        structures.append(tf.nest.map_structure(lambda _: None, results))
        flat = tf.nest.flatten(results)
        if not flat:
            raise failure(f"fn returned {results!r}, a nest without leaves; expected at least one tensor")
        return list(flat)

    return flat_fn


def _result(value: Any, path: str, batched: bool) -> Any:
    """One leaf of what `fn` returned, as a tensor: by tf.data's conventions, lists are stacked."""
    if value is None:
        raise failure(
            f"{path} of fn is None; expected a tensor for each row. If fn is there for what it does, let it return "
            "something of the row, for instance the row itself"
        )
    if isinstance(value, tf.Tensor) and value.dtype == tf.variant:
        raise failure(
            f"{path} of fn is a TensorArray or another object, not a tensor; return its .stack() or .concat()"
        )
    if not isinstance(value, tf.Tensor | tf.RaggedTensor | tf.SparseTensor):
        if isinstance(value, tf.IndexedSlices):
            value = tf.convert_to_tensor(value)
        try:
            value = tf.convert_to_tensor(value)
        except (TypeError, ValueError) as error:
            raise failure(f"{path} of fn is a {type(value).__name__}, not a tensor: {error}") from error
    if batched and value.shape.rank == 0:
        raise failure(
            f"{path} of fn is a scalar; with batched=True fn must return as many rows as it is given, of shape "
            "[rows, ...]. Set batched=False for a fn of one row"
        )
    return value


def _map_over_rows(row_fn: Any, specs: list[Any], options: Options, structure: Any) -> tuple[Any, bool, str]:
    """The loop over a shard's rows: the function, whether it is vectorised, and why."""
    wanted = options.vectorize
    obstacle = None if wanted is False else _obstacle(row_fn, specs, options)
    if wanted is True and obstacle is not None:
        raise failure(f"vectorize=True: {obstacle}. Use vectorize='auto' or False to map row by row")
    if wanted is not False and obstacle is None:

        @tf.function(autograph=False)
        def vectorized(*leaves: Any) -> list[Any]:
            # The full slice has a dense gradient; vectorized_map's gather of all rows would hand on IndexedSlices.
            leaves = tuple(leaf[:] for leaf in leaves)
            return list(tf.vectorized_map(lambda row: row_fn(*row), leaves, fallback_to_while_loop=False))

        try:
            with _without_conversion_log():
                return vectorized.get_concrete_function(*specs), True, "every op of fn has a vectorised form"
        except Exception as error:  # pfor raises ValueError, NotImplementedError, TypeError and more for what it lacks
            obstacle = _why(error)
            if wanted is True:
                raise failure(f"vectorize=True: {obstacle}. Use vectorize='auto' or False") from error
    signature = _signature(row_fn, specs, options, structure)

    @tf.function(autograph=False)
    def mapped(*leaves: Any) -> list[Any]:
        return list(tf.map_fn(lambda row: row_fn(*row), leaves, fn_output_signature=signature))

    return mapped.get_concrete_function(*specs), False, obstacle or "vectorize=False"


def _obstacle(row_fn: Any, specs: list[Any], options: Options) -> str | None:
    """What can be told to stand in the way of vectorising before trying it."""
    if options.fn_output_signature is not None:
        return "fn_output_signature is given, which is for tf.map_fn"
    if not all(isinstance(spec, tf.TensorSpec) for spec in specs):
        return "the data holds ragged or sparse tensors"
    if not all(isinstance(leaf, tf.Tensor) for leaf in row_fn.structured_outputs):
        return "fn returns ragged or sparse tensors"
    found = audit(row_fn, row_fn.graph.as_graph_def())
    if found.effects:
        return f"{found.effects[0]} acts once per row"
    if found.writes:
        return "fn writes a variable or another resource, once per row"
    if found.obstacles:
        return found.obstacles[0]
    return None


def _signature(row_fn: Any, specs: list[Any], options: Options, structure: Any) -> list[Any]:
    """What `tf.map_fn` is to expect: as `fn` returned it when it was traced, or as the user says.

    Where the data is ragged, rows of unknown length make ragged results, as in `tf.map_fn`.
    """
    outputs = row_fn.structured_outputs
    returned = [tf.type_spec_from_value(leaf) for leaf in outputs]
    if any(isinstance(spec, tf.RaggedTensorSpec) for spec in specs):
        returned = [_as_ragged(spec) for spec in returned]
    if options.fn_output_signature is None:
        return returned
    given = options.fn_output_signature
    try:
        tf.nest.assert_same_structure(given, structure)
    except (TypeError, ValueError) as error:
        raise failure(
            f"fn_output_signature is {given}, but fn returns {tf.nest.pack_sequence_as(structure, returned)}: "
            "the nests must be the same"
        ) from error
    flat = list(tf.nest.flatten(given))
    for spec, leaf in zip(flat, outputs):
        dtype = tf.as_dtype(getattr(spec, "dtype", spec))
        if dtype != leaf.dtype:
            raise failure(
                f"fn_output_signature has {dtype.name} where fn returns {leaf.dtype.name}; they must be the same"
            )
    return flat


def _as_ragged(spec: Any) -> Any:
    if isinstance(spec, tf.TensorSpec) and spec.shape.rank and spec.shape[0] is None:
        return tf.RaggedTensorSpec(spec.shape, spec.dtype, ragged_rank=0)
    return spec


def _compile_by_powers_of_two(over_rows: Any, specs: list[Any], batched: bool) -> Any:
    """Run a shard through XLA in pieces of 1, 2, 4, 8, ... rows, largest first.

    XLA compiles for each shape it meets. No row may be padded into `fn`, and sizes vary freely, so a shard is cut by the
    binary digits of its size: at most one compilation per power of two, whatever sizes come.
    """
    outputs = over_rows.structured_outputs
    if not all(isinstance(leaf, tf.Tensor) for leaf in outputs):
        raise failure("jit_compile=True with ragged or sparse results: XLA has only dense ones; set it to False")
    compiled = tf.function(lambda *leaves: over_rows(*leaves), autograph=False, jit_compile=True)

    @tf.function(autograph=False)
    def in_pieces(*leaves: Any) -> list[Any]:
        rows = tf.shape(leaves[0])[0]
        arrays = [
            tf.TensorArray(o.dtype, 0, dynamic_size=True, infer_shape=False, element_shape=spec_of(o).shape)
            for o in outputs
        ]

        def step(start: Any, piece: Any, arrays: list[Any]) -> tuple[Any, Any, list[Any]]:
            size = tf.reduce_max(tf.where(_POWERS_OF_TWO <= rows - start, _POWERS_OF_TWO, 1))
            results = compiled(*[leaf[start : start + size] for leaf in leaves])
            if batched:  # pieces that return too many and too few rows would add up
                for result in results:
                    tf.debugging.assert_equal(
                        tf.shape(result)[0], size, "fn must return one row per input row: returned and given"
                    )
            return start + size, piece + 1, [a.write(piece, r) for a, r in zip(arrays, results)]

        *_, arrays = tf.while_loop(lambda start, *_: start < rows, step, (0, 0, arrays))
        return [array.concat() for array in arrays]

    return in_pieces.get_concrete_function(*specs)


def _kept_whole(over_rows: Any, specs: list[Any]) -> Any:
    """The function as one that is never inlined, so that names in it stay its own wherever it is called."""

    @tf.function(autograph=False, experimental_attributes={"_noinline": True})
    def whole(*leaves: Any) -> Any:
        return over_rows(*leaves)

    return whole.get_concrete_function(*specs)


@contextlib.contextmanager
def _streams(stream: int | None) -> Iterator[None]:
    """Give the random ops traced inside a number stream of their own.

    The seed of the graph being traced is mixed with `stream`; op seeds stay.
    """
    if stream is None:
        yield
        return
    graph = tf.compat.v1.get_default_graph()
    mixed = np.random.SeedSequence([_UNSEEDED if graph.seed is None else graph.seed & (2**63 - 1), stream])
    graph.seed = int(mixed.generate_state(1, np.uint32)[0] >> 1)
    with retracing():  # the tf.functions that fn calls hold seeds too
        yield


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
    lines = [line.strip() for line in text.splitlines() if line.strip() and "user code" not in line]
    return lines[0] if lines else type(error).__name__
