"""Where something is drawn over and over in the same place: a terminal, or the output of a notebook's cell.

`rich` itself draws into notebooks through `ipywidgets`, and shows nothing where those are missing. IPython's own display
handles need nothing else, and what they showed last is saved with the notebook.
"""

from __future__ import annotations

from typing import Any, Protocol


class Screen(Protocol):
    """Shows one `rich` renderable at a time."""

    def show(self, drawing: Any) -> None:
        """Replace what is shown."""

    def close(self) -> None:
        """Leave what is shown where it is, and give back what was taken of the terminal."""


def has_screen(console: Any) -> bool:
    """Whether somebody can watch what a `rich.console.Console` draws: it is a terminal that can go back, or a notebook."""
    return console.is_jupyter or console.is_interactive


def screen_of(console: Any) -> Screen:
    """The screen of a console that has one; nothing happens before something is shown."""
    return NotebookScreen() if console.is_jupyter else TerminalScreen(console)


class TerminalScreen:
    """Lines at the bottom of a terminal; what is printed meanwhile appears above them."""

    def __init__(self, console: Any):
        from rich.live import Live

        self._live = Live(console=console, auto_refresh=False)

    def show(self, drawing: Any) -> None:
        """Replace what is shown. The first time, it raises where `rich` cannot draw two things on one console."""
        self._live.start()  # the first time only; not in `__init__`, so that whoever may have to close it has it already
        self._live.update(drawing, refresh=True)

    def close(self) -> None:
        """Leave the lines where they are, and show the cursor again."""
        self._live.stop()


class NotebookScreen:
    """The output of the cell that was running when it first showed something."""

    def __init__(self) -> None:
        self._handle: Any = None

    def show(self, drawing: Any) -> None:
        """Replace what is shown."""
        if self._handle is None:
            from IPython.display import display

            self._handle = display(drawing, display_id=True)
        else:
            self._handle.update(drawing)

    def close(self) -> None:
        """Leave the output where it is: nothing was taken."""
