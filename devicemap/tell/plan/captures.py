"""What a traced function captures, and how the devices share it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from devicemap.compile.audit import Treatment, variable_of
from devicemap.compile.cost.walk import row_size
from devicemap.compile.trace import Traced
from devicemap.data.rows import home_of
from devicemap.tell.plan.names import name_in_code, variable_name
from devicemap.tell.plan.plan import Captured, Handling


def captured_by(traced: Traced, fn: Callable[..., Any], devices: Sequence[str]) -> tuple[Captured, ...]:
    """Everything that `fn` captures, in the order in which its trace does.

    Args:
        traced: the trace of `fn`.
        fn: to name variables as its code does.
        devices: full names of those that rows go to.
    """
    handles = traced.concrete.captured_inputs
    found = []
    for handle, treatment in zip(handles, traced.audit.treatments):
        variable = variable_of(traced.concrete, handle)
        if variable is not None and treatment is not None:
            found.append(_variable(variable, variable_name(variable, fn), treatment, devices))
        elif treatment is None:
            home = home_of(handle)
            handling = Handling.IN_PLACE if {*devices} <= {home} else Handling.KEPT
            name = name_in_code(handle, fn) or f"tensor {len(found) + 1}"
            found.append(Captured(name, "tensor", *_elements(handle), home, handling))
        else:
            handling = _HANDLED.get(treatment, Handling.LOOKED_UP)
            if {*devices} <= {handle.device} and handling is Handling.LOOKED_UP:
                handling = Handling.IN_PLACE
            name = name_in_code(handle, fn) or f"resource {len(found) + 1}"
            found.append(Captured(name, "resource", None, None, None, handle.device, handling))
    return tuple(found)


def _variable(variable: Any, name: str, treatment: Treatment, devices: Sequence[str]) -> Captured:
    if treatment is Treatment.READ:
        handling = Handling.IN_PLACE if {*devices} <= {variable.device} else Handling.COPIED
    else:
        handling = _HANDLED[treatment]
    return Captured(name, "variable", *_elements(variable), variable.device, handling)


_HANDLED = {
    Treatment.STAYS: Handling.LOOKED_UP,
    Treatment.ATOMIC: Handling.ATOMIC,
    Treatment.SEED: Handling.SEED,
    Treatment.ORDERED: Handling.ORDERED,
}


def _elements(value: Any) -> tuple[str, tuple[int | None, ...] | None, int | None]:
    """Dtype, shape and bytes of a tensor or variable."""
    shape = None if value.shape.rank is None else tuple(value.shape.as_list())
    size = None if shape is None or None in shape else row_size(value.shape, value.dtype)
    return value.dtype.name, shape, size
