"""The chunk engine without TensorFlow's devices, where threads meet at scripted moments.

Order, errors of the data, leaving early and events are tested through whole calls, in tests/laws/test_streams.py.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
from indices import IndexSource

from devicemap.data.sources import Chunk
from devicemap.run.chunk_engine import run_chunks
from devicemap.run.workers import Call, Runner

pytestmark = pytest.mark.usefixtures("no_thread_stays")


def _runner(
    device: int,
    before: Callable[[Chunk], object] = lambda chunk: None,
    make_function: Callable[[], object] = lambda: None,
) -> Runner:
    """A device that calls `make_function` when it is made ready, and `before` for each chunk, whose rows it doubles."""

    def run(chunk: Chunk) -> Any:
        before(chunk)
        return [2 * row for row in chunk.leaves[0]]

    def make() -> Any:
        make_function()
        return run

    return Runner(f"/device:CPU:{device}", make, 1)


def _results(rows: int, runners: list[Runner], **options: Any) -> list[int]:
    results = run_chunks(IndexSource(rows), runners, Call(**options))
    return [row for result in results for part in result.parts for row in part]


def test_a_device_works_while_others_are_made_ready() -> None:
    at_work = threading.Event()
    runners = [_runner(0, lambda chunk: at_work.set()), _runner(1, make_function=lambda: at_work.wait(10) or 1 / 0)]
    assert _results(20, runners) == [*range(0, 40, 2)]


def test_an_error_while_a_call_begins_or_describes_an_error_ends_it() -> None:
    with pytest.raises(ZeroDivisionError):
        _results(20, [_runner(0, make_function=lambda: 1 / 0)])
    with pytest.raises(LookupError):
        _results(5, [_runner(0, lambda chunk: 1 / 0)], located_error=lambda error, shards: {}["no words"])
