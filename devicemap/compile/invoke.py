"""Calls in threads of their own, so that Ctrl-C takes effect at once.

Python handles signals in the main thread, between two bytecodes, and not while that thread is inside TensorFlow.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any

from devicemap._tensorflow.calls import Cancellation, unrecorded
from devicemap.hosts import is_remote, settle

_SOON_SECONDS = 0.1
"""A call that is expected to take no longer may run in the main thread. It delays Ctrl-C by at most this time."""

_SIGNAL_SECONDS = 0.1
"""The longest single wait: Python handles Ctrl-C between waits if another thread receives the signal."""

_FAREWELL_SECONDS = 0.8
"""How long to wait for cancelled calls. A running op cannot be stopped. Its thread ends when the op does."""


@dataclass
class _Known:
    """The callable of a graph, and the duration of its last call."""

    call: Callable[..., Any]
    seconds: float = math.inf  # the first call compiles
    rows: int = 1


class Invoker:
    """Calls the graphs of one function."""

    def __init__(self, steady: bool):
        """`steady`: whether the duration of a call depends only on the number of rows."""
        self._steady = steady
        self._known: dict[Any, _Known] = {}

    def call(self, graph: Any, tensors: Sequence[Any], rows: int) -> Any:
        """Call a `ConcreteFunction` on `rows` rows."""
        known = self._known.get(graph)
        if known is None:
            known = self._known[graph] = _Known(unrecorded(graph))
        start = time.perf_counter()
        soon = self._steady and known.seconds * max(1.0, rows / known.rows) < _SOON_SECONDS
        if soon or threading.current_thread() is not threading.main_thread():
            result = known.call(*tensors)
        else:
            cancellation = Cancellation()
            result = interruptible(partial(cancellation.run, known.call, *tensors), cancellation.cancel)
        known.seconds, known.rows = time.perf_counter() - start, max(rows, 1)
        return result


def interruptible(call: Callable[[], Any], cancel: Callable[[], object]) -> Any:
    """Return the result of a call in another thread, which `cancel` ends if a signal handler raises an error in this thread."""
    ended: SimpleQueue[tuple[Any, BaseException | None]] = SimpleQueue()  # safe in signal handlers

    def run() -> None:
        try:
            ended.put((call(), None))
        except BaseException as error:  # raised in the calling thread
            ended.put((None, error))

    thread = threading.Thread(target=run, name="devicemap call", daemon=True)
    try:
        thread.start()
        result, error = receive(ended)
    except BaseException:
        cancel()
        join_threads([thread])
        raise
    thread.join()
    try:
        if error is not None:
            raise error
        return result
    finally:
        del error  # its traceback refers to this frame


def settle_hosts(devices: Collection[str]) -> frozenset[str]:
    """Call `hosts.settle`. Ctrl-C takes effect also if a host has stopped."""
    return interruptible(partial(settle, devices), lambda: None) if any(map(is_remote, devices)) else frozenset()


def receive(queue: SimpleQueue[Any], deadline: float = math.inf) -> Any:
    """Return the next item of a queue. Ctrl-C takes effect while it waits.

    Raises:
        Empty: no item came before the `deadline`, a time of `time.monotonic`.
    """
    while (seconds := min(_SIGNAL_SECONDS, deadline - time.monotonic())) > 0:
        with suppress(Empty):
            return queue.get(timeout=seconds)
    raise Empty


def join_threads(threads: Sequence[threading.Thread]) -> None:
    """Wait a limited time for threads whose calls were cancelled. Some may not have started, and one may be this thread."""
    deadline, pause = time.monotonic() + _FAREWELL_SECONDS, 50e-6
    others = [thread for thread in threads if thread is not threading.current_thread()]
    while any(thread.is_alive() for thread in others) and time.monotonic() < deadline:
        time.sleep(pause)  # an interrupted Thread.join regards the thread as ended
        pause = min(2 * pause, 0.002)
