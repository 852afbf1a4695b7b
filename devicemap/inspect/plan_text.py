"""Plans as text of at most one screen."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from rich.console import Group
from rich.text import Text

from devicemap.events import short_name
from devicemap.inspect.advice import quoted
from devicemap.inspect.render import counted, listed, page, size_text, table

if TYPE_CHECKING:
    from devicemap.inspect.plan import Plan

_SHOWN = 3
"""The most reasons that are shown."""


def plan_text(plan: Plan) -> Any:
    """Return a `rich` renderable: a summary, a table of devices, facts and advice."""
    rows = "an unknown number of rows" if plan.rows is None else counted(plan.rows, "row")
    title = f"{plan.name}: {rows} on {counted(len(plan.devices), 'device')}, in {plan.engine}"
    facts = Group(*map(Text, _facts(plan)))
    return page(title, table([*_devices(plan)]), facts, notes=[f"* {line}" for line in plan.advice])


def _devices(plan: Plan) -> Iterator[dict[str, str]]:
    """Yield a row for each run of devices with equal parts."""
    for part, group in itertools.groupby(plan.devices, lambda each: (each.rows, each.shards, each.chunks_in_flight)):
        names = [short_name(each.device) for each in group]
        rows, shards, chunks = ("" if number is None else str(number) for number in part)
        each = " each" if len(plan.devices) > 1 else ""
        yield {
            "devices": ", ".join(names if len(names) < 4 else [*names[:2], "...", names[-1]]),
            f"rows{each}": rows,
            f"shards{each}": shards,
            f"chunks in flight{each}": chunks,
        }


def _facts(plan: Plan) -> Iterator[str]:
    reasons = plan.reason.split("; ")
    more = f"; and {len(reasons) - _SHOWN} more" if len(reasons) > _SHOWN else ""
    how = "vectorised" if plan.vectorized else "one by one"
    yield "rows: fn takes batches" if plan.batched else f"rows: {how}, because {'; '.join(reasons[:_SHOWN])}{more}"
    if plan.ordered:
        line = next((f", as in {each.line}" for each in plan.captured if each.line), "")
        yield f"order: kept, because fn writes {quoted(plan.ordered)} in row order{line}"
    else:
        yield "order: not kept, no device waits for another"
    sizes = ["?" if size is None else size_text(size) for size in (plan.bytes_per_row, plan.result_bytes_per_row)]
    yield "sizes: {} per row, {} per row of results".format(*sizes)
    yield from _captured(plan)
    if plan.python_ops:
        yield f"Python: called by {listed(plan.python_ops)}, one call at a time"
    if plan.on_error == "skip":
        yield "failing rows: left out, and listed in report.failed_rows"
    if plan.microbatches > 1:
        yield f"microbatches: {plan.microbatches} per device, one after another"
    if plan.gathered_for:
        yield f"outputs: gathered for {listed(plan.gathered_for)}"
    yield f"traces of fn: {plan.traces}"


def _captured(plan: Plan) -> Iterator[str]:
    """Yield a line for each handling: the number of values, the largest, and their size."""
    for handling in dict.fromkeys(each.handling for each in plan.captured):
        values = [each for each in plan.captured if each.handling is handling]
        values.sort(key=lambda each: each.size_bytes or 0, reverse=True)
        size = sum(each.size_bytes or 0 for each in values)
        names = f"`{values[0].name}`" if len(values) == 1 else f"{len(values)} values, largest `{values[0].name}`"
        yield f"captured: {names}{f', {size_text(size)}' * bool(size)}: {handling.value}"
