"""Calls inside the user's own `tf.function`: the graph of a call, with one shard per device, becomes a part of it."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from devicemap.compile.call_spec import CallSpec
from devicemap.compile.gather import with_static_rows
from devicemap.compile.graph_builder import sizes_in_graph
from devicemap.compile.program import Program
from devicemap.data.rows import HOST, Rows, count_rows


def call_inside(program: Program, rows: Rows, filled: bool = False) -> Any:
    """Call a program in the function that is being traced, with a shard for each device.

    `filled` states that each device gets at least one row, if the number of rows is unknown.
    """
    compiled = program.compiled_for(rows)
    with tf.device(HOST):  # otherwise the placer would move rows and results through the first GPU
        count = count_rows(rows.leaves[0]) if rows.count is None else rows.count
        leaves = program.seeded(rows.leaves, 0, count)
        engine = compiled.engine_inside()
        if rows.count:
            shards, sizes = compiled.shards(rows.count)
            spec = CallSpec.of_shards(len(shards), engine, 2, single_rows=rows.count < 2 * len(shards))
        else:  # an unknown number, or 0 rows, whose gradients are zeros
            spec = CallSpec.of_shards(len(compiled.slots), engine, 2, empty_shards=rows.count == 0 or not filled)
            sizes = sizes_in_graph(count, len(compiled.slots))
        graph = compiled.graph(spec)
        results = list(graph(sizes, *leaves)[0])
        if compiled.traced.reduction is None:
            results = [with_static_rows(leaf, rows.count) for leaf in results]
        return compiled.pack(results)
