"""What goes from device to device in a call, as a picture: a matrix of devices."""

from __future__ import annotations

import math
import os
from typing import TYPE_CHECKING

from devicemap.tell.render import figure_class, short_names, size_text

if TYPE_CHECKING:
    from devicemap.tell.plan.plan import Plan, Transfer

_INCHES_PER_DEVICE = 0.9
_FAINT = 0.15
"""The shade of what is not known, and where those of bytes begin."""
_DARK = 0.6
"""From this part of the scale on, text is white."""


def save_traffic(plan: Plan, path: str | os.PathLike[str]) -> None:
    """Draw a cell for each sender (rows) and receiver (columns), and write it to `path`, whose suffix says the format."""
    sent: dict[tuple[str, str], list[Transfer]] = {}
    for transfer in plan.transfers:
        sent.setdefault((transfer.sender, transfer.receiver), []).append(transfer)
    waits = {(edge.sender, edge.receiver) for edge in plan.control_edges}
    devices = list(dict.fromkeys([*sorted({end for ends in sent for end in ends}), *(d.device for d in plan.devices)]))
    sizes = {ends: _bytes(transfers, plan.rows or 1) for ends, transfers in sent.items()}
    scale = math.log1p(max(sizes.values(), default=0)) or 1.0  # what travels differs by several powers of ten
    shades = {ends: _FAINT + (1 - _FAINT) * math.log1p(size) / scale for ends, size in sizes.items()}
    side = 2.0 + _INCHES_PER_DEVICE * len(devices)
    figure = figure_class()(figsize=(side + 1.0, side), layout="constrained")
    from matplotlib.patches import Rectangle

    axes = figure.add_subplot()
    axes.imshow([[shades.get((a, b), 0.0) for b in devices] for a in devices], cmap="Blues", vmin=0.0, vmax=1.0)
    for (sender, receiver), transfers in sent.items():
        colour = "white" if shades[sender, receiver] > _DARK else "black"
        place = devices.index(receiver), devices.index(sender)
        axes.text(*place, _text(transfers), ha="center", va="center", fontsize="x-small", color=colour)
    for sender, receiver in waits:
        corner = devices.index(receiver) - 0.5, devices.index(sender) - 0.5
        axes.add_patch(Rectangle(corner, 1.0, 1.0, fill=False, edgecolor="tab:red", linewidth=2.0))
    labels = [*short_names(devices).values()]
    axes.set_xticks(range(len(devices)), labels, rotation=90)
    axes.set_yticks(range(len(devices)), labels)
    axes.set_xlabel("to" + (" (in red: waits for the sender)" if waits else ""))
    axes.set_ylabel("from")
    axes.set_title(plan.summary, fontsize="small")
    figure.savefig(path)


def _bytes(transfers: list[Transfer], rows: int) -> int:
    """Those of a call that are known, at most: which device gets how many rows of chunks, nobody knows."""
    return sum(t.bytes_per_call or (t.bytes_per_row or 0) * rows for t in transfers)


def _text(transfers: list[Transfer]) -> str:
    """Bytes per call and, where it is not known how many rows go there, per row."""
    of_call = sum(t.bytes_per_call or 0 for t in transfers)
    per_row = [t.bytes_per_row for t in transfers if t.bytes_per_call is None]
    known = [size for size in per_row if size is not None]
    parts = [size_text(of_call)] if of_call or not per_row else []
    if per_row:
        parts.append(f"{size_text(sum(known))}\nper row" if len(known) == len(per_row) else "?")
    return "\n+ ".join(parts)
