"""The graph engine: one `tf.function` gives each device a shard of the rows and gathers the results. Differentiable."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import tensorflow as tf

from devicemap._tensorflow.gradients import have_tangents
from devicemap.base.devices import is_out_of_memory
from devicemap.compile.compiled import Compiled
from devicemap.compile.gather import check_row_counts
from devicemap.compile.program import Program
from devicemap.data.rows import Rows
from devicemap.errors import DataError
from devicemap.events import Shard


@dataclass(frozen=True)
class GraphRun:
    """Times of one execution of a graph."""

    shards: Sequence[Shard]
    """In the order of rows."""

    began: float
    """In seconds since the epoch, as all times of the day here."""

    seconds: float

    in_turn: bool = False
    """Whether each shard waited for the one before."""

    arrivals: Any = None
    """Float64 `[shards]`, or longer: when the results of each were there. `None`: unknown, for one shard or without clocks."""

    def spans(self) -> list[tuple[Shard, float, float]]:
        """Each shard, when it began and when it was done."""
        ended = self.began + self.seconds
        if self.arrivals is None:
            return [(shard, self.began, ended) for shard in self.shards]
        # The clock of the graph is that of the day, which may be set meanwhile.
        done = np.clip(np.asarray(self.arrivals)[: len(self.shards)], self.began, ended)
        if not self.in_turn:
            return [(shard, self.began, float(at)) for shard, at in zip(self.shards, done)]
        done = np.maximum.accumulate(done)
        return list(zip(self.shards, [self.began, *done[:-1].tolist()], done.tolist()))


class GraphCallLog(Protocol):
    """The log of a call in one graph."""

    runs: list[GraphRun]
    """The graphs that ran; the graph engine adds them."""


class GraphObservers(Protocol):
    """Observers of calls in one graph."""

    def of_graph(
        self, rows: int, devices: Sequence[str], compiled: Compiled
    ) -> AbstractContextManager[GraphCallLog | None]:
        """Return the context of a call in one graph of `compiled`; its value is `None` if there is no observer."""


class GraphEngine:
    """Calls of one program."""

    def __init__(self, program: Program, observers: GraphObservers):
        self.program = program
        self._observers = observers

    def in_shards(self, compiled: Compiled, rows: Rows, gradients: int = 0, retried: bool = False) -> Any:
        """In eager code, a shard for each device.

        `gradients` tells which may be asked for, as `Compiled.graph` takes it. Where the call is `retried` if it runs out of
        memory, that error is TensorFlow's own, as nobody has to know on which device it was.
        """
        if gradients and have_tangents([*compiled.flat(rows.leaves), *compiled.traced.captures]):
            raise DataError(
                "a tf.autodiff.ForwardAccumulator follows the data or a variable of fn, and TensorArray, which gathers the "
                "rows, has no forward mode; use a tf.GradientTape"
            )
        count = rows.count or 0
        if not count and not gradients:
            with self._observers.of_graph(0, (), compiled):
                return compiled.pack_no_rows()
        shards, sizes = compiled.shards(count) if count else ((), tf.zeros([1], tf.int32))
        arguments = (sizes, *self.program.seeded(rows.leaves, 0, count))
        graph = compiled.graph(max(len(shards), 1), gradients, any_rows=not count)
        with self._call(compiled, rows, shards, arguments[1:], retried) as (runs, began):
            with compiled.drawing_alone():
                if gradients:
                    results, returned, arrivals = compiled.run_taped(graph, arguments, gradients)
                else:
                    results, returned, arrivals = compiled.run(graph, arguments, count)
            ends = arrivals[0] if arrivals else None
            seconds = time.perf_counter() - began[1]
            if count:
                runs.append(GraphRun(shards, began[0], seconds, compiled.traced.audit.ordered, ends))
            if count and self.program.counts_rows:
                check_row_counts(results, returned, shards)
        return compiled.pack(results)

    def over(self, rows: Rows) -> Any:
        """The same, whatever tapes ask for."""
        compiled = self.program.compiled_for(rows)
        return self.in_shards(compiled, rows, compiled.order_of_gradients(rows.leaves))

    @contextmanager
    def _call(
        self, compiled: Compiled, rows: Rows, shards: Sequence[Shard], leaves: Sequence[Any], retried: bool
    ) -> Iterator[tuple[list[GraphRun], tuple[float, float]]]:
        """What a graph runs in: where to put what it has done, and when it began, by the day's clock and by the timer.

        Raises:
            FunctionError: `fn` failed, on one of the `shards` of these `leaves` if it fails there again.
        """
        devices = tuple(dict.fromkeys(shard.device for shard in shards))
        with self._observers.of_graph(rows.count or 0, devices, compiled) as log:
            began = time.time(), time.perf_counter()
            try:
                yield [] if log is None else log.runs, began
            except tf.errors.OpError as error:  # what a running graph raises; signal handlers raise other errors
                if retried and is_out_of_memory(error):
                    raise
                seconds = time.perf_counter() - began[1]
                located, cause = self.program.located(error, compiled, leaves, shards, seconds)
                raise located from cause
