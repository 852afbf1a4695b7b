"""Who hears of Keras's loops: a step is a chunk for each device."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import Any

from devicemap.events import CallFinished, CallStarted, ChunkFinished, ChunkStarted, Event, Shard
from devicemap.tell.report.progress import ProgressBar


class Loops:
    """Tells of calls of `fit`, `evaluate` and `predict`, what these call themselves included."""

    def __init__(self, name: str, devices: Sequence[str], progress: Any):
        """`progress`: True for a bar, or what gets the events."""
        self._name, self._devices, self._progress = name, tuple(devices), progress
        self._tell: Callable[[Event], Any] | None = None

    @contextmanager
    def call(self) -> Iterator[None]:
        """What a loop runs in."""
        if self._tell is not None:
            yield
            return
        self._tell = ProgressBar(self._name) if self._progress is True else self._progress
        self._began, self._row, error = time.perf_counter(), 0, None
        self._tell(CallStarted(0.0, None, self._devices))
        try:
            yield
        except BaseException as stopped:
            error = stopped
            raise
        finally:
            tell, self._tell = self._tell, None
            tell(CallFinished(time.perf_counter() - self._began, error))

    def made(self, sizes: Sequence[int], seconds: float) -> None:
        """A step has ended that took so many seconds, with so many rows on each device."""
        if self._tell is None:
            return
        ended = time.perf_counter() - self._began
        stops = list(accumulate(sizes, initial=self._row))
        shards = [Shard(*part) for part in zip(self._devices, stops, stops[1:]) if part[1] < part[2]]
        for shard in shards:
            self._tell(ChunkStarted(ended - seconds, shard, 0.0))
        for shard in shards:
            self._tell(ChunkFinished(ended, shard, ended - seconds))
        self._row = stops[-1]
