"""What each slot captures instead of variables and tensors on other devices.

A function that reads a variable of another device fetches it at each read, in a loop in each step. A replica on the
device of the slot is assigned once per call. One rule, `copies_variables`, says which graphs use replicas. Variables in
`in_place` have none, nor has state that `fn` writes. Seeds that a call advances differ between slots. A captured tensor
never changes: each device gets it once for all calls, or once per call if gradients go through it. Another host gets a
value once.

All maps share the replicas on a device. A call in chunks has its own, because it sees one value until it ends. Two
threads that call at once while a variable changes may see either value.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any
from weakref import WeakValueDictionary

import tensorflow as tf

from devicemap._tensorflow.gradients import fanned_out, holds_gradients, redirect_gradient
from devicemap.compile.audit import Treatment, variable_of
from devicemap.compile.call_spec import CallSpec, Engine
from devicemap.compile.trace import Traced
from devicemap.data.rows import home_of
from devicemap.devices import is_out_of_memory
from devicemap.errors import brief, function_error
from devicemap.events import short_name
from devicemap.hosts import host_of, is_remote


def copies_variables(spec: CallSpec, traced: Traced, slots: Sequence[str]) -> bool:
    """Return whether slots read replicas of captured variables.

    They do if a variable may be sent more than once per call otherwise: to chunks, loops, gathers and the backward pass
    of an eager call; and to what XLA compiles, and other hosts. They cannot if XLA or the vectoriser rewrite the graph
    with a function around it, because both lack assignments; or if an op of `fn` names a device of its own.
    """
    audit = traced.audit
    if spec.engine is Engine.REWRITTEN or audit.pinned or (spec.differentiable and not holds_gradients()):
        return False
    again = audit.loops or audit.reads_again or spec.engine is Engine.CHUNKS
    backward = spec.differentiable and spec.engine is Engine.GRAPH
    far = any(map(is_remote, [*slots, *(capture.device for capture in traced.captures)]))
    return again or backward or far or traced.with_xla is not None


class Replicas:
    """What each slot captures in the graphs of one kind. Keys are `Tensor.ref()` of the captures that are replaced."""

    def __init__(self, traced: Traced, slots: Sequence[str], spec: CallSpec):
        self._slots = tuple(slots)
        self._differentiable = spec.differentiable
        self._shared = spec.engine is not Engine.CHUNKS
        self._seeds: dict[Any, Any] = {}
        self._tensors: dict[Any, Any] = {}
        read: dict[Any, Any] = {}
        stay: list[str] = []
        for capture, treatment in zip(traced.captures, traced.audit.treatments):
            variable = variable_of(traced.concrete, capture)
            if treatment is None:
                if capture.dtype != tf.variant:
                    self._tensors[capture.ref()] = capture
            elif treatment is Treatment.SEED:
                self._seeds[capture.ref()] = variable
            elif {capture.device} == {*slots}:
                continue
            elif treatment is Treatment.READ and variable is not None:
                read[capture.ref()] = variable
            else:
                stay.append(capture.device)
        copied = copies_variables(spec, traced, slots)
        if not copied:
            stay += [variable.device for variable in read.values()]
        # The placer puts all resources of a loop on one device once the loop keeps intermediate results for its
        # gradient. Then no variable is copied, and the seeds of all slots are there, too
        # (test_dropout_beside_a_counter_in_a_loop).
        self._loop_home = stay[0] if stay and spec.differentiable and traced.audit.loops else None
        self._copied = read if copied and not self._loop_home else {}
        self._fanned_out = {}
        if spec.differentiable and not self._copied and not traced.audit.loops and len(slots) > 1:
            self._fanned_out = {key: variable for key, variable in read.items() if variable.dtype.is_floating}
        self.are_local = not stay
        """Whether every resource that a slot uses is on its device."""
        self._replicas: list[dict[Any, Any]] = [{} for _ in slots]
        self._kept: list[dict[Any, Any]] = [{} for _ in slots]
        # Variable creators and strategies of the user apply to this thread (test_copies_are_not_the_users_variables).
        with ThreadPoolExecutor(1) as other_thread:
            other_thread.submit(self._create).result()

    def _create(self) -> None:
        for replicas, slot in zip(self._replicas, self._slots):
            with tf.device(self._loop_home or slot):
                replicas.update({key: _replica(variable) for key, variable in self._seeds.items()})
            with tf.device(slot):
                for key, variable in self._copied.items():
                    if variable.device != slot:
                        create = partial(_replica, variable)
                        replicas[key] = _shared(variable, slot, create) if self._shared else create()
        if not self._differentiable:
            for key, tensor in self._tensors.items():
                away = [number for number, slot in enumerate(self._slots) if home_of(tensor) != slot]
                for number, near in self._for_slots(tensor, away, host_of(home_of(tensor))).items():
                    with tf.device(self._slots[number]):
                        self._kept[number][key] = _shared(tensor, self._slots[number], partial(tf.identity, near))
        if self._seeds:
            # RngReadAndSkip, which this uses, is the one op that reads and advances a state in one step.
            self._draws = tf.random.Generator.from_seed(0)

    def values(self, slots: Iterable[int]) -> dict[Any, Any]:
        """Return a value for each of these slots, by key; each original is read once, where it is."""
        wanted = [*slots]
        found: dict[Any, Any] = {}
        for key, variable in self._copied.items():
            with tf.device(variable.device):
                lacking = [number for number in wanted if key in self._replicas[number]]
                found[key] = self._for_slots(variable.read_value(), lacking, host_of(variable.device))
        for key, variable in self._fanned_out.items():
            with tf.device(variable.device):
                # A branch around a single user would have to pass the copy to its gradient, and cannot pass resources
                # (test_a_tape_around_a_loop_or_branch_that_calls_a_map).
                found[key] = fanned_out(variable.handle, len(wanted)) if len(wanted) > 1 else [variable.handle]
        for key, variable in self._seeds.items():
            with tf.device(variable.device):
                found[key] = self._seeds_of_slots(variable)
        return found

    def assign(self, slot: int, values: dict[Any, Any]) -> tuple[dict[Any, Any], list[Any]]:
        """Assign the replicas of a slot, on the current device.

        Returns:
            What the slot captures, by key, and in a graph the ops that it waits for.
        """
        captures, assignments = self.captures(slot), []
        if self._differentiable:
            captures |= {key: tf.identity(tensor) for key, tensor in self._tensors.items()}
            captures |= {key: values[key][slot] for key in self._fanned_out}
        for key, replica in self._replicas[slot].items():
            value = values[key][slot]
            with tf.device(replica.device):
                assigned = tf.raw_ops.AssignVariableOp(resource=replica.handle, value=value)
            if assigned is not None:  # in a graph
                assignments.append(assigned)
                if self._differentiable and key in self._copied:
                    captures[key] = redirect_gradient(replica.handle, value)
        return captures, assignments

    def captures(self, slot: int) -> dict[Any, Any]:
        """Return what a slot captures, by key: handles, and tensors."""
        return self._kept[slot] | {key: replica.handle for key, replica in self._replicas[slot].items()}

    def _for_slots(self, value: Any, numbers: Sequence[int], home: str) -> dict[int, Any]:
        """Return a value, which is on the host `home`, for each of these slots; each other host gets it once."""
        hosts: dict[str, list[int]] = {}
        for number in numbers:
            hosts.setdefault(host_of(self._slots[number]), []).append(number)
        near = hosts.pop(home, [])
        values = self._for_each(value, len(near) + len(hosts))
        found = dict(zip(near, values))
        for (host, there), arriving in zip(hosts.items(), values[len(near) :]):
            with tf.device(f"{host}/device:CPU:0"):
                found.update(zip(there, self._for_each(tf.identity(arriving), len(there))))
        return found

    def _for_each(self, value: Any, count: int) -> list[Any]:
        return fanned_out(value, count) if self._differentiable else [value] * count

    def _seeds_of_slots(self, variable: Any) -> Any:
        """Return seeds `[slots, 2]` that no other slot or call has, and advance the original by one step."""
        seed = variable.read_value()
        with tf.control_dependencies([seed]):
            step = tf.constant([0, 1], variable.dtype)
            advanced = tf.raw_ops.AssignAddVariableOp(resource=variable.handle, value=step)
        draws = self._draws.uniform_full_int([len(self._slots)], tf.int64)
        with tf.control_dependencies([] if advanced is None else [advanced]):
            folded = [tf.random.experimental.stateless_fold_in(tf.cast(seed, tf.int64), n) for n in tf.unstack(draws)]
            return _as_keras_seeds(tf.stack(folded), seed.dtype)


@contextlib.contextmanager
def captures_fit(traced: Traced, name: str, *devices: str) -> Iterator[None]:
    """Return a context that copies what the function `name` captures to one of the devices.

    Raises:
        FunctionError: it has no memory for that. An instance of TensorFlow's class, too.
    """
    try:
        yield
    except tf.errors.OpError as error:
        if not is_out_of_memory(error):
            raise
        copied = [
            capture if treatment is None else variable_of(traced.concrete, capture)
            for capture, treatment in zip(traced.captures, traced.audit.treatments)
            if treatment in (None, Treatment.READ)
        ]
        size = sum((value.shape.num_elements() or 0) * value.dtype.size for value in copied if value is not None)
        raise function_error(
            f"{name}: no memory for a copy of what fn captures, {size} bytes in all, on "
            f"{' or '.join(map(short_name, devices))}; with in_place=[...] variables stay where they are: {brief(error)}",
            error,
        ) from error


def split_seeds(seed: Any, count: int) -> Any:
    """Return `count` Keras seeds, `[count, 2]`, far from each other, as layers count upwards from theirs."""
    return _as_keras_seeds(tf.random.experimental.stateless_split(tf.cast(seed, tf.int64), count), seed.dtype)


def _as_keras_seeds(seeds: Any, dtype: Any) -> Any:
    # Keras takes the low 31 or 32 bits of each number, and counts upwards in the second.
    return tf.cast(tf.abs(seeds) % 2**31, dtype)


_on_devices: WeakValueDictionary[tuple[Any, ...], Any] = WeakValueDictionary()
"""Replicas of variables and tensors by device and identity of the original, which the same maps keep alive."""

_copying = threading.Lock()


def _shared(original: Any, device: str, create: Callable[[], Any]) -> Any:
    """Return the replica that all maps share on a device."""
    with _copying:
        key = id(original), device
        found = _on_devices.get(key)
        if found is None:
            found = _on_devices[key] = create()
        return found


def _replica(variable: Any) -> Any:
    """Return a variable without the value; its shape is right at any time, because gradients of loops read it."""
    try:
        nothing = tf.zeros(variable.shape, variable.dtype)
    except (TypeError, ValueError):  # no zeros of this dtype, or of an unknown shape
        nothing = variable.read_value()
    return tf.Variable(nothing, trainable=False, dtype=variable.dtype, shape=variable.shape)
