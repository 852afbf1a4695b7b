"""What goes between the memory of a device and the host's while a traced function runs."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import tensorflow as tf

from devicemap.compile.cost.ledger import Crossing
from devicemap.compile.cost.liveness import needed
from devicemap.compile.cost.sketch import Sketch, own_outputs, parts_of, unless_unknown


@dataclass(frozen=True)
class Crossings:
    """What goes between a device's memory and the host's in a call on so many rows."""

    arriving: tuple[bool, ...]
    """For each leaf of the data, whether it goes to the device's memory."""

    leaving: tuple[bool, ...]
    """For each leaf of the results, whether it comes from there."""

    others: tuple[Crossing, ...]

    int32: Mapping[str, str]
    """Ops on int32 of the rows that the host computes, and a dtype that the device computes each on."""


@unless_unknown
def crossings(
    traced: Any,
    kind: str,
    row_lengths: Mapping[int, Sequence[Any]],
    rows: int,
    away: Mapping[int, str],
    hosted: Collection[int],
) -> Crossings:
    """What goes between the memory of a device of a kind and the host's, `None` where that cannot be told.

    Args:
        traced: the `Traced` function.
        kind: of the device.
        row_lengths: as `Asked.row_lengths`.
        rows: how many the device gets.
        away: names of what is captured and used on the host, by its position.
        hosted: positions of what is captured and lies on the host besides.
    """
    sketch = Sketch(traced.concrete.graph, kind)
    parts = parts_of(traced.input_specs, row_lengths, rows)
    given = [[replace(sketch.arriving(part), on_host=True) for part in leaf] for leaf in parts]
    flat = [value for leaf in given for value in leaf]
    inside = sketch.source.inputs[len(flat) :]
    captured = [sketch.value(sketch.unknown(t), on_host=i in away or i in hosted) for i, t in enumerate(inside)]
    sketch.away = {captured[i].number: name for i, name in away.items()}
    sketch.data, sketch.rows = {value.number for value in flat}, rows
    ends = sketch.run(sketch.source, [*flat, *captured], own_outputs(traced.concrete))
    results = iter(ends)
    leaving = []
    for leaf in traced.concrete.structured_outputs:
        parts_of_leaf = [next(results) for _ in tf.nest.flatten(leaf, expand_composites=True)]
        leaving.append(not all(end.on_host for end in parts_of_leaf))
    ops = needed(sketch.ops, [end.number for end in ends])
    made = {number for op in ops for number, _ in op.makes}
    sent = {number for number, copy in sketch.copies.items() if copy.number in made}
    arriving = [any(value.number in sent for value in leaf) for leaf in given]
    return Crossings(tuple(arriving), tuple(leaving), tuple(sketch.ledger.of(ops)), sketch.int32)
