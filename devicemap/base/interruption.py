"""What signal handlers raise: it comes out as it is, and is not lost.

Python runs the handler of a signal in the main thread, between two bytecodes of whatever runs there. Where that is `fn`,
being traced or in eager code, what the handler raises (`KeyboardInterrupt` for Ctrl-C, or the `TimeoutError` of a soft time
limit) looks like an error of `fn`, and becomes another one on its way through autograph. And TensorFlow loses some: wherever
it calls Python from C++, as for the dispatch of its ops, an exception may be dropped, or turned into a `SystemError`; and
Python itself drops those in `__del__`. A plain `tf.function` that is traced runs on after one Ctrl-C in a hundred.

So handlers are watched, where they matter: while functions are traced, and where `fn` runs in the main thread. Those of
asyncio are not: they raise nothing, and need system calls that go on after a signal, which `signal.signal` switches off.
"""

from __future__ import annotations

import functools
import signal
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any

_WATCHED = tuple(
    getattr(signal, name)
    for name in "SIGINT SIGTERM SIGALRM SIGVTALRM SIGPROF SIGUSR1 SIGUSR2 SIGHUP SIGQUIT SIGXCPU SIGBREAK".split()
    if hasattr(signal, name)
)
"""What is used to end or to limit a program."""


class Signals:
    """While it lasts, what signal handlers raise is kept, and comes out at its end, whatever has become of it.

    Handlers that are set within, say for a time limit on a part of `fn`, are whoever set them's own business. In other
    threads than the main one it does nothing: no handler runs there.

    Examples:
        >>> def out_of_time(number, frame):
        ...     raise TimeoutError("out of time")
        >>> before = signal.signal(signal.SIGTERM, out_of_time)
        >>> with Signals():
        ...     try:
        ...         signal.raise_signal(signal.SIGTERM)
        ...     except Exception:
        ...         pass
        Traceback (most recent call last):
        ...
        TimeoutError: out of time
        >>> _ = signal.signal(signal.SIGTERM, before)
    """

    def __init__(self) -> None:
        self._raised: BaseException | None = None
        self._watched: list[tuple[int, Any, Any]] = []  # signal, its handler, what stands in for that

    def check(self) -> None:
        """Raise what a handler has raised, if any has."""
        if self._raised is not None:
            raise self._raised from self._raised.__cause__  # not in the context of what it was taken for

    def __enter__(self) -> Signals:
        if threading.current_thread() is threading.main_thread():
            try:
                for number in _WATCHED:
                    handler = signal.getsignal(number)
                    if callable(handler) and not str(getattr(handler, "__module__", "")).startswith("asyncio."):
                        watched = self._watching(handler)
                        self._watched.append((number, handler, watched))
                        signal.signal(number, watched)
            except BaseException:  # a signal, of which the handler was watched already
                self._restore()
                raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._restore()
        try:
            if error is not self._raised and (error is None or isinstance(error, Exception)):
                self.check()
        finally:
            self._raised, self._watched = None, []  # which hold this

    def _watching(self, handler: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(handler)
        def watched(number: int, frame: Any) -> Any:
            try:
                return handler(number, frame)
            except BaseException as error:
                self._raised = error
                self._restore()  # here, not at the end: the next signal may come in the middle of that
                raise

        return watched

    def _restore(self) -> None:
        for number, handler, watched in self._watched:
            try:
                if signal.getsignal(number) is watched:  # and not what was set within, as by others of these
                    signal.signal(number, handler)
            except BaseException:  # a signal, of which the handler is in its place again
                self._restore()
                raise
