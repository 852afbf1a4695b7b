"""Random numbers that no two rows, devices or ways of calling share: seeds of rows, and number streams of functions.

A stateless op draws from the seed it is given; each row gets one of its own. A stateful op with a seed keeps its place in
a stream of numbers, and a copy of it begins the same stream again: in each graph, and on each device. So a function that
has such ops is traced again for each copy, and each trace draws from a stream of its own.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable, Iterator
from typing import Any, Protocol, TypeVar

import numpy as np
import tensorflow as tf

from devicemap._tensorflow.functions import last_set_seed, tracing_again
from devicemap.compile.audit import Audit

_DEFAULT = 87654321  # what TensorFlow itself mixes with the seed of an op where no global seed is set

_lock = threading.Lock()
_numbers: tuple[Any, Iterator[int]] = (None, itertools.count())

Stream = tuple[int, ...]
"""The number of a function, the way of calling it and the place: one stream of numbers."""


class Drawing(Protocol):
    """A trace, and what is known of its random ops."""

    @property
    def audit(self) -> Audit:
        """Of which `seeds` matters here."""


DrawingT = TypeVar("DrawingT", bound=Drawing)


class Streams:
    """The traces of one function for the places it runs on, in each way of calling it: each on a number stream of its own."""

    def __init__(self) -> None:
        self._number: int | None = None

    def traces(self, trace: Callable[[Stream], DrawingT], way: tuple[int, ...], places: int) -> list[DrawingT]:
        """One per place. Not for use by two threads at once.

        Args:
            trace: traces the function with a number stream.
            way: of calling the function; none begins with another one. Asked for once more, it gets the same streams, from
                their start.
            places: how many.
        """
        if self._number is None:
            self._number = _next_number()
        return [trace((self._number, *way, place)) for place in range(places)]


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
