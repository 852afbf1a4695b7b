"""Reports as tables, for terminals of any width: the one module of reports that knows `rich`."""

from __future__ import annotations

import html
import io
import shutil
from collections.abc import Callable, Sequence
from typing import Any

from devicemap.tell.report.accounts import DeviceReport
from devicemap.tell.report.timeline import short_names


class Printed:
    """What is shown as it is printed: by the REPL, and in notebooks."""

    def __repr__(self) -> str:
        try:
            return str(self)
        except ImportError:  # without rich, which some are printed with
            return object.__repr__(self)

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(repr(self))}</pre>"


def report_table(summary: str, devices: Sequence[DeviceReport], error: str | None, advice: Sequence[str]) -> Any:
    """A `rich` renderable: a summary, a row per device, what went wrong, and advice.

    Columns that hold nothing on any device are left out. Raises `ImportError` without `rich`.
    """
    _rich()
    from rich.console import Group
    from rich.padding import Padding
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")  # no lines: plain on any encoding
    table.add_column("device", overflow="fold")
    columns = [(title, cells) for title, cell in _columns(devices).items() if any(cells := [cell(d) for d in devices])]
    for title, _ in columns:
        table.add_column(title, justify="right", overflow="fold")
    names = short_names(device.device for device in devices)
    for row, device in enumerate(devices):
        lost = " (lost)" if device.lost else ""
        table.add_row(Text(names[device.device] + lost), *(cells[row] or "-" for _, cells in columns))
    notes = [Text(f"stopped by {error}", style="red")] if error else []
    notes += [Text(f"* {line}") for line in advice]
    return Group(Text(summary, style="bold"), Padding(table, (1, 0, 1 if notes else 0, 0)), *notes)


def plain_text(renderable: Any, width: int | None = None) -> str:
    """What `rich` shows for it, without colours, `width` characters wide: those of the terminal, or else 100."""
    _rich()
    from rich.console import Console

    width = width or shutil.get_terminal_size((100, 24)).columns
    text = io.StringIO()
    # Everything that a Console would else find out from the environment is said, so that text stays text.
    console = Console(file=text, width=width, color_system=None, force_terminal=False, force_jupyter=False)
    console.print(renderable)
    return "\n".join(line.rstrip() for line in text.getvalue().splitlines())


def _columns(devices: Sequence[DeviceReport]) -> dict[str, Callable[[DeviceReport], str]]:
    """What stands in each column; empty where there is nothing to say."""
    rows = sum(device.rows for device in devices)
    return {
        "rows": lambda device: f"{device.rows}",
        "share": lambda device: f"{device.rows / rows:.0%}" if rows else "",
        "calls": lambda device: f"{device.calls}",
        "busy": lambda device: _seconds(device.busy_seconds),
        "idle": lambda device: _seconds(device.idle_seconds),
        "waiting": lambda device: _seconds(device.waiting_seconds or None),
        "copying": lambda device: _seconds(device.copying_seconds or None),
        "retries": lambda device: f"{device.retries or ''}",
        "back-offs": lambda device: f"{device.back_offs or ''}",
        "in use": lambda device: "" if device.utilisation_percent is None else f"{device.utilisation_percent:.0f}%",
        "memory": lambda device: "" if device.memory_bytes is None else f"{device.memory_bytes / 2**30:.1f} GiB",
    }


def _seconds(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds:.3g} s"


def _rich() -> None:
    try:
        import rich  # noqa: F401
    except ImportError as error:
        raise ImportError("to print a report takes rich, which is not installed: pip install rich") from error
