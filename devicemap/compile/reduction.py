"""Reduce results of rows to one result, first on the devices that compute them, and then in the order of rows.

    results of rows ── reduce ──> state and number of rows ── merge, any number of times ──> state ── finish ──> result

A state is a list of tensors with a leading axis of states. The last tensor is the number of rows of each state.
So states of shards and of chunks are gathered like rows, and only this module knows that they are states.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import tensorflow as tf

from devicemap.compile.aggregates import AGGREGATES, Reducer, reducer_key
from devicemap.data.rows import count_rows, empty_rows, take_rows
from devicemap.data.shards import join
from devicemap.data.structure import as_nodes, as_objects, check_same_structure, freeze, map_nest
from devicemap.errors import OptionError, brief, failure, function_error

_BLOCK_BYTES = 2**22
"""Results of at least `_ROW_BYTES` per row are reduced in blocks of this size (`benchmarks/test_reduce.py`)."""

_ROW_BYTES = 2**12

_MAX_STATES = 64
"""The most states that eager code merges in one step."""


class Reduction:
    """A checked reducer, which is not yet bound to the results of `fn`.

    Args:
        reducer: "sum", "mean", "min" or "max", a nest of these, or a `Reducer`.

    Raises:
        OptionError: for anything else.
    """

    def __init__(self, reducer: Any):
        self._reducer = reducer if isinstance(reducer, Reducer) else as_nodes(reducer)
        if isinstance(reducer, Reducer):
            for name in ("step", "merge", "finish"):
                function = getattr(reducer, name)
                if not callable(function) or type(function).__hash__ is None:
                    raise OptionError(f"{name}={function!r} of a Reducer; expected a function, or a hashable object")
        elif not all(isinstance(leaf, str) and leaf in AGGREGATES for leaf in tf.nest.flatten(reducer) or [None]):
            raise OptionError(
                f"reducer={reducer!r:.80}; expected {', '.join(map(repr, AGGREGATES))}, a nest of these as fn returns one, "
                "or a devicemap.Reducer. Several arrays of data are a tuple, as in (x, y)"
            )
        try:
            self.key = reducer_key(reducer) if isinstance(reducer, Reducer) else freeze(self._reducer)
        except (TypeError, ValueError) as error:
            raise OptionError(
                f"initial={reducer.initial!r:.80} of a Reducer; expected a nest of tensors ({error})"
            ) from error
        """Hashable; equal for equal reducers."""

    def of(self, structure: Any, specs: Sequence[Any]) -> BoundReduction:
        """Return the reduction of results with these specs, of shapes `[None, ...]`, which are packed into `structure`.

        Raises:
            FunctionError: the reducer does not fit the results.
        """
        for spec in specs:
            if not isinstance(spec, tf.TensorSpec):
                raise failure(f"fn returns {spec}; only dense results can be reduced")
        if isinstance(self._reducer, Reducer):
            initial = tf.nest.map_structure(_dtype_and_shape, map_nest(_as_tensor, self._reducer.initial))
            try:
                return _CustomReduction(self._reducer, structure, specs)
            except Exception as error:  # of the user's functions
                results = tf.nest.pack_sequence_as(structure, [f"{s.dtype.name} {s.shape[1:]}" for s in specs])
                raise function_error(
                    f"the Reducer does not fit the results of fn, which are {results} for a row: step and merge have to return "
                    f"states like the initial one, {initial}: {type(error).__name__}: {error}",
                    error,
                ) from error
        names: list[str] = [self._reducer] * len(specs)
        if not isinstance(self._reducer, str):
            try:
                check_same_structure(self._reducer, structure)
            except (TypeError, ValueError) as error:
                results = tf.nest.pack_sequence_as(structure, list(specs))
                raise failure(
                    f"reducer is {self._reducer!r}, but fn returns {results}: the nests must be the same, or reducer "
                    "one name"
                ) from error
            names = tf.nest.flatten(self._reducer)
        return _OpReduction(names, structure, specs)


class BoundReduction(ABC):
    """A reduction of results of known specs.

    States that are sent between devices have the size of a result. They are merged in dtypes that round less.
    """

    names: Sequence[str]
    """The names of the reducers, by leaf."""

    def __init__(self, structure: Any, specs: Sequence[Any]):
        self._structure, self._specs = structure, specs
        self._result_bytes = sum((spec.shape[1:].num_elements() or 0) * spec.dtype.size for spec in specs)
        self._merge_specs = [*self._state_specs(), tf.TensorSpec([None], tf.int64)]
        # Trace the user's functions before anything is computed, because they may fail.
        trace, states = partial(tf.function, autograph=False), self._merge_specs
        self._reduce_graph = trace(lambda *results: self._reduce_rows(results)).get_concrete_function(*specs)
        merge = trace(lambda *s: [leaf[None] for leaf in self._merge_states(s)])
        self._merge_graph = merge.get_concrete_function(*states)
        self._finish_graph = trace(lambda *s: self._finish_states(self._merge_states(s))).get_concrete_function(*states)
        self.captured = self._finish_graph.captured_inputs
        """The tensors that the user's functions capture."""

    def functions(self) -> list[Any]:
        """Return the `ConcreteFunction`s of the user that determine states."""
        return []

    @abstractmethod
    def _state_specs(self) -> list[Any]:
        """Return the `tf.TensorSpec`s of states to be merged, of shapes `[None, ...]`, without the number of rows."""

    @abstractmethod
    def _reduce_rows(self, results: Sequence[Any]) -> list[Any]:
        """Return the state of results `[rows, ...]`, without the axis of states, in dtypes to be sent."""

    @abstractmethod
    def _merge_states(self, states: Sequence[Any]) -> list[Any]:
        """Return one state of any number of states, both in the dtypes for merging."""

    def _to_narrow(self, state: Sequence[Any]) -> list[Any]:
        """Return a state in dtypes to be sent."""
        return list(state)

    @abstractmethod
    def _finish_states(self, state: Sequence[Any]) -> Any:
        """Return the nest of the result."""

    def over(self, over_rows: Any, specs: Sequence[Any]) -> Any:
        """Return the `ConcreteFunction` of a shard's leaves that reduces the results of `over_rows`.

        It takes leaves of these specs, and returns a list of tensors `[1, ...]`, or `[0, ...]` for no rows.
        """

        @tf.function(autograph=False)
        def reduced(*leaves: Any) -> list[Any]:
            return as_states(self._state_of(over_rows(*leaves), count_rows(leaves[0])), leaves[0])

        return reduced.get_concrete_function(*specs)

    def over_blocks(self, over_rows: Any, specs: Sequence[Any]) -> Any | None:
        """Return `over` as a loop over blocks of rows, which keeps few results in memory; `None` if results are small."""
        if self._result_bytes < _ROW_BYTES:
            return None
        block = max(1, _BLOCK_BYTES // self._result_bytes)

        @tf.function(autograph=False)
        def reduced(*leaves: Any) -> list[Any]:
            rows = count_rows(leaves[0], tf.int32)

            def step(start: Any, state: Sequence[Any]) -> tuple[Any, list[Any]]:
                stop = tf.minimum(start + block, rows)
                results = over_rows(*(take_rows(leaf, start, stop) for leaf in leaves))
                added = self._state_of(results, tf.cast(stop - start, tf.int64))
                return stop, self._merge_states([tf.stack([a, tf.cast(b, a.dtype)]) for a, b in zip(state, added)])

            nothing = self._merge_states([empty_rows(spec) for spec in self._merge_specs])
            _, state = tf.while_loop(lambda start, _: start < rows, step, (0, nothing), parallel_iterations=1)
            return as_states(self._to_narrow(state), leaves[0])

        return reduced.get_concrete_function(*specs)

    def _state_of(self, results: Sequence[Any], rows: Any) -> list[Any]:
        """Return the state of the results of some rows. If a leaf has another number of rows, the state has its count."""
        *state, count = self._reduce_graph(*results)
        if any(leaf.shape[0] is None for leaf in results[1:]):
            counts = tf.stack([count_rows(leaf) for leaf in results])
            count = counts[tf.argmax(tf.cast(counts != rows, tf.int32))]
        return [*state, count]

    def merge_states(self, parts: Sequence[Sequence[Any]]) -> list[Any]:
        """Merge neighbouring states, in eager code, into leaves `[1, ...]`. The first part may be a merged state."""
        states = [join(leaves) for leaves in zip(*map(self._to_wide, parts))]
        return list(_run("merge", self._merge_graph, states))

    def merge_stream(self, states: Iterable[Sequence[Any]], device: str) -> list[Any] | None:
        """Merge states in order on a device, and keep few states in memory. Return `None` if there are no states."""
        limit = max(2, min(_MAX_STATES, _BLOCK_BYTES // max(self._result_bytes, 1)))
        kept: list[Sequence[Any]] = []
        for state in states:
            kept.append(state)
            if len(kept) == limit:
                with tf.device(device):
                    kept = [self.merge_states(kept)]
        with tf.device(device):
            return self.merge_states(kept) if kept else None

    def finish_state(self, states: Sequence[Any]) -> list[Any]:
        """Return the leaves of the result, in eager code or in a graph. `states` are in the order of rows."""
        return list(tf.nest.flatten(_run("finish", self._finish_graph, self._to_wide(states))))

    def pack_result(self, leaves: Sequence[Any]) -> Any:
        """Pack leaves into the result."""
        return as_objects(tf.nest.pack_sequence_as(self._finish_graph.structured_outputs, leaves))

    def _to_wide(self, states: Sequence[Any]) -> list[Any]:
        return [tf.cast(leaf, spec.dtype) for leaf, spec in zip(states, self._merge_specs)]


def _run(name: str, function: Any, states: Sequence[Any]) -> Any:
    try:
        return function(*states)
    except tf.errors.OpError as error:
        raise function_error(f"{name} of the reduction failed: {brief(error)}", error) from error


class _OpReduction(BoundReduction):
    """A reduction by TensorFlow's ops, one for each leaf."""

    def __init__(self, names: Sequence[str], structure: Any, specs: Sequence[Any]):
        self.names = names
        self._ops = [AGGREGATES[name](spec.dtype) for name, spec in zip(names, specs)]
        super().__init__(structure, specs)

    def _state_specs(self) -> list[Any]:
        return [tf.TensorSpec(spec.shape, op.wide) for op, spec in zip(self._ops, self._specs)]

    def _reduce_rows(self, results: Sequence[Any]) -> list[Any]:
        return [*(op.reduce_rows(leaf) for op, leaf in zip(self._ops, results)), count_rows(results[0])]

    def _merge_states(self, states: Sequence[Any]) -> list[Any]:
        *leaves, counts = states
        return [*(op.merge_states(leaf, counts) for op, leaf in zip(self._ops, leaves)), tf.reduce_sum(counts)]

    def _to_narrow(self, state: Sequence[Any]) -> list[Any]:
        *leaves, count = state
        return [*(op.to_narrow(leaf) for op, leaf in zip(self._ops, leaves)), count]

    def _finish_states(self, state: Sequence[Any]) -> Any:
        *leaves, count = state
        finished = [op.finish_state(leaf, count) for op, leaf in zip(self._ops, leaves)]
        return tf.nest.pack_sequence_as(self._structure, finished)


class _CustomReduction(BoundReduction):
    """A reduction by the user's functions, in loops over rows and over states."""

    names = (Reducer.__name__,)

    def __init__(self, reducer: Reducer, structure: Any, specs: Sequence[Any]):
        with tf.init_scope():
            self._initial = map_nest(_as_tensor, reducer.initial)
        self._user_functions = [*map(tf.function, (reducer.step, reducer.merge, reducer.finish))]
        super().__init__(structure, specs)

    def functions(self) -> list[Any]:
        return [self._reduce_graph, self._merge_graph]

    def _state_specs(self) -> list[Any]:
        return [tf.TensorSpec([None, *leaf.shape], leaf.dtype) for leaf in tf.nest.flatten(self._initial)]

    def _reduce_rows(self, results: Sequence[Any]) -> list[Any]:
        count = count_rows(results[0])
        return [*self._fold(self._user_functions[0], self._structure, results, count), count]

    def _merge_states(self, states: Sequence[Any]) -> list[Any]:
        *leaves, counts = states
        return [*self._fold(self._user_functions[1], self._initial, leaves, count_rows(counts)), tf.reduce_sum(counts)]

    def _fold(self, function: Any, structure: Any, leaves: Sequence[Any], count: Any) -> list[Any]:
        """Return the state after `function(state, element)` for each of `count` elements in turn."""

        def step(i: Any, state: Any) -> tuple[Any, Any]:
            element = tf.nest.pack_sequence_as(structure, [leaf[i] for leaf in leaves])
            new = map_nest(_as_tensor, function(as_objects(state), as_objects(element)))
            check_same_structure(new, self._initial)
            return i + 1, tf.nest.map_structure(
                lambda leaf, like: tf.ensure_shape(leaf, like.shape), new, self._initial
            )

        stop = tf.cast(count, tf.int32)
        _, state = tf.while_loop(lambda i, _: i < stop, step, (0, self._initial), parallel_iterations=1)
        return list(tf.nest.flatten(state))

    def _finish_states(self, state: Sequence[Any]) -> Any:
        return as_nodes(self._user_functions[2](as_objects(tf.nest.pack_sequence_as(self._initial, list(state)[:-1]))))


def as_states(state: Sequence[Any], rows: Any) -> list[Any]:
    """Add the axis of states to a state. Its length is 1, or 0 if there are no rows."""
    states = tf.minimum(count_rows(rows, tf.int32), 1)
    return [tf.expand_dims(leaf, 0)[:states] for leaf in state]


def _dtype_and_shape(tensor: Any) -> str:
    return f"{tensor.dtype.name} {tensor.shape}"


def _as_tensor(leaf: Any, path: str) -> Any:
    return tf.convert_to_tensor(leaf)
