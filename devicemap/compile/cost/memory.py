"""How many bytes a graph takes at once on a device, as a function of its rows."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from devicemap.base.devices import kind_of, list_devices
from devicemap.compile.cost.liveness import made_by, needed, peak_bytes
from devicemap.compile.cost.sketch import (
    NOTHING,
    Part,
    Sketch,
    UnknownSizeError,
    aligned,
    own_outputs,
    parts_of,
    unless_unknown,
)
from devicemap.compile.cost.walk import full_name
from devicemap.data.rows import HOST, home_of

_ROWS = (1024, 2048)
"""Rows of a device that are compared: what a row takes is the difference. Many, so that nothing else is the peak."""


@dataclass(frozen=True)
class Footprint:
    """What a graph takes of a device's memory."""

    held: Mapping[str, int]
    """Bytes of what it uses that lies there, before and after a call too, by what it is to the caller."""

    least_bytes: int | None
    """What a call takes besides at once however few its rows; `None` where it cannot be told, as what follows."""

    fixed_bytes: int | None
    """What a call on many rows takes besides what grows with them."""

    bytes_per_row: float | None
    """What one more row of the call, of all devices, adds to that."""


@unless_unknown
def memory_bytes_per_row(traced: Any, kind: str, row_lengths: Mapping[int, Sequence[Any]]) -> int:
    """What one more row of a shard adds to the most memory that is taken at once on a device of a kind.

    Args:
        traced: the `Traced` function; a shard is in the device's memory first, and results leave as soon as they are there.
        kind: of the device.
        row_lengths: as `Asked.row_lengths`.

    Returns:
        Bytes, or `None` where a shape is not known before it runs.
    """
    few, many = (_of_shard(traced, kind, row_lengths, rows) for rows in _ROWS)
    return math.ceil((many - few) / (_ROWS[1] - _ROWS[0]))


def _of_shard(traced: Any, kind: str, row_lengths: Mapping[int, Sequence[Any]], rows: int) -> int:
    sketch = Sketch(traced.concrete.graph, kind)
    parts = [part for leaf in parts_of(traced.input_specs, row_lengths, rows) for part in leaf]
    given = [sketch.arriving(part) for part in parts]
    captured = [sketch.value(sketch.unknown(t), on_host=True) for t in sketch.source.inputs[len(given) :]]
    ends = sketch.run(sketch.source, [*given, *captured], own_outputs(traced.concrete))
    sizes = {value.number: sketch.bytes_of(value) for value in given} | {value.number: 0 for value in captured}
    return _peak(sketch, sizes, [end.number for end in ends if end is not NOTHING], ())


def _peak(sketch: Sketch, sizes: Mapping[int, int], results: Sequence[int], kept: Sequence[int]) -> int:
    ops = needed(sketch.ops, [*results, *kept])
    if sketch.unsized & {value for value, _ in made_by(ops)}:
        raise UnknownSizeError
    return peak_bytes(ops, sizes, kept)


def footprints(
    graph: Callable[[int], Any],
    devices: Sequence[str],
    output_device: str,
    role: Callable[[Any], str],
    parts: Callable[[int], Sequence[Part]] | None,
    places: int,
    stages: bool = False,
) -> dict[str, Footprint]:
    """What a graph over several devices takes of each.

    Args:
        graph: gives the `ConcreteFunction` for a number of rows.
        devices: full names.
        output_device: the one that results go to.
        role: what something captured, a handle or a tensor, is to the caller.
        parts: the tensors that it is called with, of so many rows; `None` where what it does cannot be told.
        places: the number of shards, which have as many rows.
        stages: whether each device does work of its own, and those that it takes from may be ahead of it.
    """
    default = _default_device()
    counts = [rows * places for rows in (1, *_ROWS)]
    concrete, *others = [graph(rows) for rows in counts]
    found: dict[str, Footprint] = {}
    alike: dict[Any, Footprint] = {}  # a sketch takes a while
    for device in devices:
        held = [(role(outside), size) for outside, home, size in _captured(concrete) if home == device]
        key = (device,) if stages else (_likeness(device, default, output_device), *sorted(held))
        if key not in alike:
            total: Counter[str] = Counter()
            for name, size in held:
                total[name] += size
            peaks = _peaks([concrete, *others], device, default, parts, counts, stages)
            if peaks is None:
                alike[key] = Footprint(total, None, None, None)
            else:
                least, few, many = (peak - total.total() for peak in peaks)
                per_row = (many - few) / (_ROWS[1] - _ROWS[0]) / places
                alike[key] = Footprint(total, least, max(0, round(few - per_row * _ROWS[0] * places)), per_row)
        found[device] = alike[key]
    return found


@unless_unknown
def fits(concrete: Any, limits: Mapping[str, float], output_device: str, parts: Sequence[Part]) -> bool:
    """Whether a call with these tensors takes no more bytes of each device than its limit; `None` where it cannot be told."""
    default = _default_device()
    told: dict[Any, int] = {}
    for device, limit in limits.items():
        held = sorted(size for _, home, size in _captured(concrete) if home == device)
        key = _likeness(device, default, output_device), *held
        if key not in told:
            told[key] = _graph_bytes(concrete, device, default, parts, ahead=False)
        if told[key] > limit:
            return False
    return True


def _default_device() -> str:
    """Where ops run that nobody places."""
    return next((device.name for kind in ("GPU", "CPU") for device in list_devices(kind)), HOST)


def _likeness(device: str, default: str, output_device: str) -> Any:
    """The same for devices that do the same work, if they hold the same."""
    return kind_of(device), device == default, device == output_device


@unless_unknown
def _peaks(
    graphs: Sequence[Any],
    device: str,
    default: str,
    parts: Callable[[int], Sequence[Part]] | None,
    counts: Sequence[int],
    stages: bool,
) -> list[int]:
    """The most that is taken at once on a device by so many rows, each in a graph."""
    if parts is None:
        raise UnknownSizeError
    return [_graph_bytes(graph, device, default, parts(rows), stages) for graph, rows in zip(graphs, counts)]


def _captured(concrete: Any) -> Iterator[tuple[Any, str, int]]:
    """What it captures, where it lies, and its bytes; those of a variable for its handle."""
    variables = {id(variable.handle): variable for variable in concrete.graph.variables}
    for outside in concrete.captured_inputs:
        value = variables.get(id(outside), outside)
        home, elements = full_name(home_of(outside)), value.shape.num_elements() or 0
        size = 0 if value.dtype in (tf.resource, tf.variant, tf.string) else elements * value.dtype.size
        yield outside, home, aligned(size, kind_of(home))


def _graph_bytes(concrete: Any, device: str, default: str, parts: Sequence[Part], ahead: bool) -> int:
    """The most that is taken at once on a device, with what is captured and lies there."""
    sketch = Sketch(concrete.graph, kind_of(device), device, default, ahead)
    given = [sketch.value(sketch.tensor(p), on_host=p.home != device, known=p.known) for p in parts]
    sizes = {value.number: sketch.bytes_of(value) for value in given}
    variables = {id(variable.handle): variable for variable in concrete.graph.variables}
    captured = []
    for (outside, home, size), inside in zip(_captured(concrete), sketch.source.inputs[len(given) :]):
        here, variable = home == device, variables.get(id(outside))
        value = sketch.value(sketch.unknown(inside), on_host=not here, home=None if variable is None else home)
        captured.append(value)
        sizes[value.number] = size if here and variable is None else 0
        if variable is not None:
            content = sketch.contents[value.number] = sketch.value(sketch.unknown(variable), on_host=not here)
            sizes[content.number] = size if here else 0
    ends = sketch.run(sketch.source, [*given, *captured], own_outputs(concrete))
    kept = [*given, *captured, *sketch.contents.values(), *(end for end in ends if end is not NOTHING)]
    return _peak(sketch, sizes, (), [value.number for value in kept])
