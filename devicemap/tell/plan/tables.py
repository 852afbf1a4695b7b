"""Plans as text, for terminals of any width."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import TYPE_CHECKING, Any

from rich.console import Group
from rich.padding import Padding
from rich.text import Text

from devicemap.events import short_name
from devicemap.tell.plan.memory import memory_table
from devicemap.tell.render import listed, page, short_names, size_text, table

if TYPE_CHECKING:
    from devicemap.tell.plan.plan import Captured, Plan

_WORDS = frozenset(("to", "treatment", "type", "what"))
"""Columns that hold no numbers."""


def plan_table(plan: Plan) -> Any:
    """A `rich` renderable: a summary, a row per device, what is to be known, and advice."""
    ends = [(transfer.sender, transfer.receiver) for transfer in plan.transfers]
    ends += [(edge.sender, edge.receiver) for edge in plan.control_edges]
    names = short_names([*(device.device for device in plan.devices), *chain(*ends)])
    tables = {
        "": _devices(plan, names),
        "what travels": [
            {
                "from": names[transfer.sender],
                "to": names[transfer.receiver],
                "what": transfer.what,
                "per row": _size(transfer.bytes_per_row, ""),
                "per call": _size(transfer.bytes_per_call),
            }
            for transfer in plan.transfers
        ],
        "what is in memory at once": memory_table(plan.memory),
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
    chunks = plan.way == "chunks"
    return [
        {
            "device": names[device.device],
            "rows": "when idle" if chunks else _number(device.rows),
            "chunks in flight" if chunks else "shards": _number(device.chunks_in_flight if chunks else device.shards),
            "memory": _size(device.memory_bytes),
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
    for stray in plan.strays:
        on = {"no kernel": "no kernel on", "int32": "int32 on the host of"}.get(stray.reason, f"{stray.reason}, on")
        yield f"leaves its device: {stray.op} ({on} {short_name(stray.device)})"
    yield f"memory per row and device: {_size(plan.memory_bytes_per_row, 'cannot be told')}"
    if plan.microbatches > 1:
        yield f"microbatches: {plan.microbatches}, one after another"


def _type(captured: Captured) -> str:
    if captured.dtype is None:
        return captured.kind
    shape = "" if captured.shape is None else f" [{', '.join(map(_number, captured.shape))}]"
    return f"{captured.dtype}{shape}"


def _number(value: int | None) -> str:
    return "?" if value is None else str(value)


def _size(size_bytes: int | None, unknown: str = "?") -> str:
    return unknown if size_bytes is None else size_text(size_bytes)
