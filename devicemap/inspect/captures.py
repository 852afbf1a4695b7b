"""The variables, tensors and resources that a traced function captures, with their names in the user's code."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

import tensorflow as tf

from devicemap.compile.audit import Treatment, variable_of, writing_line
from devicemap.compile.graph_walker import size_of
from devicemap.compile.trace import Traced
from devicemap.data.rows import home_of
from devicemap.inspect.plan import Captured, Handling

_UNNAMED = ("", "Variable", "StateVar")
"""TensorFlow's names of variables and generator states without a name."""

_HANDLINGS: dict[Treatment | None, Handling] = {
    None: Handling.KEPT,
    Treatment.READ: Handling.COPIED,
    Treatment.STAYS: Handling.LOOKED_UP,
    Treatment.ATOMIC: Handling.ATOMIC,
    Treatment.SEED: Handling.SEED,
    Treatment.ORDERED: Handling.ORDERED,
}


def captured_by(traced: Traced, fn: Callable[..., Any], devices: Sequence[str]) -> tuple[Captured, ...]:
    """Return the captured values of a function, in the order of its trace.

    Args:
        traced: the traced function.
        fn: the user's function, for names.
        devices: full names of the devices that get rows.
    """
    names = _names_around(fn)
    found: list[Captured] = []
    for handle, treatment in zip(traced.captures, traced.audit.treatments):
        variable = variable_of(traced.concrete, handle) if treatment is not None else None
        thing = handle if variable is None else variable
        home = home_of(handle) if variable is None else variable.device
        own_name = "" if variable is None else str(variable.name).partition(":")[0]
        name = own_name if own_name not in _UNNAMED else names.get(id(thing)) or own_name
        handling = _HANDLINGS[treatment]
        if treatment is Treatment.READ and variable is None:  # a lookup table
            handling = Handling.LOOKED_UP
        if {*devices} <= {home} and handling in (Handling.COPIED, Handling.KEPT, Handling.LOOKED_UP):
            handling = Handling.IN_PLACE
        line = writing_line(traced.function.graph, handle) if handling is Handling.ORDERED else None
        size = size_of(thing.shape, thing.dtype) if thing.dtype != tf.resource else None
        found.append(Captured(name or f"capture {len(found) + 1}", size, home, handling, line))
    return tuple(found)


def _names_around(fn: Any) -> dict[int, str]:
    """Return the names of variables, tensors and resources that `fn` can see, by identity.

    `fn` can see globals, closure variables, attributes of these and of a method's object, and closures of functions among
    them.

    Examples:
        >>> total = tf.Variable(0.0)
        >>> _names_around(lambda row: total.assign_add(row))[id(total)]
        'total'
    """
    owner = getattr(fn, "__self__", fn)
    function = fn if inspect.isroutine(getattr(fn, "python_function", fn)) else type(fn).__call__
    seen = _closure_of(function)
    inner = (entry for value in seen.values() for entry in _closure_of(value).items())
    attributes = (entry for name, value in seen.items() for entry in _attributes(f"{name}.", value))
    names = [*inner, *attributes, *_attributes("", owner), *seen.items()]
    return {id(_captured(value)): name for name, value in names}  # the last name of a value counts


def _closure_of(fn: Any) -> Mapping[str, Any]:
    """Return the globals and closure variables that a Python function uses, except modules; nothing for other values."""
    fn = getattr(fn, "python_function", fn)
    if not inspect.isroutine(fn):
        return {}
    with suppress(TypeError, ValueError):  # not Python code, or a cell that is still empty
        seen = inspect.getclosurevars(inspect.unwrap(fn))
        return {
            name: value for name, value in {**seen.globals, **seen.nonlocals}.items() if not inspect.ismodule(value)
        }
    return {}


def _attributes(prefix: str, value: Any) -> Iterator[tuple[str, Any]]:
    for name, entry in (value if isinstance(value, Mapping) else getattr(value, "__dict__", {})).items():
        yield f"{prefix}{str(name).lstrip('_')}", entry


def _captured(value: Any) -> Any:
    """Return the object that a graph captures of a value: the state of a generator, or the handle of a table."""
    return value.state if isinstance(value, tf.random.Generator) else getattr(value, "resource_handle", value)
