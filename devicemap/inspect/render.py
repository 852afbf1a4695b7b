"""The base class of results, and text for numbers, lists and tables. `rich` draws them in terminals of any width."""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import html
import io
import json
import math
import os
import shutil
from abc import abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console, Group
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from devicemap.errors import OptionError

BLUE, ORANGE = "#0072b2", "#d55e00"
"""Colours that colour-blind readers can tell apart (Okabe and Ito 2008)."""


class Result:
    """Base class of result dataclasses. The REPL and notebooks show the same text as `print`; `rich` prints it in colour."""

    @abstractmethod
    def __rich__(self) -> Any:
        """Return a renderable of `rich`."""

    def to_dict(self) -> dict[str, Any]:
        """Return the result as JSON values: strings, numbers, lists, dicts and `None`. Names contain units."""
        values: dict[str, Any] = _plain(self)
        return values

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write `to_dict()` to a JSON file."""
        Path(path).write_text(json.dumps(self.to_dict(), indent=1) + "\n", encoding="utf-8")

    def __str__(self) -> str:
        return text_of(self, shutil.get_terminal_size((100, 24)).columns)

    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(str(self))}</pre>"


def _plain(value: Any) -> Any:
    """Convert to JSON values: `None` for NaN and infinity, and for a dataclass a dict of its fields and public properties."""
    if dataclasses.is_dataclass(value):
        names = [field.name for field in dataclasses.fields(value)]
        names += [name for name, member in vars(type(value)).items() if isinstance(member, property) and name[0] != "_"]
        return {name: _plain(getattr(value, name)) for name in names}
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: _plain(entry) for key, entry in value.items()}
    return [_plain(entry) for entry in value] if isinstance(value, tuple | list) else value


def text_of(renderable: Any, width: int) -> str:
    """Render a renderable of `rich` without colours, in lines of at most `width` characters."""
    text = io.StringIO()
    # Without these arguments, a Console reads FORCE_COLOR and other environment variables.
    Console(file=text, width=width, color_system=None, force_terminal=False, force_jupyter=False).print(renderable)
    return "\n".join(line.rstrip() for line in text.getvalue().splitlines())


def table(rows: Sequence[Mapping[str, str]], left: Collection[str] = (), nothing: str = "") -> Table:
    """Make a table of cells by title, without columns that are empty in all rows.

    `left` are titles of left-aligned columns besides the first. `nothing` is the text of empty cells.
    """
    titles = [title for title in (rows[0] if rows else ()) if any(row[title] for row in rows)]
    made = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for title in titles:
        made.add_column(title, justify="left" if title in (titles[0], *left) else "right", overflow="fold")
    for row in rows:
        made.add_row(*(Text(row[title] or nothing) for title in titles))
    return made


def page(title: str, *parts: Any, notes: Sequence[str] = ()) -> Group:
    """Put a title, parts and notes below each other, separated by empty lines."""
    spaced = [Padding(part, (1, 0, 0, 0)) for part in parts]
    return Group(Text(title, style="bold"), *spaced, *([Text(""), *map(Text, notes)] if notes else []))


def listed(words: Sequence[str]) -> str:
    """Return `a`, `a and b`, or `a, b and c`."""
    return ", ".join([*words[:-2], " and ".join(words[-2:])])


def counted(number: int, noun: str) -> str:
    """Return `1 row`, `2 rows` or `2 batches`."""
    return f"{number} {noun}" + ("" if number == 1 else "es" if noun.endswith("ch") else "s")


def seconds_text(seconds: float) -> str:
    """Return a duration with a unit.

    >>> seconds_text(2.5), seconds_text(0.0123)
    ('2.5 s', '12.3 ms')
    """
    return f"{1e3 * seconds:.3g} ms" if 0 < seconds < 0.1 else f"{seconds:.3g} s"


def size_text(size_bytes: int) -> str:
    """Return a size with a unit.

    >>> size_text(80), size_text(123456), size_text(3 * 2**30)
    ('80 B', '120.6 KiB', '3.0 GiB')
    """
    size, units = float(size_bytes), ["B", "KiB", "MiB", "GiB", "TiB"]
    while size >= 1024 and len(units) > 1:
        size /= 1024
        del units[0]
    return f"{size_bytes} B" if units[0] == "B" else f"{size:.1f} {units[0]}"


def check_drawable(path: str | os.PathLike[str]) -> None:
    """Raise `ImportError` without matplotlib, or `OptionError` if it cannot write files with this suffix."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("a plot needs matplotlib, which is not installed: pip install matplotlib") from error
    known = Figure().canvas.get_supported_filetypes()
    if Path(path).suffix[1:].lower() not in known:
        raise OptionError(f"{path} cannot be drawn: its suffix has to be one of {', '.join(sorted(known))}")


@contextlib.contextmanager
def drawing(path: str | os.PathLike[str], width: float, height: float) -> Iterator[Any]:
    """Yield a matplotlib `Figure` of that many inches, and write it to `path`. Its text is legible at half size."""
    check_drawable(path)
    from matplotlib import rc_context
    from matplotlib.figure import Figure  # does not change the state of pyplot or the backend

    with rc_context({"font.size": 14, "axes.titlesize": 14, "legend.fontsize": 13}):
        figure = Figure(figsize=(width, height), dpi=100, layout="constrained")
        yield figure
        figure.savefig(path)
