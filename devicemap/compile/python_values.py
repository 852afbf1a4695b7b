"""The values to which a Python function refers by name. A trace keeps them as they were."""

from __future__ import annotations

import contextlib
import dis
import inspect
import sys
from collections.abc import Callable, Collection, Iterator
from enum import Enum
from functools import lru_cache, partial
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType
from typing import Any, NamedTuple

import numpy as np

_PLAIN = frozenset([bool, bytes, complex, float, int, str, type(None)])
"""Types of values that are compared with those of an earlier trace."""

_FUNCTIONS = frozenset([BuiltinFunctionType, FunctionType, np.ufunc])

_LIBRARIES = "keras.", "tensorflow."
"""Prefixes of modules whose functions do not change."""

_OF_GLOBALS = frozenset(["LOAD_GLOBAL", "LOAD_NAME"])
_OF_ATTRIBUTES = frozenset(["LOAD_ATTR", "LOAD_METHOD"])
_ASSIGN_GLOBALS = frozenset(["DELETE_GLOBAL", "STORE_GLOBAL"])
_ASSIGN_NONLOCALS = frozenset(["DELETE_DEREF", "STORE_DEREF"])
"""Instructions of Python that read global names and attributes, and that assign to variables."""


class _Names(NamedTuple):
    """The names in the code of a function and of functions in it."""

    globals: tuple[str, ...]
    attributes: tuple[str, ...]
    imported: tuple[str, ...]
    """Modules."""

    assigned_globals: frozenset[str]
    assigned_nonlocals: frozenset[str]


@lru_cache(maxsize=1024)
def _names_in(code: CodeType) -> _Names:
    lines = [*_instructions_of(code)]

    def names(kinds: Collection[str]) -> tuple[str, ...]:
        return tuple(dict.fromkeys(line.argval for line in lines if line.opname in kinds))

    return _Names(
        names(_OF_GLOBALS),
        names(_OF_ATTRIBUTES),
        names(["IMPORT_NAME"]),
        frozenset(names(_ASSIGN_GLOBALS)),
        frozenset(names(_ASSIGN_NONLOCALS)),
    )


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
    """Return the numbers, texts and flags to which a function refers as global and nonlocal variables, as a hashable value.

    Functions of its module that it calls count as parts of it, with their code and defaults, and others by their names.
    Variables to which these functions assign are left out, for instance counters of traces.
    """
    while type(fn) is partial:
        fn = fn.func
    each: Any = fn if type(fn) in (FunctionType, MethodType) else type(fn).__call__
    each, pending = getattr(each, "__func__", each), list[FunctionType]()
    while type(each) is FunctionType and each not in pending:  # a decorator, and the function that it wraps
        pending.append(each)
        each = vars(each).get("__wrapped__")
    pending = [function for function in pending if not str(function.__module__).startswith(_LIBRARIES)]
    modules = [function.__globals__ for function in pending]
    found, assigned, seen = list[tuple[Any, ...]](), set[str](), set[FunctionType]()
    while pending:
        function = pending.pop()
        seen.add(function)
        names, known = _names_in(function.__code__), function.__globals__
        assigned |= names.assigned_globals
        defaults = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
        found.append((function.__code__, *(_key_of(value) for value in defaults if _is_plain(value))))
        values: list[tuple[Any, Any]] = [(name, known[name]) for name in names.globals if name in known]
        values += [(None, value) for name, value in _cells_of(function) if name not in names.assigned_nonlocals]
        for name, value in values:
            if _is_plain(value):
                found.append((name, _key_of(value)))
            elif type(value) in _FUNCTIONS:
                found.append((name, getattr(value, "__module__", None), value.__name__))
                ours = type(value) is FunctionType and any(value.__globals__ is module for module in modules)
                if ours and value not in seen:
                    pending.append(value)
    return tuple(entry for entry in found if entry[0] not in assigned)


def _is_plain(value: Any) -> bool:
    if type(value) is tuple:
        return all(map(_is_plain, value))
    return type(value) in _PLAIN or issubclass(type(value), np.generic | Enum)  # isinstance asks a proxy for its class


def _key_of(value: Any) -> Any:
    """Return a hashable value that differs for 1, 1.0 and True, and for 0.0 and -0.0."""
    return type(value), value if type(value) in (str, bytes, int) else repr(value)


def _cells_of(fn: Any) -> list[tuple[str, Any]]:
    """Return the nonlocal variables of a function that have values, with their names."""
    cells = []
    for name, cell in zip(fn.__code__.co_freevars, fn.__closure__ or ()):
        with contextlib.suppress(ValueError):  # an empty cell
            cells.append((name, cell.cell_contents))
    return cells
