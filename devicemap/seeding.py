"""Random numbers that no two rows, devices or ways of calling share: seeds of rows, and number streams of functions.

A stateless op draws from the seed it is given; each row gets one of its own. A stateful op with a seed keeps its place in
a stream of numbers, and the same op elsewhere begins the same stream again: in each graph, and on each device. So each of
these gets a copy of a function that has such ops, and each copy draws from a stream of its own.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import tensorflow as tf

from devicemap.internals.copying import copied
from devicemap.internals.functions import last_set_seed

_lock = threading.Lock()
_numbers: tuple[Any, Iterator[int]] = (None, itertools.count())


class Streams:
    """The copies of one function for the places it runs on, in each way of calling it: each on number streams of its own."""

    def __init__(self) -> None:
        self._number: int | None = None

    def copies(self, concrete: Any, way: tuple[int, ...], places: int) -> list[Any]:
        """Copies of a `ConcreteFunction`, one per place. Not for use by two threads at once.

        Args:
            concrete: the function.
            way: of calling it; none begins with another one. Asked for once more, it gets the same streams, from their start.
            places: how many.
        """
        if self._number is None:
            self._number = _next_number()
        graph_def = concrete.graph.as_graph_def()
        return [copied(concrete, graph_def, partial(_mixed, (self._number, *way, place))) for place in range(places)]


def _mixed(copy: tuple[int, ...], seed: int, seed2: int) -> tuple[int, int]:
    """The seeds of an op in a copy of a function: the same for ops that had the same, and never those of another copy."""
    words = np.array([*copy, seed % 2**64, seed2 % 2**64], np.uint64).view(np.uint32)
    first, second = map(int, np.random.SeedSequence(words).generate_state(2, np.uint64))
    return first >> 1, second >> 1


def row_seeds(seed: int, first_row: int, rows: Any) -> Any:
    """Stateless seeds, int32 `[rows, 2]`: the `seed` and the row's global index, so that no two rows share one."""
    # NumPy's scalars keep their dtype whatever conversion of Python's ints is switched on (enable_numpy_behavior).
    index = tf.range(tf.cast(rows, tf.int64)) + np.int64(first_row)
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
