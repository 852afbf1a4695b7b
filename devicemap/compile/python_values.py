"""The values to which a Python function refers by name. A trace keeps them as they were."""

from __future__ import annotations

import contextlib
import dis
import inspect
import sys
from collections.abc import Callable, Collection, Iterator
from functools import lru_cache, partial
from types import CodeType, FunctionType, MethodType
from typing import Any, NamedTuple

import numpy as np

_PLAIN = frozenset([bool, bytes, complex, float, int, str, type(None)])
"""Types of values that are compared with those of an earlier trace."""

_LIBRARIES = "keras.", "tensorflow."
"""Prefixes of modules whose functions do not change."""

_OF_GLOBALS = frozenset(["LOAD_GLOBAL", "LOAD_NAME"])
_OF_ATTRIBUTES = frozenset(["LOAD_ATTR", "LOAD_METHOD"])
_ASSIGN = frozenset(["DELETE_GLOBAL", "STORE_ATTR", "STORE_DEREF", "STORE_GLOBAL"])
"""Instructions of Python that read global names and attributes, and that assign to names which other code may read."""


class _Names(NamedTuple):
    """The names in the code of a function and of functions in it."""

    globals: tuple[str, ...]
    attributes: tuple[str, ...]
    imported: tuple[str, ...]
    """Modules."""

    assigned: frozenset[str]
    """Global and nonlocal names, and those of attributes, that it assigns to."""


@lru_cache(maxsize=1024)
def _names_in(code: CodeType) -> _Names:
    lines = [*_instructions_of(code)]

    def names(kinds: Collection[str]) -> tuple[str, ...]:
        return tuple(dict.fromkeys(line.argval for line in lines if line.opname in kinds))

    return _Names(names(_OF_GLOBALS), names(_OF_ATTRIBUTES), names(["IMPORT_NAME"]), frozenset(names(_ASSIGN)))


def _instructions_of(code: CodeType) -> Iterator[dis.Instruction]:
    """Yield the instructions of a function and of the functions in it."""
    yield from dis.get_instructions(code)
    for constant in code.co_consts:
        if inspect.iscode(constant):
            yield from _instructions_of(constant)


def values_in(fn: Any, depth: int = 3) -> Iterator[Any]:
    """Yield the objects to which a Python function and its callees refer.

    They refer to them by global names, closures, imports, and attributes of the object of a method.
    """
    with contextlib.suppress(Exception):  # objects may define any attribute
        fn = inspect.unwrap(fn) if callable(fn) else fn
        fn = fn if hasattr(fn, "__code__") else fn.__call__
    code = getattr(fn, "__code__", None)
    if not inspect.iscode(code) or not depth:
        return
    names = _names_in(code)
    values = [fn.__globals__[name] for name in names.globals if name in fn.__globals__]
    values += [sys.modules[name] for name in names.imported if name in sys.modules]
    values += [value for _, value in _cells_of(fn)]
    if inspect.ismethod(fn):
        for name in names.attributes:
            value = inspect.getattr_static(fn.__self__, name, None)  # runs no code of the user
            values.append(MethodType(value, fn.__self__) if type(value) is FunctionType else value)
    for value in values:
        yield np.random if value is np and "random" in names.attributes else value
        if type(value) in (FunctionType, MethodType):  # isinstance asks a proxy for its class
            yield from values_in(value, depth - 1)


def plain_values(fn: Callable[..., Any]) -> tuple[Any, ...]:
    """Return the numbers, texts and flags to which a function refers by name, with these names, as a hashable value.

    They are global and nonlocal ones, and attributes of the object of a method. Functions of the same module that it calls
    count as parts of it, with their code. Names to which it assigns are left out, for instance that of a counter of traces.
    """
    while type(fn) is partial:
        fn = fn.func
    if type(fn) not in (FunctionType, MethodType):
        fn = MethodType(type(fn).__call__, fn)
    module: Any = getattr(fn, "__module__", None)
    if str(module).startswith(_LIBRARIES):
        return ()
    found, assigned, pending, seen = list[tuple[Any, ...]](), set[str](), [fn], set[int]()
    while pending:
        each: Any = pending.pop()
        function, owner = (each.__func__, each.__self__) if type(each) is MethodType else (each, None)
        if type(function) is not FunctionType or id(function) in seen or function.__module__ != module:
            continue
        seen.add(id(function))
        names, known = _names_in(function.__code__), function.__globals__
        assigned |= names.assigned
        found.append((function.__code__,))
        values = [*((name, known[name]) for name in names.globals if name in known), *_cells_of(function)]
        if owner is not None:
            values += [(name, inspect.getattr_static(owner, name, None)) for name in names.attributes]
        for name, value in values:
            if type(value) in _PLAIN:
                found.append((name, type(value), value))
            elif type(value) is FunctionType:
                pending.append(value if owner is None else MethodType(value, owner))
    return tuple(entry for entry in found if entry[0] not in assigned)


def _cells_of(fn: Any) -> list[tuple[str, Any]]:
    """Return the nonlocal variables of a function that have values, with their names."""
    cells = []
    for name, cell in zip(fn.__code__.co_freevars, fn.__closure__ or ()):
        with contextlib.suppress(ValueError):  # an empty cell
            cells.append((name, cell.cell_contents))
    return cells
