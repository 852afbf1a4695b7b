"""Results of rows -> one result: reduced on the device that computes them, merged in the order of rows.

    results of some rows ── reduced ──> a state and its rows ── merged, any number of times ──> one state ── finished ──> result

A state is a list of tensors with a leading axis of states, the last of them how many rows are in each: so states of shards,
of pieces and of chunks are gathered as rows are, and nothing but this module knows that they are none.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from devicemap.base.structure import as_nodes, as_objects, check_same_structure, freeze, map_nest
from devicemap.compile.aggregates import AGGREGATES
from devicemap.data.join import join
from devicemap.data.rows import count_rows, empty_rows, take_rows
from devicemap.errors import OptionError, failure

_BLOCK_BYTES = 2**22
"""Results that are kept before they are reduced, where each row has some kilobytes: `benchmarks/test_reduce.py`."""

_ROW_BYTES = 2**12

_MOST_STATES = 64
"""That are merged at once in eager code."""


@dataclass(frozen=True)
class Reducer:
    """A reduction of your own: `finish(merge(step(step(initial, row), row), ...))`, in the order of rows.

    Args:
        initial: the state without rows, a nest of numbers, arrays or tensors, of the dtypes of later states (0.0 for floats).
            Each device begins with it, so merging it with another state must give that other state.
        step: `(state, result of a row) -> state`, of the same structure, shapes and dtypes. It runs on the device that has
            computed the row.
        merge: `(state, state of later rows) -> state`; associative, it need not be commutative.
        finish: `state -> result`.

    Examples:
        >>> from devicemap import parallel_reduce
        >>> larger = lambda a, b: tf.cond(b[0] > a[0], lambda: b, lambda: a)
        >>> largest = Reducer(initial=(-1.0, -1), step=larger, merge=larger, finish=lambda best: best[1])
        >>> int(parallel_reduce(lambda x, i: (tf.sin(x), i), (tf.range(8.0), tf.range(8)), largest))
        2
    """

    initial: Any
    step: Callable[[Any, Any], Any]
    merge: Callable[[Any, Any], Any]
    finish: Callable[[Any], Any] = lambda state: state


class Reduction:
    """What a `reducer` asks for, whatever `fn` returns."""

    counts_rows = True
    """Whether the last leaf of a state tells how many rows are in it."""

    def __init__(self, reducer: Any):
        """
        Args:
            reducer: "sum", "mean", "min" or "max", a nest of these, or a `Reducer`.

        Raises:
            OptionError: for anything else.
        """
        self._reducer = reducer if isinstance(reducer, Reducer) else as_nodes(reducer)
        if isinstance(reducer, Reducer):
            for name in ("step", "merge", "finish"):
                if not callable(getattr(reducer, name)):
                    raise OptionError(f"{name}={getattr(reducer, name)!r} of a Reducer; expected a function")
        elif not all(isinstance(leaf, str) and leaf in AGGREGATES for leaf in tf.nest.flatten(reducer) or [None]):
            raise OptionError(
                f"reducer={reducer!r}; expected {', '.join(map(repr, AGGREGATES))}, a nest of these as fn returns one, or a "
                "devicemap.Reducer"
            )
        self.key = freeze(self._reducer) if not isinstance(reducer, Reducer) else _key_of(reducer)
        """Hashable: the same for those that are the same."""

    def of(self, structure: Any, specs: Sequence[Any]) -> BoundReduction:
        """The reduction of results of these specs, of shapes `[None, ...]`, which are packed into that nest.

        Raises:
            FunctionError: they cannot be reduced so.
        """
        for spec in specs:
            if not isinstance(spec, tf.TensorSpec):
                raise failure(f"fn returns {spec}; only dense results can be reduced")
        if isinstance(self._reducer, Reducer):
            return _ByReducer(self._reducer, structure, specs)
        names: list[str] = [self._reducer] * len(specs)
        if not isinstance(self._reducer, str):
            try:
                check_same_structure(self._reducer, structure)
            except (TypeError, ValueError) as error:
                results = tf.nest.pack_sequence_as(structure, list(specs))
                raise failure(
                    f"reducer is {self._reducer!r}, but fn returns {results}: the nests must be the same, or reducer one name"
                ) from error
            names = tf.nest.flatten(self._reducer)
        return _ByOps(names, structure, specs)


class Collection:
    """Whatever a function gives for a shard, joined: nothing is known of how many rows its leaves have."""

    key = "collection"
    counts_rows = False

    def of(self, structure: Any, specs: Sequence[Any]) -> Collection:
        return self

    def over(self, over_rows: Any, specs: Sequence[Any]) -> Any:
        return over_rows

    def over_blocks(self, over_rows: Any, specs: Sequence[Any]) -> Any | None:
        return None

    def packed(self, leaves: Sequence[Any]) -> list[Any]:
        return list(leaves)


class BoundReduction(ABC):
    """A reduction of results of known specs."""

    def __init__(self, structure: Any, specs: Sequence[Any]):
        self._structure, self._specs = structure, specs
        self._result_bytes = sum((spec.shape[1:].num_elements() or 0) * spec.dtype.size for spec in specs)
        self._wide = self._states()
        # Traced now, and not when all is computed: that is where functions of the user's may fail.
        self._merge = self._traced(lambda *states: [leaf[None] for leaf in self._merged(states)])
        self._finish = self._traced(lambda *states: self._finished(self._merged(states)))
        self.captured = self._finish.captured_inputs
        """What functions of the user's close over."""

    names: Sequence[str]
    """What tells it from other reductions of the same results, by leaf; besides its `functions`."""

    def functions(self) -> list[Any]:
        """What makes states of results and of other states besides TensorFlow's ops: `ConcreteFunction`s."""
        return []

    @abstractmethod
    def _reduced(self, results: Sequence[Any]) -> list[Any]:
        """The state of results `[rows, ...]`, in a graph; without the axis of states, in dtypes that travel well."""

    @abstractmethod
    def _merged(self, states: Sequence[Any]) -> list[Any]:
        """One state of any number of states, in dtypes that add up well."""

    @abstractmethod
    def _narrowed(self, state: Sequence[Any]) -> list[Any]:
        """A state in dtypes that travel well."""

    @abstractmethod
    def _states(self) -> list[Any]:
        """The `tf.TensorSpec`s of states that are merged, of shapes `[None, ...]`."""

    @abstractmethod
    def _finished(self, state: Sequence[Any]) -> Any:
        """The nest that the user gets."""

    def over(self, over_rows: Any, specs: Sequence[Any]) -> Any:
        """The function of a shard's leaves, of these specs, that reduces what `over_rows` gives: a `ConcreteFunction` that
        returns a list of tensors `[1, ...]`."""

        @tf.function(autograph=False)
        def reduced(*leaves: Any) -> list[Any]:
            return as_states(self._reduced(over_rows(*leaves)), leaves[0])

        return reduced.get_concrete_function(*specs)

    def over_blocks(self, over_rows: Any, specs: Sequence[Any]) -> Any | None:
        """The same, which keeps few results at a time, by a loop; `None` where it is not worth one."""
        if self._result_bytes < _ROW_BYTES:
            return None
        block = max(1, _BLOCK_BYTES // self._result_bytes)

        @tf.function(autograph=False)
        def reduced(*leaves: Any) -> list[Any]:
            rows = count_rows(leaves[0], tf.int32)

            def step(start: Any, state: Sequence[Any]) -> tuple[Any, list[Any]]:
                stop = tf.minimum(start + block, rows)
                results = over_rows(*(take_rows(leaf, start, stop) for leaf in leaves))
                added = self._reduced(results)
                return stop, self._merged([tf.stack([a, tf.cast(b, a.dtype)]) for a, b in zip(state, added)])

            nothing = self._merged([empty_rows(spec) for spec in self._wide])
            _, state = tf.while_loop(lambda start, _: start < rows, step, (0, nothing), parallel_iterations=1)
            return as_states(self._narrowed(state), leaves[0])

        return reduced.get_concrete_function(*specs)

    def merged(self, parts: Sequence[Sequence[Any]]) -> list[Any]:
        """The state of neighbouring ones, in eager code: leaves of shape `[1, ...]`. The first may be such a state itself."""
        return list(self._merge(*(join(leaves) for leaves in zip(*map(self._widened, parts)))))

    def merged_as_they_come(self, states: Iterable[Sequence[Any]], device: str) -> list[Any] | None:
        """The state of all of them, in order, on that device; few are kept at a time. `None` without any."""
        most = max(2, min(_MOST_STATES, _BLOCK_BYTES // max(self._result_bytes, 1)))
        kept: list[Sequence[Any]] = []

        def merge() -> list[Any]:
            with tf.device(device):  # where states come from is none of its business
                return self.merged(kept)

        for state in states:
            kept.append(state)
            if len(kept) >= most:
                kept[:] = [merge()]
        return merge() if kept else None

    def finished(self, states: Sequence[Any]) -> list[Any]:
        """The leaves of what the user gets of all states, in the order of rows; in eager code or in a graph."""
        return list(tf.nest.flatten(self._finish(*self._widened(states))))

    def packed(self, leaves: Sequence[Any]) -> Any:
        """What the user gets, of its leaves."""
        return as_objects(tf.nest.pack_sequence_as(self._finish.structured_outputs, leaves))

    def _traced(self, of_states: Callable[..., Any]) -> Any:
        return tf.function(of_states, autograph=False, input_signature=self._wide).get_concrete_function()

    def _widened(self, states: Sequence[Any]) -> list[Any]:
        return [tf.cast(leaf, spec.dtype) for leaf, spec in zip(states, self._wide)]


class _ByOps(BoundReduction):
    """By TensorFlow's ops, one for each leaf. The last leaf of a state counts its rows."""

    def __init__(self, names: Sequence[str], structure: Any, specs: Sequence[Any]):
        self.names = names
        self._ops = [AGGREGATES[name](spec.dtype) for name, spec in zip(names, specs)]
        super().__init__(structure, specs)

    def _reduced(self, results: Sequence[Any]) -> list[Any]:
        return [*(op.reduced(leaf) for op, leaf in zip(self._ops, results)), count_rows(results[0])]

    def _merged(self, states: Sequence[Any]) -> list[Any]:
        *leaves, counts = states
        return [*(op.merged(leaf, counts) for op, leaf in zip(self._ops, leaves)), tf.reduce_sum(counts)]

    def _narrowed(self, state: Sequence[Any]) -> list[Any]:
        *leaves, count = state
        return [*(op.narrowed(leaf) for op, leaf in zip(self._ops, leaves)), count]

    def _states(self) -> list[Any]:
        leaves = (tf.TensorSpec(spec.shape, op.wide) for op, spec in zip(self._ops, self._specs))
        return [*leaves, tf.TensorSpec([None], tf.int64)]

    def _finished(self, state: Sequence[Any]) -> Any:
        *leaves, count = state
        finished = [op.finished(leaf, count) for op, leaf in zip(self._ops, leaves)]
        return tf.nest.pack_sequence_as(self._structure, finished)


class _ByReducer(BoundReduction):
    """By functions of the user's, in loops over rows and over states."""

    names = (Reducer.__name__,)

    def __init__(self, reducer: Reducer, structure: Any, specs: Sequence[Any]):
        with tf.init_scope():
            self._initial = map_nest(lambda value, _: tf.convert_to_tensor(value), reducer.initial)
        self._step, self._join, self._end = map(tf.function, (reducer.step, reducer.merge, reducer.finish))
        super().__init__(structure, specs)

    def functions(self) -> list[Any]:
        initial = tf.nest.flatten(self._initial)

        @tf.function(autograph=False)
        def both(*leaves: Any) -> Any:
            first, second = (
                as_objects(tf.nest.pack_sequence_as(self._initial, part))
                for part in (leaves[: len(initial)], leaves[len(initial) : 2 * len(initial)])
            )
            result = as_objects(tf.nest.pack_sequence_as(self._structure, leaves[2 * len(initial) :]))
            states = self._step(first, result), self._join(first, second)
            return [*tf.nest.flatten([self._state(state) for state in states]), *map(tf.identity, initial)]

        row_specs = [
            tf.TensorSpec(spec.shape[1:], spec.dtype) for spec in (*self._wide[:-1], *self._wide[:-1], *self._specs)
        ]
        return [both.get_concrete_function(*row_specs)]

    def _reduced(self, results: Sequence[Any]) -> list[Any]:
        rows = count_rows(results[0], tf.int32)

        def step(row: Any, state: Any) -> tuple[Any, Any]:
            result = tf.nest.pack_sequence_as(self._structure, [leaf[row] for leaf in results])
            return row + 1, self._state(self._step(as_objects(state), as_objects(result)))

        _, state = tf.while_loop(lambda row, _: row < rows, step, (0, self._initial), parallel_iterations=1)
        return [*tf.nest.flatten(state), tf.cast(rows, tf.int64)]

    def _merged(self, states: Sequence[Any]) -> list[Any]:
        *leaves, counts = states

        def step(i: Any, state: Any) -> tuple[Any, Any]:
            later = tf.nest.pack_sequence_as(self._initial, [leaf[i] for leaf in leaves])
            return i + 1, self._state(self._join(as_objects(state), as_objects(later)))

        count = tf.shape(counts)[0]
        _, state = tf.while_loop(lambda i, _: i < count, step, (0, self._initial), parallel_iterations=1)
        return [*tf.nest.flatten(state), tf.reduce_sum(counts)]

    def _state(self, state: Any) -> Any:
        """What a function of the user's returned as such."""
        state = as_nodes(state)
        check_same_structure(state, self._initial)
        return tf.nest.map_structure(lambda new, first: tf.ensure_shape(new, first.shape), state, self._initial)

    def _narrowed(self, state: Sequence[Any]) -> list[Any]:
        return list(state)

    def _states(self) -> list[Any]:
        leaves = (tf.TensorSpec([None, *leaf.shape], leaf.dtype) for leaf in tf.nest.flatten(self._initial))
        return [*leaves, tf.TensorSpec([None], tf.int64)]

    def _finished(self, state: Sequence[Any]) -> Any:
        return as_nodes(self._end(as_objects(tf.nest.pack_sequence_as(self._initial, list(state)[:-1]))))


def _key_of(reducer: Reducer) -> Any:
    def value(leaf: Any) -> Any:
        array = np.asarray(leaf)
        return array.dtype.str, array.shape, array.tobytes()

    return freeze(as_nodes(reducer.initial), value), reducer.step, reducer.merge, reducer.finish


def as_states(state: Sequence[Any], rows: Any) -> list[Any]:
    """A state of some rows with the axis of states, whose length is not told while tracing: a branch may have none."""
    states = tf.minimum(count_rows(rows, tf.int32), 1)
    return [leaf[None][:states] for leaf in state]
