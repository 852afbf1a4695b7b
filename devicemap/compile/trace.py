"""User function -> one traced function over the rows of a shard.

`fn` is traced once, for one row (`batched=False`) or for a batch of any size. The loop over a shard's rows calls that trace.
In a vectorised loop, ops without a tested vectorised form run row by row. Other functions run in a loop over the rows.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import tensorflow as tf

from devicemap._tensorflow.functions import call_with_leaves, pinning_loops
from devicemap._tensorflow.gradients import unpin_gradients
from devicemap.compile.audit import Audit, Treatment, audit
from devicemap.compile.hints import check_ranks, tracing_error
from devicemap.compile.random import Stream, drawing_from, random_states
from devicemap.compile.reduction import BoundReduction, Reduction
from devicemap.compile.returned import as_result, check_validity
from devicemap.compile.vectorize import ShardFunction, loops_over_rows
from devicemap.data.rows import empty_rows, row_spec
from devicemap.data.structure import as_objects, map_nest, paths_of_lists
from devicemap.errors import FunctionError, OptionError, failure, function_error, warn_user
from devicemap.options import Options

in_fn: ContextVar[bool] = ContextVar("in_fn", default=False)
"""Whether the `fn` of a map is being traced."""


@dataclass(frozen=True, kw_only=True)
class Traced(ShardFunction):
    """A traced function of a shard's rows, which can be called on any device."""

    structure: Any
    """The nest into which the result leaves are packed; a tuple for states."""

    user_function: Any
    """`tf.types.experimental.ConcreteFunction` of the user's function, for one row or for a batch."""

    audit: Audit
    """The state that the function uses."""

    gradient_variant: Traced | None = None
    """The same function with the right gradients, if this one lacks them."""

    xla_variant: Traced | None = None
    """The same function compiled by XLA, if `jit_compile` asks for it."""

    reduction: BoundReduction | None = None
    """The reduction whose states the function returns; `None` if it returns rows."""

    counts_rows: bool = False
    """Whether the function takes a batch and must return as many rows as it gets."""

    def for_gradients(self, wanted: bool) -> Traced:
        """Return the variant with the right gradients if they are wanted."""
        return (self.gradient_variant or self) if wanted else self

    @cached_property
    def captures(self) -> tuple[Any, ...]:
        """Its captured inputs, in the order of `audit.treatments`."""
        return tuple(self.concrete.captured_inputs)

    @property
    def seeds(self) -> list[Any]:
        """The captures from which calls draw numbers. They differ between devices."""
        treated = zip(self.captures, self.audit.treatments)
        return [capture for capture, treatment in treated if treatment is Treatment.SEED]

    @property
    def input_specs(self) -> list[Any]:
        """`tf.TypeSpec` of each input leaf."""
        leaves, _ = self.concrete.structured_input_signature
        return list(leaves)

    @property
    def nest_of_specs(self) -> Any:
        """The nest of `tf.TypeSpec`s of its results."""
        return tf.nest.pack_sequence_as(self.structure, self.specs)

    def no_rows(self) -> list[Any]:
        """Return result leaves without rows."""
        return [empty_rows(spec) for spec in self.specs]


def trace(
    fn: Callable[..., Any],
    specs: Any,
    options: Options,
    stream: Stream | None = None,
    reduction: Reduction | None = None,
) -> Traced:
    """Trace `fn` for data of these specs.

    Args:
        fn: the user's function, of one row or of a batch.
        specs: nest of `tf.TypeSpec`s of the data, of shapes `[None, ...]`.
        options: `devices`, `batched`, `vectorize`, `seed`, `fn_output_signature`, `jit_compile` and `in_place` are used.
        stream: the number stream of seeded random ops; `None` leaves their seeds as they are.
        reduction: the reduction of the results, if there is one.

    Raises:
        FunctionError: `fn` cannot be traced, or its results are not rows or cannot be reduced. It is an instance of the
            original error's class.
        OptionError: `in_place` has a variable that `fn` does not use.
    """
    leaf_specs = list(tf.nest.flatten(specs))
    if options.seed is not None:
        leaf_specs.append(tf.TensorSpec([None, 2], tf.int32))
    traced_fn, structure, loops, compiled = _trace_loops(fn, specs, leaf_specs, options, stream)
    for variable in options.in_place:
        if not any(handle is variable.handle for handle in traced_fn.captured_inputs):
            raise OptionError(f"in_place has {variable.name!r} of shape {variable.shape}, which fn does not use")
    of_results = None
    if reduction is None:
        check_validity(structure, loops[0].specs)
    else:
        try:
            of_results = reduction.of(structure, loops[0].specs)
            loops, compiled = (_reduced(of_results, each, leaf_specs) for each in (loops, compiled))
        except FunctionError:
            raise
        except Exception as error:
            raise function_error(
                f"the results of fn cannot be reduced: {type(error).__name__}: {error}", error
            ) from error
        structure = (None,) * len(loops[0].specs)
    prepared = partial(
        _traced, specs=leaf_specs, in_place=options.in_place, structure=structure, user_function=traced_fn,
        reduction=of_results, counts_rows=options.batched,
    )  # fmt: skip
    variants = [prepared(loop) for loop in loops]
    if compiled:
        variants = [replace(each, xla_variant=prepared(loop)) for each, loop in zip(variants, compiled)]
    first, *others = variants
    return replace(first, gradient_variant=others[0]) if others else first


def _trace_loops(
    fn: Callable[..., Any],
    specs: Any,
    leaf_specs: list[Any],
    options: Options,
    stream: Stream | None,
) -> tuple[Any, Any, list[ShardFunction], list[ShardFunction]]:
    """Trace `fn`, and its loops over rows.

    Returns:
        The `ConcreteFunction` of `fn`, the structure of its results, the loops, and the loops compiled by XLA.
    """
    flat_fn, structures = _flatten(fn, specs, options, stream)
    drawn_from = random_states(fn)
    drawn = drawn_from()
    try:
        with tf.device(None):  # the trace serves every device
            if options.batched:
                traced_fn = flat_fn.get_concrete_function(*leaf_specs)
                loops = [ShardFunction(traced_fn, False, "fn takes a batch")]
            else:
                check_ranks(fn, specs)
                traced_fn = flat_fn.get_concrete_function(*map(row_spec, leaf_specs))
                loops = loops_over_rows(traced_fn, leaf_specs, options, structures[-1])
            compiled = [_compile_with_xla(loop, leaf_specs) for loop in loops if options.jit_compile]
    except FunctionError as error:
        while isinstance(error.__context__, FunctionError):  # autograph adds a traceback to the message
            error = error.__context__
        raise error from error.__cause__
    except Exception as error:
        raise tracing_error(fn, specs, options, error) from error
    if drawn_from() != drawn:
        warn_user(
            "fn draws random numbers of NumPy or Python. It does so once, when it is traced: all rows get the same numbers. "
            "Use the option seed= with tf.random.stateless_normal and the like",
        )
    return traced_fn, structures[-1], loops, compiled


def _reduced(reduction: BoundReduction, loops: list[ShardFunction], specs: list[Any]) -> list[ShardFunction]:
    """Return the loops with their results reduced. If rows are large, the fast loop runs over blocks of rows."""
    if not loops:
        return []
    in_blocks = reduction.over_blocks(loops[0].concrete, specs)
    if in_blocks is None:
        return [replace(loop, concrete=reduction.over(loop.concrete, specs)) for loop in loops]
    last = loops[-1]  # for gradients, because a loop over blocks would keep all intermediate results
    return [replace(loops[0], concrete=in_blocks), replace(last, concrete=reduction.over(last.concrete, specs))]


def _traced(loop: ShardFunction, specs: list[Any], in_place: Sequence[Any], **facts: Any) -> Traced:
    """Return the loop, prepared for calls on many devices. `facts` are further fields of `Traced`."""
    unpin_gradients(loop.concrete.graph)
    found = audit(loop.concrete, in_place)
    by_gradients = found.loops and not tf.config.get_soft_device_placement()  # which otherwise ignores their groups
    if found.colocated or by_gradients:  # the names of colocation groups must stay unique
        called = call_with_leaves(loop.concrete, specs, experimental_attributes={"_noinline": True})
        loop = replace(loop, concrete=called)
        found = audit(loop.concrete, in_place)
    return Traced(**vars(loop), audit=found, **facts)


def _flatten(fn: Callable[..., Any], specs: Any, options: Options, stream: Stream | None) -> tuple[Any, list[Any]]:
    """Return `fn` as a `tf.function` from leaves to a list of leaves, and a list to which each trace adds the nest of results.

    An inner `tf.function` applies autograph, and lifts variables that `fn` creates in its first
    call.
    """
    unpack = type(specs) is tuple  # as in tf.data, named tuples and dicts stay one argument
    count = len(tf.nest.flatten(specs))
    structures: list[Any] = []
    lists = paths_of_lists(options.fn_output_signature, "the result")
    if isinstance(fn, tf.types.experimental.PolymorphicFunction | tf.types.experimental.ConcreteFunction):
        inner = fn
    elif hasattr(fn, "__code__") and not _takes_others(fn, (len(specs) if unpack else 1) + (options.seed is not None)):
        inner = tf.function(fn)
    else:  # Keras layers, partials, objects: tf.function would use the signature of the wrapped function
        inner = tf.function(lambda *args, **kwargs: fn(*args, **kwargs))

    @tf.function(autograph=False)
    def flat_fn(*leaves: Any) -> list[Any]:
        with drawing_from(stream), pinning_loops():
            arguments = as_objects(tf.nest.pack_sequence_as(specs, leaves[:count]))
            seeds = {} if options.seed is None else {"seed": leaves[count]}
            token = in_fn.set(True)
            try:
                results = inner(*arguments, **seeds) if unpack else inner(arguments, **seeds)
            finally:
                in_fn.reset(token)
        results = map_nest(
            lambda value, path: as_result(value, path, options.batched), results, "the result", lists=lists.__contains__
        )
        structures.append(tf.nest.map_structure(lambda _: None, results))
        flat = tf.nest.flatten(results)
        if not flat:
            raise failure(f"fn returned {results!r}, a nest without leaves; expected at least one tensor")
        return list(flat)

    return flat_fn, structures


def _takes_others(fn: Callable[..., Any], count: int) -> bool:
    """Return whether the signature of the function that `fn` wraps does not fit `count` arguments."""
    return hasattr(fn, "__wrapped__") and len(inspect.signature(fn).parameters) != count


def _compile_with_xla(loop: ShardFunction, specs: list[Any]) -> ShardFunction:
    """Return the loop compiled by XLA, once for each number of rows of a shard."""
    results = loop.concrete.structured_outputs
    if not all(isinstance(leaf, tf.Tensor) for leaf in results) or any(
        x.dtype == tf.string for x in (*specs, *results)
    ):
        raise failure(
            "jit_compile=True with text, or ragged or sparse results: XLA has only dense numbers; set it to False"
        )
    return replace(loop, concrete=call_with_leaves(loop.concrete, specs, jit_compile=True))
