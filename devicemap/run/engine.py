"""The choice between the two engines, a pure function, and the measurements on which it depends."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Literal

from devicemap.run.chunk_sizes import Throughput

ROWS_PER_SLOT = 16
"""Calls on fewer rows per slot always use the graph engine."""

_LONG_SECONDS_PER_CALL = 0.1
"""Shorter calls gain little from load balance (`benchmarks/test_balance.py`)."""

_TRIED_SECONDS = 0.3
"""A call that takes no longer in chunks is tried in one graph."""


_UNMEASURED_CALLS = {"chunks": 2, "one graph": 1}
"""First calls that are not measured. The first call of an engine compiles. The speeds of devices are known from the second."""


def choose_engine(
    rows: int,
    slots: int,
    differentiable: bool,
    seconds_per_row: float | None,
    *,
    graph_seconds_per_row: float | None = None,
    first_seconds_per_row: float | None = None,
    free: bool = False,
) -> Literal["one graph", "chunks"]:
    """Return the engine for an eager call on rows in memory without `batch_size`.

    Args:
        rows: number of rows.
        slots: devices, or cores of a CPU, that take one shard each.
        differentiable: whether chunks are not allowed: a tape records the call, results depend on the shards, or for other
            reasons of `CompiledMap.may_use_chunks`.
        seconds_per_row: last measurement of this map in chunks; `None` before there is one.
        graph_seconds_per_row: the same in one graph.
        first_seconds_per_row: the same in chunks before that measurement, in a call that may also compile.
        free: whether large chunks took as long as small ones, as in a vectorised loop of many steps. One shard per device may
            then be much faster than several chunks.

    >>> choose_engine(1000, 8, False, None), choose_engine(1000, 8, False, 1e-5), choose_engine(1000, 8, False, 1e-2)
    ('chunks', 'one graph', 'chunks')
    """
    if differentiable or slots < 2 or rows < ROWS_PER_SLOT * slots:
        return "one graph"
    if seconds_per_row is None:
        longest = max(_LONG_SECONDS_PER_CALL, rows * (first_seconds_per_row or 0.0))
        faster = graph_seconds_per_row is None or rows * graph_seconds_per_row <= longest
        return "one graph" if free and faster else "chunks"
    if graph_seconds_per_row is None:
        return "one graph" if free or rows * seconds_per_row < _TRIED_SECONDS else "chunks"
    in_graph, in_chunks = rows * graph_seconds_per_row, rows * seconds_per_row
    return "chunks" if in_graph > max(_LONG_SECONDS_PER_CALL, in_chunks) else "one graph"


@dataclass
class CallStats:
    """Measurements of a compiled map, kept between calls."""

    throughput: dict[str, Throughput] = field(default_factory=dict)
    """Measurements of its devices in the chunk engine, by full name."""

    calls: Counter[str] = field(default_factory=Counter)
    """Number of calls with each engine."""

    seconds_per_row: dict[str, float] = field(default_factory=dict)
    """Wall time per row of the last measured call with each engine."""

    first_seconds_per_row: dict[str, float] = field(default_factory=dict)
    """The same of the last call that does not count as measured (`_UNMEASURED_CALLS`)."""

    most_rows: int | None = None
    """The most rows that go into one graph, after more ran out of memory."""

    def add(self, engine: str, seconds_per_row: float) -> None:
        """Record a call."""
        self.calls[engine] += 1
        measured = self.calls[engine] > _UNMEASURED_CALLS[engine]
        (self.seconds_per_row if measured else self.first_seconds_per_row)[engine] = seconds_per_row
