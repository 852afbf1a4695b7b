"""Where 32-bit integers lie: TensorFlow's kernels for GPUs take and give most of them in the host's memory, and some not."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from devicemap._tensorflow.functions import Kernel, functions_within, registered_kernels

_CALLS = frozenset("PartitionedCall StatefulPartitionedCall".split())
_PASSES = frozenset("Identity StopGradient".split())


def is_taken_on_host(graph: Any, tensor: Any) -> bool:
    """Whether GPUs leave an int32 tensor of a function's graph in the host's memory, by what takes it.

    Where some ops take it there and some do not, it has to travel anyway.
    """
    takers = list(_takers(graph, tensor, functions_within(graph)))
    return bool(takers) and all(_is_on_host(op, op.op_def.input_arg, i) for op, i in takers)


def is_made_on_host(graph: Any, tensor: Any) -> bool:
    """Whether GPUs make an int32 tensor of a function's graph in the host's memory."""
    functions = functions_within(graph)
    while tensor.op.type in _PASSES or tensor.op.type in _CALLS:
        if tensor.op.type in _PASSES:
            tensor = tensor.op.inputs[0]
        elif tensor.op.get_attr("f").name in functions:
            inner, _ = functions[tensor.op.get_attr("f").name]
            tensor = inner.outputs[tensor.value_index]
        else:
            return True
    return tensor.op.type in ("Placeholder", "Const") or _is_on_host(
        tensor.op, tensor.op.op_def.output_arg, tensor.value_index
    )


def _takers(graph: Any, tensor: Any, functions: dict[str, tuple[Any, bool]]) -> Iterator[tuple[Any, int]]:
    """The ops that take it, also in functions that get it, and as which of their inputs."""
    for op in tensor.consumers():
        for i, taken in enumerate(op.inputs):
            if taken.name != tensor.name:
                continue
            if op.type in _PASSES:
                yield from _takers(graph, op.outputs[0], functions)
            elif op.type in _CALLS and op.get_attr("f").name in functions:
                inner, _ = functions[op.get_attr("f").name]
                yield from _takers(inner, inner.inputs[i], functions)
            else:
                yield op, i


def _is_on_host(op: Any, arguments: Iterable[Any], index: int) -> bool:
    """Whether an argument of an op lies there, for any kernel of GPUs that takes its dtypes. Without one, it does."""
    kernel = _kernel_for(registered_kernels(op.type), "GPU", _dtypes_of(op))
    return kernel is None or _are_named(op, arguments, kernel.on_host)[index]


def _are_named(op: Any, arguments: Any, names: frozenset[str]) -> list[bool]:
    """For each tensor of the arguments of an op, whether its argument has one of these names."""
    found: list[bool] = []
    for argument in arguments:
        if argument.number_attr:
            count = op.get_attr(argument.number_attr)
        else:
            count = len(op.get_attr(argument.type_list_attr)) if argument.type_list_attr else 1
        found += [argument.name in names] * count
    return found


def _kernel_for(kernels: Sequence[Kernel], kind: str, dtypes: Mapping[str, Sequence[int]]) -> Kernel | None:
    """Of these kernels the one that a kind of device has for an op with attributes of these dtypes.

    Those for `"DEFAULT"` serve every kind that has none of its own, as in TensorFlow.

    >>> _kernel_for([Kernel("CPU", {}), Kernel("GPU", {"T": frozenset([1])})], "GPU", {"T": [7]})
    """
    for wanted in (kind, "DEFAULT"):
        for kernel in kernels:
            fits = all(set(dtypes.get(attribute, ())) <= allowed for attribute, allowed in kernel.dtypes.items())
            if kernel.device == wanted and fits:
                return kernel
    return None


def _dtypes_of(op: Any) -> dict[str, list[int]]:
    """The dtypes (enums) among the attributes of an op."""
    attributes = op.node_def.attr.items()
    return {name: [value.type] if value.type else list(value.list.type) for name, value in attributes}
