"""The plots of the report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.records import OURS, Record

STYLES: dict[str, dict[str, Any]] = {
    "graph blocks": {"color": "tab:red", "marker": "s", "markersize": 10, "markerfacecolor": "none"},
    "eager blocks": {"color": "tab:orange", "marker": "s", "markersize": 5},
    "MirroredStrategy": {"color": "tab:green", "marker": "^", "markersize": 8, "markerfacecolor": "none"},
    "joblib threads": {"color": "tab:purple", "marker": "D", "markersize": 4},
    "Dataset.map": {"color": "tab:brown", "marker": "v", "markersize": 5},
    "devicemap": {"color": "tab:blue", "marker": "o", "markersize": 4},
}
"""One look for a way in all plots, in the order in which they are drawn: where lines cover each other, markers show."""


def draw(pages: Mapping[str, Sequence[Record]], folder: Path) -> dict[str, list[str]]:
    """Write the plots; returns the names of the files for each page."""
    import matplotlib

    matplotlib.use("Agg")
    plots: dict[str, list[str]] = {}
    if scaling := pages.get("scaling"):
        draw_scaling(scaling, folder / "speed_up.png")
        plots["scaling"] = ["speed_up.png"]
    if sweep := pages.get("batch_size"):
        draw_batch_sizes(sweep, folder / "batch_size.png")
        plots["batch_size"] = ["batch_size.png"]
    return plots


def draw_scaling(records: Sequence[Record], path: Path) -> None:
    """Draw the speed-up against devices, a panel for each function."""
    figure, panels = _panels(records)
    for axes, case in zip(panels, _cases(records)):
        mine = [record for record in records if record.case == case]
        counts = [record.devices for record in mine]
        axes.plot(counts, counts, color="0.7", linestyle="--", label="ideal")
        for way in _ways(mine):
            points = [(r.devices, r.share(way) * r.devices) for r in mine if way in r.seconds]
            axes.plot(*zip(*points), label=way, **STYLES.get(way, {"marker": "."}))
        axes.set_xscale("log", base=2)
        axes.set_yscale("log", base=2)
        axes.set(
            title=case, xlabel="simulated devices", xticks=counts, xticklabels=counts, yticks=counts, yticklabels=counts
        )
    panels[0].set_ylabel("speed-up")
    _finish(figure, panels, path)


def draw_batch_sizes(records: Sequence[Record], path: Path) -> None:
    """Seconds against rows per call; `batch_size="auto"` as a line across."""
    fixed = sorted((record for record in records if record.case != "auto"), key=lambda record: int(record.case))
    figure, (axes,) = _panels(records[:1])
    for way in _ways(fixed):
        points = [(int(record.case), record.seconds_of(way)) for record in fixed]
        axes.plot(*zip(*points), label=way, **STYLES.get(way, {"marker": "."}))
    for record in records:
        if record.case == "auto":
            axes.axhline(
                record.seconds_of(OURS),
                color=STYLES[OURS]["color"],
                linestyle=":",
                label='devicemap, batch_size="auto"',
            )
    if records[0].ideal_seconds is not None:
        axes.axhline(records[0].ideal_seconds, color="0.7", linestyle="--", label="ideal")
    axes.set_xscale("log", base=2)
    sizes = [int(record.case) for record in fixed]
    axes.set(title=f"{records[0].devices} simulated devices", xlabel="rows per call", ylabel="seconds")
    axes.set(xticks=sizes, xticklabels=sizes, ylim=(0, None))
    _finish(figure, [axes], path)


def _cases(records: Sequence[Record]) -> list[str]:
    return list(dict.fromkeys(record.case for record in records))


def _ways(records: Sequence[Record]) -> list[str]:
    order = list(STYLES)
    ways = dict.fromkeys(way for record in records for way in record.seconds)
    return sorted(ways, key=lambda way: order.index(way) if way in order else -1)


def _panels(records: Sequence[Record]) -> tuple[Any, list[Any]]:
    """A panel for each case."""
    from matplotlib import pyplot

    count = len(_cases(records))
    size = (6.4, 3.6) if count == 1 else (3.4 * count, 3.4)
    figure, panels = pyplot.subplots(1, count, figsize=size, layout="constrained", sharey=True, squeeze=False)
    return figure, list(panels[0])


def _finish(figure: Any, panels: Sequence[Any], path: Path) -> None:
    from matplotlib import pyplot

    for axes in panels:
        axes.spines[["top", "right"]].set_visible(False)
    handles = dict(zip(*reversed(panels[0].get_legend_handles_labels())))
    figure.legend(
        handles.values(), handles.keys(), loc="outside lower center", ncols=4, frameon=False, fontsize="small"
    )
    figure.savefig(path, dpi=120, metadata={"Software": None})
    pyplot.close(figure)
