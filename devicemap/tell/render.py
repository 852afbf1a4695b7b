"""What results have in common: a table in terminals of any width and in notebooks, drawn by `rich`, and JSON."""

from __future__ import annotations

import dataclasses
import enum
import html
import io
import json
import os
import shutil
from abc import abstractmethod
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, ClassVar, cast

from rich.console import Console, Group
from rich.padding import Padding
from rich.table import Table
from rich.text import Text


class Result:
    """A dataclass that is shown as it is printed: in terminals, by the REPL, and in notebooks."""

    _least_width: ClassVar[int] = 20
    """Characters that its text takes in the narrowest of terminals."""

    @abstractmethod
    def __rich__(self) -> Any:
        """What `rich` draws for it, in colour where there are any."""

    def to_dict(self) -> dict[str, Any]:
        """All of it, as JSON has it: text, numbers, lists, dicts and `None`. Units are in the names."""
        values: dict[str, Any] = plain(dataclasses.asdict(cast(Any, self)))
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


def plain(value: Any) -> Any:
    """A value as JSON has it."""
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, dict):
        return {key: plain(entry) for key, entry in value.items()}
    if isinstance(value, tuple | list):
        return [plain(entry) for entry in value]
    return value


def text_of(renderable: Any, width: int) -> str:
    """What `rich` shows for it, without colours, so many characters wide."""
    text = io.StringIO()
    # Everything that a Console would else find out from the environment is said, so that text stays text.
    Console(file=text, width=width, color_system=None, force_terminal=False, force_jupyter=False).print(renderable)
    return "\n".join(line.rstrip() for line in text.getvalue().splitlines())


def table(header: Sequence[str], rows: Sequence[Sequence[str]], left: Collection[str] = ()) -> Table:
    """Cells under a header; the first column and those that are named are on the left, those of numbers on the right."""
    made = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")  # no lines: plain on any encoding
    for i, title in enumerate(header):
        made.add_column(title, justify="left" if i == 0 or title in left else "right", overflow="fold")
    for cells in rows:
        made.add_row(*map(Text, cells))
    return made


def without_empty(header: Sequence[str], rows: Sequence[Sequence[str]], nothing: str = "") -> Table:
    """A table without the columns that hold nothing in any row; what is missing in others reads as `nothing`."""
    known = [any(cells) for cells in zip(*rows)] or [True] * len(header)
    kept = [[cell or nothing for cell, is_known in zip(cells, known) if is_known] for cells in rows]
    return table([title for title, is_known in zip(header, known) if is_known], kept)


def page(title: str, *parts: Any, notes: Sequence[str] = ()) -> Group:
    """A title, what is below it, and notes, with an empty line between any two."""
    spaced = [Padding(part, (1, 0, 0, 0)) for part in parts]
    return Group(Text(title, style="bold"), *spaced, *([Text(""), *map(Text, notes)] if notes else []))
