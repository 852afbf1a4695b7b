"""One graph that balances itself: a loop for each device, which takes its next rows when it is done with some.

    rows ── a ticket: the next rows ──> a device's function ──> results, numbered as the ticket ── concat ──> rows in order
               ^                                                    |
               └───────────── when the results are there ──────────┘

What loops share is made by the graph for each call, and goes with it, so that calls do not meet: a counter that gives tickets,
the speeds that devices have shown, and arrays of results. The numbers are those of `data/pieces.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from devicemap._tensorflow.functions import UNCHAINED, UNCHAINED_UNIT, has_own_variables, must_run, own_variable
from devicemap.compile.layout import Layout, copied, ops_of
from devicemap.compile.trace import Traced
from devicemap.data.pieces import first_piece, next_piece, seconds_too_late
from devicemap.data.rows import HOST, carried, count_rows, restored, take_rows

_NUMBERS = 2**20
"""More pieces than a call has: a ticket is the first row times this, and the number of the piece."""

_STEP = 256
"""What `RngReadAndSkip`, the one op that reads and adds in one step, adds for 1."""

COLUMNS = "place", "start", "stop", "began", "ended"
"""What a row of a call's log says of a piece; the times are in seconds since the epoch."""


class _Turn(NamedTuple):
    """What a device's loop goes round with."""

    start: Any
    """int64: its next rows; the number of rows where it has none."""
    stop: Any
    number: Any
    """int64: which piece that is, in the order of rows."""
    seconds_per_row: Any
    """float64: as measured, 0 before."""
    began: Any
    """float64: when it took its next rows."""
    flows: Any
    """One per array of results: what reads these has to wait for."""


def can_balance(specs: Sequence[Any]) -> bool:
    """Whether results of these specs come back from loops: dense ones, where TensorFlow gives a run variables of its own."""
    return has_own_variables() and all(
        isinstance(spec, tf.TensorSpec) and spec.shape.rank is not None for spec in specs
    )


def balanced_graph(layout: Layout, traces: Sequence[Traced]) -> Any:
    """A whole call as one `ConcreteFunction`, of the traces that run on the places: `(speeds, *leaves) -> (result leaves, rows
    that fn returned, log)`.

    `speeds`: float64 `[places]`, the rows per second that each is expected to compute, 0 where nobody knows. The rows returned
    are int64 `[pieces]` per leaf. The log is float64 `[pieces, 5]`, its columns are `COLUMNS`.
    """
    places, specs = len(traces), layout.traced.specs

    @tf.function(autograph=False, experimental_attributes=UNCHAINED_UNIT if layout.acts else UNCHAINED)
    def call(speeds: Any, *leaves: Any) -> tuple[list[Any], list[Any], Any]:
        values = layout.mirrors.values()
        with tf.device(HOST):
            desk = _Desk(count_rows(leaves[0]), speeds)
            arrays = [_Array(spec.dtype, spec.shape[1:]) for spec in specs]
            log = _Array(tf.float64, tf.TensorShape([]))
        flows = [_loop(layout, i, traces[i], leaves, values, desk, [*arrays, log]) for i in range(places)]
        with tf.device(HOST):
            *gathered, (lines, _) = [
                array.rows(tf.add_n(list(ends))) for array, ends in zip([*arrays, log], zip(*flows))
            ]
            joined = [rows for rows, _ in gathered]
            if layout.acts or layout.reads:
                joined = must_run([], joined)
            joined, lengths = layout.finished(joined, [lengths for _, lengths in gathered])
            return joined, lengths, tf.reshape(lines, [-1, len(COLUMNS)])

    with tf.device(None):
        return call.get_concrete_function(tf.TensorSpec([places], tf.float64), *layout.traced.input_specs)


def measured_speeds(log: Any, known: Any) -> Any:
    """Rows per second that the places had in a call with this log, float64 `[places]`; those `known` of places without rows."""
    places, count = tf.cast(log[:, 0], tf.int32), known.shape[0]
    rows, seconds = (tf.math.unsorted_segment_sum(log[:, i + 1] - log[:, i], places, count) for i in (1, 3))
    return tf.where(rows > 0, rows / tf.maximum(seconds, 1e-9), known)


def _loop(
    layout: Layout,
    i: int,
    traced: Traced,
    leaves: Sequence[Any],
    values: dict[int, Any],
    desk: _Desk,
    arrays: Sequence[_Array],
) -> list[Any]:
    """A device's part of a call: the flow of each array when it is done."""
    handles, _, before = layout.handles(i, values)

    def computed(turn: _Turn) -> _Turn:
        with tf.device(HOST):
            rows = [take_rows(leaf, turn.start, turn.stop) for leaf in leaves]
        results = layout.run_on(i, traced, rows, {}, (handles, {}, []))
        with tf.device(HOST):
            results = copied(results)
            if layout.acts:
                results = must_run([], results)
            with tf.control_dependencies(ops_of(results)):
                now = tf.timestamp()
            seconds = (now - turn.began) / tf.cast(turn.stop - turn.start, tf.float64)
            seconds = tf.where(turn.seconds_per_row > 0, (turn.seconds_per_row + seconds) / 2, seconds)
            numbers = (tf.constant(i), turn.start, turn.stop, turn.began, now)
            line = tf.stack([tf.cast(number, tf.float64) for number in numbers])
            flows = [
                array.write(turn.number, leaf, flow) for array, leaf, flow in zip(arrays, [*results, line], turn.flows)
            ]
            return desk.next_turn(i, 1 / seconds, now, flows)

    with tf.device(HOST), tf.control_dependencies(before):
        speed = tf.identity(desk.known[i])
        first = desk.next_turn(i, speed, tf.identity(desk.began), [array.flow for array in arrays])
        last = tf.while_loop(
            lambda turn: turn.start < desk.rows, lambda turn: (computed(turn),), (first,), parallel_iterations=1
        )
    return list(last[0].flows)


class _Desk:
    """What gives out rows: made in a graph, for each of its runs anew."""

    def __init__(self, rows: Any, speeds: Any):
        """`speeds`: float64 `[places]`, 0 where nobody knows."""
        self.rows, self.known, self.began = rows, speeds, tf.timestamp()
        self._tickets, self._leavers = (own_variable(tf.zeros([3], tf.int64)) for _ in range(2))
        self._speeds, self._places = own_variable(speeds), speeds.shape[0]
        self._ask = tf.function(self._next_rows, autograph=False, experimental_attributes=UNCHAINED_UNIT)

    def next_turn(self, place: int, speed: Any, now: Any, flows: Sequence[Any]) -> _Turn:
        """The next rows of a place that computes at this speed (0: nobody knows); none where all are taken, or others will
        have finished before it could. Of all places, one at least stays until all are taken."""
        start, stop, number = self._ask(tf.constant(place), speed, now - self.began)
        return _Turn(start, stop, number, tf.math.divide_no_nan(tf.ones([], tf.float64), speed), now, list(flows))

    def _next_rows(self, place: Any, speed: Any, elapsed: Any) -> tuple[Any, Any, Any]:
        with tf.device(HOST):
            told = tf.raw_ops.ResourceScatterUpdate(resource=self._speeds, indices=place[None], updates=speed[None])
            with tf.control_dependencies([told]):
                speeds = tf.raw_ops.ReadVariableOp(resource=self._speeds, dtype=tf.float64)
                taken = tf.raw_ops.ReadVariableOp(resource=self._tickets, dtype=tf.int64)
            left = tf.maximum(self.rows - taken[0] // (_STEP * _NUMBERS), 0)
            rows_left = tf.cast(left, tf.float64)
            known = tf.cast(tf.math.count_nonzero(speeds), tf.float64)
            usual = tf.math.divide_no_nan(tf.reduce_sum(speeds), known)
            others = tf.where(speeds > 0, speeds, usual) * tf.one_hot(place, self._places, 0.0, 1.0, dtype=tf.float64)
            of_others = tf.reduce_sum(others)
            size = next_piece(rows_left, speed, speed + of_others, elapsed, tf.minimum, tf.maximum)
            size = tf.where(speed > 0, tf.cast(size, tf.int64), first_piece(self.rows, self._places))
            size = tf.minimum(tf.maximum(size, 1), tf.maximum(left, 1))
            late = seconds_too_late(rows_left, speed, of_others, tf.reduce_max(others), tf.maximum)
            leaves = (speed > 0) & (left > 0) & (late > 0)
            leaves &= _add(self._leavers, tf.cast(leaves, tf.int64)) < self._places - 1
            ticket = _add(self._tickets, tf.where(leaves, tf.zeros([], tf.int64), size * _NUMBERS + 1))
            start = tf.where(leaves, self.rows, tf.minimum(ticket // _NUMBERS, self.rows))
            return start, tf.minimum(start + size, self.rows), ticket % _NUMBERS


def _add(counter: Any, number: Any) -> Any:
    """Add to a counter in one step: what it was before."""
    before = tf.raw_ops.RngReadAndSkip(resource=counter, alg=1, delta=tf.cast(number, tf.uint64))
    return before[0] // _STEP


class _Array:
    """Rows in pieces of any size, which several loops write, and which are joined in one copy: TensorFlow's arrays of old,
    which are one for all of a graph, while a `tf.TensorArray` is one for each loop."""

    def __init__(self, dtype: Any, inner: Any):
        self._dtype, self._held, self._inner = dtype, carried(tf.constant([], dtype)).dtype, inner
        self._handle, self.flow = tf.raw_ops.TensorArrayV3(size=0, dtype=self._held, dynamic_size=True)

    def write(self, number: Any, rows: Any, flow: Any) -> Any:
        """Put rows in, as the piece of that number."""
        return tf.raw_ops.TensorArrayWriteV3(
            handle=self._handle, index=tf.cast(number, tf.int32), value=carried(rows), flow_in=flow
        )

    def rows(self, flow: Any) -> tuple[Any, Any]:
        """All rows, and how many each piece has."""
        joined = tf.raw_ops.TensorArrayConcatV3(
            handle=self._handle, flow_in=flow, dtype=self._held, element_shape_except0=self._inner
        )
        joined.value.set_shape([None, *self._inner])  # which TensorFlow does not tell
        return restored(joined.value, self._dtype), joined.lengths
