"""Random numbers that no two rows, devices or ways of calling share: seeds of rows, and number streams of functions.

A stateless op draws from the seed it is given; each row gets one of its own. A stateful op with a seed keeps its place in
a stream of numbers, and a copy of it begins the same stream again: in each graph, and on each device. So a function that
has such ops is traced again for each copy, and each trace draws from a stream of its own.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from devicemap._tensorflow.functions import last_set_seed, tracing_again
from devicemap.compile.audit import Audit

_DEFAULT = 87654321  # what TensorFlow itself mixes with the seed of an op where no global seed is set

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
    """Whether two traces on different streams draw the same numbers somewhere.

    A function that was traced before, by itself or for a SavedModel, keeps the seeds it got then; so do raw ops.
    """
    return bool(one.seeds & other.seeds)


@contextlib.contextmanager
def drawing_from(stream: Stream | None) -> Iterator[None]:
    """Give the random ops that are traced inside a number stream of their own; with `None`, leave their seeds as they are.

    The seed of the graph being traced is mixed with `stream`; op seeds stay. The `tf.function`s that it calls are traced for
    it: they take over the seed, and what is done to these traces is not done to those that the user calls.
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


def row_seeds(seed: int, first_row: int, rows: Any) -> Any:
    """Stateless seeds, int32 `[rows, 2]`: the `seed` and the row's global index, so that no two rows share one."""
    # NumPy's scalars keep their dtype whatever conversion of Python's ints is switched on (enable_numpy_behavior).
    return seeds_of_rows(seed, tf.range(tf.cast(rows, tf.int64)) + np.int64(first_row))


def seeds_of_rows(seed: int, index: Any) -> Any:
    """Stateless seeds, int32 `[rows, 2]`, of the rows with these numbers, int64 `[rows]`."""
    low_words = tf.bitcast(index, tf.int32)[:, 0]
    return tf.stack([tf.fill(tf.shape(low_words), np.uint32(seed).view(np.int32)), low_words], axis=1)


def _next_number() -> int:
    """A number for a function that no other one has; from 0 again after `tf.random.set_seed`."""
    global _numbers
    with _lock:
        now = last_set_seed()
        if _numbers[0] is not now:
            _numbers = now, itertools.count()
        return next(_numbers[1])
