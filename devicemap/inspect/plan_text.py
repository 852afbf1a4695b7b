"""Plans as text, for terminals of any width."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from rich.console import Group
from rich.padding import Padding
from rich.text import Text

from devicemap.inspect.render import listed, page, short_names, size_text, table

if TYPE_CHECKING:
    from devicemap.inspect.plan import Captured, Plan

_WORDS = frozenset(("treatment", "type"))
"""Columns that hold no numbers."""


def plan_table(plan: Plan) -> Any:
    """A `rich` renderable: a summary, a row per device, what is to be known, and advice."""
    ends = [end for edge in plan.control_edges for end in (edge.sender, edge.receiver)]
    names = short_names([*(device.device for device in plan.devices), *ends])
    tables = {
        "": _devices(plan, names),
        "what fn captures": [
            {"name": c.name, "type": _type(c), "size": _size(c.size_bytes), "treatment": c.handling.value}
            for c in plan.captured
        ],
    }
    parts = []
    for title, rows in tables.items():
        if rows:
            heading = [Text(title, style="bold")] if title else []
            parts.append(Group(*heading, Padding(table(rows, _WORDS), (0, 0, 0, 2))))
    facts = Group(*map(Text, _facts(plan, names)))
    return page(plan.summary, *parts, facts, notes=[f"* {line}" for line in plan.advice])


def _devices(plan: Plan, names: dict[str, str]) -> list[dict[str, str]]:
    chunks = plan.engine == "chunks"
    return [
        {
            "device": names[device.device],
            "rows": "when idle" if chunks else _number(device.rows),
            "chunks in flight" if chunks else "shards": _number(device.chunks_in_flight if chunks else device.shards),
        }
        for device in plan.devices
    ]


def _facts(plan: Plan, names: dict[str, str]) -> Iterator[str]:
    """What stands in no table, a line each."""
    way = "fn takes batches" if plan.batched else f"{'vectorised' if plan.vectorized else 'one by one'}, {plan.reason}"
    yield f"rows: {way}"
    yield f"traces of fn: {plan.traces}"
    waits = [f"{names[edge.receiver]} waits for {names[edge.sender]}" for edge in plan.control_edges]
    yield f"control edges between devices: {', '.join(waits) or 'none'}"
    if plan.ordered:
        yield f"order is kept for: {listed(plan.ordered)}"
    for random in plan.random_ops:
        yield f"random numbers: {listed(random.ops)}: {random.seeding}"
    if plan.python_ops:
        yield f"runs in Python: {listed(plan.python_ops)}"
    sizes = _size(plan.bytes_per_row), _size(plan.result_bytes_per_row)
    yield "size of a row: {}; of a row of results: {}".format(*sizes)
    if plan.microbatches > 1:
        yield f"microbatches: {plan.microbatches}, one after another"


def _type(captured: Captured) -> str:
    if captured.dtype is None:
        return captured.kind
    shape = "" if captured.shape is None else f" [{', '.join(map(_number, captured.shape))}]"
    return f"{captured.dtype}{shape}"


def _number(value: int | None) -> str:
    return "?" if value is None else str(value)


def _size(size_bytes: int | None) -> str:
    return "?" if size_bytes is None else size_text(size_bytes)
