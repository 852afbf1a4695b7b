"""Write `kernels.txt`: which kernels a CUDA build of TensorFlow has for GPUs, and which arguments are in host memory.

`pip install tensorflow` and `python list_kernels.py`; no GPU is needed, as the registry of kernels is there without one.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from pathlib import Path
from typing import Any

import tensorflow as tf
from tensorflow.python.framework import kernels

LIST = Path(__file__).with_name("kernels.txt")

_OF_ANY_DEVICE = frozenset(
    "Switch Merge Enter Exit NextIteration _EagerConst Identity StopGradient PreventGradient _SwitchN AssignVariableOp Const "
    "BatchFunction RemoteCall".split()
)
"""TensorFlow's kernels for all devices serve; they hand on what they get, or use the device's own copies."""

_NOT_HERE = ("Iterator", "Anonymous", "Xla", "_Xla", "Collective", "Nccl", "_Nccl", "Ref", "Optional", "Cudnn")
"""What needs a compiler or a library of the vendor, or iterates data: how their names begin."""

_COMPUTED = frozenset(
    "AddN Fill ZerosLike OnesLike Where Unique ScatterNd ResourceGather AssignAddVariableOp AssignSubVariableOp Square Neg Abs "
    "Sign ParallelDynamicStitch LinSpace Equal AddV2 EmptyTensorList".split()
)
"""Registered for all devices, and they compute: on another device than a CPU by what its build has, so by the CPU's here."""

_ALSO_COMPUTED = ("TensorList", "TensorScatter", "ResourceScatter")


def main() -> None:
    found: dict[tuple[str, str, tuple[str, ...], tuple[str, ...]], set[tuple[str, ...]]] = defaultdict(set)
    known: set[tuple[str, str, tuple[str, ...]]] = set()  # a kernel for GPUs hides one for all devices
    for kernel in sorted(kernels.get_all_registered_kernels().kernel, key=lambda each: each.device_type != "GPU"):
        if _wanted(kernel):
            of_types = [c for c in kernel.constraint if c.allowed_values.list.type]  # the few others are left out
            names = tuple(constraint.name for constraint in of_types)
            types = [[_name(each) for each in c.allowed_values.list.type] for c in of_types]
            which = (kernel.op, kernel.label, tuple(kernel.host_memory_arg), names)
            found[which] |= {each for each in itertools.product(*types) if (kernel.op, kernel.label, each) not in known}
            if kernel.device_type == "GPU":
                known |= {(kernel.op, kernel.label, each) for each in itertools.product(*types)}
    lines = [line for which, types in sorted(found.items()) if types for line in _lines(*which, types)]
    head = f"# The kernels for GPUs of TensorFlow {tf.__version__}'s CUDA build, by list_kernels.py."
    LIST.write_text("\n".join([head, *lines]) + "\n")
    print(f"{len(lines)} lines for {len({which[0] for which in found})} ops in {LIST.name}")


def _wanted(kernel: Any) -> bool:
    if kernel.op in _OF_ANY_DEVICE or kernel.op.startswith(_NOT_HERE) or "Dataset" in kernel.op:
        return False
    if kernel.device_type == "DEFAULT":
        return kernel.op in _COMPUTED or kernel.op.startswith(_ALSO_COMPUTED)
    return bool(kernel.device_type == "GPU")


def _name(number: int) -> str:
    """As TensorFlow's C++ names a dtype."""
    return {"float32": "float", "float64": "double", "float16": "half"}.get(name := tf.as_dtype(number).name, name)


def _lines(
    op: str, label: str, host: tuple[str, ...], names: tuple[str, ...], types: set[tuple[str, ...]]
) -> list[str]:
    """One line for all dtypes that differ in one attribute."""
    head = [op, *([f"label={label}"] if label else []), *([f"host={','.join(host)}"] if host else [])]
    merged = {tuple((each,) for each in one) for one in types}
    for place in range(len(names)):
        groups: dict[Any, set[str]] = defaultdict(set)
        for one in merged:
            groups[one[:place], one[place + 1 :]].update(one[place])
        merged = {(*before, tuple(sorted(each)), *after) for (before, after), each in groups.items()}
    return [" ".join([*head, *(f"{n}={','.join(t)}" for n, t in zip(names, one))]) for one in sorted(merged)]


if __name__ == "__main__":
    main()
