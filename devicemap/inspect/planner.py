"""Collect the facts of a `Plan`, from the traced function, the graph of the call and the number of rows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import tensorflow as tf

from devicemap.compile.call_spec import CallSpec
from devicemap.compile.compiled import CompiledMap
from devicemap.compile.graph_walker import GraphWalker, size_of, waits_between_devices
from devicemap.devices import gpu_indices
from devicemap.events import Shard
from devicemap.inspect.captures import captured_by
from devicemap.inspect.data_spec import DataSpec
from devicemap.inspect.plan import DevicePlan, Plan
from devicemap.options import Options
from devicemap.run.mapper import in_flight

_PYTHON_OPS = frozenset("PyFunc EagerPyFunc PyFuncStateless".split())


def explain_call(
    data: DataSpec, compiled: CompiledMap, options: Options, fn: Callable[..., Any], devices: Sequence[str], name: str
) -> Plan:
    """Return the plan of a call of `compiled`, the compiled form of `fn`, on data of these specs."""
    traced = compiled.traced
    shards = () if data.chunks else _shards(data.rows, compiled)
    graph = compiled.graph(CallSpec.of_shards(len(shards))) if shards else None
    used = compiled.devices if data.chunks else tuple(dict.fromkeys(shard.device for shard in shards))
    flights, gpus = in_flight(compiled, options.prefetch), gpu_indices(devices)

    def plan_of(device: str) -> DevicePlan:
        own = [len(shard) for shard in shards if shard.device == device]
        if data.chunks:
            return DevicePlan(device, None, None, flights.get(device, 0), gpus.get(device))
        return DevicePlan(device, None if data.rows is None else sum(own), len(own), None, gpus.get(device))

    return Plan(
        name=name,
        engine="chunks" if data.chunks else "one graph",
        rows=data.rows,
        batch_size=options.batch_size if data.chunks else None,
        devices=tuple(map(plan_of, devices)),
        batched=options.batched,
        vectorized=traced.vectorized,
        reason=traced.reason,
        traces=compiled.traces,
        control_edges=tuple(waits_between_devices(graph)) if graph is not None else (),
        captured=captured_by(traced, fn, used),
        python_ops=tuple(sorted(GraphWalker(traced.concrete).op_types(live=True) & _PYTHON_OPS)),
        fixed_seeds=traced.audit.random_ops if compiled.keeps_seeds else (),
        bytes_per_row=_bytes_per_row(tf.nest.flatten(data.specs)),
        result_bytes_per_row=_bytes_per_row(traced.specs),
    )


def _shards(rows: int | None, compiled: CompiledMap) -> tuple[Shard, ...]:
    """Return the shards of the call; if the number of rows is unknown, one for each slot."""
    if rows is None:
        return tuple(Shard(slot, i, i + 1) for i, slot in enumerate(compiled.slots))
    return compiled.shards(rows)[0]


def _bytes_per_row(specs: Iterable[Any]) -> int | None:
    """Return the bytes of one row of all leaves; `None` if their shapes do not determine them."""
    sizes = [size_of(spec.shape, spec.dtype) if isinstance(spec, tf.TensorSpec) else None for spec in specs]
    return None if None in sizes else sum(size or 0 for size in sizes)
