"""Random numbers that no two rows, devices or graphs share: seeds of rows, and number streams of traces.

A stateless op draws from the seed that it gets, so each row gets a seed. A stateful op with a seed begins the same
stream in each copy of it. So a function with such ops is traced again for each slot of each graph, and each trace draws
from a stream of its own.
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
import pickle
import random
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import tensorflow as tf

from devicemap._tensorflow.functions import last_set_seed, tracing_again
from devicemap.compile.audit import Audit

_DEFAULT = 87654321  # TensorFlow mixes it with the seed of an op if there is no global seed

_lock = threading.Lock()
_numbers: tuple[Any, Iterator[int]] = (None, itertools.count())

Stream = tuple[int, int]
"""The number of a function and that of a trace: one stream of random numbers."""


class Streams:
    """The number streams of one function. Not thread-safe."""

    def __init__(self) -> None:
        self._function: int | None = None
        self._counter = itertools.count()

    def next(self) -> Stream:
        """Return a stream that no other trace draws from."""
        if self._function is None:
            self._function = _next_number()
        return self._function, next(self._counter)


def drawn_alike(one: Audit, other: Audit) -> bool:
    """Return whether two traces on different streams share a seed: that of a raw op, or of a function traced before."""
    return bool(one.seeds & other.seeds)


@contextlib.contextmanager
def drawing_from(stream: Stream | None) -> Iterator[None]:
    """Return a context in which random ops that are traced draw from `stream`; with `None` they keep their seeds.

    It mixes the seed of the graph with `stream`. The `tf.function`s that the graph calls are traced again for it.
    """
    if stream is None:
        with tracing_again(None):
            yield
        return
    given = tf.compat.v1.get_default_graph().seed
    words = np.array([_DEFAULT if given is None else given % 2**64, *stream], np.uint64).view(np.uint32)
    seed = int(np.random.SeedSequence(words).generate_state(1, np.uint64)[0]) >> 2
    tf.compat.v1.set_random_seed(seed)  # of the graph being traced, and of no other
    with tracing_again(seed):
        yield


def random_states(fn: Callable[..., Any]) -> Callable[[], bytes]:
    """Return a function that returns the state of all generators of Python and NumPy that `fn` can draw from.

    These are the global ones, and those among the globals and the closure of `fn`.
    """
    try:
        seen = inspect.getclosurevars(inspect.unwrap(fn))
        values = [*seen.globals.values(), *seen.nonlocals.values()]
    except (TypeError, ValueError):  # not a Python function, or a cell of its closure is empty
        values = []
    getters: list[Callable[[], Any]] = [
        random.getstate,
        np.random.get_state,
        *(v.getstate for v in values if isinstance(v, random.Random) and not isinstance(v, random.SystemRandom)),
        *(v.get_state for v in values if isinstance(v, np.random.RandomState)),
        *(partial(getattr, v.bit_generator, "state") for v in values if isinstance(v, np.random.Generator)),
    ]

    def states() -> bytes:
        return pickle.dumps([state() for state in getters])

    return states


def row_seeds(seed: int, first_row: int, rows: Any) -> Any:
    """Return stateless seeds, int32 `[rows, 2]`, that no two rows share: the `seed` and the row's global index."""
    # NumPy scalars keep their dtype whatever enable_numpy_behavior does to Python's ints.
    return seeds_of_rows(seed, tf.range(tf.cast(rows, tf.int64)) + np.int64(first_row))


def seeds_of_rows(seed: int, index: Any) -> Any:
    """Return stateless seeds, int32 `[rows, 2]`, of the rows with these indices, int64 `[rows]`."""
    low_words = tf.bitcast(index, tf.int32)[:, 0]
    return tf.stack([tf.fill(tf.shape(low_words), np.uint32(seed).view(np.int32)), low_words], axis=1)


def _next_number() -> int:
    """Return a number that no other function has, from 0 again after `tf.random.set_seed`."""
    global _numbers
    with _lock:
        last = last_set_seed()
        if _numbers[0] is not last:
            _numbers = last, itertools.count()
        return next(_numbers[1])
