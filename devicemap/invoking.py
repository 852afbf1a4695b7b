"""Calling a graph such that Ctrl-C takes effect at once.

Python handles signals in the main thread, between two bytecodes: not while that thread is inside TensorFlow. So a call
runs in a thread of its own, unless it is expected to end soon, or this is not the main thread anyway.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from devicemap.internals.running import Cancellation, unrecorded

_SOON_SECONDS = 0.1
"""A call that takes no longer than this may run in the calling thread: that is how late Ctrl-C can then be."""

_FAREWELL_SECONDS = 0.8
"""How long to wait for a cancelled call; an op that is running cannot be stopped, and its thread ends after it."""


class Invoker:
    """Calls the graphs of one function; it keeps what calls them, and they live as long as it does."""

    def __init__(self, optimize: bool):
        """`optimize`: whether TensorFlow still has to optimise the graphs."""
        self._optimize = optimize
        self._calls: dict[Any, Callable[..., Any]] = {}
        self._last = math.inf, 1  # seconds and rows of the last call; the first one compiles

    def call(self, graph: Any, tensors: Sequence[Any], rows: int) -> Any:
        """Call a `ConcreteFunction` on so many rows."""
        last_seconds, last_rows = self._last
        expected_seconds = last_seconds * max(1.0, rows / last_rows)
        if expected_seconds < _SOON_SECONDS or threading.current_thread() is not threading.main_thread():
            call = self._calls.get(graph)
            if call is None:
                call = self._calls[graph] = unrecorded(graph, self._optimize)
            start = time.perf_counter()
            result = call(*tensors)
            self._last = time.perf_counter() - start, rows
            return result
        result, seconds = _run_in_thread(graph, tensors, self._optimize)
        self._last = seconds, rows
        return result


def _run_in_thread(graph: Any, tensors: Sequence[Any], optimize: bool) -> tuple[Any, float]:
    """Call a `ConcreteFunction` such that Ctrl-C takes effect at once; returns its result and the seconds it took."""
    cancellation = Cancellation()
    cancellable = cancellation.cancellable(graph, optimize)
    outcome: list[Any] = []
    finished = threading.Event()  # not Thread.join: interrupted, it takes the thread for ended

    def call() -> None:
        try:
            outcome.append((cancellable(*tensors), None))
        except BaseException as error:  # handed to the caller, whatever it is
            outcome.append((None, error))
        finished.set()

    thread = threading.Thread(target=call, name="devicemap call", daemon=True)
    start = time.perf_counter()
    try:
        thread.start()
        while not finished.wait(_SOON_SECONDS):  # a wait without an end can miss a signal that another thread gets
            pass
    except BaseException:
        cancellation.cancel()
        finished.wait(_FAREWELL_SECONDS)
        raise
    thread.join()
    ((result, error),) = outcome
    if error is not None:
        raise error
    return result, time.perf_counter() - start
