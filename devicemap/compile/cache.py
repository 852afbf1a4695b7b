"""The programs of functions that were passed to `parallel_map`. Each program is kept as long as its function exists.

A program refers to its function, so a table with weak references to functions would keep both. The cache keeps programs
without their functions, and each call passes its function. TensorFlow's registries keep the functions of `tf.py_function` and
`tf.custom_gradient` forever, so the number of programs is limited.
"""

from __future__ import annotations

import inspect
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from devicemap.compile.program import Program
from devicemap.data.structure import freeze
from devicemap.devices import task_device
from devicemap.errors import OptionError
from devicemap.options import variables_of

_MOST = 64
"""The largest number of kept programs. The least recently used program is dropped first."""


class ProgramCache:
    """Programs by function and options. Thread-safe."""

    def __init__(self, most: int = _MOST) -> None:
        self._most = most
        self._kept: OrderedDict[Any, _Kept] = OrderedDict()
        self._lock = threading.Lock()

    def program_of(self, fn: Callable[..., Any], options: dict[str, Any]) -> Program:
        """Return the program of an earlier call with the same function and options except `progress`, or a new one.

        Bound methods are equal if they are the same method of the same object.
        """
        # Each access creates a new bound method, so the key consists of its object and its function.
        parts = (fn.__self__, fn.__func__) if inspect.ismethod(fn) else (fn,)
        compiled_for = {name: value for name, value in options.items() if name != "progress"}
        compiled_for["task"] = task_device.get()
        try:
            in_place = variables_of(options.get("in_place", ()))
            compiled_for["in_place"] = [id(variable) for variable in in_place]
            # By identity, because __hash__ and __eq__ would call the user's code; and with types, because True == 1.
            key = (*map(id, parts), *((name, type(value), freeze(value)) for name, value in compiled_for.items()))
            hash(key)
        except (TypeError, OptionError):  # an option that is not hashable, or not valid
            return Program(fn, options)
        with self._lock:
            program = self._kept[key].program if key in self._kept else None
            if program is None:
                program = Program(fn, options)
                for dropped in [other for other, kept in self._kept.items() if kept.program is None]:
                    del self._kept[dropped]
                self._kept[key] = _Kept(program.of(_provided_by_calls, False), (*parts, *in_place))
            else:
                program = program.of(fn, options["progress"])
            self._kept.move_to_end(key)
            while len(self._kept) > self._most:
                self._kept.popitem(last=False)[1].drop()
            return program


class _Kept:
    """A program, which is dropped with any of the objects that its function consists of."""

    def __init__(self, program: Program, parts: tuple[Any, ...]):
        self.program: Program | None = program
        self._parts = [self._reference(part) for part in parts]

    def drop(self, _: Any = None) -> None:
        # The garbage collector may call this at any moment, also in a thread that holds the lock. So it changes no table.
        self.program = None

    def _reference(self, part: Any) -> Any:
        try:
            return weakref.ref(part, self.drop)
        except TypeError:  # an object of a class with __slots__ is kept as long as the program
            return part


def _provided_by_calls(*args: Any, **kwargs: Any) -> Any:
    """Replace the function of a kept program."""
    raise AssertionError("a program of the cache was called without its function")
