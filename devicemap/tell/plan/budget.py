"""The memory that graphs take of devices, found from the graphs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import tensorflow as tf

from devicemap.base.devices import choose_output_device, list_devices
from devicemap.compile.compiled import Compiled
from devicemap.compile.cost.memory import Footprint, footprints
from devicemap.compile.cost.sketch import Part, parts_of
from devicemap.data.rows import HOST
from devicemap.data.shards import shard_sizes
from devicemap.tell.plan.memory import Memory
from devicemap.tell.plan.request import Asked

VARIABLE, COPY, SLOT = "variable", "copy", "slot"
"""What things are that a call uses and that lie on a device."""


def memory_of_map(
    asked: Asked,
    compiled: Compiled,
    devices: Sequence[str],
    output_device: str,
    at_once: Mapping[str, int] | None,
    known: bool,
) -> tuple[Memory, ...]:
    """What a call of a map takes of each device; nothing of chunks with seeds, which would be drawn anew.

    Args:
        asked: what is asked for.
        compiled: the map.
        devices: full names.
        output_device: where results go.
        at_once: how many chunks are under way on each device; `None` in one graph.
        known: whether the ops of the graph can be seen, and run one by one.
    """
    traced, places = compiled.traced, len(compiled.places)
    if traced.audit.seeded and at_once is not None:
        return ()
    originals = {id(captured) for captured in traced.concrete.captured_inputs}
    host = choose_output_device(HOST)
    homes = [*asked.homes, *[host] * (len(traced.input_specs) - len(asked.homes))]

    def parts(rows: int) -> list[Part]:
        sizes = np.array(shard_sizes(rows, places), np.int32)
        of_leaves = zip(homes, parts_of(traced.input_specs, asked.row_lengths, rows))
        data = [replace(part, home=home) for home, leaf in of_leaves for part in leaf]
        return [Part(tf.TensorShape([places]), tf.int32, sizes, host), *data]

    taken = footprints(
        lambda rows: compiled.graph(places, gradients=0),
        devices,
        output_device,
        lambda captured: VARIABLE if id(captured) in originals else COPY,
        parts if known else None,
        places,
    )
    return memory_of(taken, at_once, places)


def memory_of_graph(
    graph: Callable[[int], Any],
    devices: Sequence[str],
    output_device: str,
    specs: Sequence[Any],
    places: int,
    role: Callable[[Any], str] = lambda captured: VARIABLE,
    stages: bool = False,
) -> tuple[Memory, ...]:
    """What a call of a graph takes of each device.

    Args:
        graph: gives, for a number of rows, a `ConcreteFunction` of leaves of rows, which come from the host.
        devices: full names.
        output_device: where results go.
        specs: of the leaves.
        places: into how many parts the rows are cut.
        role: what something captured, a handle or a tensor, is.
        stages: whether each device does work of its own, and those that it takes from may be ahead of it.
    """
    host = choose_output_device(HOST)

    def parts(rows: int) -> list[Part]:
        return [replace(part, home=host) for leaf in parts_of(specs, {}, rows) for part in leaf]

    return memory_of(footprints(graph, devices, output_device, role, parts, places, stages))


def memory_of(
    taken: Mapping[str, Footprint], at_once: Mapping[str, int] | None = None, places: int = 1
) -> tuple[Memory, ...]:
    """What calls take of each device.

    Args:
        taken: what a call over so many `places` does.
        at_once: how many chunks are under way on each device, where rows are those of a chunk; `None`: of a call.
        places: how many shards a call has.
    """
    limits = {device.name: device.memory for device in list_devices()}

    def times(value: float | None, factor: int) -> Any:
        return None if value is None else factor * value

    found = []
    for device, own in taken.items():
        chunks = 1 if at_once is None else at_once.get(device, 0)
        found.append(
            Memory(
                device,
                variable_bytes=own.held.get(VARIABLE, 0),
                copy_bytes=own.held.get(COPY, 0),
                slot_bytes=own.held.get(SLOT, 0),
                gradient_bytes=times(own.least_bytes, chunks),
                fixed_bytes=times(own.fixed_bytes, chunks),
                bytes_per_row=times(own.bytes_per_row, chunks * (1 if at_once is None else places)),
                limit_bytes=limits.get(device),
            )
        )
    return tuple(found)
