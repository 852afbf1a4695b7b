"""Calls inside the user's own `tf.function`: their graph becomes a part of it.

Where no tape follows it, one graph holds both ways, and takes the one that was quicker in the calls before:

    rows ── long, by the calls before? ──┬─ no ──> a shard for each device ──┬──> results
                  ^                      └─ yes ─> balanced ─────────────────┤
                  └────────────────────── seconds per row <──────────────────┘

The way that is not taken costs nothing: it is a function that is not called. Gradients, should somebody ask for some later,
come from the shards, which run once more for them, with variables as they were when the call came.
"""

from __future__ import annotations

import math
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from devicemap._tensorflow.functions import (
    UNCHAINED,
    UNCHAINED_UNIT,
    in_function_of_user,
    must_run,
    own_variable,
)
from devicemap._tensorflow.gradients import call_holding, call_with_gradient, holds_gradients, tape_is_recording
from devicemap.compile.compiled import ROWS_PER_PLACE, Compiled, has_clock, is_rewritten_with_its_caller
from devicemap.compile.gather import with_row_counts_checked, with_static_rows
from devicemap.compile.layout import copied, ops_of, sizes_in_graph
from devicemap.compile.program import Program
from devicemap.data.pieces import COMPILING_SECONDS, balance_pays
from devicemap.data.rows import HOST, Rows, count_rows
from devicemap.run.clock import Clock

_FEW = 4
"""A call in shards of a function that captures fewer variables is not inlined: that took 0.7 to 0.95 times as long with none of
them, and 1.1 to 1.3 times with 14, on 2 to 8 logical CPUs."""


def call_inside(program: Program, rows: Rows, clock: Clock | None = None, filled: bool = False) -> Any:
    """A call in the function that is being traced.

    With a `clock`, shards are as large as devices were fast in earlier calls. `filled`: there are as many rows as places,
    where nobody knows how many.
    """
    compiled = program.compiled_for(rows)
    with tf.device(HOST):  # else all that comes and goes would go by the first device
        count = count_rows(rows.leaves[0]) if rows.count is None else rows.count
        leaves = program.seeded(rows.leaves, 0, count)
        call = _Shards(program, compiled, rows.count or None, filled and rows.count != 0)  # without rows, for gradients
        results = _balanced(call, leaves) if clock is None and _may_balance(call) else call(leaves, 2, clock)
        if compiled.traced.reduction is None:
            results = [with_static_rows(leaf, rows.count) for leaf in results]
        return compiled.pack(results)


class _Shards:
    """A shard for each device."""

    def __init__(self, program: Program, compiled: Compiled, rows: int | None, filled: bool):
        """`rows`: `None` where nobody knows; as for `call_inside`."""
        self.program, self.compiled, self.rows = program, compiled, rows
        self.filled = filled
        self._places = len(compiled.places) if rows is None else len(compiled.shards(rows)[0])

    def __call__(
        self, leaves: Sequence[Any], gradients: int, clock: Clock | None = None, values: Mapping[int, Any] | None = None
    ) -> list[Any]:
        """The results in the function that is being traced; `gradients` tells which of those may be asked for.

        `values`: what variables are taken to be, by the id of their handle; `None`: what they are.
        """
        places, rows = self._places, self.rows
        one_row = rows is not None and rows < 2 * places
        if clock is not None and (places < len(clock.devices) or not has_clock()):
            clock = None
        timed = clock is not None
        empty, checked = rows is None and not self.filled, self.program.counts_rows
        graph = self.compiled.graph(places, gradients, empty, True, one_row, timed, checked)
        sizes = sizes_in_graph(count_rows(leaves[0]), places) if rows is None else self.compiled.shards(rows)[1]
        if clock is not None:
            sizes, began = clock.sizes(sizes)
        results, _, arrivals = _called_with(values, graph, [sizes, *leaves]) if values else graph(sizes, *leaves)
        if clock is not None:
            clock.note(sizes, began, arrivals)
        return list(results)


def _may_balance(call: _Shards) -> bool:
    """Whether a call may do its rows a second time for gradients, and is where nobody needs it to be one straight graph."""
    compiled = call.compiled
    return (
        compiled.may_balance(call.rows)
        and compiled.traced.audit.repeatable
        and not _captures_numbers(compiled)
        and not call.filled
        and in_function_of_user()
        and not is_rewritten_with_its_caller()
        and not tape_is_recording()
        and holds_gradients()
    )


def _captures_numbers(compiled: Compiled) -> bool:
    """Whether gradients may be asked for tensors that `fn` captures: of those that are no variables, small ones are lost."""
    concrete, treatments = compiled.traced.concrete, compiled.traced.audit.treatments
    plain = (tensor for tensor, treatment in zip(concrete.captured_inputs, treatments) if treatment is None)
    return compiled.belongs_to_a_graph or any(tensor.dtype.is_floating or tensor.dtype.is_complex for tensor in plain)


def _balanced(call: _Shards, leaves: Sequence[Any]) -> list[Any]:
    """The results, in the way that was quicker."""
    compiled, variables = call.compiled, tuple(call.compiled.traced.concrete.graph.variables)
    name = f"devicemap_{uuid.uuid4().hex}"

    def of_shards(*leaves: Any) -> list[Any]:
        return call(leaves, 0)

    def of_pieces(*leaves: Any) -> list[Any]:
        nothing_known = tf.zeros([len(compiled.places)], tf.float64)
        results, returned, log = compiled.balanced_graph()(nothing_known, *leaves)
        if call.program.counts_rows:
            results = with_row_counts_checked(results, returned, log[:, 2] - log[:, 1])
        return [tf.stop_gradient(leaf) for leaf in results]  # a SavedModel takes other gradients than `gradient`

    # A function that is called, and not inlined, costs little where it is not; but much for each variable where it is.
    few = len(compiled.traced.concrete.captured_inputs) < _FEW
    ways = [_timed(of_shards, UNCHAINED_UNIT if few else UNCHAINED), _timed(of_pieces, UNCHAINED_UNIT)]

    @tf.function(autograph=False, experimental_attributes=UNCHAINED)
    def quicker(*leaves: Any) -> tuple[list[Any], list[Any]]:
        values = []
        for variable in variables:
            with tf.device(variable.device):
                values.append(variable.read_value())
        with tf.device(HOST):
            history = _History(name, len(ways))
            known = history.read()
            rows = tf.cast(count_rows(leaves[0]), tf.float64)
            in_shards, balanced = tf.unstack(known.seconds_per_row)
            pays = balance_pays(rows, in_shards, balanced, tf.maximum)
            pays &= tf.reduce_sum(known.seconds) > COMPILING_SECONDS
            results, seconds = tf.cond(pays, lambda: ways[1](*leaves), lambda: ways[0](*leaves))
            enough = rows >= ROWS_PER_PLACE * len(compiled.places)
            noted = history.write(known.after(tf.cast(pays, tf.int32), rows, seconds, enough))
            return must_run([noted, *ops_of(values)], results), values

    with tf.device(None):
        graph = quicker.get_concrete_function(*compiled.traced.input_specs)

    def gradient(
        leaves: Sequence[Any], values: Mapping[int, Any], upstream: Sequence[Any], sources: Sequence[Any]
    ) -> list[Any]:
        with tf.device(HOST):
            packed = tf.nest.pack_sequence_as(compiled.traced.input_specs, leaves, expand_composites=True)
            # A tape does not ask the op of a call for its gradient, as `call_holding` needs.
            return tf.gradients(call(packed, 2, values=values), sources, list(upstream))

    return call_with_gradient(graph, leaves, variables, gradient)


def _called_with(values: Mapping[int, Any], graph: Any, arguments: Sequence[Any]) -> list[Any]:
    """A call of a graph whose variables have these values, by the id of their handle: gradients go to the values."""
    held = {i: values[id(handle)] for i, handle in enumerate(graph.captured_inputs) if id(handle) in values}
    handles = {}
    for i, value in held.items():
        with tf.device(graph.captured_inputs[i].device):  # where the graph expects it
            handles[i] = own_variable(value)
    return call_holding(held, handles, graph, arguments)


def _timed(way: Callable[..., list[Any]], attributes: Any) -> Callable[..., tuple[list[Any], Any]]:
    """What it gives, and the seconds that it takes, as a function that is called only where it is to run."""

    @tf.function(autograph=False, experimental_attributes=attributes)
    def call(*leaves: Any) -> tuple[list[Any], Any]:
        with tf.device(HOST):
            began = tf.timestamp()
            with tf.control_dependencies([began]):
                given = copied(list(leaves))
            results = way(*given)
            with tf.control_dependencies(ops_of(results)):
                return results, tf.timestamp() - began

    return call


class _Known(NamedTuple):
    """What is known of each way, float64 `[ways]`; 0: nothing yet."""

    seconds: Any
    """In all calls so far."""

    seconds_per_row: Any
    """Of the last call, but for the first, which makes kernels."""

    def after(self, way: Any, rows: Any, seconds: Any, enough: Any) -> _Known:
        """After another call in one of the ways; `enough`: whether it had so many rows that their number made its length."""
        now = tf.one_hot(way, self.seconds.shape[0], dtype=tf.float64)
        per_row = tf.where((now > 0) & (self.seconds > 0) & enough, seconds / rows, self.seconds_per_row)
        return _Known(self.seconds + now * seconds, per_row)


class _History:
    """What is known stays from one run of a graph to the next, in a table that TensorFlow's runtime keeps under a name.

    A variable would be captured, and `tf.saved_model.save` refuses what is and does not belong to the model. A loaded model has
    a table of another name, which nobody has begun; there, variables of a run are no longer one for each run.
    """

    def __init__(self, name: str, ways: int):
        self._name, self._shape = name, (len(_Known._fields), ways)
        with tf.init_scope(), tf.device(HOST):
            self._write(tf.zeros(self._shape, tf.float64))

    def _table(self) -> Any:
        return tf.raw_ops.MutableHashTableOfTensorsV2(
            key_dtype=tf.int64, value_dtype=tf.float64, value_shape=[math.prod(self._shape)], shared_name=self._name
        )

    def _write(self, numbers: Any) -> Any:
        row = tf.reshape(numbers, [1, -1])
        return tf.raw_ops.LookupTableInsertV2(table_handle=self._table(), keys=tf.zeros([1], tf.int64), values=row)

    def read(self) -> _Known:
        """What is known; less than nothing where it is not kept."""
        unknown = tf.fill([math.prod(self._shape)], tf.constant(-math.inf, tf.float64))
        found = tf.raw_ops.LookupTableFindV2(
            table_handle=self._table(), keys=tf.zeros([1], tf.int64), default_value=unknown
        )
        return _Known(*tf.unstack(tf.reshape(found, self._shape)))

    def write(self, known: _Known) -> Any:
        """The op that does."""
        return self._write(tf.stack(known))
