"""Functions that are traced together, one for each device, and meet: what each brings, all get.

A function cannot wait for another one that is traced after it. So each has a thread of its own, of which one runs at a time,
from meeting to meeting: ops that several devices' values go into are made when all have come.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from devicemap.errors import failure


class Lockstep:
    """Functions without arguments that run in turns, in the graph that is being built."""

    def __init__(self, functions: Sequence[Callable[[], Any]]):
        self._graph = tf.compat.v1.get_default_graph()
        self._scope = self._graph.get_name_scope()
        self._turns = [_Turn(self, function) for function in functions]
        self._current: _Turn | None = None

    def run(self) -> list[Any]:
        """What the functions return.

        Raises:
            FunctionError: some have ended while others wait for them.
            Exception: what one of them raises.
        """
        self._graph.switch_to_thread_local()  # scopes of devices, which threads enter and leave in any order
        try:
            while any(turn.running for turn in self._turns):
                for turn in self._turns:
                    self._current = turn
                    turn.go_on()
                waiting = [turn for turn in self._turns if turn.running]
                if waiting and len(waiting) < len(self._turns):
                    raise failure("the function meets those of other devices more often on one device than on another")
                if waiting:
                    combine = waiting[0].combine
                    for turn, gets in zip(waiting, combine([turn.brings for turn in waiting])):
                        turn.gets = gets
            return [turn.result for turn in self._turns]
        finally:
            for turn in self._turns:
                turn.give_up()

    def meet(self, brings: Any, combine: Callable[[list[Any]], Sequence[Any]]) -> Any:
        """Wait for the functions of all devices: `combine` takes what they bring, and returns what each gets."""
        assert self._current is not None
        return self._current.wait(brings, combine)

    def thread(self, call: Callable[[], None]) -> threading.Thread:
        """A thread that is in this graph."""

        def run() -> None:
            with self._graph.as_default(), tf.name_scope(f"{self._scope}/" if self._scope else ""):
                call()

        return threading.Thread(target=run, name="devicemap lockstep", daemon=True)


class _GivenUp(BaseException):
    """Ends a function that nobody waits for any more."""


class _Turn:
    """One of the functions: its thread runs between `go_on` and the next meeting, while the caller waits."""

    brings: Any = None
    gets: Any = None
    combine: Any = None
    result: Any = None

    def __init__(self, lockstep: Lockstep, function: Callable[[], Any]):
        self.running = True
        self._function = function
        self._error: BaseException | None = None
        self._given_up = False
        self._mine, self._callers = threading.Semaphore(0), threading.Semaphore(0)
        self._thread = lockstep.thread(self._run)

    def _run(self) -> None:
        try:
            self.result = self._function()
        except _GivenUp:
            pass
        except BaseException as error:  # raised again by the caller
            self._error = error
        self.running = False
        self._callers.release()

    def go_on(self) -> None:
        """Let it run until it meets, or ends."""
        if self._thread.ident is None:
            self._thread.start()
        else:
            self._mine.release()
        self._callers.acquire()
        if self._error is not None:
            raise self._error

    def wait(self, brings: Any, combine: Callable[[list[Any]], Sequence[Any]]) -> Any:
        """Called in its thread."""
        self.brings, self.combine = brings, combine
        self._callers.release()
        self._mine.acquire()
        if self._given_up:
            raise _GivenUp
        return self.gets

    def give_up(self) -> None:
        """End it, wherever it is."""
        if self._thread.ident is not None and self.running:
            self._given_up = True
            self._mine.release()
            self._callers.acquire()
            self._thread.join()
