"""Calls of Keras models without side effects: their arguments, outputs, losses and new values of variables."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import keras
import tensorflow as tf

from devicemap._tensorflow.keras import LOGITS, MASK, attached_tensors, is_seed, mask_of
from devicemap._tensorflow.keras_calls import RunningCalls
from devicemap.compile.graph_walker import depends_on
from devicemap.data.rows import count_rows
from devicemap.errors import failure

ROWS, SHARED = object(), object()
"""Placeholders for a tensor of rows, and for a scalar, which is the same for all rows."""

_scope: ContextVar[Any] = ContextVar("scope")


@dataclass(frozen=True)
class CallArguments:
    """The arguments of a forward pass: tensors of rows, with their masks, and values that are the same for all rows."""

    nest: Any
    """The arguments, with `ROWS` and `SHARED` in place of tensors."""

    masked: tuple[bool, ...]
    """Which of the tensors have a Keras mask."""

    rows: tuple[Any, ...]
    """The tensors `[rows, ...]`, and then their masks. A scalar is repeated for each row."""

    losses: bool = True
    """Whether losses that layers add are collected."""

    calls: RunningCalls = field(default_factory=RunningCalls)
    """The calls that surround the forward pass."""

    @classmethod
    def of(cls, args: Any, kwargs: Any, losses: bool = True) -> CallArguments:
        nest = tf.nest.map_structure(
            lambda leaf: tf.convert_to_tensor(leaf) if isinstance(leaf, tf.Variable | keras.Variable) else leaf,
            (args, kwargs),
        )
        tensors = [leaf for leaf in tf.nest.flatten(nest) if tf.is_tensor(leaf)]
        masks = [mask_of(leaf) for leaf in tensors]
        many = next((leaf for leaf in tensors if leaf.shape.rank != 0), None)
        if many is not None:
            count = many.shape[0] or count_rows(many)
            tensors = [tf.repeat(leaf, count) if leaf.shape.rank == 0 else leaf for leaf in tensors]
        return cls(
            tf.nest.map_structure(
                lambda leaf: (ROWS if leaf.shape.rank != 0 else SHARED) if tf.is_tensor(leaf) else leaf, nest
            ),
            tuple(mask is not None for mask in masks),
            (*tensors, *(mask for mask in masks if mask is not None)),
            losses,
        )

    def has_rows(self, batch: int | None) -> bool:
        """Whether the tensors have a common axis of rows, by static shapes. Beside unknown lengths, only that of the batch."""
        given = tf.nest.flatten(self.nest)
        if all(leaf is not ROWS for leaf in given) or any(leaf.shape.rank is None for leaf in self.rows):
            return False
        lengths = {leaf.shape[0] for leaf in self.rows[: len(self.masked)]}
        return lengths != {0} and (len(lengths) == 1 or (batch is not None and lengths == {None, batch}))

    @property
    def count(self) -> int | None:
        """The number of rows, `None` if it is unknown."""
        return next((leaf.shape[0] for leaf in self.rows if leaf.shape[0] is not None), None)

    def with_equal_scalars(self, rows: Sequence[Any]) -> list[Any]:
        """Return rows in which each scalar is one."""
        kinds = [leaf for leaf in tf.nest.flatten(self.nest) if leaf is ROWS or leaf is SHARED]
        tensors = [tf.ones_like(row) if kind is SHARED else row for kind, row in zip(kinds, rows)]
        return [*tensors, *rows[len(kinds) :]]

    def with_rows(self, rows: Sequence[Any]) -> Any:
        """Return the arguments, with other rows."""
        count = len(self.masked)
        for leaf, mask in zip((leaf for leaf, masked in zip(rows, self.masked) if masked), rows[count:]):
            setattr(leaf, MASK, mask)
        left = iter(rows[:count])
        return tf.nest.map_structure(
            lambda leaf: next(left) if leaf is ROWS else next(left)[0] if leaf is SHARED else leaf, self.nest
        )


@dataclass(frozen=True)
class Activation:
    """A softmax or sigmoid at the end of a model. Crossentropies of Keras use its input, which does not saturate."""

    name: str
    """The type of its op."""

    has_logits: bool
    """Whether Keras has attached the input to the output, which eager code needs."""

    def __call__(self, logits: Any) -> Any:
        output = tf.nn.softmax(logits) if self.name == "Softmax" else tf.sigmoid(logits)
        if self.has_logits:
            setattr(output, LOGITS, logits)
        return output

    @classmethod
    def of(cls, output: Any) -> Activation | None:
        """Return the activation that computes an output of a graph, or `None`."""
        if not isinstance(output, tf.Tensor) or output.op.type not in ("Softmax", "Sigmoid"):
            return None
        logits = attached_tensors(output).get(LOGITS)
        if logits is not None and logits is not output.op.inputs[0]:
            return None
        return cls(output.op.type, logits is not None)


@dataclass(frozen=True)
class ResultSpec:
    """A description of the results of a forward pass, with which results of devices are combined."""

    nest: Any
    """The outputs, with `ROWS` in place of tensors."""

    shapes: tuple[Any, ...]
    """Static shapes of the tensors."""

    attached: tuple[tuple[str, ...], ...]
    """For each of the tensors, the attributes of `attached_tensors`."""

    activations: tuple[Activation | None, ...]
    """For each of the tensors, the activation to apply to the tensor that is passed in its place."""

    losses: tuple[tuple[Any, bool, Any], ...]
    """For each loss, the layer that adds it, whether it depends on the rows, and its dtype."""

    updated: tuple[int, ...]
    """Indices of the variables that got new values."""

    @property
    def row_tensors(self) -> int:
        """The number of outputs and of their attached tensors."""
        return len(self.attached) + sum(map(len, self.attached))

    def unpacked(self, results: Sequence[Any]) -> tuple[Any, list[Any], list[Any]]:
        """Return outputs with their attached tensors, losses, and new values, from tensors in this order."""
        outputs, left = list(results[: len(self.attached)]), list(results[len(self.attached) :])
        outputs = [leaf if op is None else op(leaf) for op, leaf in zip(self.activations, outputs)]
        for output, names in zip(outputs, self.attached):
            for name in names:
                setattr(output, name, left.pop(0))
        tensors = iter(outputs)
        nest = tf.nest.map_structure(lambda leaf: next(tensors) if leaf is ROWS else leaf, self.nest)
        return nest, left[: len(self.losses)], left[len(self.losses) :]


class CallScope(keras.StatelessScope):
    """A scope that collects losses and new values of the calls in it."""

    def __init__(self, overrides: Sequence[tuple[Any, Any]] = (), losses: bool = True):
        """`overrides`: variables and their values in the scope. `losses`: whether losses are collected, or dropped."""
        super().__init__(overrides, collect_losses=losses)
        self.changed = list[Any]()
        self.draws = Counter[int]()
        """The number of draws from each seed, by identity."""
        self.added = list[tuple[Any, Any, bool]]()
        """Losses, each with the layer that adds it, and whether it may depend on the rows."""

    def inner(self) -> CallScope:
        """Return a scope with the same values, for a function in the call."""
        scope = CallScope((), self.collect_losses)
        scope.state_mapping |= self.state_mapping
        scope.draws += self.draws
        return scope

    def __enter__(self) -> Any:
        self._token = _scope.set(self)
        self._graph = tf.compat.v1.get_default_graph()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        _scope.reset(self._token)
        super().__exit__(*error)

    def get_current_value(self, variable: Any) -> Any:
        """Return the value of a variable in the scope."""
        value, draws = super().get_current_value(variable), self.draws[id(variable)]
        return value if value is None or not draws else value + tf.constant([0, draws], value.dtype)

    def add_update(self, update: Any) -> None:
        """Set the value of a variable in the scope."""
        variable, value = update
        self.changed.append(variable)
        if is_seed(variable):  # counted, because an inner graph could not pass the new value on
            _check_no_loop(variable, self._graph)
            self.draws[id(variable)] += 1
            return
        if tf.compat.v1.get_default_graph() is not self._graph:
            raise failure(
                f"{variable.path} gets a new value in a loop, a branch or a tf.function inside a layer, which cannot pass "
                "it on to the variable; change the variable outside of them"
            )
        value = tf.stop_gradient(value)
        if variable.trainable:  # gradients of later reads go to the variable
            now = tf.cast(variable.value, value.dtype)
            value += now - tf.stop_gradient(now)
        super().add_update((variable, value))


def _check_no_loop(seed: Any, outermost: Any) -> None:
    graph = tf.compat.v1.get_default_graph()
    while graph is not outermost:
        if type(graph).__name__ == "WhileBodyFuncGraph":
            raise failure(
                f"a layer draws from {seed.path} in a loop, which would draw the same numbers in each step; draw them before "
                "the loop"
            )
        graph = graph.outer_graph


def current_scope() -> Any:
    """Return the innermost `CallScope` in this thread, or `None`."""
    return _scope.get(None)


def add_loss(layer: Any, loss: Any) -> None:
    """Add losses of a layer to the innermost `CallScope`, instead of to the layer."""
    scope = current_scope()
    if scope is None:  # in a direct call in another thread
        keras.layers.Layer.add_loss(layer, loss)
    elif scope.collect_losses:
        scope.added += [(layer, each, True) for each in tf.nest.flatten(loss)]


def call_stateless(
    call: Any, scope: Any, variables: Sequence[Any], rows: Sequence[Any]
) -> tuple[list[Any], list[Any], ResultSpec]:
    """Call a model or layer on some rows, in a `CallScope`.

    Return outputs and their attached tensors; losses that layers add and new values of `variables`; a description of these.
    """
    before, known = [*map(scope.get_current_value, variables)], {*scope.state_mapping, *map(id, variables)}
    with scope:
        outputs = call()
    after = [*map(scope.get_current_value, variables)]
    for variable in scope.changed:
        if id(variable) not in known:
            raise failure(
                f"a layer changes {variable.path}, which is none of the model's variables. Neither are those of metrics and "
                "of keras.random without a seed: use a keras.random.SeedGenerator of the layer, and pass metrics to compile"
            )
    for leaf in tf.nest.flatten(outputs):
        attributes = [] if tf.is_tensor(leaf) else tf.nest.flatten([*getattr(leaf, "__dict__", {}).values()])
        if any(isinstance(each, tf.Tensor) and not hasattr(each, "numpy") for each in attributes):
            raise failure(
                f"a layer returns an object of {type(leaf).__name__}, whose tensors cannot be gathered from several devices; "
                "return them in a tuple, a named tuple or a dict"
            )
    flat = [leaf for leaf in tf.nest.flatten(outputs) if tf.is_tensor(leaf)]
    attached, activations = [attached_tensors(leaf) for leaf in flat], [*map(Activation.of, flat)]
    for i, activation in enumerate(activations):
        if activation is not None:
            attached[i].pop(LOGITS, None)
            flat[i] = flat[i].op.inputs[0]
    updates = {i: new for i, (old, new) in enumerate(zip(before, after)) if new is not old}
    spec = ResultSpec(
        tf.nest.map_structure(lambda leaf: ROWS if tf.is_tensor(leaf) else leaf, outputs),
        tuple(leaf.shape for leaf in flat),
        tuple(map(tuple, attached)),
        tuple(activations),
        tuple((layer, may_depend and depends_on(loss, rows), loss.dtype) for layer, loss, may_depend in scope.added),
        tuple(updates),
    )
    losses = [loss for _, loss, _ in scope.added]
    return [*flat, *(tensor for each in attached for tensor in each.values())], [*losses, *updates.values()], spec
