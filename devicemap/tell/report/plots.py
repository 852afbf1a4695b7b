"""The timeline of a call as a picture."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

from devicemap.errors import OptionError
from devicemap.tell.render import short_names
from devicemap.tell.report.timeline import Span, lanes_of

_COLOURS = {"finished": "tab:blue", "failed": "tab:red", "unfinished": "tab:grey"}
_INCHES_PER_LANE = 0.3
_MOST_BARS_WITH_EDGES = 200
"""Edges tell bars apart that touch; of very many bars they would cover all there is."""


def save_timeline(spans: Sequence[Span], devices: Sequence[str], title: str, path: str | os.PathLike[str]) -> None:
    """Draw a bar per chunk over the seconds of the call, a band per device from the top down, and write it to `path`.

    Raises:
        ImportError: without matplotlib.
        ValueError: for a suffix that is no format of matplotlib's.
    """
    lanes = lanes_of(spans)
    depths = [1 + max((lane for s, lane in zip(spans, lanes) if s.shard.device == d), default=0) for d in devices]
    tops = dict(zip(devices, accumulate([0, *depths])))
    edge = 0.5 if len(spans) <= _MOST_BARS_WITH_EDGES else 0.0
    figure = figure_class()(figsize=(9.0, 1.2 + _INCHES_PER_LANE * max(sum(depths), 3)), layout="constrained")
    axes = figure.add_subplot()
    bars: dict[tuple[str, int], list[tuple[float, float]]] = defaultdict(list)
    for span, lane in zip(spans, lanes):
        bars[span.outcome, tops[span.shard.device] + lane].append((span.started_seconds, span.seconds))
    for (outcome, row), times in bars.items():
        colour = _COLOURS[outcome]
        axes.broken_barh(times, (row + 0.1, 0.8), facecolors=colour, edgecolors="white", linewidth=edge)
    for top in tops.values():
        axes.axhline(top, color="lightgrey", linewidth=0.5)
    axes.set_yticks([tops[d] + depth / 2 for d, depth in zip(devices, depths)], [*short_names(devices).values()])
    axes.set_ylim(max(sum(depths), 1), 0)
    axes.set_xlim(left=0.0)
    axes.set_xlabel("seconds since the call began")
    axes.set_title(title, fontsize="medium")
    outcomes = [outcome for outcome in _COLOURS if any(span.outcome == outcome for span in spans)]
    if outcomes not in ([], ["finished"]):
        keys = [axes.barh(0, 0, color=_COLOURS[outcome], label=outcome) for outcome in outcomes]
        figure.legend(handles=keys, loc="outside lower center", ncols=len(keys), frameon=False)
    figure.savefig(path)


def check_drawable(path: str | os.PathLike[str]) -> None:
    """Raise now for a picture that could not be drawn later: `ImportError`, or `OptionError` for its format."""
    known, suffix = figure_class()().canvas.get_supported_filetypes(), Path(path).suffix[1:].lower()
    if suffix not in known:
        raise OptionError(f"{path} cannot be drawn: its suffix has to be one of {', '.join(sorted(known))}")


def figure_class() -> Any:
    """matplotlib's `Figure`, which leaves the state of pyplot, and the backend that the user chose, alone."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("a plot needs matplotlib, which is not installed: pip install matplotlib") from error
    return Figure
