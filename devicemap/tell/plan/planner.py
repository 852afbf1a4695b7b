"""The facts of a call, gathered into a `Plan`: from its traced function, its built graph, and numbers of rows."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import tensorflow as tf

from devicemap._tensorflow.functions import shows_functions
from devicemap.base.devices import choose_output_device, gpu_indices, kind_of, list_devices
from devicemap.base.options import Options
from devicemap.compile.compiled import Compiled
from devicemap.compile.cost.crossings import Crossings, crossings
from devicemap.compile.cost.memory import memory_bytes_per_row
from devicemap.compile.cost.walk import live_ops, row_size, waits_between_devices, without_loop
from devicemap.compile.kernels import is_taken_on_host
from devicemap.data.rows import HOST
from devicemap.events import Shard
from devicemap.run.capacity import in_flight
from devicemap.tell.plan.budget import memory_of_map
from devicemap.tell.plan.captures import captured_by
from devicemap.tell.plan.memory import Memory
from devicemap.tell.plan.plan import Captured, ControlEdge, DevicePlan, Handling, Plan, RandomOps, StrayOp, Transfer
from devicemap.tell.plan.request import Asked
from devicemap.tell.plan.strays import stray_ops
from devicemap.tell.plan.traffic import (
    ASKED_WHERE_IT_LIVES,
    Leaf,
    captured_on,
    rows_sent,
    to_memory,
    to_strays,
)

_FEW_ROWS = 16
"""What a row sends is told by how much more twice as many send."""

_PYTHON_OPS = frozenset("PyFunc EagerPyFunc PyFuncStateless".split())


def explain_call(
    asked: Asked,
    compiled: Compiled,
    options: Options,
    fn: Callable[..., Any],
    devices: Sequence[str],
    output_device: str,
    name: str,
    memory: tuple[Memory, ...] | None = None,
) -> Plan:
    """The plan of a call on what was `asked`, with `fn`, `compiled`; `memory`: of what it is a part of, `None`: its own."""
    traced, chunks = compiled.traced, asked.chunks
    ops = live_ops(traced.concrete)
    of_fn = ops if options.batched or traced.vectorized else without_loop(ops, traced.concrete)
    all_seen = shows_functions(traced.concrete.graph)
    if not all_seen:
        warnings.warn(
            "this TensorFlow does not show what the functions that a graph calls hold: the plan lacks their ops, the devices "
            "these leave and what waits for them",
            RuntimeWarning,
            stacklevel=3,
        )
    shards = () if chunks else _shards(asked.rows, compiled)
    call = compiled.graph(len(shards), gradients=0) if shards else None
    used = compiled.devices if chunks else tuple(dict.fromkeys(shard.device for shard in shards))
    captured = captured_by(traced, fn, used)
    kinds = [kind_of(device) for device in compiled.devices]
    crossed = {kind: cache(_crossings(kind, compiled, captured, asked)) for kind in dict.fromkeys(kinds)}
    few = {kind: of_rows(_FEW_ROWS) for kind, of_rows in crossed.items()}
    int32 = [
        StrayOp(op, kind, "int32", to)
        for kind, told in few.items()
        if told is not None
        for op, to in told.int32.items()
    ]
    strays = () if options.jit_compile else (*stray_ops(of_fn, compiled.devices, kinds), *int32)
    known = all_seen and not options.jit_compile
    per_row = memory_bytes_per_row(traced, kinds[0], asked.row_lengths) if known else None
    under_way = in_flight(compiled, options.prefetch)
    working = tuple(under_way) if chunks else used
    return Plan(
        name=name,
        way="chunks" if chunks else "one graph",
        balanced=compiled.may_balance(asked.rows) or (chunks and len(working) > 1),
        rows=asked.rows,
        batch_size=options.batch_size if chunks else None,
        devices=tuple(
            _device_plan(device, asked, shards, under_way.get(device, 0) if chunks else None, options, per_row)
            for device in devices
        ),
        batched=options.batched,
        vectorized=traced.vectorized,
        reason=traced.reason,
        traces=compiled.traces,
        control_edges=tuple(ControlEdge(*ends) for ends in waits_between_devices(call)) if call is not None else (),
        ordered=tuple(c.name for c in captured if c.handling is Handling.ORDERED),
        strays=strays,
        transfers=_transfers(asked, compiled, shards, working, captured, strays, output_device, crossed),
        captured=captured,
        random_ops=_random_ops(ops, captured, compiled, options),
        python_ops=tuple(sorted({op.type for op in ops} & _PYTHON_OPS)),
        memory_bytes_per_row=per_row,
        memory=memory_of_map(asked, compiled, devices, output_device, under_way if chunks else None, known)
        if memory is None
        else memory,
    )


def _shards(rows: int | None, compiled: Compiled) -> tuple[Shard, ...]:
    """Those of the call; where the rows are not known, one for each place, as many rows have."""
    if rows is None:
        return tuple(Shard(place, i, i + 1) for i, place in enumerate(compiled.places))
    return compiled.shards(rows)[0]


def _device_plan(
    device: str, asked: Asked, shards: Sequence[Shard], under_way: int | None, options: Options, per_row: int | None
) -> DevicePlan:
    """`under_way`: how many chunks may be, on this device; `None` in one graph."""
    own = [len(shard) for shard in shards if shard.device == device]
    rows = None if under_way is not None or asked.rows is None else sum(own)
    at_once = rows
    if under_way is not None and isinstance(options.batch_size, int):
        most = under_way * options.batch_size
        at_once = most if asked.rows is None else min(most, asked.rows)
    return DevicePlan(
        device=device,
        kind=kind_of(device),
        rows=rows,
        shards=len(own) if under_way is None else None,
        chunks_in_flight=under_way,
        memory_bytes=None if per_row is None or at_once is None else per_row * at_once,
        memory_limit_bytes=next((d.memory for d in list_devices(kind_of(device)) if d.name == device), None),
        gpu=gpu_indices([device]).get(device),
    )


def _transfers(
    asked: Asked,
    compiled: Compiled,
    shards: Sequence[Shard],
    working: Sequence[str],
    captured: Sequence[Captured],
    strays: Sequence[StrayOp],
    output_device: str,
    crossed_of: Mapping[str, Callable[[int], Crossings | None]],
) -> tuple[Transfer, ...]:
    host, chunks, known = choose_output_device(HOST), asked.chunks, asked.rows is not None
    specs = list(compiled.traced.concrete.structured_input_signature[0])
    homes = [*asked.homes, *[host] * (len(specs) - len(asked.homes))]
    arriving = [_leaf(spec, home) for spec, home in zip(specs, homes)]
    leaving = [_leaf(spec, output_device) for spec in compiled.traced.specs]
    found: list[Transfer] = []
    if asked.rows != 0 and (chunks or len(shards) > 1):  # cut on the host; a single shard goes from where it is
        found += rows_sent("rows", arriving, {host: [asked.rows]}, to_devices=True, chunks=False)
        arriving = [Leaf(leaf.tensors, leaf.bytes_per_row, host) for leaf in arriving]
    parts: dict[str, list[int | None]] = {device: [] for device in working}
    for shard in shards:
        parts[shard.device].append(len(shard) if known else None)
    if chunks:  # which device gets how many, nobody knows
        parts = {device: [asked.rows if len(working) == 1 else None] for device in working}
    for kind in dict.fromkeys(map(kind_of, working)):
        own = {device: rows for device, rows in parts.items() if kind_of(device) == kind}
        few = crossed_of[kind](_FEW_ROWS)
        coming = arriving if few is None else [leaf for leaf, sent in zip(arriving, few.arriving) if sent]
        going = leaving if few is None else [leaf for leaf, sent in zip(leaving, few.leaving) if sent]
        found += rows_sent("rows", coming, own, to_devices=True, chunks=chunks)
        reduces = compiled.traced.reduction is not None
        states = {device: [None if chunks else 1] * len(rows) for device, rows in own.items()}
        results = rows_sent("results", going, states if reduces else own, to_devices=False, chunks=chunks)
        found += [replace(each, bytes_per_row=None) for each in results] if reduces else results
        sent = captured
        if few is not None:  # what is asked on the host is told with what else crosses to there
            sent = [thing for thing in captured if thing.device != host or thing.handling not in ASKED_WHERE_IT_LIVES]
        found += captured_on([*own], sent, len(compiled.places))
        found += to_strays([*own], strays, host, known=() if few is None else {host})
        for device, rows in own.items() if few is not None else ():
            in_call = None if chunks or not known else sum(count or 0 for count in rows)
            found += to_memory(device, host, crossed_of[kind], _FEW_ROWS, in_call)
    return tuple(found)


def _crossings(
    kind: str, compiled: Compiled, captured: Sequence[Captured], asked: Asked
) -> Callable[[int], Crossings | None]:
    """What goes between the memory of devices of a kind and the host's, for so many rows; not told of CPUs."""
    traced, host = compiled.traced, choose_output_device(HOST)
    inside = traced.concrete.inputs[len(traced.concrete.inputs) - len(captured) :]
    away = {i: c.name for i, c in enumerate(captured) if c.device == host and c.handling in ASKED_WHERE_IT_LIVES}
    hosted = {
        i for i, c in enumerate(captured) if c.kind == "tensor" and is_taken_on_host(traced.concrete.graph, inside[i])
    }

    def of_rows(rows: int) -> Crossings | None:
        return None if kind == "CPU" else crossings(traced, kind, asked.row_lengths, rows, away, hosted)

    return of_rows


def _leaf(spec: Any, home: str) -> Leaf:
    if isinstance(spec, tf.RaggedTensorSpec):
        return Leaf(spec.ragged_rank + 1, None, home)
    if isinstance(spec, tf.SparseTensorSpec):
        return Leaf(3, None, home)
    return Leaf(1, row_size(spec.shape, spec.dtype), home)


def _random_ops(
    ops: Sequence[Any], captured: Sequence[Captured], compiled: Compiled, options: Options
) -> tuple[RandomOps, ...]:
    audit, types = compiled.traced.audit, {op.type for op in ops}
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
