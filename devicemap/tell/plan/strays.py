"""Which ops of a function leave the device of their rows: those it has no kernel for, and those that are placed elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from devicemap._tensorflow.functions import Kernel, registered_kernels
from devicemap.compile.cost.walk import called_by, full_name, is_placed
from devicemap.compile.kernels import dtypes_of, instead_of_int32, kernel_for
from devicemap.tell.plan.plan import StrayOp

_NOT_PLACED = frozenset("Placeholder NoOp Const Identity".split())
"""Ops that stand for inputs, for order, for values that are copied wherever they are used, or for a copy."""


def stray_ops(
    ops: Iterable[Any],
    places: Sequence[str],
    kinds: Sequence[str],
    kernels_of: Callable[[str], Sequence[Kernel]] = registered_kernels,
) -> list[StrayOp]:
    """The ops that do not run where their rows are, each type once per device that it leaves or goes to.

    `places` are full names of the devices that it runs on, and `kinds` theirs. TensorFlow knows kernels of the devices that it
    was built for.
    """
    found: dict[StrayOp, None] = {}
    for op in ops:
        if op.type in _NOT_PLACED or called_by(op) or (op.device and op.type.startswith("TensorList")):
            continue
        if is_placed(op.device) and any(full_name(op.device) != place for place in places):
            stray = StrayOp(op.type, full_name(op.device), "with a resource" if _of_resource(op) else "placed by fn")
            found[stray] = None
            continue
        kernels = kernels_of(op.type)
        for kind in dict.fromkeys(kinds):
            if kernels and kernel_for(kernels, kind, dtypes_of(op)) is None:
                found[StrayOp(op.type, kind, "no kernel", instead_of_int32(kernels, kind, dtypes_of(op)))] = None
    return list(found)


def _of_resource(op: Any) -> bool:
    """Whether TensorFlow places it, with what it asks or writes: a table, or a file of summaries."""
    return op.type.startswith(("LookupTable", "Write", "FlushSummaryWriter"))
