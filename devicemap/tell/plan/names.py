"""What the code around a function calls the variables that it captures."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import tensorflow as tf

_OWN_NAMES = ("Variable", "StateVar")
"""What TensorFlow calls variables and generator states that were given no name."""


def name_in_code(captured: Any, fn: Callable[..., Any]) -> str | None:
    """What the code around `fn` calls a variable, a tensor or the handle of a resource; `None` where that is not found.

    Examples:
        >>> total = tf.Variable(0.0)
        >>> name_in_code(total, lambda row: total.assign_add(row))
        'total'
    """
    return next((name for name, value in _around(fn) if _holds(value, captured)), None)


def variable_name(variable: Any, fn: Callable[..., Any]) -> str:
    """The name that a `tf.Variable` was given, or else what the code around `fn` calls it."""
    own = str(variable.name).partition(":")[0]
    return (name_in_code(variable, fn) or own) if own in _OWN_NAMES else own


def _around(fn: Any) -> Iterator[tuple[str, Any]]:
    """Names and values that `fn` can see, and the attributes of its objects."""
    fn = getattr(fn, "python_function", fn)
    if not inspect.isroutine(fn):  # an object that is called
        yield from _attributes("", fn)
        fn = type(fn).__call__
    if inspect.ismethod(fn):
        yield from _attributes("", fn.__self__)
        fn = fn.__func__
    try:
        seen = inspect.getclosurevars(inspect.unwrap(fn))
    except (TypeError, ValueError):  # not Python code, or a cell that is still empty
        return
    names: dict[str, Any] = {**seen.globals, **seen.nonlocals}
    yield from names.items()
    for name, value in names.items():
        yield from _attributes(f"{name}.", value)
        if inspect.isfunction(value) or isinstance(value, tf.types.experimental.PolymorphicFunction):
            yield from _closure(value)


def _closure(fn: Any) -> Iterator[tuple[str, Any]]:
    """What a function that `fn` calls closes over; one level, so that functions that call each other come to an end."""
    try:
        yield from inspect.getclosurevars(getattr(fn, "python_function", fn)).nonlocals.items()
    except (TypeError, ValueError):
        return


def _attributes(prefix: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        yield from ((f"{prefix}{name}", entry) for name, entry in value.items())
    elif hasattr(value, "__dict__") and not inspect.ismodule(value):
        yield from ((f"{prefix}{name.lstrip('_')}", entry) for name, entry in vars(value).items())


def _holds(value: Any, captured: Any) -> bool:
    """Whether it is what is captured, a `tf.random.Generator` with this state, or a table with this handle."""
    if isinstance(value, tf.random.Generator):
        return value.state is captured
    return value is captured or getattr(value, "resource_handle", None) is captured
