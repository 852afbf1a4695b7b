"""Captured variables -> a copy per device, refreshed once per call.

A traced function reads a captured variable where the variable lives, so every tower would fetch it again for each read,
in a loop for each step. Instead each tower captures a copy on its own device, which the call refreshes first. What a
function writes is not copied, except for seeds that advance with each call: those must differ between towers.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import tensorflow as tf

from devicemap.auditing import Treatment, variable_of
from devicemap.tracing import Traced


class Mirrors:
    """What the tower on each device captures in place of the original variables.

    A copy holds a value from the start of some call that is running. Two threads that call at once while the original
    changes may see either value, as they would without copies.
    """

    def __init__(self, traced: Traced, devices: Sequence[str], copy_read: bool):
        """`copy_read=False` leaves variables that are only read where they are, so that gradients reach them."""
        concrete = traced.concrete
        self._captures = list(concrete.captured_inputs)
        self._read: dict[int, Any] = {}
        self._seeds: dict[int, Any] = {}
        for i, (handle, treatment) in enumerate(zip(self._captures, traced.audit.treatments)):
            if treatment is Treatment.SEED:
                self._seeds[i] = variable_of(concrete, handle)
            elif treatment is Treatment.READ and copy_read:
                variable = variable_of(concrete, handle)
                if variable is not None and set(devices) != {variable.device}:
                    self._read[i] = variable
        self._copies: list[dict[int, Any]] = []
        with tf.init_scope():
            now = {i: variable.read_value() for i, variable in (self._seeds | self._read).items()}
            for device in devices:
                needed = self._seeds | {i: v for i, v in self._read.items() if v.device != device}
                with tf.device(device):
                    self._copies.append({i: _copy(variable, now[i]) for i, variable in needed.items()})
            if self._seeds:
                # RngReadAndSkip, which this uses, is the one op that reads and advances a state in one step.
                self._draws = tf.random.Generator.from_seed(0)

    def values(self) -> dict[int, Any]:
        """What the copies are to hold, read once where each original lives; seeds of all towers as `[devices, 2]`."""
        found = {}
        for i, variable in self._read.items():
            with tf.device(variable.device):
                found[i] = variable.read_value()
        for i, variable in self._seeds.items():
            with tf.device(variable.device):
                found[i] = self._seeds_of_towers(variable)
        return found

    def refresh(self, tower: int, values: dict[int, Any]) -> list[Any]:
        """Assign the copies of one tower, on its device; returns the ops to wait for (nothing in eager code)."""
        ops = []
        for i, copy in self._copies[tower].items():
            value = values[i][tower] if i in self._seeds else values[i]
            ops.append(tf.raw_ops.AssignVariableOp(resource=copy.handle, value=value))
        return [op for op in ops if op is not None]

    @contextlib.contextmanager
    def captured_by(self, tower: int, concrete: Any) -> Iterator[None]:
        """While it lasts, calls of `concrete` capture the copies of one tower. Not for use by two threads at once."""
        copies = self._copies[tower]
        own = concrete.captured_inputs
        concrete.set_external_captures([copies[i].handle if i in copies else own[i] for i in range(len(own))])
        try:
            yield
        finally:
            concrete.set_external_captures(own)

    def _seeds_of_towers(self, variable: Any) -> Any:
        """Seeds `[devices, 2]` that no other tower or call has, and the original moved on by one step."""
        seed = variable.read_value()
        with tf.control_dependencies([seed]):
            step = tf.constant([0, 1], variable.dtype)
            advanced = tf.raw_ops.AssignAddVariableOp(resource=variable.handle, value=step)
        draws = self._draws.uniform_full_int([len(self._copies)], tf.int64)
        with tf.control_dependencies([] if advanced is None else [advanced]):
            folded = [
                tf.random.experimental.stateless_fold_in(tf.cast(seed, tf.int64), draw) for draw in tf.unstack(draws)
            ]
        # Keras takes the low 31 or 32 bits of each number, and counts upwards in the second
        return tf.cast(tf.abs(tf.stack(folded)) % 2**31, variable.dtype)


def _copy(variable: Any, value: Any) -> Any:
    return tf.Variable(value, trainable=False, dtype=variable.dtype, shape=variable.shape)
