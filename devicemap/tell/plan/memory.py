"""What a call takes of the devices' memory, as a function of its rows, and the most rows that fit."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from devicemap.errors import OptionError
from devicemap.events import short_name
from devicemap.tell.render import figure_class, short_names, size_text

MARGIN = 0.1
"""The part of the memory that is left free, for what kernels take for themselves and TensorFlow's allocator loses."""


@dataclass(frozen=True)
class Memory:
    """What a call takes of one device's memory.

    Predicted from the graph of the call: what is alive at once when TensorFlow runs its ops, in the order of its executor. Not
    in it is what kernels of cuDNN and XLA take for themselves, what TensorFlow's allocator loses between tensors, and what
    other functions and programs hold.

    Examples:
        >>> memory = Memory("GPU:0", 4000, 0, 8000, 4000, 0, 20.0, 100_000)
        >>> memory.peak_bytes(100), memory.peak_bytes(1000), memory.most_rows(100_000)
        (16000, 32000, 4400)
    """

    device: str
    """Full name."""

    variable_bytes: int
    """Of variables that lie there."""

    copy_bytes: int
    """Of copies of variables and tensors from other devices, which stay there between calls."""

    slot_bytes: int
    """Of what an optimizer keeps there for each variable."""

    gradient_bytes: int | None
    """Of gradients of variables and whatever else a call holds however few its rows, as much as is alive at once."""

    fixed_bytes: int | None
    """What of that is alive when rows take most."""

    bytes_per_row: float | None
    """What one more row of the call, of all devices, adds when rows take most; `None`, as the two before it, where it cannot be
    told before it runs."""

    limit_bytes: int | None
    """What TensorFlow may use there, `None` where it has no limit of its own or does not tell."""

    @property
    def held_bytes(self) -> int:
        """What is there before and after the call, too."""
        return self.variable_bytes + self.copy_bytes + self.slot_bytes

    def peak_bytes(self, rows: int) -> int | None:
        """The most that a call on so many rows takes at once, with what is held; `None` where it cannot be told."""
        if self.gradient_bytes is None or self.fixed_bytes is None or self.bytes_per_row is None:
            return None
        return self.held_bytes + max(self.gradient_bytes, math.ceil(self.fixed_bytes + self.bytes_per_row * rows))

    def most_rows(self, memory_bytes: float) -> int | None:
        """The most rows of a call that takes no more; `None` where it cannot be told, or rows take nothing there."""
        least = self.peak_bytes(0)
        if least is None or self.fixed_bytes is None or not self.bytes_per_row:
            return None
        return (
            0 if least > memory_bytes else int((memory_bytes - self.held_bytes - self.fixed_bytes) / self.bytes_per_row)
        )


class Planned:
    """What plans of calls have in common: the memory of each device."""

    memory: tuple[Memory, ...]

    def largest_batch(self, memory_bytes: int | None = None, margin: float = MARGIN) -> int | None:
        """The most rows of a call for which each device has memory.

        For n alike devices it solves n * memory - model - rows * pass - overhead = 0, where the model is what is held.

        Args:
            memory_bytes: of each device; `None`: what TensorFlow may use there.
            margin: the part of it that is left free.

        Returns:
            A number of rows, of all devices together; 0 where not even the model fits, `None` where memory has no limit, or
            what a row takes cannot be told.

        Raises:
            OptionError: for a margin that is not in [0, 1), or memory that is not positive.
        """
        if memory_bytes is not None and not (isinstance(memory_bytes, int | float) and memory_bytes > 0):
            raise OptionError(f"memory_bytes={memory_bytes!r}; expected a positive number of bytes, or None")
        if not 0 <= margin < 1:
            raise OptionError(f"margin={margin!r}; expected a part of the memory, at least 0 and less than 1")
        return largest_batch(self.memory, memory_bytes, margin)

    def plot_memory(self, path: str | os.PathLike[str], rows: int | None = None) -> None:
        """Draw memory against rows of a call into a `.png`, `.svg` or `.pdf`, with the limit of each device; needs matplotlib.

        Args:
            path: where to.
            rows: up to how many; `None`: somewhat more than fit, and 1024 where that is not known.
        """
        most = rows or math.ceil(1.25 * (self.largest_batch(margin=0.0) or 820))
        figure = figure_class()(figsize=(7, 4), layout="constrained")
        axes = figure.subplots()
        counts = [most * i // 64 for i in range(65)]
        for i, memory in enumerate(self.memory):
            peaks = [memory.peak_bytes(count) for count in counts]
            if None not in peaks:
                axes.plot(
                    counts, [(peak or 0) / 2**20 for peak in peaks], color=f"C{i}", label=short_name(memory.device)
                )
            if memory.limit_bytes is not None:
                axes.axhline(memory.limit_bytes / 2**20, color=f"C{i}", linestyle="--", linewidth=1)
        axes.set_xlabel("rows of a call")
        axes.set_ylabel("MiB at once; dashed: the limit")
        axes.set_ylim(bottom=0)
        axes.legend()
        figure.savefig(path)


def largest_batch(memory: Iterable[Memory], memory_bytes: int | None, margin: float) -> int | None:
    """The most rows of a call that takes of each device no more than its memory, or so much, but for the margin."""
    limits = [(each, each.limit_bytes if memory_bytes is None else memory_bytes) for each in memory]
    bounds = [(each, limit * (1 - margin)) for each, limit in limits if limit is not None]
    if any(each.bytes_per_row is None for each, _ in bounds):
        return None
    most = [each.most_rows(bound) for each, bound in bounds]
    return min((rows for rows in most if rows is not None), default=None)


def memory_table(memory: Sequence[Memory]) -> list[dict[str, str]]:
    """A row of text for each device: what it holds, and what a call takes besides."""
    names = short_names(each.device for each in memory)
    return [
        {
            "device": names[each.device],
            "variables": size_text(each.variable_bytes),
            "copies": size_text(each.copy_bytes) if each.copy_bytes else "",
            "slots": size_text(each.slot_bytes) if each.slot_bytes else "",
            "gradients": "?" if each.gradient_bytes is None else size_text(each.gradient_bytes),
            "per row of a call": "?" if each.bytes_per_row is None else size_text(round(each.bytes_per_row)),
            "limit": "none" if each.limit_bytes is None else size_text(each.limit_bytes),
        }
        for each in memory
    ]
