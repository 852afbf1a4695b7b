"""The facts of a call, gathered into a `Plan`: from its traced function, its built graph, and numbers of rows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import tensorflow as tf

from devicemap.compile.call_spec import CallSpec
from devicemap.compile.compiled import CompiledMap
from devicemap.compile.graph_walker import GraphWalker, size_of, waits_between_devices
from devicemap.devices import gpu_indices, kind_of
from devicemap.events import Shard
from devicemap.inspect.captures import captured_by
from devicemap.inspect.data_spec import Asked
from devicemap.inspect.plan import Captured, ControlEdge, DevicePlan, Handling, Plan, RandomOps
from devicemap.options import Options
from devicemap.run.mapper import in_flight

_PYTHON_OPS = frozenset("PyFunc EagerPyFunc PyFuncStateless".split())


def explain_call(
    asked: Asked, compiled: CompiledMap, options: Options, fn: Callable[..., Any], devices: Sequence[str], name: str
) -> Plan:
    """Return the plan of a call of `compiled`, the compiled form of `fn`, on the data in `asked`."""
    traced, chunks = compiled.traced, asked.chunks
    types = GraphWalker(traced.concrete).op_types(live=True)
    shards = () if chunks else _shards(asked.rows, compiled)
    call = compiled.graph(CallSpec.of_shards(len(shards))) if shards else None
    used = compiled.devices if chunks else tuple(dict.fromkeys(shard.device for shard in shards))
    captured = captured_by(traced, fn, used)
    under_way = in_flight(compiled, options.prefetch)
    return Plan(
        name=name,
        engine="chunks" if chunks else "one graph",
        rows=asked.rows,
        batch_size=options.batch_size if chunks else None,
        devices=tuple(
            _device_plan(device, asked.rows, shards, under_way.get(device, 0) if chunks else None) for device in devices
        ),
        batched=options.batched,
        vectorized=traced.vectorized,
        reason=traced.reason,
        traces=compiled.traces,
        control_edges=tuple(ControlEdge(*ends) for ends in waits_between_devices(call)) if call is not None else (),
        ordered=tuple(c.name for c in captured if c.handling is Handling.ORDERED),
        captured=captured,
        random_ops=_random_ops(types, captured, compiled, options),
        python_ops=tuple(sorted(types & _PYTHON_OPS)),
        bytes_per_row=_bytes_per_row(tf.nest.flatten(asked.specs)),
        result_bytes_per_row=_bytes_per_row(traced.specs),
    )


def _shards(rows: int | None, compiled: CompiledMap) -> tuple[Shard, ...]:
    """Return the shards of the call; if the number of rows is unknown, one for each slot."""
    if rows is None:
        return tuple(Shard(slot, i, i + 1) for i, slot in enumerate(compiled.slots))
    return compiled.shards(rows)[0]


def _device_plan(device: str, rows: int | None, shards: Sequence[Shard], under_way: int | None) -> DevicePlan:
    """Return one device's part; `under_way` is the number of its chunks in flight, `None` in one graph."""
    own = [len(shard) for shard in shards if shard.device == device]
    return DevicePlan(
        device=device,
        kind=kind_of(device),
        rows=None if under_way is not None or rows is None else sum(own),
        shards=len(own) if under_way is None else None,
        chunks_in_flight=under_way,
        gpu=gpu_indices([device]).get(device),
    )


def _bytes_per_row(specs: Iterable[Any]) -> int | None:
    """Return the bytes of one row of all leaves; `None` if their shapes do not determine them."""
    sizes = [size_of(spec.shape, spec.dtype) if isinstance(spec, tf.TensorSpec) else None for spec in specs]
    return None if None in sizes else sum(size or 0 for size in sizes)


def _random_ops(
    types: set[str], captured: Sequence[Captured], compiled: CompiledMap, options: Options
) -> tuple[RandomOps, ...]:
    audit = compiled.traced.audit
    found = []
    if audit.random_ops:
        seeded = (
            "seeds that stay the same in every trace (of a function that was traced before, or of raw ops): the numbers would "
            "repeat on a second device, so one does all the work; use the option seed= with tf.random.stateless_* ops"
            if compiled.keeps_seeds
            else "fixed seeds, mixed with a number for each device: a number stream for each, and other numbers on other "
            "devices"
            if audit.seeded
            else "no seed was set: each device draws a number stream of its own"
        )
        found.append(RandomOps(audit.random_ops, seeded))
    skips = sorted(t for t in types if t.startswith(("Rng", "Stateful")) and "Call" not in t)
    if skips:
        found.append(RandomOps(tuple(skips), "a tf.random.Generator, which all devices advance in turn, atomically"))
    stateless = tuple(sorted(t for t in types if t.startswith("Stateless") and ("Random" in t or "Multinomial" in t)))
    drawing = tuple(t for t in stateless if "GetAlg" not in t and "GetKey" not in t and "Counter" not in t)
    if drawing and not skips:
        keras = any(c.handling is Handling.SEED for c in captured)
        from_row = "the option seed= and the row's index: the same results on any devices"
        fixed = "the seeds that fn gives them: the same numbers wherever those are the same"
        from_keras = "a Keras seed generator: a seed of its own for each device and call"
        found.append(RandomOps(drawing, from_keras if keras else from_row if options.seed is not None else fixed))
    return tuple(found)
