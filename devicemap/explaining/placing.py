"""Which ops of a function leave the device of their rows: those it has no kernel for, and those that are placed elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from devicemap.explaining.plans import StrayOp
from devicemap.explaining.walking import called_by, full_name, is_placed
from devicemap.internals.functions import registered_kernels

Kernels = Sequence[tuple[str, Mapping[str, frozenset[int]], frozenset[str]]]
"""Of a type of op: the device type of each kernel, the dtypes (enums) that each attribute may have, and the arguments that lie
in the host's memory."""

_NOT_PLACED = frozenset("Placeholder NoOp Const Identity".split())
"""Ops that stand for inputs, for order, for values that are copied wherever they are used, or for a copy."""


def fitting(kernels: Kernels, kind: str, dtypes: Mapping[str, Sequence[int]]) -> frozenset[str] | None:
    """The arguments that lie in the host's memory, of the kernel that a kind of device has for an op with attributes of these
    dtypes; `None` where it has none.

    Kernels for `"DEFAULT"` serve every kind, as in TensorFlow.

    >>> fitting([("CPU", {}, frozenset()), ("GPU", {"T": frozenset([1])}, frozenset())], "GPU", {"T": [7]})
    """
    for wanted in (kind, "DEFAULT"):
        for device, constraints, on_host in kernels:
            if device == wanted and all(
                set(dtypes.get(attribute, ())) <= allowed for attribute, allowed in constraints.items()
            ):
                return on_host
    return None


def stray_ops(
    ops: Iterable[Any],
    places: Sequence[str],
    kinds: Sequence[str],
    kernels_of: Callable[[str], Kernels] = registered_kernels,
) -> list[StrayOp]:
    """The ops that do not run where their rows are, each type once per device that it leaves or goes to.

    Args:
        ops: of the traced function, as `walking.live_ops` finds them.
        places: full names of the devices that it runs on.
        kinds: the kinds of these.
        kernels_of: the kernels there are for a type of op. TensorFlow knows those of the devices that it was built for.
    """
    found: dict[StrayOp, None] = {}
    for op in ops:
        if op.type in _NOT_PLACED or called_by(op):
            continue
        if is_placed(op.device) and any(full_name(op.device) != place for place in places):
            stray = StrayOp(op.type, full_name(op.device), "with a resource" if _of_resource(op) else "placed by fn")
            found[stray] = None
            continue
        kernels = kernels_of(op.type)
        for kind in dict.fromkeys(kinds):
            if kernels and fitting(kernels, kind, dtypes_of(op)) is None:
                found[StrayOp(op.type, kind, "no kernel")] = None
    return list(found)


def _of_resource(op: Any) -> bool:
    """Whether TensorFlow places it, with what it asks or writes: a table, or a file of summaries."""
    return op.type.startswith(("LookupTable", "Write", "FlushSummaryWriter"))


def dtypes_of(op: Any) -> dict[str, list[int]]:
    """The dtypes (enums) among the attributes of an op."""
    attributes = op.node_def.attr.items()
    return {name: [value.type] if value.type else list(value.list.type) for name, value in attributes}
