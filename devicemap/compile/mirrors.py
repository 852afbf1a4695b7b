"""Captured variables and tensors -> their values on each device, brought there once per call.

A traced function reads a captured variable where the variable lives, so every device would fetch it again for each read,
in a loop for each step. Instead each device captures a copy of its own, which the call assigns first. What a
function writes is not copied, except for seeds that advance with each call: those must differ between devices. To another host
a value goes once, to its first CPU device, from which its devices have it.

A captured tensor never changes, so that each device gets it once for all calls; where gradients go through it, once per
call. Whether a variable has changed since the last call cannot be told: TensorFlow counts no assignments, and whoever held
its buffer to compare would make each update copy all of it.

All maps share the copies on a device, and drop them with the last map. A job in chunks has its own of variables: it is to see
one value to its end, whatever is called meanwhile. Graphs whose gradients do not go through them may make theirs in each run.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any
from weakref import WeakValueDictionary

import tensorflow as tf

from devicemap._tensorflow.functions import own_variable
from devicemap._tensorflow.gradients import fanned_out
from devicemap.base.hosts import host_of
from devicemap.compile.audit import Treatment, variable_of
from devicemap.compile.trace import Traced
from devicemap.data.rows import home_of


class Mirrors:
    """What each place captures in place of the original variables.

    A copy holds a value from the start of some call that is running. Two threads that call at once while the original
    changes may see either value, as they would without copies.
    """

    def __init__(
        self,
        traced: Traced,
        places: Sequence[str],
        differentiable: bool,
        in_place: bool = False,
        shared: bool = True,
        of_run: bool = False,
    ):
        """Where they are to be `differentiable`, gradients go from what the places hold to the originals.

        `in_place`: variables that are read stay where they are. `shared`: whether their copies are those of other maps, too.
        `of_run`: whether each run of a graph makes copies for itself, which go with it.
        """
        concrete = traced.concrete
        self._differentiable = differentiable
        self._shared = shared
        self._of_run = of_run
        self._read: dict[int, Any] = {}
        self._seeds: dict[int, Any] = {}
        for i, (handle, treatment) in enumerate(zip(traced.captures, traced.audit.treatments)):
            variable = variable_of(concrete, handle)
            if treatment is Treatment.SEED:
                self._seeds[i] = variable
            elif treatment is Treatment.READ and variable is not None and {variable.device} != {*places}:
                self._read[i] = variable
        self._places = tuple(places)
        self._seeds_on: str | None = None
        in_reach = dict(self._read)
        if in_place or traced.audit.pinned:  # what asks for another device reads a variable wherever it is, but no copy
            self._read = {}
        if differentiable and traced.audit.loops and (where := self._others_stay(traced.captures, places)):
            self._read = {}
            self._seeds_on = where
        # Gradients of a variable are added where it is, also where each device reads it there.
        alone = not differentiable or traced.audit.loops or len(places) < 2
        self._stays = (
            {} if alone else {i: v for i, v in in_reach.items() if i not in self._read and v.dtype.is_floating}
        )
        self._tensors = {
            i: tensor
            for i, (tensor, treatment) in enumerate(zip(traced.captures, traced.audit.treatments))
            if treatment is None and tensor.dtype != tf.variant
        }
        self._kept: list[dict[int, Any]] = [{} for _ in places]
        self._copies: list[dict[int, Any]] = []
        # In a thread of its own: what the user's tf.function or strategy does with variables that are created is not for these.
        with ThreadPoolExecutor(1) as other_thread:
            other_thread.submit(self._create, places).result()

    def _others_stay(self, captures: Sequence[Any], places: Sequence[str]) -> str | None:
        """Where the function uses resources where they are: variables that it writes, tables. `None`: it does not.

        A loop that hands on some of them and copies on another device besides gets one device for all from TensorFlow, once
        it keeps intermediate results for its gradient. Then variables that are read stay where they are, too, and the seeds
        of all places are there.
        """
        others = [
            handle.device
            for i, handle in enumerate(captures)
            if handle.dtype == tf.resource and i not in self._read and i not in self._seeds
        ]
        return next((device for device in others if {device} != {*places}), None)

    def _create(self, places: Sequence[str]) -> None:
        for place in places:
            with tf.device(self._seeds_on or place):
                copies = {i: _copy(variable) for i, variable in self._seeds.items()}
            with tf.device(place):
                for i, variable in self._read.items():
                    if variable.device != place:
                        copies[i] = None if self._of_run else self._copy_of(variable, place)
            self._copies.append(copies)
        if not self._differentiable:
            for i, tensor in self._tensors.items():
                away = [number for number, place in enumerate(places) if home_of(tensor) != place]
                for number, near in self._for_places(tensor, away, host_of(home_of(tensor))).items():
                    with tf.device(places[number]):
                        self._kept[number][i] = _shared(tensor, places[number], partial(tf.identity, near))
        if self._seeds:
            # RngReadAndSkip, which this uses, is the one op that reads and advances a state in one step.
            self._draws = tf.random.Generator.from_seed(0)

    def _copy_of(self, variable: Any, place: str) -> Any:
        copy = partial(_copy, variable)
        return _shared(variable, place, copy) if self._shared else copy()

    def values(self, places: Iterable[int] | None = None) -> dict[int, Any]:
        """What each of the places, or of all of them, is to hold, read once where each original lives."""
        wanted = range(len(self._places)) if places is None else [*places]
        found: dict[int, Any] = {}
        for i, variable in self._read.items():
            with tf.device(variable.device):
                value = variable.read_value()
                lacking = [number for number in wanted if i in self._copies[number]]
                found[i] = self._for_places(value, lacking, host_of(variable.device))
        for i, variable in self._stays.items():
            with tf.device(variable.device):
                found[i] = fanned_out(variable.handle, len(self._copies))
        for i, variable in self._seeds.items():
            with tf.device(variable.device):
                found[i] = self._seeds_of_places(variable)
        return found

    def assign(self, place: int, values: dict[int, Any]) -> tuple[dict[int, Any], dict[int, Any], list[Any]]:
        """Assign the copies of one place, on the device of the moment.

        Returns:
            Handles of the copies, and copies of tensors, by the index of the capture they replace; in a graph, those of the
            values that gradients go to, and the ops that the place has to wait for besides.
        """
        handles, held, before = dict(self._kept[place]), {}, []
        if self._differentiable:
            handles |= {i: tf.identity(tensor) for i, tensor in self._tensors.items()}
            handles |= {i: values[i][place] for i in self._stays if i in values}
        for i, copy in self._copies[place].items():
            value = values[i][place]
            if copy is None:
                handles[i] = own_variable(value)
                continue
            with tf.device(copy.device):
                assigned = tf.raw_ops.AssignVariableOp(resource=copy.handle, value=value)
                handles[i] = copy.handle
                if assigned is None:  # eager code
                    continue
                before.append(assigned)
                if self._differentiable and i in self._read:
                    held[i] = value
        return handles, held, before

    def captures(self, place: int) -> dict[int, Any]:
        """One place's copies as they are, by the index of the capture they replace: handles, and tensors."""
        return self._kept[place] | {i: copy.handle for i, copy in self._copies[place].items()}

    def _for_places(self, value: Any, numbers: Sequence[int], home: str) -> dict[int, Any]:
        """A value on the host `home` for each of these places: to another host it goes once, and its gradient comes so."""
        hosts: dict[str, list[int]] = {}
        for number in numbers:
            hosts.setdefault(host_of(self._places[number]), []).append(number)
        near = hosts.pop(home, [])
        values = self._fanned_out(value, len(near) + len(hosts))
        found = dict(zip(near, values))
        for (host, there), arriving in zip(hosts.items(), values[len(near) :]):
            with tf.device(f"{host}/device:CPU:0"):
                found.update(zip(there, self._fanned_out(tf.identity(arriving), len(there))))
        return found

    def _fanned_out(self, value: Any, count: int) -> list[Any]:
        return fanned_out(value, count) if self._differentiable else [value] * count

    def _seeds_of_places(self, variable: Any) -> Any:
        """Seeds `[places, 2]` that no other place or call has, and the original moved on by one step."""
        seed = variable.read_value()
        with tf.control_dependencies([seed]):
            step = tf.constant([0, 1], variable.dtype)
            advanced = tf.raw_ops.AssignAddVariableOp(resource=variable.handle, value=step)
        draws = self._draws.uniform_full_int([len(self._copies)], tf.int64)
        with tf.control_dependencies([] if advanced is None else [advanced]):
            return folded_seeds(seed, tf.unstack(draws))


def folded_seeds(seed: Any, numbers: Sequence[Any]) -> Any:
    """A Keras seed of its own for each int64 number: `[numbers, 2]`."""
    folded = [tf.random.experimental.stateless_fold_in(tf.cast(seed, tf.int64), number) for number in numbers]
    return _as_keras_seeds(tf.stack(folded), seed.dtype)


def split_seeds(seed: Any, count: int) -> Any:
    """So many Keras seeds, far from each other, as layers count upwards from theirs: `[count, 2]`."""
    return _as_keras_seeds(tf.random.experimental.stateless_split(tf.cast(seed, tf.int64), count), seed.dtype)


def _as_keras_seeds(seeds: Any, dtype: Any) -> Any:
    # Keras takes the low 31 or 32 bits of each number, and counts upwards in the second
    return tf.cast(tf.abs(seeds) % 2**31, dtype)


_on_devices: WeakValueDictionary[tuple[Any, ...], Any] = WeakValueDictionary()
"""What maps hold of variables and tensors on other devices, by the identity of these, which the same maps keep alive, and
the device."""

_copying = threading.Lock()


def _shared(original: Any, place: str, copy: Callable[[], Any]) -> Any:
    """The copy that all maps have of it on a device."""
    with _copying:
        key = id(original), place
        found = _on_devices.get(key)
        if found is None:
            found = _on_devices[key] = copy()
        return found


def _copy(variable: Any) -> Any:
    """Without its value, which each call assigns, but of its shape: gradients of loops ask for that at any moment."""
    try:
        nothing = tf.zeros(variable.shape, variable.dtype)
    except (TypeError, ValueError):  # no zeros of this dtype, or of an unknown shape
        nothing = variable.read_value()
    return tf.Variable(nothing, trainable=False, dtype=variable.dtype, shape=variable.shape)
