"""A Keras model called without side effects: what it is given, and what it gives besides outputs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import tensorflow as tf

from devicemap.base.structure import freeze
from devicemap.compile.lockstep import Lockstep

ROWS = object()
"""Stands for a tensor of rows."""


@dataclass(frozen=True)
class Given:
    """The arguments of a forward pass: tensors of rows, and what is the same for all rows."""

    structure: Any
    static: tuple[Any, ...]
    rows: tuple[Any, ...]

    @classmethod
    def of(cls, args: Any, kwargs: Any) -> Given:
        leaves = tf.nest.flatten((args, kwargs))
        return cls(
            tf.nest.map_structure(lambda _: None, (args, kwargs)),
            tuple(ROWS if tf.is_tensor(leaf) else leaf for leaf in leaves),
            tuple(leaf for leaf in leaves if tf.is_tensor(leaf)),
        )

    @property
    def key(self) -> Any:
        """Hashable: the same for what is to be traced once."""
        return freeze(self.structure), self.static

    def without_rows(self) -> Given:
        return replace(self, rows=())

    def with_rows(self, rows: Sequence[Any]) -> Any:
        """The arguments, with other rows."""
        left = iter(rows)
        leaves = [next(left) if leaf is ROWS else leaf for leaf in self.static]
        return tf.nest.pack_sequence_as(self.structure, leaves)


@dataclass(frozen=True)
class Passed:
    """What one forward pass gives besides rows, and how that of devices becomes one."""

    outputs: Any
    """The structure of the model's outputs; leaves are their numbers."""

    masked: tuple[bool, ...]
    """Which outputs have a Keras mask."""

    losses: int
    """How many scalars `add_loss` got."""

    updated: tuple[int, ...]
    """Which of the model's non-trainable variables got new values."""


def collecting(held: Sequence[tuple[Any, Any]] = ()) -> Any:
    """A scope in which variables have these values, or are read as they are, and losses and new values are collected.

    Seeds of random numbers that are read do advance, as each device has to draw others.
    """
    import keras

    class Scope(keras.StatelessScope):
        def add_update(self, update: Any) -> None:
            variable, value = update
            if is_seed(variable) and not held:
                variable.value.assign(tf.cast(value, variable.value.dtype))
            else:
                super().add_update(update)

    return Scope(held, collect_losses=True)


def is_seed(variable: Any) -> bool:
    """Whether it is the state of a `keras.random.SeedGenerator`."""
    return variable.path.rpartition("/")[2] == "seed_generator_state"


def depends_on(tensor: Any, sources: Sequence[Any]) -> bool:
    """Whether a tensor of a graph is computed from one of these."""
    looked_at, left = set(), [tensor]
    while left:
        each = left.pop()
        if any(each is source for source in sources):
            return True
        if id(each.op) not in looked_at:
            looked_at.add(id(each.op))
            left += each.op.inputs
    return False


@contextlib.contextmanager
def moments_of_all(layers: Sequence[Any], lockstep: Lockstep) -> Iterator[None]:
    """While it lasts, layers of batch normalization take mean and variance of the rows of all devices."""
    for layer in layers:
        vars(layer)["_moments"] = partial(_moments, layer, lockstep)
    try:
        yield
    finally:
        for layer in layers:
            del vars(layer)["_moments"]


def _moments(layer: Any, lockstep: Lockstep, inputs: Any, mask: Any) -> Any:
    mean, variance = type(layer)._moments(layer, inputs, mask)
    counted = tf.ones_like(inputs[..., :1]) if mask is None else tf.cast(mask, inputs.dtype)
    return lockstep.meet((mean, variance, tf.reduce_sum(counted)), lambda own: [_merged(own)] * len(own))


def _merged(own: Sequence[tuple[Any, Any, Any]]) -> tuple[Any, Any]:
    """Mean and variance of all, of those of parts of so many values (Chan, Golub and LeVeque, 1983)."""
    means, variances, counts = (tf.stack(each) for each in zip(*own))
    shares = (counts / tf.reduce_sum(counts))[:, None]
    mean = tf.reduce_sum(means * shares, 0)
    return mean, tf.reduce_sum((variances + tf.square(means - mean)) * shares, 0)
