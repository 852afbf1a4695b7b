"""Actors of Ray. Each has a `DeviceMap`, or a function that reduces the rows of a block to a state."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import tensorflow as tf

from devicemap.api import DeviceMap
from devicemap.compile.program import Program
from devicemap.compile.random import seeds_of_rows
from devicemap.compile.reduction import BoundReduction, Reduction
from devicemap.inspect.recorder import Observers
from devicemap.ray.columns import columns_of, rows_of
from devicemap.run.mapper import Mapper

NUMBER = "devicemap.row"
"""The column of row numbers."""

STATE = "state"
"""The column of states."""


class Actor:
    """Maps blocks, from a table to columns, with the callable that `make()` returns."""

    def __init__(self, make: Callable[[], Callable[[Any], Any]], seed: int | None, gpus: bool):
        # Ray does not hide GPUs. With a `runtime_env` that hides them, Ray would read blocks in tasks that need further CPUs.
        if not gpus:
            os.environ["CUDA_VISIBLE_DEVICES"] = ""
        self._run = make()
        self._seed = seed

    def __call__(self, block: Any) -> dict[str, Any]:
        data: Any = rows_of(block)
        if self._seed is not None:
            data = data, seeds_of_rows(self._seed, data.pop(NUMBER))
        return columns_of(self._run(data))


class Later:
    """A factory that is unpickled when it is called, because variables in it start TensorFlow."""

    def __init__(self, make: Callable[[], Any]):
        self._make = make

    def __reduce__(self) -> Any:
        return partial, (
            _made,
            np.frombuffer(_pickled(self._make), np.uint8),
        )  # Ray stores an array only once in the memory of a host


def _pickled(value: Any) -> bytes:
    from ray import cloudpickle

    dumps: Any = cloudpickle.dumps
    pickled: bytes = dumps(value)
    return pickled


def _made(pickled: Any) -> Any:
    return pickle.loads(pickled)()


def mapper(fn: Callable[..., Any], options: dict[str, Any]) -> Callable[[Any], Any]:
    """Return a function that maps rows."""
    return DeviceMap(fn, **options)


def reducer(reducer: Any, fn: Callable[..., Any], options: dict[str, Any]) -> Callable[[Any], Any]:
    """Return a function that reduces rows to one pickled state."""
    program = Program(fn, options)
    return Mapper(program.reducing(_Unfinished(reducer)), Observers(program.name, program.options, program.gpus)).run


class _Unfinished(Reduction):
    """A reduction that ends with a state, and with the structure and specs that are needed to finish it."""

    def of(self, structure: Any, specs: Sequence[Any]) -> BoundReduction:
        bound = super().of(structure, specs)

        def packed(leaves: Sequence[Any]) -> Any:
            state = structure, specs, [leaf.numpy() for leaf in leaves]  # may refer to classes of the program
            return {STATE: tf.constant([_pickled(state)])}

        bound.finished = lambda states: bound.merged([states])  # type: ignore[method-assign]
        bound.packed = packed  # type: ignore[method-assign]
        return bound
