"""Dispatched chunks: order, the window, errors, and leaving early; without TensorFlow."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from devicemap.streaming import Chunk, run_chunks


def _chunks(count: int, taken: list[int] | None = None) -> Iterator[Chunk]:
    for i in range(count):
        if taken is not None:
            taken.append(i)
        yield Chunk(i, 1, (i,))


def _double(chunk: Chunk) -> Any:
    return chunk.leaves[0] * 2


def _threads() -> set[str]:
    return {thread.name for thread in threading.enumerate() if thread.name.startswith("devicemap")}


@pytest.mark.parametrize("workers", [1, 2, 8])
@pytest.mark.parametrize("count", [0, 1, 5, 200])
def test_every_chunk_once_and_in_order(workers: int, count: int) -> None:
    results = [(chunk.start, result) for chunk, result in run_chunks(_chunks(count), [_double] * workers, 4)]
    assert results == [(i, 2 * i) for i in range(count)]
    assert _threads() == set()


def test_a_slow_chunk_does_not_stop_the_others_until_the_window_is_full() -> None:
    release, started = threading.Event(), [threading.Event() for _ in range(10)]

    def work(chunk: Chunk) -> int:
        started[chunk.start].set()
        if chunk.start == 0:
            assert release.wait(10)
        return chunk.start

    taken: list[int] = []
    stream = run_chunks(_chunks(10, taken), [work] * 2, window=4)
    consumed: list[int] = []
    consumer = threading.Thread(target=lambda: consumed.extend(result for _, result in stream))
    consumer.start()
    assert started[3].wait(10)
    assert taken == [0, 1, 2, 3]  # read and not delivered: no more than the window
    release.set()
    consumer.join(10)
    assert consumed == list(range(10))


def test_an_error_comes_in_its_turn_after_what_was_finished() -> None:
    def work(chunk: Chunk) -> int:
        if chunk.start == 5:
            raise ZeroDivisionError("chunk 5")
        return chunk.start

    delivered: list[int] = []
    with pytest.raises(ZeroDivisionError, match="chunk 5"):
        delivered.extend(result for _, result in run_chunks(_chunks(100), [work] * 3, 6))
    assert delivered == [0, 1, 2, 3, 4]
    assert _threads() == set()


def test_an_error_of_the_input_comes_in_its_turn_too() -> None:
    def chunks() -> Iterator[Chunk]:
        yield from _chunks(3)
        raise OSError("the disk")

    delivered: list[int] = []
    with pytest.raises(OSError, match="the disk"):
        delivered.extend(result for _, result in run_chunks(chunks(), [_double] * 2, 4))
    assert delivered == [0, 2, 4]


def test_leaving_early_stops_reading_and_cancels_what_runs() -> None:
    taken: list[int] = []
    cancelled = threading.Event()

    def work(chunk: Chunk) -> int:
        if chunk.start > 2:
            assert cancelled.wait(10)
        return chunk.start

    stream = run_chunks(_chunks(1000, taken), [work] * 2, 4, cancelled.set)
    assert [next(stream)[1] for _ in range(3)] == [0, 1, 2]
    stream.close()
    assert cancelled.is_set()
    assert len(taken) <= 3 + 4
    assert _threads() == set()
