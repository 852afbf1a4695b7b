"""Calls inside the user's own `tf.function`: the graph of a call, with one shard per device, becomes a part of it."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from devicemap.compile.gather import with_static_rows
from devicemap.compile.layout import sizes_in_graph
from devicemap.compile.program import Program
from devicemap.data.rows import HOST, Rows, count_rows


def call_inside(program: Program, rows: Rows, filled: bool = False) -> Any:
    """Call a program in the function that is being traced, with a shard for each device.

    `filled` promises at least one row for each device, if their number is unknown.
    """
    compiled = program.compiled_for(rows)
    with tf.device(HOST):  # else all that comes and goes would go by the first device
        count = count_rows(rows.leaves[0]) if rows.count is None else rows.count
        leaves = program.seeded(rows.leaves, 0, count)
        if rows.count:
            shards, sizes = compiled.shards(rows.count)
            places, any_rows, one_row = len(shards), False, rows.count < 2 * len(shards)
        else:  # unknown, or none, for which gradients are zeros
            places, any_rows, one_row = len(compiled.places), rows.count == 0 or not filled, False
            sizes = sizes_in_graph(count, places)
        graph = compiled.graph(places, 2, any_rows, True, one_row, program.counts_rows)
        results = list(graph(sizes, *leaves)[0])
        if compiled.traced.reduction is None:
            results = [with_static_rows(leaf, rows.count) for leaf in results]
        return compiled.pack(results)
