"""What goes from device to device in a call, as a picture: a matrix of devices."""

from __future__ import annotations

import math
import os
from typing import TYPE_CHECKING, Any

from devicemap.tell.plan.advice import size_text
from devicemap.tell.report.plots import figure_class
from devicemap.tell.report.timeline import short_names

if TYPE_CHECKING:
    from devicemap.tell.plan.plan import Plan, Transfer

_INCHES_PER_DEVICE = 0.9
_DARK = 0.6
"""From this part of the scale on, text is white."""


def save_traffic(plan: Plan, path: str | os.PathLike[str]) -> None:
    """Draw a cell for each sender (rows) and receiver (columns), and write it to `path`, whose suffix says the format."""
    sent: dict[tuple[str, str], list[Transfer]] = {}
    for transfer in plan.transfers:
        sent.setdefault((transfer.sender, transfer.receiver), []).append(transfer)
    waits = {(edge.sender, edge.receiver) for edge in plan.control_edges}
    devices = list(dict.fromkeys([*sorted({end for ends in sent for end in ends}), *(d.device for d in plan.devices)]))
    sizes = {ends: _bytes(transfers, plan.rows) for ends, transfers in sent.items()}
    largest = max((size for size in sizes.values() if size), default=1)
    shades = [[_shade(sizes.get((sender, receiver), 0), largest) for receiver in devices] for sender in devices]
    side = 2.0 + _INCHES_PER_DEVICE * len(devices)
    figure = figure_class()(figsize=(side + 1.0, side), layout="constrained")
    axes = figure.add_subplot()
    axes.imshow(shades, cmap="Blues", vmin=0.0, vmax=1.0)
    for row, sender in enumerate(devices):
        for column, receiver in enumerate(devices):
            if transfers := sent.get((sender, receiver)):
                colour = "white" if shades[row][column] > _DARK else "black"
                axes.text(column, row, _text(transfers), ha="center", va="center", fontsize="x-small", color=colour)
            if (sender, receiver) in waits:
                axes.add_patch(_frame(column, row))
    names = short_names(devices)
    labels = [names[device] for device in devices]
    axes.set_xticks(range(len(devices)), labels, rotation=90)
    axes.set_yticks(range(len(devices)), labels)
    axes.set_xlabel("to" + (" (in red: waits for the sender)" if waits else ""))
    axes.set_ylabel("from")
    axes.set_title(plan.summary, fontsize="small")
    figure.savefig(path)


def _bytes(transfers: list[Transfer], rows: int | None) -> int | None:
    """Those of a call, at most, where they are known at all: which device gets how many rows of chunks, nobody knows."""
    sizes = [
        t.bytes_per_call if t.bytes_per_row is None else t.bytes_per_call or t.bytes_per_row * (rows or 1)
        for t in transfers
    ]
    return None if None in sizes else sum(size or 0 for size in sizes)


def _text(transfers: list[Transfer]) -> str:
    """Bytes per call and, where it is not known how many rows go there, per row."""
    of_call = sum(t.bytes_per_call or 0 for t in transfers)
    per_row = [t.bytes_per_row for t in transfers if t.bytes_per_call is None]
    parts = [size_text(of_call)] if of_call or not per_row else []
    if per_row:
        known = [size for size in per_row if size is not None]
        parts.append(f"{size_text(sum(known))}\nper row" if len(known) == len(per_row) else "?")
    return "\n+ ".join(parts)


def _shade(size: int | None, largest: int) -> float:
    """0 to 1, by powers of ten: what travels differs by several of them."""
    if not size:
        return 0.15 if size is None else 0.0
    return 0.15 + 0.85 * math.log1p(size) / math.log1p(largest)


def _frame(column: int, row: int) -> Any:
    from matplotlib.patches import Rectangle

    return Rectangle((column - 0.5, row - 0.5), 1.0, 1.0, fill=False, edgecolor="tab:red", linewidth=2.0)
