"""What `parallel_map` remembers of the functions that it was given: their programs, each for as long as its function lives.

A table of weak functions would not do by itself: a program holds its function, so neither would ever go. What a function was
traced to does not hold it, though. So programs are remembered without their functions, and each call brings its own along.

    guarantee   a function that the user drops takes its program with it: traces, and copies on devices
    limit       some functions nobody can drop: TensorFlow keeps what `tf.py_function` and `tf.custom_gradient` are given, with
                all that it closes over. So no more than a fixed number of programs is remembered.
"""

from __future__ import annotations

import inspect
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from devicemap.base.options import variables_of
from devicemap.base.structure import freeze
from devicemap.compile.program import Program
from devicemap.errors import OptionError

_MOST = 64
"""Programs that are remembered at once; the one that was asked for longest ago goes first."""


class Memory:
    """The programs of functions, by their options. Thread-safe."""

    def __init__(self, most: int = _MOST) -> None:
        self._most = most
        self._remembered: OrderedDict[Any, _Remembered] = OrderedDict()
        self._lock = threading.Lock()

    def program_of(self, fn: Callable[..., Any], options: dict[str, Any]) -> Program:
        """The program of an earlier call with the same function and options, or a new one.

        Bound methods are the same where they are the same method of the same object. What `progress` is makes no difference:
        like the function, it is there for the call alone.
        """
        # A bound method is made anew at each access, and lives as long as its object and its function do.
        parts = (fn.__self__, fn.__func__) if inspect.ismethod(fn) else (fn,)
        compiled_for = {name: value for name, value in options.items() if name != "progress"}
        try:
            in_place = variables_of(options.get("in_place", ()))
            compiled_for["in_place"] = [id(variable) for variable in in_place]
            # by identity, which calls no code of the user's; with the types: 1 is True to a dict, and not to `batch_size`
            key = (*map(id, parts), *((name, type(value), freeze(value)) for name, value in compiled_for.items()))
            hash(key)
        except (TypeError, OptionError):  # an option that cannot be a key, or cannot be
            return Program(fn, options)
        with self._lock:
            known = self._remembered.get(key)
            remembered = None if known is None else known.program
            if remembered is None:
                program = Program(fn, options)
                self._forget_dropped()
                self._remembered[key] = _Remembered(program.of(_brought_along, False), (*parts, *in_place))
            else:
                program = remembered.of(fn, options["progress"])
            self._remembered.move_to_end(key)
            while len(self._remembered) > self._most:
                self._remembered.popitem(last=False)[1].forget()
            return program

    def _forget_dropped(self) -> None:
        for key in [key for key, each in self._remembered.items() if each.program is None]:
            del self._remembered[key]


class _Remembered:
    """A program, until one of the objects that its function consists of is dropped."""

    def __init__(self, program: Program, parts: tuple[Any, ...]):
        self.program: Program | None = program
        self._parts = [self._referred(part) for part in parts]

    def forget(self, _: Any = None) -> None:
        # It may run at any moment, in any thread, also in one that holds the lock: so it changes no table.
        self.program = None

    def _referred(self, part: Any) -> Any:
        try:
            return weakref.ref(part, self.forget)
        except TypeError:  # an object of a class with __slots__, perhaps: it stays until the program goes
            return part


def _brought_along(*args: Any, **kwargs: Any) -> Any:
    """Stands for the function of a program that is remembered."""
    raise AssertionError("a remembered program was called without its function")
