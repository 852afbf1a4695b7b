"""Seeds of rows, and number streams of traces, so that no two rows, devices or graphs share random numbers.

A stateless op draws from its seed input, so each row gets a seed. A stateful op with a fixed seed begins the same stream in
each copy of the op. So a function with such ops is traced for each slot of each graph, and each trace has a separate stream.
"""

from __future__ import annotations

import contextlib
import itertools
import pickle
import random
import threading
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import numpy as np
import tensorflow as tf

from devicemap._tensorflow.functions import last_set_seed, retracing
from devicemap.compile.python_values import values_in

_DEFAULT = 87654321  # TensorFlow mixes it with the seed of an op if there is no global seed

_lock = threading.Lock()
_numbers: tuple[Any, Iterator[int]] = (None, itertools.count())

_GENERATORS = random.Random, np.random.RandomState, np.random.Generator
"""Classes whose objects are pickled with their states."""

Stream = tuple[int, int]
"""The number of a function and the number of a trace, which identify a stream of random numbers."""


def streams_of_function() -> Iterator[Stream]:
    """Yield the number streams of one function, from which no other trace draws. The first trace numbers the function."""
    number = cache(_next_number)

    def stream(trace: int) -> Stream:
        return number(), trace

    return map(stream, itertools.count())  # a generator would raise an error in two threads


@contextlib.contextmanager
def drawing_from(stream: Stream | None) -> Iterator[None]:
    """Return a context in which traced random ops draw from `stream`. With `None`, they keep their seeds.

    The context mixes the seed of the graph with `stream`. The `tf.function`s that the graph calls are traced again.
    """
    seed = None
    if stream is not None:
        given = tf.compat.v1.get_default_graph().seed
        words = np.array([_DEFAULT if given is None else given % 2**64, *stream], np.uint64).view(np.uint32)
        seed = int(np.random.SeedSequence(words).generate_state(1, np.uint64)[0]) >> 2
        tf.compat.v1.set_random_seed(seed)  # of the graph being traced, and of no other
    with retracing(seed):
        yield


def random_states(fn: Callable[..., Any]) -> Callable[[], bytes]:
    """Return a function that reads the state of all generators of Python and NumPy to which `fn` and its helpers refer.

    Other generators are left out, because other threads may draw from them while `fn` is traced.
    """
    found: list[Any] = []
    for value in values_in(fn):
        # Proxies run the user's code for any attribute, and some generators have no state.
        with contextlib.suppress(Exception):
            source = value.random if value is random or value is np.random else value
            source = getattr(source, "__self__", source)  # of a method, its object
            if isinstance(source, _GENERATORS) and pickle.dumps(source):
                found.append(source)
    return lambda: pickle.dumps(found)


def row_seeds(seed: int, first_row: int, rows: Any) -> Any:
    """Return stateless seeds, int32 `[rows, 2]`, which consist of `seed` and the row's global index."""
    # NumPy scalars keep their dtype also after enable_numpy_behavior, which changes that of Python's ints.
    return seeds_of_rows(seed, tf.range(tf.cast(rows, tf.int64)) + np.int64(first_row))


def seeds_of_rows(seed: int, index: Any) -> Any:
    """Return stateless seeds, int32 `[rows, 2]`, of the rows with these indices, int64 `[rows]`."""
    low_words = tf.bitcast(index, tf.int32)[:, 0]
    return tf.stack([tf.fill(tf.shape(low_words), np.uint32(seed).view(np.int32)), low_words], axis=1)


def _next_number() -> int:
    """Return a number that no other function has. Numbers start at 0 again after `tf.random.set_seed`."""
    global _numbers
    with _lock:
        last = last_set_seed()
        if _numbers[0] is not last:
            _numbers = last, itertools.count()
        return next(_numbers[1])
