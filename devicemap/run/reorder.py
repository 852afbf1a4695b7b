"""Results of chunks, in whatever order they come -> groups of them, in input order or as they are whole.

Nothing here knows of threads: whoever shares `Groups` guards them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from devicemap.data.chunks import Chunk


@dataclass(frozen=True)
class Group:
    """Results that are delivered as one: those of a batch of the user's, or of `batch_size` rows."""

    start: int
    """Global index of the first row."""

    results: list[Any]
    """What the chunks of the group gave, in row order."""


@dataclass
class _Open:
    """A group whose results are not all delivered."""

    start: int
    left: int = 0
    """Rows that were taken and are not finished."""

    closed: bool = False
    """Whether its last chunk was taken."""

    finished: dict[int, Any] = field(default_factory=dict)
    """Results by first row."""

    error: BaseException | None = None

    @property
    def ready(self) -> bool:
        return self.closed and not self.left

    def as_group(self) -> Group:
        return Group(self.start, [self.finished[start] for start in sorted(self.finished)])


class Groups:
    """The groups that are read and not delivered.

    Args:
        window: how many there may be, `None`: any number.
        in_order: whether they are delivered in the order in which they were read, or as they are whole.
    """

    def __init__(self, window: int | None, in_order: bool):
        self._window = window
        self._in_order = in_order
        self._open: dict[int, _Open] = {}  # in the order in which they were read

    def __len__(self) -> int:
        return len(self._open)

    @property
    def full(self) -> bool:
        """Whether the next chunk that is read would begin one more than there may be."""
        if self._window is None or len(self) < self._window:
            return False
        return all(group.closed for group in self._open.values())

    @property
    def due(self) -> bool:
        """Whether `take_due` may give a group, or raise."""
        turn = next(iter(self._open.values()), None)
        return turn is not None and (not self._in_order or turn.ready or turn.error is not None)

    def add(self, chunk: Chunk) -> None:
        """A chunk was read."""
        group = self._open.setdefault(chunk.group, _Open(chunk.start))
        group.left += chunk.count
        group.closed |= chunk.last

    def finish(self, chunk: Chunk, result: Any) -> None:
        """A chunk, or a part of one, was computed."""
        group = self._open[chunk.group]
        group.finished[chunk.start] = result
        group.left -= chunk.count

    def fail(self, chunk: Chunk, error: BaseException) -> None:
        """A chunk will never be computed: its group ends with the error."""
        self._open[chunk.group].error = error

    def take_due(self) -> Group | None:
        """Take out a group that is whole and whose turn it is; `None`: none is yet.

        Raises:
            BaseException: the error of a group whose turn it is.
        """
        turn = list(self._open)[:1] if self._in_order else list(self._open)
        for number in turn:
            if self._open[number].ready:
                return self._open.pop(number).as_group()
        for number in turn:
            if (error := self._open[number].error) is not None:
                raise error
        return None
