"""One traced function on several places: a `tf.device` block for each, in one graph, or one function each."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import tensorflow as tf

from devicemap._tensorflow.calls import begin_backward_on
from devicemap._tensorflow.functions import UNCHAINED, UNCHAINED_UNIT, capturing, must_run, tells_callers
from devicemap._tensorflow.gradients import call_holding, differentiate_in_place
from devicemap.base.devices import kind_of
from devicemap.compile.gather import gather, with_row_counts_checked
from devicemap.compile.mirrors import Mirrors
from devicemap.compile.reduction import BoundReduction
from devicemap.compile.trace import Traced
from devicemap.data.rows import HOST, cut_rows

_Held: TypeAlias = tuple[dict[int, Any], dict[int, Any], list[Any]]


class Form(NamedTuple):
    """What the graph of a whole call is besides the call."""

    any_rows: bool
    """Whether a shard may have no rows; then its device is not called."""

    clocked: bool
    """Whether it tells when the results of each shard were there."""

    apart: bool
    """Whether it stays a function of its own where another one calls it."""

    checked: bool
    """Whether `fn` has to return a row for each; the check is a part of the graph, as what another function that calls it
    returns would have to wait for both."""


@dataclass(frozen=True)
class Layout:
    """A traced function laid out over places, each with its copies of what the function captures.

    A place is a device that takes one shard of a call; a device may be named more than once.
    """

    traced: Traced
    places: tuple[str, ...]
    mirrors: Mirrors
    output_device: str
    differentiable: bool
    """Whether gradients go through its graphs; `mirrors` are made for the same."""
    scope: str
    """What the name scopes of the places begin with."""

    def graph(self, traces: Sequence[Traced], form: Form) -> Any:
        """A whole call as one `ConcreteFunction`, of the traces that run on the first so many places.

        Returns:
            `(sizes, *leaves) -> (result leaves, rows that fn returned, arrivals)`; `Compiled.graph` says what they are.
        """
        shards = len(traces)
        unit = form.apart or self.acts or (self.reads and not tells_callers())

        @tf.function(autograph=False, experimental_attributes=UNCHAINED_UNIT if unit else UNCHAINED)
        def call(sizes: Any, *leaves: Any) -> tuple[list[Any], list[Any], list[Any]]:
            values = self.mirrors.values()
            with tf.device(HOST):
                cut = zip(*(cut_rows(leaf, sizes, shards) for leaf in leaves))
                of_shard = tf.unstack(sizes, shards)
            results: list[list[Any]] = []
            for i, shard in enumerate(cut):
                after = ops_of(results[-1]) if self.traced.audit.ordered and results else []
                # Not where a condition decides: what a loop there reads has no gradient if it was made there.
                handles = self.handles(i, values) if self.differentiable else None
                on_place = partial(self.run_on, i, traces[i], shard, values, handles)
                if form.any_rows:
                    with tf.device(self.places[i]), tf.control_dependencies(after):
                        results.append(tf.cond(of_shard[i] > 0, on_place, self.traced.no_rows))
                else:
                    results.append(on_place(after))
            acting = [op for part in results for op in ops_of(part)] if self.acts else []
            ends = (
                [ended_on(self.places[i], part) for i, part in enumerate(results)]
                if form.clocked and self._hides_ends
                else []
            )
            with tf.device(self.output_device):
                if form.any_rows:
                    results = [_like_first(part, results[0]) for part in results]
                # The gradient of joining asks for the shape of each part, from here.
                if self.differentiable or form.clocked:
                    results = [copied(part) for part in results]
                ends = ends or [ops_of(part) for part in results]
                if shards == 1:
                    gathered = [(leaf, None) for leaf in copied(results[0])]
                else:
                    gathered = [gather(parts) for parts in zip(*results)]
                joined = [rows for rows, _ in gathered]
                lengths = [lengths for _, lengths in gathered if lengths is not None]
                joined, lengths = self.finished(joined, lengths)
                if form.checked:  # of a shard without rows there is no state
                    given = sizes if self.traced.reduction is None else tf.boolean_mask(sizes, sizes > 0)
                    joined = with_row_counts_checked(joined, lengths, given)
                if self.acts or self.reads:  # all that was read went into the results
                    joined = must_run(acting, joined)
            with tf.device(HOST if self._hides_ends else self.output_device):
                arrivals = [arrivals_of(ends)] if form.clocked else []
            if self.differentiable:
                differentiate_in_place(tf.compat.v1.get_default_graph().get_operations())
            return joined, lengths, arrivals

        with tf.device(None):
            graph = call.get_concrete_function(tf.TensorSpec([shards], tf.int32), *self.traced.input_specs)
        begin_backward_on(HOST, graph)
        return graph

    def function(self, place: int, traced: Traced) -> Any:
        """One place's part of a call by itself, as a `ConcreteFunction`: `(*leaves) -> result leaves`."""

        @tf.function(autograph=False, experimental_attributes=UNCHAINED_UNIT if self.acts else UNCHAINED)
        def call(*shard: Any) -> list[Any]:
            with tf.device(self.places[place]), tf.name_scope(f"{self.scope}_{place}"):
                results = self._call(traced, shard, self.mirrors.captures(place), {})
                ended = ended_on(self.places[place], results) if self._hides_ends else []
            with tf.device(self.output_device):  # copied out as a part of the call
                copies = copied(results)
                must = [*ended, *(ops_of(results) if self.acts else ())]
                return must_run(must, copies) if must else copies

        with tf.device(None):
            return call.get_concrete_function(*self.traced.input_specs)

    def finished(self, joined: list[Any], lengths: list[Any]) -> tuple[list[Any], list[Any]]:
        """What a call gives, and how many rows each part of it has, by leaf: rows as they are, or the result of states, whose
        last leaf counts their rows."""
        reduction = self.traced.reduction
        if isinstance(reduction, BoundReduction):
            return reduction.finished(joined), joined[-1:]
        return joined, lengths

    @property
    def _hides_ends(self) -> bool:
        """Whether results are there, for all that the host can see, before the devices have computed them."""
        return kind_of(self.output_device) != "CPU"

    @property
    def acts(self) -> bool:
        """Whether `fn` does something besides returning."""
        return bool(self.traced.audit.effects) or self.traced.audit.writes

    @property
    def reads(self) -> bool:
        """Whether `fn` reads variables where they are: what the user's function does next to them has to wait for that."""
        return any(handle.dtype == tf.resource for handle in self.traced.captures)

    def handles(self, place: int, values: dict[int, Any]) -> _Held:
        """What a place captures instead of the originals, of these values: as `Mirrors.assign` tells."""
        with tf.device(self.places[place]), tf.name_scope(f"{self.scope}_{place}"):
            return self.mirrors.assign(place, values)

    def run_on(
        self,
        place: int,
        traced: Traced,
        shard: Sequence[Any],
        values: dict[int, Any],
        held: _Held | None,
        after: Sequence[Any] = (),
    ) -> list[Any]:
        """What runs on a place, `after` other ops, with captured variables of these values."""
        handles, of_values, before = held or self.handles(place, values)
        with tf.device(self.places[place]), tf.name_scope(f"{self.scope}_{place}"):
            results = self._call(traced, shard, handles, of_values, [*after, *before])
            if self.differentiable:
                if traced.vectorized and (traced.audit.cuts_gradients or len(shard) > 1):
                    results = _joined_to(results, shard)
                differentiate_in_place(ops_of(results))
            return results

    def _call(
        self,
        traced: Traced,
        shard: Sequence[Any],
        handles: dict[int, Any],
        of_values: dict[int, Any],
        after: Sequence[Any] = (),
    ) -> list[Any]:
        """Call it on the device of the moment, with other handles for some of its captures, of these values."""
        # Ops that are colocated with their input (tf.debugging's, for instance) would follow the shard to the device that cut
        # it, and constants that wait for it would do so across devices.
        shard = copied(list(shard))
        # Each trace captures the same, and numbers it as it met it.
        numbers = {id(tensor): i for i, tensor in enumerate(self.traced.captures)}
        captures = [numbers.get(id(tensor)) for tensor in traced.captures]
        captured = {position: handles[i] for position, i in enumerate(captures) if i is not None and i in handles}
        held = {position: of_values[i] for position, i in enumerate(captures) if i is not None and i in of_values}
        # Here, not around the whole: TensorFlow takes an edge to the call for redundant if its inputs have it.
        with tf.control_dependencies(after), contextlib.ExitStack() as scopes:
            first = ops_of(shard)[0]
            inputs = (captured.get(i, own) for i, own in enumerate(traced.captures))
            if self.differentiable and all(tensor.device == first.device for tensor in inputs):
                # Lists that a loop leaves for its gradient stay here, too. TensorFlow hands out tensors where they are, but
                # lists on the first device, unless what makes them belongs to others; and moves all that do to one device.
                scopes.enter_context(first.graph.colocate_with(first))
            if held:
                return call_holding(held, captured, traced.concrete, shard)
            with capturing(traced.concrete, captured):
                return list(traced.concrete(*shard))


def ended_on(device: str, results: Sequence[Any]) -> list[Any]:
    """An op on the host that runs when these results of a device are there, and not before, as it takes an element of each."""
    with tf.device(device):
        firsts = [tf.reshape(tensor, [-1])[:1] for tensor in tf.nest.flatten(list(results), expand_composites=True)]
    with tf.device(HOST):  # of a stateless op that only others wait for, TensorFlow drops the input
        return [tf.raw_ops.Assert(condition=tf.constant(True), data=firsts)]


def sizes_in_graph(rows: Any, shards: int) -> Any:
    """`data.shards.shard_sizes` for a number of rows that only the running graph knows; the last ones may be 0."""
    rows = tf.cast(rows, tf.int32)
    return rows // shards + tf.cast(tf.range(shards) < rows % shards, tf.int32)


def copied(leaves: list[Any]) -> list[Any]:
    """The leaves, on the device of the moment."""
    copies: list[Any] = tf.nest.map_structure(tf.identity, leaves, expand_composites=True)
    return copies


def _joined_to(results: Sequence[Any], leaves: Sequence[Any]) -> list[Any]:
    """The results, with gradients of zero where they have none to the leaves: as they have if rows are mapped one by one.

    Each takes no element of each leaf.
    """
    ends = [tf.reshape(leaf, [-1])[:0] for leaf in leaves if _has_gradients(leaf)]
    joined = list(results)
    for i, result in enumerate(results):
        if ends and _has_gradients(result):
            empty = [tf.cast(end, result.dtype) for end in ends if result.dtype.is_complex or not end.dtype.is_complex]
            joined[i] = tf.reshape(tf.concat([tf.reshape(result, [-1]), *empty], 0), tf.shape(result))
            joined[i].set_shape(result.shape)
    return joined


def _has_gradients(leaf: Any) -> bool:
    return isinstance(leaf, tf.Tensor) and (leaf.dtype.is_floating or leaf.dtype.is_complex)


def ops_of(results: Sequence[Any]) -> list[Any]:
    """The ops that give these results, each a tensor, ragged or sparse: one for each tensor that they are made of."""
    return [t.op for t in tf.nest.flatten(list(results), expand_composites=True)]


def arrivals_of(ends: Sequence[Sequence[Any]]) -> Any:
    """When each of these ops had run, on the device of the moment: float64 `[len(ends)]`, in seconds since the epoch."""
    times = []
    for ops in ends:
        with tf.control_dependencies(ops):
            times.append(tf.timestamp())
    return tf.stack(times)


def _like_first(part: list[Any], first: list[Any]) -> list[Any]:
    """Give results without rows the inner shape of the first ones, where it was not known before running."""
    shaped = []
    for leaf, model in zip(part, first):
        if isinstance(leaf, tf.Tensor) and leaf is not model and not leaf.shape[1:].is_fully_defined():
            shape = tf.shape(leaf)
            empty = tf.concat([[0], tf.shape(model)[1:]], 0)
            leaf = tf.reshape(leaf, tf.where(shape[0] > 0, shape, empty))
        shaped.append(leaf)
    return shaped
