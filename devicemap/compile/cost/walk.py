"""What can be read from graphs before they run: which ops there are, where they want to be, what waits for what."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from devicemap._tensorflow.functions import functions_within
from devicemap.compile.audit import LOOPS


def live_ops(concrete: Any) -> list[Any]:
    """The ops of a `ConcreteFunction` and of what it calls that its results or effects need, each once.

    Vectorising leaves the ops for a single row behind, which nothing needs. What XLA compiles is left out: its ops are
    not run one by one.
    """
    return _reached([concrete.graph], functions_within(concrete.graph))


def _reached(graphs: list[Any], functions: dict[str, tuple[Any, bool]]) -> list[Any]:
    """The ops that the results and effects of graphs need, and of the functions that these call."""
    found: dict[Any, None] = {}
    pending = list(graphs)
    entered: set[str] = set()
    while pending:
        graph = pending.pop()
        needed = [tensor.op for tensor in graph.outputs] + list(graph.control_outputs)
        while needed:
            op = needed.pop()
            if op in found:
                continue
            found[op] = None
            needed += [*op.control_inputs, *(tensor.op for tensor in op.inputs)]
            for name in called_by(op):
                inner, compiled = functions.get(name, (None, False))
                if inner is not None and not compiled and name not in entered:
                    entered.add(name)
                    pending.append(inner)
    return list(found)


def needed_in(graph: Any, results: Sequence[Any] | None = None) -> set[Any]:
    """The ops of one graph, without those of functions that it calls, that its results, or some of them, and effects need."""
    found: set[Any] = set()
    needed = [*(tensor.op for tensor in (graph.outputs if results is None else results)), *graph.control_outputs]
    while needed:
        op = needed.pop()
        if op not in found:
            found.add(op)
            needed += [*op.control_inputs, *(tensor.op for tensor in op.inputs)]
    return found


def lasting_variables(used: set[int], step: Any, test: Any) -> set[int]:
    """Which variables of a loop are used after it, or for these: gradients that were built once leave others behind.

    `step` and `test` are the graphs of its body and its condition.
    """
    kept = _taken(test, test.outputs) | used
    while more := _taken(step, [step.outputs[i] for i in kept]) - kept:
        kept |= more
    return kept


def _taken(graph: Any, results: Sequence[Any]) -> set[int]:
    """Which inputs of a graph some of its results need."""
    needed = needed_in(graph, results)
    return {i for i, tensor in enumerate(graph.inputs) if tensor.op in needed}


def without_loop(ops: Sequence[Any], concrete: Any) -> list[Any]:
    """Of the ops of a `ConcreteFunction` that calls another one for each row, those that are not of its loop over rows."""
    functions = functions_within(concrete.graph)
    loops = [op for op in concrete.graph.get_operations() if op.type in LOOPS]
    own = {concrete.graph, *(functions[name][0] for op in loops for name in called_by(op) if name in functions)}
    return [op for op in ops if op.graph not in own]


def called_by(op: Any) -> list[str]:
    """The names of the functions that an op calls."""
    values = op.node_def.attr.values()
    return [v.func.name for v in values if v.HasField("func")] + [f.name for v in values for f in v.list.func]


def waits_between_devices(concrete: Any) -> list[tuple[str, str]]:
    """Pairs of devices, `(sender, receiver)`, that control edges of a call's graph join: the second waits for the first.

    Without those that say no more than the tensors that an op is made of: as results do, which wait for the whole of what
    they come from.
    """
    functions = functions_within(concrete.graph)
    homes = {op: _home(op, functions) for op in concrete.graph.get_operations()}
    pairs: dict[tuple[str, str], None] = {}
    for op, receiver in homes.items():
        senders = [before for before in op.control_inputs if receiver and homes[before] not in (None, receiver)]
        sources = _sources(op) if senders else set()
        pairs |= {(homes[before] or "", receiver or ""): None for before in senders if before not in sources}
    return list(pairs)


def _sources(op: Any) -> set[Any]:
    """The ops that an op's tensors come from."""
    found: set[Any] = set()
    ahead = [tensor.op for tensor in op.inputs]
    while ahead:
        source = ahead.pop()
        if source not in found:
            found.add(source)
            ahead += [tensor.op for tensor in source.inputs]
    return found


def row_size(shape: Any, dtype: Any) -> int | None:
    """Bytes of a tensor, or of one row of it where the first dimension is not known; `None` where it cannot be told.

    >>> row_size(tf.TensorShape([None, 3]), tf.float32), row_size(tf.TensorShape([None]), tf.string)
    (12, None)
    """
    if shape.rank is None or dtype in (tf.string, tf.resource, tf.variant):
        return None
    inner = shape[1:] if shape.rank and shape[0] is None else shape
    elements = inner.num_elements()
    return None if elements is None else int(elements) * int(dtype.size)


def full_name(device: str) -> str:
    """The full name of a device on this host that may be named in part.

    >>> full_name("/device:CPU:1")
    '/job:localhost/replica:0/task:0/device:CPU:1'
    """
    here = tf.DeviceSpec(job="localhost", replica=0, task=0, device_type="CPU", device_index=0)
    return here.make_merged_spec(tf.DeviceSpec.from_string(device)).to_string()


def is_placed(device: str) -> bool:
    """Whether what an op asks for names a device, and not only a host, as `tf.py_function` does."""
    return bool(tf.DeviceSpec.from_string(device).device_type)


def _home(op: Any, functions: dict[str, tuple[Any, bool]]) -> str | None:
    """The device that an op is placed on; of a branch without one, for a device that may get no rows, that device."""
    inside = [o for name in called_by(op) if name in functions for o in functions[name][0].get_operations()]
    return next((full_name(o.device) for o in [op, *inside] if is_placed(o.device)), None)
