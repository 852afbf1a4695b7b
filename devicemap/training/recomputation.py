"""Gradient checkpointing: the backward pass runs functions again from their arguments.

    rows ── microbatches, one after another ──> results, joined
    gradients of results ── the same microbatches, each run again ──> gradients of values, added

So intermediate results exist for one microbatch at a time, at the price of a second run (Chen, Xu, Zhang and Guestrin, 2016).
`tf.recompute_grad` loses gradients of variables (tensorflow#36981).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import tensorflow as tf

from devicemap._tensorflow.functions import with_captures
from devicemap._tensorflow.gradient_links import add_gradients, link_gradients
from devicemap._tensorflow.keras import is_seed, replacing, states_of, sublayers_of
from devicemap.compile.audit import audit
from devicemap.compile.lookups import lookups
from devicemap.data.rows import count_rows, spec_of, take_rows
from devicemap.data.shards import join
from devicemap.errors import failure
from devicemap.training.stateless import CallArguments, CallScope, ResultSpec, call_stateless, current_scope


def recompute(
    function: Callable[..., tuple[list[Any], list[Any]]],
    rows: Sequence[Any],
    values: Sequence[Any] | None = None,
    microbatches: int = 1,
) -> list[Any]:
    """Return the results of a function of rows, in the graph that is being traced.

    Args:
        function: `(number of the microbatch, rows) -> (results [rows, ...], results [1, ...])`, of dense tensors.
        rows: tensors `[rows, ...]`, dense, ragged or sparse, which get no gradients.
        values: the tensors that the function captures and that get gradients. By default, all tensors that it captures, and
            the variables that it reads.
        microbatches: the largest number of parts of the rows. No part is empty.

    Raises:
        FunctionError: the function draws other random numbers when it runs again, or changes a variable.
    """
    cut = _RowParts(rows, microbatches)
    part = tf.function(function, autograph=False).get_concrete_function(cut.number, cut.specs)
    _check(part)
    count = len(part.inputs) - len(part.captured_inputs)
    inner = {tensor.ref(): taken for tensor, taken in zip(part.captured_inputs, part.inputs[count:])}
    # A step of the user may train variables that are not Keras's, and a `ConcreteFunction` reads variables themselves.
    others = [v for v in part.graph.variables if v.trainable and _has_gradient(v)]
    values = [value for value in (part.captured_inputs if values is None else values) if value.ref() in inner]
    values = [value for value in values if _has_gradient(value) and not hasattr(value, "numpy")]
    tables = [inner[source.ref()] for source in (*values, *(v.handle for v in others))]
    kinds = [lookups(part.graph, table, part.inputs[:count]) for table in tables]
    results, of_rows = tf.nest.flatten(part.structured_outputs), len(part.structured_outputs[0])
    floats = [i for i, leaf in enumerate(results) if _has_gradient(leaf)]

    def gradient_of_part(number: Any, rows: Any, held: Any, upstream: Any) -> Any:
        again = with_captures(part, {value.ref(): each for value, each in zip(values, held)})
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch([*held, *others])
            found = tf.nest.flatten(again(number, rows))
            taken = [found[i] for i in floats]
        return tape.gradient(taken, [*held, *others], upstream)

    def gradient(*upstream: Any) -> list[Any]:
        taken = [upstream[i] for i in floats]
        with _after(taken):  # otherwise all functions would run again at once, and their results be kept
            given, held = tf.nest.map_structure(tf.identity, (list(rows), values), expand_composites=True)
        again, of_part = _RowParts(given, microbatches), gradient_of_part
        if microbatches > 1:
            of_part = tf.function(gradient_of_part, autograph=False).get_concrete_function(
                again.number, again.specs, held, [spec_of(results[i]) for i in floats]
            )

        def gradients(number: Any) -> Any:
            parts = [again.part_of(leaf, number, i < of_rows) for i, leaf in zip(floats, taken)]
            return of_part(number, again.parts(number), held, parts)

        found = again.over(gradients, [partial(add_gradients, lookups=kind) for kind in kinds])
        for i, value in enumerate(values):
            found[i] = tf.ensure_shape(found[i], value.shape) if isinstance(found[i], tf.Tensor) else found[i]
        return found

    given = cut.over(lambda i: tf.nest.flatten(part(i, cut.parts(i))), [join] * len(results))
    return link_gradients(given, [*values, *map(tf.convert_to_tensor, others)], gradient)


def without_state(layers: Sequence[Any]) -> list[Any]:
    """Return the layers that change only seeds in a call. Other layers are replaced by such sublayers."""
    found = []
    for layer in layers:
        keeps = all(map(is_seed, states_of(layer)))
        found += [layer] if keeps else without_state(sublayers_of(layer))
    return found


@contextmanager
def recomputing(layers: Sequence[Any]) -> Iterator[None]:
    """Return a context in which gradients run these layers again. The layers are called in `CallScope`s."""
    with ExitStack() as replaced:
        for layer in layers:
            replaced.enter_context(replacing(layer, call=partial(_recompute_call, layer, layer.call)))
        yield


def _recompute_call(layer: Any, call: Any, *args: Any, **kwargs: Any) -> Any:
    given, scope = CallArguments.of(args, kwargs), current_scope()
    if scope is None or not all(isinstance(leaf, tf.Tensor) for leaf in given.rows):  # `None`: in another thread
        return call(*args, **kwargs)
    states = [variable for variable in layer.variables if id(variable) in scope.state_mapping and not is_seed(variable)]
    found = list[tuple[ResultSpec, CallScope]]()

    def run(number: Any, none: Any) -> tuple[list[Any], list[Any]]:
        rows = [*map(tf.identity, given.rows)]
        args, kwargs = given.with_rows(rows)
        own = scope.inner()
        tensors, others, spec = call_stateless(partial(call, *args, **kwargs), own, states, rows)
        found.append((spec, own))
        return tensors, others

    results = recompute(run, [])
    spec, own = found[-1]
    outputs, losses, updates = spec.unpacked(results)
    # A call depends on all of its arguments, so the graph around it does not show which losses are constant.
    scope.added += [(owner, loss, of_rows) for (owner, of_rows, _), loss in zip(spec.losses, losses)]
    scope.draws = own.draws
    for variable in own.changed:
        if not is_seed(variable) and all(variable is not each for each in states):
            raise failure(
                f"{layer.name} changes {variable.path}, a variable of another layer, and would change it again when it runs "
                "for its gradients; leave this layer out of recompute"
            )
    for i, value in zip(spec.updated, updates):
        scope.add_update((states[i], value))
    return outputs


class _RowParts:
    """Rows in parts. The first parts may have one row more than the last."""

    def __init__(self, rows: Sequence[Any], most: int):
        self._rows, self._most = rows, most
        self.number = tf.constant(0)
        self.specs = [tf.type_spec_from_value(leaf) if most == 1 else spec_of(leaf) for leaf in rows]

    def part_of(self, leaf: Any, number: Any, of_rows: bool = True) -> Any:
        """Return a part of a leaf `[rows, ...]`, or of one `[parts, ...]`."""
        if self._most == 1:
            return leaf
        if not of_rows:
            return leaf[number : number + 1]
        count = count_rows(self._rows[0], tf.int32)
        each, more = count // self._most, count % self._most
        start = number * each + tf.minimum(number, more)
        return take_rows(leaf, start, start + each + tf.cast(number < more, tf.int32))

    def parts(self, number: Any) -> list[Any]:
        """Return a part of each leaf."""
        return [self.part_of(leaf, number) for leaf in self._rows]

    def over(self, call: Callable[[Any], Any], combine: Sequence[Callable[[Sequence[Any]], Any]]) -> list[Any]:
        """Call `call(number)` for all parts with rows, one after another, and combine each of its results except `None`."""
        first = list(call(self.number))
        if self._most == 1:
            return first
        known = [each for each in first if each is not None]
        combiners = [combiner for combiner, each in zip(combine, first) if each is not None]
        with _after(known):  # otherwise the loop would begin at once
            second = tf.identity(self.number + 1)
        parts = tf.minimum(count_rows(self._rows[0], tf.int32), self._most)

        def step(number: Any, so_far: Sequence[Any]) -> Any:
            more = [each for each in call(number) if each is not None]
            pairs = zip(tf.nest.pack_sequence_as(known, so_far, True), more)
            combined = [combiner(pair) for combiner, pair in zip(combiners, pairs)]
            return number + 1, tf.nest.flatten(combined, True)

        flat = tf.nest.flatten(known, True)
        shapes = [
            tf.TensorShape([None]).concatenate(leaf.shape[1:]) if leaf.shape.rank else leaf.shape for leaf in flat
        ]
        _, flat = tf.while_loop(
            lambda number, _: number < parts,
            step,
            (second, flat),
            shape_invariants=(tf.TensorShape([]), shapes),
            parallel_iterations=1,
        )
        combined = iter(tf.nest.pack_sequence_as(known, flat, True))
        return [None if each is None else next(combined) for each in first]


def _has_gradient(tensor: Any) -> bool:
    return bool(tensor.dtype.is_floating or tensor.dtype.is_complex)


def _after(tensors: Sequence[Any]) -> Any:
    """Return a scope of ops that wait for tensors. A control edge from a call would not wait for arguments that it returns."""
    return tf.control_dependencies([*map(tf.identity, tf.nest.flatten(tensors, expand_composites=True))])


def _check(part: Any) -> None:
    """Raise an error unless a second run of a function has the same results and no side effects."""
    found = audit(part)
    if found.random_ops:
        raise failure(
            f"{', '.join(found.random_ops)} would draw other numbers when layers run again for their gradients; use "
            "keras.random with a keras.random.SeedGenerator of the layer"
        )
    if found.writes:
        raise failure(
            "a layer changes a variable, and would change it again when it runs for its gradients; create the variable by "
            "add_weight"
        )
