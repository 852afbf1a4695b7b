"""The choice between the two engines, from the measurements of earlier calls."""

from __future__ import annotations

import pytest

from devicemap.run.chunk_sizes import Throughput
from devicemap.run.engine import CallStats, choose_engine


def _stats(chunks: float | None, graph: float | None, first: float | None, free: bool, rows: int) -> CallStats:
    """Return measurements in which `rows` rows took these times in chunks, in one graph, and in the first call in chunks."""
    stats = CallStats()
    for times, engine, seconds in (
        (stats.seconds_per_row, "chunks", chunks),
        (stats.seconds_per_row, "one graph", graph),
        (stats.first_seconds_per_row, "chunks", first),
    ):
        if seconds is not None:
            times[engine] = seconds / rows
    throughput = Throughput()
    for size in (4, 16, 64):
        throughput = throughput.finishing(size, *([0.1, 0.1] if free else [0.1 * size, 0.1 * size]))
    stats.throughput["/device:CPU:0"] = throughput
    return stats


@pytest.mark.parametrize(
    ("rows", "slots", "chunks", "graph", "first", "free", "engine"),
    [
        (1000, 1, 10.0, 20.0, 30.0, False, "one graph"),
        (1000, 8, None, None, None, False, "chunks"),  # how long it takes is unknown
        (1000, 8, None, None, 3.0, True, "one graph"),  # rows cost nothing: tried
        (1000, 8, None, 0.09, 0.05, True, "one graph"),
        (1000, 8, None, 0.11, 0.10, True, "chunks"),  # one graph is slower than a call that compiles
        (1000, 8, 2.0, None, 3.0, False, "chunks"),
        (1000, 8, 0.2, None, 3.0, False, "one graph"),  # tried
        (1000, 8, 0.5, 0.6, 3.0, False, "chunks"),
        (1000, 8, 0.05, 0.09, 3.0, False, "one graph"),  # short
        (1000, 8, 1000.0, None, 3000.0, True, "one graph"),  # rows cost nothing: tried
        (1000, 8, 1000.0, 2000.0, 3000.0, True, "chunks"),
    ],
)
def test_choose_engine(
    rows: int, slots: int, chunks: float | None, graph: float | None, first: float | None, free: bool, engine: str
) -> None:
    assert choose_engine(rows, slots, _stats(chunks, graph, first, free, rows)) == engine


@pytest.mark.parametrize(
    ("calls", "seconds", "slower", "engine"),
    [(8, 2.0, 1, "chunks"), (9, 2.0, 1, "one graph"), (9, 11.0, 1, "chunks"), (9, 2.0, 4, "chunks")],
)
def test_one_graph_is_tried_after_many_calls(calls: int, seconds: float, slower: int, engine: str) -> None:
    stats = _stats(seconds, None, None, False, 1000)
    stats.calls["chunks"] = calls
    speed = stats.throughput["/device:CPU:0"].rows_per_second or 0.0
    stats.throughput["/device:CPU:1"] = Throughput(rows_per_second=speed / slower)
    assert choose_engine(1000, 8, stats) == engine


def test_more_rows_than_fit_into_a_graph_go_in_chunks() -> None:
    stats = CallStats(most_rows=20)
    assert (choose_engine(20, 8, stats), choose_engine(21, 8, stats)) == ("one graph", "chunks")


def test_calls_that_trace_or_make_functions_are_not_measurements() -> None:
    stats = CallStats()
    for engine, seconds in (("chunks", 9.0), ("chunks", 5.0), ("one graph", 7.0)):
        stats.add(engine, seconds)
    assert not stats.seconds_per_row
    assert stats.first_seconds_per_row == {"chunks": 5.0, "one graph": 7.0}
    for engine in ("chunks", "one graph"):
        stats.add(engine, 1.0)
    assert stats.seconds_per_row == {"chunks": 1.0, "one graph": 1.0}


def test_calls_that_raise_or_have_few_rows_are_not_recorded() -> None:
    stats = CallStats()
    with pytest.raises(ValueError), stats.measuring("one graph", 1000, 2):
        raise ValueError
    with stats.measuring("one graph", 31, 2):
        pass
    assert not stats.calls
    with stats.measuring("one graph", 32, 2):
        pass
    assert stats.calls == {"one graph": 1}
