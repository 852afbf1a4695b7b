"""What a traced function captures, what the code around it calls that, and how the devices share it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

import tensorflow as tf

from devicemap.compile.audit import Treatment, variable_of
from devicemap.compile.graph_walker import size_of
from devicemap.compile.trace import Traced
from devicemap.data.rows import home_of
from devicemap.inspect.plan import Captured, Handling

_UNNAMED = ("", "Variable", "StateVar")
"""What TensorFlow calls variables and generator states that were given no name."""

_HANDLED: dict[Treatment | None, Handling] = {
    Treatment.STAYS: Handling.LOOKED_UP,
    Treatment.ATOMIC: Handling.ATOMIC,
    Treatment.SEED: Handling.SEED,
    Treatment.ORDERED: Handling.ORDERED,
}
_ELSE_HANDLED = {"variable": Handling.COPIED, "tensor": Handling.KEPT, "resource": Handling.LOOKED_UP}


def captured_by(traced: Traced, fn: Callable[..., Any], devices: Sequence[str]) -> tuple[Captured, ...]:
    """Everything that `fn` captures, in the order in which its trace does; `devices` are those that rows go to."""
    found: list[Captured] = []
    for handle, treatment in zip(traced.captures, traced.audit.treatments):
        variable = variable_of(traced.concrete, handle) if treatment is not None else None
        kind: Literal["variable", "tensor", "resource"] = "tensor" if treatment is None else "resource"
        thing, own_name, home = handle, "", home_of(handle)
        if variable is not None:
            kind, thing, home = "variable", variable, variable.device
            own_name = str(variable.name).partition(":")[0]
        name = own_name if own_name not in _UNNAMED else _name_in_code(thing, fn) or own_name
        handling = _HANDLED.get(treatment, _ELSE_HANDLED[kind])
        if {*devices} <= {home} and handling in _ELSE_HANDLED.values():
            handling = Handling.IN_PLACE
        elements = _elements(None if kind == "resource" else thing)
        found.append(Captured(name or f"{kind} {len(found) + 1}", kind, *elements, home, handling))
    return tuple(found)


def _elements(value: Any) -> tuple[str | None, tuple[int | None, ...] | None, int | None]:
    """Dtype, shape and bytes of a tensor or variable; of a resource, there are none."""
    if value is None:
        return None, None, None
    shape = None if value.shape.rank is None else tuple(value.shape.as_list())
    size = None if shape is None or None in shape else size_of(value.shape, value.dtype)
    return value.dtype.name, shape, size


def _name_in_code(captured: Any, fn: Callable[..., Any]) -> str | None:
    """What the code around `fn` calls a variable, a tensor or the handle of a resource; `None` where that is not found.

    Examples:
        >>> total = tf.Variable(0.0)
        >>> _name_in_code(total, lambda row: total.assign_add(row))
        'total'
    """
    return next((name for name, value in _around(fn) if _holds(value, captured)), None)


def _around(fn: Any) -> Iterator[tuple[str, Any]]:
    """Names and values that `fn` can see, the attributes of its objects, and what functions that it calls close over."""
    fn = getattr(fn, "python_function", fn)
    if not inspect.isroutine(fn):  # an object that is called
        yield from _attributes("", fn)
        fn = type(fn).__call__
    if inspect.ismethod(fn):
        yield from _attributes("", fn.__self__)
        fn = fn.__func__
    global_names, own_names = _seen_by(fn)
    names = {**global_names, **own_names}
    yield from names.items()
    for name, value in names.items():
        yield from _attributes(f"{name}.", value)
        if inspect.isfunction(value) or isinstance(value, tf.types.experimental.PolymorphicFunction):
            yield from _seen_by(value)[1].items()


def _seen_by(fn: Any) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """The globals that a function uses, and what it closes over."""
    try:
        seen = inspect.getclosurevars(inspect.unwrap(getattr(fn, "python_function", fn)))
    except (TypeError, ValueError):  # not Python code, or a cell that is still empty
        return {}, {}
    return seen.globals, seen.nonlocals


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
