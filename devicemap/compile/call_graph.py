"""Facts about a graph before it runs: the ops that it needs, their devices, and the devices that wait for each other."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from devicemap._tensorflow.functions import functions_within


def live_ops(concrete: Any) -> list[Any]:
    """Return the ops that the results and effects of a `ConcreteFunction` need, with those of functions it calls, each once.

    Vectorisation leaves ops for a single row behind, which nothing needs. Functions that XLA compiles are left out, because
    their ops do not run one by one.
    """
    functions = functions_within(concrete.graph)
    found: dict[Any, None] = {}
    pending = [concrete.graph]
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
            for name in _called_by(op):
                inner, compiled = functions.get(name, (None, False))
                if inner is not None and not compiled and name not in entered:
                    entered.add(name)
                    pending.append(inner)
    return list(found)


def waits_between_devices(concrete: Any) -> list[tuple[str, str]]:
    """Return pairs of devices, `(sender, receiver)`, where control edges of a call's graph make the second wait for the first.

    Control edges that repeat a data dependency are left out.
    """
    functions = functions_within(concrete.graph)
    homes = {op: _home(op, functions) for op in concrete.graph.get_operations()}
    pairs: dict[tuple[str, str], None] = {}
    for op, receiver in homes.items():
        senders = [source for source in op.control_inputs if receiver and homes[source] not in (None, receiver)]
        sources = _sources(op) if senders else set()
        pairs |= {(homes[source] or "", receiver or ""): None for source in senders if source not in sources}
    return list(pairs)


def _sources(op: Any) -> set[Any]:
    """Return the ops that an op depends on through tensors."""
    found: set[Any] = set()
    ahead = [tensor.op for tensor in op.inputs]
    while ahead:
        source = ahead.pop()
        if source not in found:
            found.add(source)
            ahead += [tensor.op for tensor in source.inputs]
    return found


def size_of(shape: Any, dtype: Any) -> int | None:
    """Return the bytes of a tensor, or of one row of it if the first dimension is unknown; `None` if they are not determined.

    >>> size_of(tf.TensorShape([None, 3]), tf.float32), size_of(tf.TensorShape([None]), tf.string)
    (12, None)
    """
    if shape.rank is None or dtype in (tf.string, tf.resource, tf.variant):
        return None
    inner = shape[1:] if shape.rank and shape[0] is None else shape
    elements = inner.num_elements()
    return None if elements is None else int(elements) * int(dtype.size)


def _called_by(op: Any) -> list[str]:
    """Return the names of the functions that an op calls."""
    values = op.node_def.attr.values()
    return [v.func.name for v in values if v.HasField("func")] + [f.name for v in values for f in v.list.func]


def _home(op: Any, functions: dict[str, tuple[Any, bool]]) -> str | None:
    """Return the device that an op is placed on; for a `tf.cond` around a shard, the device of the ops in its branches."""
    inside = [o for name in _called_by(op) if name in functions for o in functions[name][0].get_operations()]
    specs = [tf.DeviceSpec.from_string(o.device) for o in [op, *inside]]
    here = tf.DeviceSpec(job="localhost", replica=0, task=0, device_type="CPU", device_index=0)
    return next((here.make_merged_spec(spec).to_string() for spec in specs if spec.device_type), None)
