"""Values through which gradients flow in another way than TensorFlow's: added, redirected, computed again, or left out."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from enum import Enum
from functools import partial
from typing import Any

import tensorflow as tf

from devicemap._tensorflow import Private, usable, with_fallback
from devicemap._tensorflow.functions import functions_by_name, reachable
from devicemap._tensorflow.gradients import _operations, _registry, _resources

_record = Private("tensorflow.python.eager.record", "could_possibly_record", "record_operation", "stop_recording")
_handle_data = Private("tensorflow.python.ops.handle_data_util", "copy_handle_data")


class Lookups(Enum):
    """The lookups of a function in a table, by which `tf.IndexedSlices` of several calls are added."""

    NONE = "none"
    OF_ROWS = "each row has indices of its own"
    SHARED = "each call has the same indices"
    DISTINCT = "each call has each index once"
    MIXED = "several of these"


def fan_out(value: Any, count: int, lookups: Lookups = Lookups.NONE) -> list[Any]:
    """Return a value, or the handle of a variable, for `count` consumers, whose gradients are added on the current device.

    `lookups`: those of the consumers.

    TensorFlow would add them on the device of the gradient function
    (test_gradients_of_several_users_are_added_on_the_current_device).
    """
    if count == 1 or tf.executing_eagerly():
        return [value] * count

    def add(*upstream: Any) -> list[Any]:
        known = [gradient for gradient in upstream if gradient is not None]
        return [add_gradients(known, lookups) if known else None, *[None] * (count - 1)]

    return gradients_through([value] * count, add)


@with_fallback(lambda values, _: list(values), _registry, _operations, _handle_data)
def gradients_through(values: Sequence[Any], change: Callable[..., Sequence[Any]]) -> list[Any]:
    """Return copies. `change` maps their gradients to those of the values, on the current device."""
    with _unrecorded():
        copies = tf.raw_ops.IdentityN(input=values)
    for value, copy in zip(values, copies):
        if value.dtype == tf.resource:
            _handle_data.copy_handle_data(value, copy)
    if tf.executing_eagerly():
        _record.record_operation("IdentityN", list(copies), list(values), change)
        return list(copies)
    op = copies[0].op

    def changed(op: Any, *upstream: Any) -> Sequence[Any]:
        with tf.device(op.device):
            return change(*upstream)

    _set_gradient(op, values, changed)
    return list(copies)


class GradientPaths:
    """Decides which inputs of a call get gradients, by the results that have one.

    TensorFlow's gradient of a function call has zeros for inputs on which only other results depend. With zeros, optimizers
    with a momentum update a variable; without a gradient, they do not (`InTurn` in tests/steps.py). In the fallback, and in a
    graph under persistent or nested tapes, all inputs get gradients.
    """

    def __init__(self, sources: Sequence[frozenset[Any] | None]):
        """`sources`: for each result, the inputs on which it depends; `None` if it never has a gradient."""
        known = [each for each in sources if each is not None]
        self.inputs = frozenset().union(*known)
        self.differ = len({*known}) > 1 and usable(_record, _registry, _operations, _handle_data, _resources)
        """Whether some results depend on other inputs than others."""
        self._sources: list[frozenset[Any]] = []
        self._used: set[int] = set()
        self._finished = self._all = self._recorded = False
        self._graph: Any = None

    def track_results(self, results: Sequence[Any], sources: Sequence[frozenset[Any] | None]) -> list[Any]:
        """Return the results, whose gradients are noted. Results after those with `sources` depend on all inputs.

        Ragged and sparse results have `sources` for each component.
        """
        if not self.differ:
            return list(results)
        parts = tf.nest.flatten(list(results), expand_composites=True)
        more = len(parts) - len(sources)
        self._sources = [frozenset() if each is None else each for each in sources] + [self.inputs] * more
        tracked = [
            gradients_through([part], partial(self._record_use, i))[0]
            if part.dtype.is_floating or part.dtype.is_complex
            else part
            for i, part in enumerate(parts)
        ]
        return list(tf.nest.pack_sequence_as(list(results), tracked, expand_composites=True))

    def _record_use(self, i: int, upstream: Any) -> list[Any]:
        graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
        if self._finished:  # this is another gradient of the same call
            # A gradient of the earlier gradient reaches inputs through the backward pass, and not only through results.
            self._all |= self._recorded or graph is not self._graph
            self._used.clear()
            self._finished = False
        self._graph = graph
        self._recorded |= bool(_record.could_possibly_record())
        self._used.add(i)
        return [upstream]

    def gets_gradient(self, source: Any) -> bool:
        """Return whether an input gets a gradient, after those of all results are noted."""
        self._finished = True
        return not self.differ or self._all or any(source in self._sources[i] for i in self._used)

    def track(self, tensor: Any, source: Any) -> Any:
        """Return a tensor or a handle, which gets a gradient if it reaches the input `source`."""
        with tf.device(tensor.device):
            return gradients_through([tensor], lambda upstream: [upstream if self.gets_gradient(source) else None])[0]

    def prune(self, concrete: Any, op: Any) -> None:
        """Limit the gradients of an op in the graph being traced, which calls a function of `begin_backward_on`, to its paths.

        The op takes the handles of variables themselves: automatic control dependencies order its reads by them
        (test_steps_repeat_their_weights).
        """
        first = len(op.inputs) - len(concrete.captured_inputs)
        keys = [None] * first + [tensor.ref() for tensor in concrete.captured_inputs]

        def limited(differentiate: Callable[..., Sequence[Any]], upstream: Sequence[Any]) -> list[Any]:
            found = differentiate(*upstream)
            return [
                gradient if key not in self.inputs or self.gets_gradient(key) else None
                for key, gradient in zip(keys, found)
            ]

        op.on_gradient = limited

    def handles(self, variables: Sequence[tf.Variable]) -> dict[Any, Any]:
        """Return tracked handles of variables for eager code, by the `Tensor.ref()` of their own handles."""
        found = {}
        for variable in variables:
            if (key := variable.handle.ref()) in self.inputs:
                _resources.variable_accessed(variable)  # tapes start to watch it, as in the call
                found[key] = self.track(variable.handle, key)
        return found


def sources_of_gradients(concrete: Any) -> list[frozenset[Any] | None]:
    """Return the inputs to which the gradient of each result of a `ConcreteFunction` goes; `None` for integers and the like.

    Inputs are given by their index, captures by the `Tensor.ref()` of the captured tensor. Gradients of the results of loops
    and branches go to all of their inputs.
    """
    captures = concrete.captured_inputs
    count = len(concrete.inputs) - len(captures)
    names = [*range(count), *(tensor.ref() for tensor in captures)]
    found = _sources(concrete.graph, {})
    return [
        frozenset(map(names.__getitem__, inputs)) if _may_have_gradient(result.dtype) else None
        for result, inputs in zip(concrete.outputs, found)
    ]


def _may_have_gradient(dtype: Any) -> bool:
    """Whether gradients may go through a tensor of a dtype, for instance through the handle of a variable."""
    return dtype.is_floating or dtype.is_complex or dtype in (tf.resource, tf.variant)


def _sources(graph: Any, known: dict[Any, list[set[int]]]) -> list[set[int]]:
    """Return the indices of the inputs to which the gradient of each result of a function's graph goes.

    `known`: the same of the functions that it calls, by name.
    """
    functions = functions_by_name(graph)
    inputs = {tensor.ref(): i for i, tensor in enumerate(graph.inputs) if _may_have_gradient(tensor.dtype)}

    def inputs_of(key: Any) -> list[Any]:
        op = key.deref().op
        name = op.get_attr("f").name if op.type in ("PartitionedCall", "StatefulPartitionedCall") else None
        if key in inputs or not _may_have_gradient(key.deref().dtype):
            return []
        if name not in functions or getattr(op, _REDIRECTED, False):
            return [each.ref() for each in op.inputs] if has_gradient(op) else []
        if name not in known:
            known[name] = _sources(functions[name], known)
        return [op.inputs[i].ref() for i in known[name][key.deref().value_index]]

    return [{inputs[key] for key in reachable([tensor.ref()], inputs_of) if key in inputs} for tensor in graph.outputs]


_REDIRECTED = "_devicemap_redirected"
"""An attribute of ops of `gradient_redirector`, whose gradients do not go the way of their function."""

_WITHOUT_GRADIENT = frozenset("Ceil Floor FloorDiv Rint Round StopGradient TruncateDiv".split())
"""Ops whose gradient function returns `None`."""


@with_fallback(lambda op: True, _registry)
def has_gradient(op: Any) -> bool:
    """Whether a gradient may go through an op. The fallback is that it does."""
    try:
        return op.type not in _WITHOUT_GRADIENT and _registry.get_gradient_function(op) is not None
    except LookupError:
        return True


def _set_gradient(op: Any, inputs: Sequence[Any], gradient: Callable[..., Any]) -> None:
    """Set the gradient function of an op of `_unrecorded`, for tapes inside and outside the function being traced."""
    op._gradient_function = gradient
    if usable(_record):
        _record.record_operation(op.type, list(op.outputs), list(inputs), partial(gradient, op))


@with_fallback(contextlib.nullcontext, _record)
def _unrecorded() -> Any:
    return _record.stop_recording()


def _link_by_custom_gradient(results: Sequence[Any], values: Sequence[Any], gradient: Callable[..., Any]) -> list[Any]:
    link = tf.custom_gradient(lambda *_: (list(results), lambda *upstream: gradient(*upstream)))
    return list(link(*values))


@with_fallback(_link_by_custom_gradient, _registry, _operations)
def link_gradients(results: Sequence[Any], values: Sequence[Any], gradient: Callable[..., Any]) -> list[Any]:
    """Return the results, in the function being traced, with gradients to `values`, which `gradient` computes.

    Tapes inside the function do not use `gradient`. The fallback is `tf.custom_gradient`, for which TensorFlow's gradient
    registry keeps each graph forever, with the weights of the model.
    """
    copies = tf.raw_ops.IdentityN(input=[*results, *values])
    copies[0].op._gradient_function = lambda _, *upstream: [
        *[None] * len(results),
        *gradient(*upstream[: len(results)]),
    ]
    return list(copies[: len(results)])


def add_gradients(gradients: Sequence[Any], lookups: Lookups = Lookups.NONE) -> Any:
    """Return the sum of gradients. A sum of `tf.IndexedSlices` has the slices of one call for all rows."""
    if not all(isinstance(gradient, tf.IndexedSlices) for gradient in gradients):
        return tf.add_n([tf.convert_to_tensor(gradient) for gradient in gradients])
    values, indices = (tf.concat([getattr(each, part) for each in gradients], 0) for part in ("values", "indices"))
    if lookups is Lookups.SHARED:  # calls without rows may have no slices
        count = tf.reduce_max([tf.size(each.indices) for each in gradients])
        calls = tf.size(indices) // tf.maximum(count, 1)
        values = tf.reduce_sum(tf.reshape(values, tf.concat([[calls, count], tf.shape(values)[1:]], 0)), 0)
        indices = indices[:count]
    if lookups is Lookups.DISTINCT:
        indices, positions = tf.unique(indices)
        values = tf.math.unsorted_segment_sum(values, positions, tf.size(indices))
    return tf.IndexedSlices(values, indices, gradients[0].dense_shape)


def slices_if(has_rows: Any, gradient: Any) -> Any:
    """Return a gradient without the slices of a call without rows, which are zeros for the whole variable."""
    if has_rows is True or not isinstance(gradient, tf.IndexedSlices):
        return gradient
    count = tf.where(has_rows, tf.size(gradient.indices), 0)
    return tf.IndexedSlices(gradient.values[:count], gradient.indices[:count], gradient.dense_shape)


def gradient_redirector() -> Callable[[Any, Any], Any]:
    """Return a function `(handle, value)` that redirects gradients. It traces once for each shape of values.

    In the function being traced, it returns a handle of a variable whose gradients go to `value`, its assigned value. An
    assignment has no gradient. The handle comes from a call and not from `IdentityN`, because the gradient of a while loop
    follows resources only through calls (`resource_input_index`; test_a_tape_around_a_loop_or_branch_that_calls_a_map).
    """
    first = tf.function(lambda handle, value: handle, autograph=False)

    def redirect(handle: Any, value: Any) -> Any:
        with _unrecorded():
            redirected = first.get_concrete_function(handle, value)(handle, value)
        _set_gradient(redirected.op, [handle, value], lambda op, upstream: [None, upstream])
        setattr(redirected.op, _REDIRECTED, True)
        return redirected

    return redirect
