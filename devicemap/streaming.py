"""Dispatched chunks: each device takes the next chunk when it is idle; results come out in input order.

The contract: chunks are read one at a time, in order, and at most `window` of them are read and not yet delivered. Each
is run exactly once. The first error stops reading, and is raised when its turn comes: everything before it has been
delivered. Leaving the generator, in whatever way, stops the workers: what runs is cancelled, nothing more is read.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from devicemap.types import Shard

_FAREWELL_SECONDS = 0.5
"""How long to wait for cancelled workers; an op that is running cannot be stopped, and its thread ends after it."""

_SIGNAL_SECONDS = 0.1
"""How often the consumer looks up from waiting: a wait without an end can miss a signal that another thread gets."""


@dataclass(frozen=True)
class Chunk:
    """Neighbouring rows, read and ready to run."""

    start: int
    """Global index of the first row."""

    count: int
    """How many rows, at least one."""

    leaves: tuple[Any, ...]
    """Leaves of shape `[count, ...]`."""

    def on(self, device: str) -> Shard:
        """The rows of this chunk, on a device."""
        return Shard(device, self.start, self.start + self.count)


def run_chunks(
    chunks: Iterable[Chunk],
    workers: Sequence[Callable[[Chunk], Any]],
    window: int,
    cancel: Callable[[], None] = lambda: None,
) -> Iterator[tuple[Chunk, Any]]:
    """Yield `(chunk, result)` in the order of `chunks`, each computed by the first idle worker."""
    dispatch = _Dispatch(iter(chunks), window)
    threads = [
        threading.Thread(target=dispatch.work, args=(worker,), name=f"devicemap worker {i}", daemon=True)
        for i, worker in enumerate(workers)
    ]
    try:
        for thread in threads:
            thread.start()
        yield from dispatch.deliver()
    finally:
        if dispatch.stop():
            cancel()
        deadline = time.monotonic() + _FAREWELL_SECONDS
        for thread in threads:
            if thread.ident is not None:  # the interruption may have come before it was started
                thread.join(max(0.0, deadline - time.monotonic()))


class _Dispatch:
    """What the workers and the consumer share. `_reading` is held while a chunk is read, so that indices follow the
    order of reading; `_changed` guards everything else, and is never held while something slow happens."""

    def __init__(self, chunks: Iterator[Chunk], window: int):
        self._chunks = chunks
        self._window = window
        self._reading = threading.Lock()
        self._changed = threading.Condition()
        self._read = 0
        self._delivered = 0
        self._finished: dict[int, tuple[Chunk | None, Any, BaseException | None]] = {}
        self._at_end = False
        self._stopped = False

    def work(self, worker: Callable[[Chunk], Any]) -> None:
        """A worker's life: take the next chunk, run it, hand in the result."""
        while (taken := self._take()) is not None:
            index, chunk = taken
            try:
                self._hand_in(index, (chunk, worker(chunk), None))
            except BaseException as error:  # raised again by the consumer, whatever it is
                self._hand_in(index, (None, None, error))

    def deliver(self) -> Iterator[tuple[Chunk, Any]]:
        """The consumer's side: results in order until all are out, or the first error."""
        while True:
            with self._changed:
                while self._delivered not in self._finished:
                    if self._at_end and self._delivered == self._read:
                        return
                    self._changed.wait(_SIGNAL_SECONDS)
                chunk, result, error = self._finished.pop(self._delivered)
                self._delivered += 1
                self._changed.notify_all()
            if error is not None:
                raise error
            assert chunk is not None
            yield chunk, result

    def stop(self) -> bool:
        """Let the workers end; returns whether some still have work."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
            return self._delivered < self._read

    def _take(self) -> tuple[int, Chunk] | None:
        with self._reading:
            with self._changed:
                while self._read - self._delivered >= self._window and not self._stopped:
                    self._changed.wait()
                if self._stopped or self._at_end:
                    return None
            try:
                chunk = next(self._chunks, None)
            except BaseException as error:  # the user's input failed: that is the next result, and the last
                with self._changed:
                    self._read += 1
                self._hand_in(self._read - 1, (None, None, error))
                return None
            with self._changed:
                if chunk is None:
                    self._at_end = True
                    self._changed.notify_all()
                    return None
                self._read += 1
                return self._read - 1, chunk

    def _hand_in(self, index: int, finished: tuple[Chunk | None, Any, BaseException | None]) -> None:
        with self._changed:
            self._finished[index] = finished
            self._at_end |= finished[2] is not None
            self._changed.notify_all()
