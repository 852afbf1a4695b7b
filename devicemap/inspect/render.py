"""What results have in common: numbers in words, a table in terminals of any width and in notebooks, drawn by `rich`, JSON."""

from __future__ import annotations

import dataclasses
import enum
import html
import io
import json
import os
import shutil
from abc import abstractmethod
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from rich.console import Console, Group
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from devicemap.errors import OptionError
from devicemap.events import short_name


class Result:
    """A dataclass that is shown as it is printed: in terminals, by the REPL, and in notebooks."""

    _least_width: ClassVar[int] = 20
    """Characters that its text takes in the narrowest of terminals."""

    @abstractmethod
    def __rich__(self) -> Any:
        """What `rich` draws for it, in colour where there are any."""

    def to_dict(self) -> dict[str, Any]:
        """All of it, as JSON has it: text, numbers, lists, dicts and `None`. Units are in the names."""
        values: dict[str, Any] = _plain(self)
        return values

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write `to_dict()` to a file, as JSON."""
        Path(path).write_text(json.dumps(self.to_dict(), indent=1) + "\n", encoding="utf-8")

    def __str__(self) -> str:
        return text_of(self, max(self._least_width, shutil.get_terminal_size((100, 24)).columns))

    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(str(self))}</pre>"


def _plain(value: Any) -> Any:
    """A value as JSON has it: of dataclasses, the fields, and those properties that `_derived` names."""
    if dataclasses.is_dataclass(value):
        names = (*(field.name for field in dataclasses.fields(value)), *getattr(value, "_derived", ()))
        return {name: _plain(getattr(value, name)) for name in names}
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, dict):
        return {key: _plain(entry) for key, entry in value.items()}
    return [_plain(entry) for entry in value] if isinstance(value, tuple | list) else value


def text_of(renderable: Any, width: int) -> str:
    """What `rich` shows for it, without colours, so many characters wide."""
    text = io.StringIO()
    # Everything that a Console would else find out from the environment is said, so that text stays text.
    Console(file=text, width=width, color_system=None, force_terminal=False, force_jupyter=False).print(renderable)
    return "\n".join(line.rstrip() for line in text.getvalue().splitlines())


def table(rows: Sequence[Mapping[str, str]], left: Collection[str] = (), nothing: str = "") -> Table:
    """Cells by their titles; a column that is empty in all rows is left out.

    Args:
        rows: all with the same titles.
        left: titles of columns of words, which begin on the left, as the first one does.
        nothing: what an empty cell reads as.
    """
    titles = [title for title in (rows[0] if rows else ()) if any(row[title] for row in rows)]
    made = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")  # no lines: plain on any encoding
    for title in titles:
        made.add_column(title, justify="left" if title in (titles[0], *left) else "right", overflow="fold")
    for row in rows:
        made.add_row(*(Text(row[title] or nothing) for title in titles))
    return made


def page(title: str, *parts: Any, notes: Sequence[str] = ()) -> Group:
    """A title, what is below it, and notes, with an empty line between any two."""
    spaced = [Padding(part, (1, 0, 0, 0)) for part in parts]
    return Group(Text(title, style="bold"), *spaced, *([Text(""), *map(Text, notes)] if notes else []))


def short_names(devices: Iterable[str]) -> dict[str, str]:
    """The name that people read for each full name.

    >>> short_names(["/job:localhost/replica:0/task:0/device:GPU:1"])
    {'/job:localhost/replica:0/task:0/device:GPU:1': 'GPU:1'}
    """
    return {device: short_name(device) for device in devices}


def listed(words: Sequence[str]) -> str:
    """`a`, `a and b`, `a, b and c`."""
    return " and ".join(filter(None, (", ".join(words[:-1]), words[-1])))


def counted(number: int, noun: str) -> str:
    """`1 row`, `2 rows`."""
    return f"{number} {noun}" + "s" * (number != 1)


def seconds_text(seconds: float) -> str:
    """A time as people write it.

    >>> seconds_text(2.5), seconds_text(0.0123)
    ('2.5 s', '12.3 ms')
    """
    return f"{1e3 * seconds:.3g} ms" if 0 < seconds < 0.1 else f"{seconds:.3g} s"


def size_text(size_bytes: int) -> str:
    """A size as people write it.

    >>> size_text(80), size_text(123456), size_text(3 * 2**30)
    ('80 B', '120.6 KiB', '3.0 GiB')
    """
    size, units = float(size_bytes), ["B", "KiB", "MiB", "GiB", "TiB"]
    while size >= 1024 and len(units) > 1:
        size /= 1024
        del units[0]
    return f"{size_bytes} B" if units[0] == "B" else f"{size:.1f} {units[0]}"


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
