"""Calls inside the user's own `tf.function`: the graph of a call, with one shard per device, becomes a part of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from devicemap.compile.compiled import Compiled, has_clock
from devicemap.compile.gather import with_static_rows
from devicemap.compile.layout import sizes_in_graph
from devicemap.compile.program import Program
from devicemap.data.rows import HOST, Rows, count_rows
from devicemap.run.clock import Clock


def call_inside(program: Program, rows: Rows, clock: Clock | None = None, filled: bool = False) -> Any:
    """A call in the function that is being traced.

    With a `clock`, shards are as large as devices were fast in earlier calls. `filled`: there are as many rows as places,
    where nobody knows how many.
    """
    compiled = program.compiled_for(rows)
    with tf.device(HOST):  # else all that comes and goes would go by the first device
        count = count_rows(rows.leaves[0]) if rows.count is None else rows.count
        leaves = program.seeded(rows.leaves, 0, count)
        call = _Shards(program, compiled, rows.count or None, filled and rows.count != 0)  # without rows, for gradients
        results = call(leaves, 2, clock)
        if compiled.traced.reduction is None:
            results = [with_static_rows(leaf, rows.count) for leaf in results]
        return compiled.pack(results)


class _Shards:
    """A shard for each device."""

    def __init__(self, program: Program, compiled: Compiled, rows: int | None, filled: bool):
        """`rows`: `None` where nobody knows; as for `call_inside`."""
        self.program, self.compiled, self.rows = program, compiled, rows
        self.filled = filled
        self._places = len(compiled.places) if rows is None else len(compiled.shards(rows)[0])

    def __call__(self, leaves: Sequence[Any], gradients: int, clock: Clock | None = None) -> list[Any]:
        """Return the results in the function that is being traced; `gradients` is the order of gradients to support."""
        places, rows = self._places, self.rows
        one_row = rows is not None and rows < 2 * places
        if clock is not None and (places < len(clock.devices) or not has_clock()):
            clock = None
        timed = clock is not None
        empty, checked = rows is None and not self.filled, self.program.counts_rows
        graph = self.compiled.graph(places, gradients, empty, True, one_row, timed, checked)
        sizes = sizes_in_graph(count_rows(leaves[0]), places) if rows is None else self.compiled.shards(rows)[1]
        if clock is not None:
            sizes, began = clock.sizes(sizes)
        results, _, arrivals = graph(sizes, *leaves)
        if clock is not None:
            clock.note(sizes, began, arrivals)
        return list(results)
