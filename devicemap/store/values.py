"""Python values as digests: the same in each process for what does the same, and another one for what may do something else.

A value is taken apart as a copy of it would be made; functions and classes into their code, defaults, what they close over,
and the globals that they name. Installed packages count by their names, and so does what stands under its own name in one.
"""

from __future__ import annotations

import copyreg
import dis
import functools
import operator
import sys
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import CellType, CodeType, FunctionType, GetSetDescriptorType, MemberDescriptorType, ModuleType
from typing import Any

import numpy as np

from devicemap.store.storage import checksum

_PLAIN = (type(None), type(...), type(NotImplemented), bool, int, float, complex, str, bytes)
_WRAPPERS: dict[type, Sequence[str]] = {
    property: ("fget", "fset", "fdel"), classmethod: ("__func__",), staticmethod: ("__func__",),
    functools.cached_property: ("func",),
}  # fmt: skip
"""What copies are not made of, and the functions in it."""

_MOST_VALUES = 20_000


class UnknownValueError(ValueError):
    """A value that cannot be told from others; the message names what of it."""


def digest_value(value: Any) -> str:
    """The digest of a value, and of all that it consists of.

    >>> digest_value(functools.partial(max, [1, 2])) == digest_value(functools.partial(max, [1, 2]))
    True
    >>> digest_value(lambda x: x + 1) == digest_value(lambda x: x + 2)
    False

    Raises:
        UnknownValueError: for what holds locks, open files, or anything else that cannot be copied or has no name.
    """
    try:
        return _Walk().digest(value)
    except RecursionError as error:
        raise UnknownValueError("values in values, too deep to follow") from error


class _Walk:
    def __init__(self) -> None:
        self._met: dict[int, tuple[Any, str]] = {}  # with the value: nobody else gets its id
        self._depth = 0

    def digest(self, value: Any) -> str:
        if type(value) in _PLAIN:
            return f"{type(value).__name__} {value!r}"
        if id(value) not in self._met:
            if len(self._met) >= _MOST_VALUES:
                raise UnknownValueError(f"more than {_MOST_VALUES} values")
            self._met[id(value)] = value, f"circle {self._depth}"
            self._depth += 1
            kind, parts = _apart(value)
            digests = [self.digest(part) for part in parts]
            if isinstance(value, set | frozenset):  # their order is another one in each process
                digests.sort()
            self._depth -= 1
            self._met[id(value)] = value, checksum(f"{kind} {digests}".encode())
        return self._met[id(value)][1]


def _apart(value: Any) -> tuple[str, list[Any]]:
    """What a value is called, and what it consists of."""
    kind = type(value)
    if isinstance(value, ModuleType):
        return f"module {value.__name__}", []
    if isinstance(value, FunctionType | type) and (name := _installed_name(value)):
        return name, []
    if kind in (tuple, list, set, frozenset):
        return kind.__name__, [*value]
    if kind is dict:
        return "dict", [part for item in value.items() for part in item]
    if kind is np.ndarray or isinstance(value, np.generic):
        array = np.asarray(value)
        contents = array.ravel().tolist() if array.dtype.hasobject else checksum(array.tobytes())
        return f"{kind.__name__} {array.dtype!r} {array.shape}", [contents]
    if isinstance(value, FunctionType):
        own = {name: part for name, part in vars(value).items() if not name.endswith("__")}  # the marks of TensorFlow
        used = [part for item in _globals(value.__code__, value.__globals__) for part in item]
        return "function", [value.__code__, value.__defaults__, value.__kwdefaults__, value.__closure__, own, *used]
    if isinstance(value, CodeType):
        flow = getattr(value, "co_exceptiontable", b"")  # since Python 3.11
        takes = [value.co_flags, value.co_argcount, value.co_kwonlyargcount, value.co_varnames]
        return "code", [value.co_code, flow, *takes, value.co_names, *value.co_consts]
    if isinstance(value, CellType):
        try:
            return "cell", [value.cell_contents]
        except ValueError:
            return "empty cell", []
    if isinstance(value, type):
        told = {name: part for name, part in vars(value).items() if not name.startswith(("__", "_abc_")) or _acts(part)}
        return f"class {value.__qualname__}", [kind, *value.__bases__, told]
    if isinstance(value, GetSetDescriptorType | MemberDescriptorType):
        return f"{kind.__name__} {value.__name__}", []
    if kind in _WRAPPERS:
        return kind.__name__, [getattr(value, name) for name in _WRAPPERS[kind]]
    return _reduced(value)


def _acts(part: Any) -> bool:
    """Whether an entry of a class does something, and is not a mark of Python's."""
    return callable(part) or hasattr(type(part), "__get__")


def _reduced(value: Any) -> tuple[str, list[Any]]:
    """What `copy` and `pickle` would make the value again from."""
    kind = type(value)
    try:
        reduce = copyreg.dispatch_table.get(kind)
        found = reduce(value) if reduce else value.__reduce_ex__(4)
        if isinstance(found, str):  # it stands under this name, and is what its module makes of it
            return f"{kind.__qualname__} {_name(value, found)}", [getattr(value, "__dict__", None)]
        made, arguments, state, *items = (*found, None, None, None)[:5]
        return "object", [made, arguments, state, *([*part] for part in items if part is not None)]
    except UnknownValueError:
        raise
    except Exception as error:  # whatever its class does
        raise UnknownValueError(f"a {kind.__module__}.{kind.__qualname__}") from error


def _name(value: Any, name: str) -> str:
    """The module and the name that a value stands under. Raises `LookupError` or `AttributeError` where it does not."""
    module = getattr(value, "__module__", None) or type(value).__module__
    if operator.attrgetter(name)(sys.modules[module]) is not value:
        raise LookupError(name)
    return f"{module}.{name}"


def _installed_name(value: Any) -> str | None:
    """The name of a function or class, where it is one of an installed package and stands under that name there."""
    try:
        return _name(value, value.__qualname__) if _is_installed(value.__module__) else None
    except (LookupError, AttributeError):
        return None


@functools.cache
def _is_installed(module: str) -> bool:
    """Whether a module is a part of Python or of a package that was installed, and none of the user's own."""
    file = getattr(sys.modules.get(module), "__file__", None)
    if file is None:
        return module in sys.builtin_module_names
    path = Path(file)
    of_python = path.is_relative_to(sysconfig.get_path("stdlib"))
    return of_python or not {"site-packages", "dist-packages"}.isdisjoint(path.parts)


def _globals(code: CodeType, space: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """The globals that code names, and what it may mean of the user's own modules among them."""
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _globals(constant, space)
    spaces = [(space, {step.argval for step in dis.get_instructions(code) if step.opname == "LOAD_GLOBAL"})]
    for inside, names in spaces:
        for name in sorted(names & inside.keys()):
            value = inside[name]
            yield name, value
            own = isinstance(value, ModuleType) and not _is_installed(value.__name__)
            if own and not any(vars(value) is known for known, _ in spaces):
                spaces.append((vars(value), {*code.co_names}))
