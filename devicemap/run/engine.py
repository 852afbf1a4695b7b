"""The choice between the two engines, a pure function, and the measurements on which it depends."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal

from devicemap.run.chunk_sizes import Throughput, rows_are_free

_ROWS_PER_SLOT = 16
"""Calls on fewer rows per slot use the graph engine. Their time per row does not predict that of more rows."""

_LONG_SECONDS_PER_CALL = 0.1
"""Shorter calls gain little from load balance (`benchmarks/test_balance.py`)."""

_TRIED_SECONDS = 0.3
"""A call that takes no longer in chunks is tried in one graph."""

_TRIED_LATER_SECONDS = 10.0
"""The same after more calls in chunks than slots, on devices of similar speeds. At worst, when one device has all the work, the
trial takes as long as all these calls did."""

_SIMILAR_SPEEDS = 3.0
"""The largest ratio of similar speeds."""

_UNMEASURED_CALLS = {"chunks": 2, "one graph": 1}
"""First calls that are not measured. The first call of an engine compiles. The speeds of devices are known from the second."""

EngineName = Literal["one graph", "chunks"]


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

    @contextmanager
    def measuring(self, engine: EngineName, rows: int, slots: int) -> Iterator[None]:
        """Record the time of a call with an engine, unless it raises or has few rows."""
        began = time.perf_counter()
        yield
        if rows >= _ROWS_PER_SLOT * slots:
            self.add(engine, (time.perf_counter() - began) / rows)

    def add(self, engine: EngineName, seconds_per_row: float) -> None:
        """Record a call."""
        self.calls[engine] += 1
        measured = self.calls[engine] > _UNMEASURED_CALLS[engine]
        (self.seconds_per_row if measured else self.first_seconds_per_row)[engine] = seconds_per_row


def choose_engine(rows: int, slots: int, stats: CallStats) -> EngineName:
    """Return the engine for an eager call that may use either, on rows in memory without `batch_size`.

    Args:
        rows: number of rows.
        slots: devices, or cores of a CPU, that take one shard each.
        stats: measurements of earlier calls.

    >>> choose_engine(1000, 8, CallStats())
    'chunks'
    >>> choose_engine(1000, 8, CallStats(seconds_per_row={"chunks": 1e-5}))
    'one graph'
    """
    if stats.most_rows is not None and rows > stats.most_rows:
        return "chunks"
    if slots < 2 or rows < _ROWS_PER_SLOT * slots:
        return "one graph"
    # If large chunks took as long as small ones, as in a vectorised loop of many steps, one shard per device may be much
    # faster than several chunks.
    free = rows_are_free(stats.throughput.values())
    per_row, first_per_row = stats.seconds_per_row, stats.first_seconds_per_row
    if "chunks" not in per_row:
        longest = max(_LONG_SECONDS_PER_CALL, rows * first_per_row.get("chunks", 0.0))
        return "one graph" if free and rows * per_row.get("one graph", 0.0) <= longest else "chunks"
    in_chunks = rows * per_row["chunks"]
    if "one graph" not in per_row:
        speeds = [each.rows_per_second or 0.0 for each in stats.throughput.values()]
        later = stats.calls["chunks"] > slots and max(speeds) <= _SIMILAR_SPEEDS * min(speeds)
        return "one graph" if free or in_chunks < (_TRIED_LATER_SECONDS if later else _TRIED_SECONDS) else "chunks"
    return "chunks" if rows * per_row["one graph"] > max(_LONG_SECONDS_PER_CALL, in_chunks) else "one graph"
