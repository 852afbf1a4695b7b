"""Plans as text, for terminals of any width."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from rich.console import Group
from rich.padding import Padding
from rich.text import Text

from devicemap.tell.plan.advice import listed, short, size_text
from devicemap.tell.render import page, table
from devicemap.tell.report.timeline import short_names

if TYPE_CHECKING:
    from devicemap.tell.plan.plan import Captured, Plan


def plan_table(plan: Plan) -> Any:
    """A `rich` renderable: a summary, a row per device, what is to be known, and advice."""
    names = short_names(
        [*(device.device for device in plan.devices), *(end for t in plan.transfers for end in (t.sender, t.receiver))]
    )
    parts: list[Any] = []
    for title, header, rows in _tables(plan, names):
        if rows:
            drawn = Padding(table(header, rows, _WORDS), (0, 0, 0, 2))
            parts.append(Group(Text(title, style="bold"), drawn) if title else drawn)
    facts = Group(*map(Text, _facts(plan, names)))
    return page(plan.summary, *parts, facts, notes=[f"* {line}" for line in plan.advice])


_WORDS = frozenset(("to", "treatment", "type", "what"))


def _tables(plan: Plan, names: dict[str, str]) -> Iterator[tuple[str, list[str], list[list[str]]]]:
    """Titles, headers and rows; empty ones are not shown."""
    chunks = plan.way == "chunks"
    yield (
        "",
        ["device", "rows", "chunks in flight" if chunks else "shards", "memory"],
        [
            [
                names[device.device],
                _number(device.rows) if not chunks else "as it is idle",
                _number(device.chunks_in_flight if chunks else device.shards),
                _size(device.memory_bytes),
            ]
            for device in plan.devices
        ],
    )
    yield (
        "what travels",
        ["from", "to", "what", "per row", "per call"],
        [
            [names[t.sender], names[t.receiver], t.what, _size(t.bytes_per_row, ""), _size(t.bytes_per_call)]
            for t in plan.transfers
        ],
    )
    yield (
        "what fn captures",
        ["name", "type", "size", "treatment"],
        [[c.name, _type(c), _size(c.size_bytes), c.handling.value] for c in plan.captured],
    )


def _facts(plan: Plan, names: dict[str, str]) -> Iterator[str]:
    """What stands in no table, a line each."""
    if plan.batched:
        yield "rows: fn takes batches"
    else:
        yield f"rows: {'vectorised' if plan.vectorized else 'one by one'}, {plan.reason}"
    yield f"traces of fn: {plan.traces}"
    if plan.control_edges:
        edges = [
            f"{names.get(e.receiver, e.receiver)} waits for {names.get(e.sender, e.sender)}" for e in plan.control_edges
        ]
        yield f"control edges between devices: {', '.join(edges)}"
    else:
        yield "control edges between devices: none"
    if plan.ordered:
        yield f"order is kept for: {listed(plan.ordered)}"
    for random in plan.random_ops:
        yield f"random numbers: {listed(random.ops)}: {random.seeding}"
    if plan.python_ops:
        yield f"runs in Python: {listed(plan.python_ops)}"
    for stray in plan.strays:
        on = {"no kernel": "no kernel on ", "int32": "int32 on the host of "}.get(stray.reason, f"{stray.reason}, on ")
        yield f"leaves its device: {stray.op} ({on}{short(stray.device)})"
    per_row = _size(plan.memory_bytes_per_row, "cannot be told")
    yield f"memory per row and device: {per_row}"


def _type(captured: Captured) -> str:
    if captured.dtype is None:
        return captured.kind
    shape = "" if captured.shape is None else str(["?" if d is None else d for d in captured.shape]).replace("'", "")
    return f"{captured.dtype} {shape}".strip()


def _number(value: int | None) -> str:
    return "?" if value is None else str(value)


def _size(size_bytes: int | None, unknown: str = "?") -> str:
    return unknown if size_bytes is None else size_text(size_bytes)
