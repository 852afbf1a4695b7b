"""Random numbers that no two rows, devices or ways of calling share: seeds of rows, and number streams of traces.

A stateless op draws from the seed it is given; each row gets one of its own. A stateful op with a seed keeps its place in
a stream of numbers, and a copy of it begins the same stream again: in each graph, and on each device. So a function that
has such ops is traced again for each copy, and each trace draws from a stream of its own.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable, Hashable, Iterator
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
import tensorflow as tf

from devicemap.auditing import Audit
from devicemap.errors import failure
from devicemap.internals.functions import last_set_seed, retracing

_UNSEEDED = 87654321  # what TensorFlow itself mixes with the seed of an op where no global seed is set

_lock = threading.Lock()
_numbers: tuple[Any, Iterator[int]] = (None, itertools.count())

Stream = tuple[int, int]
"""The number of a function, and that of a trace of it: one stream of numbers."""


class Drawing(Protocol):
    """A trace, and what is known of its random ops."""

    @property
    def audit(self) -> Audit:
        """Of which `seeds` matters here."""


DrawingT = TypeVar("DrawingT", bound=Drawing)


class Streams(Generic[DrawingT]):
    """The traces of one function with seeded random ops: one for each place, in each way of calling it."""

    def __init__(self, trace: Callable[[Stream], DrawingT], places: int):
        """`trace(stream)` traces the function with a number stream."""
        self._trace = trace
        self._places = places
        self._traces: dict[Hashable, list[DrawingT]] = {}
        self._number: int | None = None
        self._taken = (
            itertools.count()
        )  # for good: after `tf.random.set_seed`, what was traced before begins again, too
        self._drawn: list[frozenset[tuple[int, int]]] = []

    def traces(self, way: Hashable) -> list[DrawingT]:
        """One per place. Not for use by two threads at once.

        Raises:
            FunctionError: `fn` keeps its seeds in every trace.
        """
        if way not in self._traces:
            if self._number is None:
                self._number = _next_number()
            made = [self._trace((self._number, next(self._taken))) for _ in range(self._places)]
            self._drawn += [traced.audit.seeds for traced in made]
            if any(a & b for a, b in itertools.combinations(self._drawn, 2)):
                # What was traced before, by itself or for a SavedModel, is not traced again and keeps its seeds.
                raise failure(
                    "fn holds random ops whose seed stays the same when fn is traced again (of a ConcreteFunction, of a "
                    "function of a SavedModel or one with jit_compile=True, or raw ones); they would draw the same numbers on "
                    "every device. Call a plain tf.function and tf.random's functions, or use the option seed= with "
                    "tf.random.stateless_* ops, or a tf.random.Generator"
                )
            self._traces[way] = made
        return self._traces[way]

    def forget(self, way: Hashable) -> None:
        """Let the next call in this way take other streams; what draws from these may still run."""
        self._traces.pop(way, None)


@contextlib.contextmanager
def drawing_from(stream: Stream | None) -> Iterator[None]:
    """Give the random ops that are traced inside a number stream of their own; with `None`, leave their seeds as they are.

    The seed of the graph being traced is mixed with `stream`; op seeds stay.
    """
    if stream is None:
        yield
        return
    graph = tf.compat.v1.get_default_graph()
    mixed = np.random.SeedSequence([_UNSEEDED if graph.seed is None else graph.seed & (2**63 - 1), *stream])
    graph.seed = int(mixed.generate_state(1, np.uint32)[0] >> 1)
    with retracing():  # the tf.functions that fn calls hold seeds too
        yield


def row_seeds(seed: int, first_row: int, rows: Any) -> Any:
    """Stateless seeds, int32 `[rows, 2]`: the `seed` and the row's global index, so that no two rows share one."""
    index = tf.range(first_row, first_row + rows, dtype=tf.int64)
    seeds = tf.stack([tf.fill(tf.shape(index), tf.constant(seed, tf.int64)), index], axis=1)
    return tf.bitcast(tf.cast(seeds % 2**32, tf.uint32), tf.int32)


def _next_number() -> int:
    """A number for a function that no other one has; from 0 again after `tf.random.set_seed`."""
    global _numbers
    with _lock:
        now = last_set_seed()
        if _numbers[0] is not now:
            _numbers = now, itertools.count()
        return next(_numbers[1])
