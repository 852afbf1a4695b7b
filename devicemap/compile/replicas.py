"""The replicas that slots capture instead of variables and tensors on other devices.

A function that reads a variable of another device fetches it at each read, and in each step of a loop. So a call creates a
replica on the device of the slot, a temporary variable. Variables in `in_place` and state that `fn` writes have no replicas,
nor have variables in graphs that XLA or pfor rewrites, because both lack assignments. Seeds that a call advances differ
between slots. A captured tensor never changes. Each device gets it once for all calls, or once per call if gradients go
through it. Values are sent along trees, and another host gets a value once.

TensorFlow has no gradients of loops that create variables for inner loops. So if `fn` has a loop, calls of a map inside of
`tf.function`s share its replicas. If several threads call such functions while a variable changes, one may read an old value.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from weakref import WeakValueDictionary

import tensorflow as tf

from devicemap._tensorflow.functions import temporary_variable
from devicemap._tensorflow.gradient_links import Lookups, fan_out, gradient_redirector
from devicemap._tensorflow.gradients import can_redirect_gradients
from devicemap.compile.audit import Treatment, variable_of
from devicemap.compile.call_spec import CallSpec, Engine
from devicemap.compile.lookups import lookups_in
from devicemap.compile.trace import Traced
from devicemap.compile.transfers import send_along_tree, send_in_buckets
from devicemap.devices import is_out_of_memory, kind_of
from devicemap.errors import brief, function_error
from devicemap.events import short_name
from devicemap.hosts import host_of

_IN_HOST_MEMORY = tf.int32, tf.string
"""Dtypes of variables that TensorFlow keeps on a CPU, also if a program has GPUs."""


class Replicas:
    """The captures of each slot in the graphs of one kind. Keys are `Tensor.ref()` of the captures that are replaced."""

    def __init__(self, traced: Traced, slots: Sequence[str], spec: CallSpec):
        self._slots = tuple(slots)
        self._differentiable = spec.differentiable
        self._redirect = gradient_redirector()
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
            elif {capture.device} == {*slots} or _is_in_reach(variable, slots):
                continue
            elif treatment is Treatment.READ and variable is not None:
                read[capture.ref()] = variable
            else:
                stay.append(capture.device)
        # Ops that request a device, or need the shape of a variable, take no replica. Gradients must reach the variable.
        audit, redirects = traced.audit, can_redirect_gradients() or not spec.differentiable
        copied = redirects and not (spec.engine is Engine.REWRITTEN or audit.pinned or audit.gathers_nd)
        if not copied:
            stay += [variable.device for variable in read.values()]
        # The placer puts all resources of a loop on one device if the loop keeps intermediate results for its gradient. Then
        # no variable is copied, and the seeds of all slots are on that device (test_dropout_beside_a_counter_in_a_loop).
        self._loops = audit.loops
        self._loop_home = stay[0] if stay and spec.differentiable and self._loops else None
        self._copied = read if copied and not self._loop_home else {}
        self._lookups = lookups_in(traced.concrete, traced.seeds) if spec.differentiable else {}
        self.are_local = not stay
        """Whether every resource that a slot uses is on its device."""
        self._tensor_copies: list[dict[Any, Any]] = [{} for _ in slots]
        with tf.init_scope():
            for key, tensor in ({} if spec.differentiable else self._tensors).items():
                away = [index for index, slot in enumerate(slots) if home_of(tensor) != slot]
                for near, _, indices in self._send_to_hosts(tensor, home_of(tensor), away):
                    for index in indices:
                        self._tensor_copies[index][key] = _copy_on_device(tensor, near, slots[index])
        self._persistent: list[dict[Any, Any]] = [{} for _ in slots]
        # Variable creators and strategies of the user apply to this thread (test_copies_are_not_the_users_variables).
        with ThreadPoolExecutor(1) as other_thread:
            if spec.is_inside and self._loops:
                other_thread.submit(self._create_persistent).result()
            if self._seeds:
                # Its op RngReadAndSkip is the only one that reads and advances a state in one step.
                self._draws = other_thread.submit(tf.random.Generator.from_seed, 0).result()

    def _create_persistent(self) -> None:
        """Create the replicas that calls inside of a `tf.function` share."""
        for index, replicas in enumerate(self._persistent):
            for key, variable in self.replicated(index).items():
                with tf.device(self._device_of(key, index)):
                    replicas[key] = _uninitialized_like(variable)

    def replicated(self, slot: int) -> dict[Any, Any]:
        """Return the variables of which a slot gets a replica, by key."""
        return {k: v for k, v in self._copied.items() if v.device != self._slots[slot]} | self._seeds

    def values(self, slots: Iterable[int]) -> dict[Any, Any]:
        """Return a value or a handle by key and slot. Each original is read once, on its device."""
        wanted = [*slots]
        found: dict[Any, Any] = {}
        sent: dict[Any, tuple[Any, str, Lookups]] = {}
        for key, variable in self._copied.items():
            away = [index for index in wanted if variable.device != self._slots[index]]
            near = [index for index in wanted if variable.device == self._slots[index]]
            # With separate handles, gradients are added on the variable's device. A loop cannot pass such handles to its
            # gradient.
            apart = self._differentiable and not self._loops and away and near and variable.dtype.is_floating
            kind = self._kind(key)
            with tf.device(variable.device):
                count = 1 + len(near)
                handles = fan_out(variable.handle, count, kind) if apart else [variable.handle] * count
                value = tf.raw_ops.ReadVariableOp(resource=handles[0], dtype=variable.dtype)
                if self._loops and away and kind in (Lookups.SHARED, Lookups.DISTINCT):
                    value, *others = fan_out(value, count, kind)
                    handles[1:] = [self._redirect(variable.handle, other) for other in others]
            found[key] = dict(zip(near, handles[1:]))
            if away:
                sent[key] = value, variable.device, kind

        def send(value: Any, home: str, kind: Lookups) -> dict[int, Any]:
            return self._send_to_slots(value, home, kind, [index for index in wanted if self._slots[index] != home])

        for key, copies in send_in_buckets(sent, self._slots, send).items():
            found[key] |= copies
        if self._differentiable:
            found |= {
                key: self._send_to_slots(tensor, home_of(tensor), self._kind(key), wanted)
                for key, tensor in self._tensors.items()
            }
        for key, variable in self._seeds.items():
            with tf.device(variable.device):
                found[key] = self._split_seeds(variable)
        return found

    def create(self, slot: int, values: dict[Any, Any]) -> tuple[dict[Any, Any], list[Any]]:
        """Create the replicas of a slot, on the current device, with the values of `values`.

        Returns:
            The captures of the slot, by key, and in a graph the ops for which the slot must wait.
        """
        captures, assignments = {**self._tensor_copies[slot]}, []
        if self._differentiable:
            captures |= {key: values[key][slot] for key in (*self._tensors, *self._copied)}
        for key, variable in self.replicated(slot).items():
            value = values[key][slot]
            with tf.device(self._device_of(key, slot)):
                kept = self._persistent[slot].get(key)
                captures[key] = temporary_variable(variable) if kept is None else kept.handle
                assigned = tf.raw_ops.AssignVariableOp(resource=captures[key], value=value)
            if assigned is None:  # in eager code
                continue
            if self._differentiable and key in self._copied:
                with tf.control_dependencies([assigned]):
                    captures[key] = self._redirect(captures[key], value)
            else:
                assignments.append(assigned)
        return captures, assignments

    def with_handles(self, slot: int, handles: Sequence[Any]) -> dict[Any, Any]:
        """Return the captures of a slot, by key, with these handles of its replicas, in the order of `replicated`."""
        return self._tensor_copies[slot] | dict(zip(self.replicated(slot), handles))

    def _device_of(self, key: Any, slot: int) -> str:
        return self._loop_home if self._loop_home and key in self._seeds else self._slots[slot]

    def _kind(self, key: Any) -> Lookups:
        return self._lookups.get(key, Lookups.NONE)

    def _send_to_slots(self, value: Any, home: str, kind: Lookups, indices: Sequence[int]) -> dict[int, Any]:
        """Return a value of the device `home` on each of these slots.

        The tree begins at the slot of `home`, so that variables on different devices use different slots in between.
        """
        first, count = self._slots.index(home) if home in self._slots else 0, len(self._slots)
        indices = sorted(indices, key=lambda index: (index - first) % count)
        return {
            there[i]: arrived
            for near, device, there in self._send_to_hosts(value, home, indices, kind)
            for i, arrived in send_along_tree(near, device, kind, [self._slots[index] for index in there]).items()
        }

    def _send_to_hosts(
        self, value: Any, home: str, indices: Sequence[int], kind: Lookups = Lookups.NONE
    ) -> list[tuple[Any, str, list[int]]]:
        """Copy a value of the device `home` to each host of these slots. Return copies, their devices, and the slots there."""
        hosts: dict[str, list[int]] = {}
        for index in indices:
            hosts.setdefault(host_of(self._slots[index]), []).append(index)
        with tf.device(home):
            values = fan_out(value, len(hosts), kind) if hosts else []
        found = []
        for (host, there), near in zip(hosts.items(), values):
            device = home
            if host != host_of(home):
                device = f"{host}/device:CPU:0"
                with tf.device(device):
                    near = tf.identity(near)
            found.append((near, device, there))
        return found

    def _split_seeds(self, variable: Any) -> Any:
        """Return unique seeds `[slots, 2]` for the slots, and advance the original by one step."""
        seed = variable.read_value()
        with tf.control_dependencies([seed]):
            step = tf.constant([0, 1], variable.dtype)
            advanced = tf.raw_ops.AssignAddVariableOp(resource=variable.handle, value=step)
        draws = self._draws.uniform_full_int([len(self._slots)], tf.int64)
        with tf.control_dependencies([] if advanced is None else [advanced]):
            folded = [tf.random.experimental.stateless_fold_in(tf.cast(seed, tf.int64), n) for n in tf.unstack(draws)]
            return _as_keras_seeds(tf.stack(folded), seed.dtype)


def _is_in_reach(variable: Any, slots: Sequence[str]) -> bool:
    """Return whether devices share a variable of their host, because accelerators have no kernels for its dtype."""
    if variable is None or variable.dtype not in _IN_HOST_MEMORY or kind_of(variable.device) != "CPU":
        return False
    return {*map(host_of, slots)} == {host_of(variable.device)} and any(kind_of(slot) != "CPU" for slot in slots)


@contextlib.contextmanager
def captures_fit(traced: Traced, name: str, *devices: str) -> Iterator[None]:
    """Return a context for copies of the captures of the function `name` to one of the devices.

    Raises:
        FunctionError: the device has no memory for the copies. It is also an instance of TensorFlow's class.
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
    """Return `count` Keras seeds, `[count, 2]`, far from each other, because layers count upwards from their seeds."""
    if count == 1:
        return seed[None]
    return _as_keras_seeds(tf.random.experimental.stateless_split(tf.cast(seed, tf.int64), count), seed.dtype)


def _as_keras_seeds(seeds: Any, dtype: Any) -> Any:
    # Keras takes the low 31 or 32 bits of each number, and counts upwards in the second.
    return tf.cast(tf.abs(seeds) % 2**31, dtype)


_on_devices: WeakValueDictionary[tuple[int, str], Any] = WeakValueDictionary()
"""Copies of tensors by identity of the original and device. The maps of a copy keep the original alive."""

_copying = threading.Lock()


def _copy_on_device(original: Any, near: Any, device: str) -> Any:
    """Return the copy of a tensor that all maps share on a device, and create it from the copy `near` if there is none."""
    with _copying, tf.device(device):
        copy = _on_devices.get((id(original), device))
        if copy is None:
            copy = _on_devices[id(original), device] = tf.identity(near)
        return copy


def _uninitialized_like(variable: Any) -> Any:
    """Return a variable with the shape of the original, which gradients of loops read, and without its value."""
    try:
        nothing = tf.zeros(variable.shape, variable.dtype)
    except (TypeError, ValueError):  # no zeros of this dtype, or of an unknown shape
        nothing = variable.read_value()
    return tf.Variable(nothing, trainable=False, dtype=variable.dtype, shape=variable.shape)


def home_of(tensor: Any) -> str:
    """Return the device whose memory holds a tensor. `tensor.device` may be the device of the op that returned it."""
    home = None if tensor.dtype in (tf.resource, tf.variant) else getattr(tensor, "backing_device", None)
    return str(home or tensor.device)
