"""Chunks that were read and wait for a device: those that failed, and parts of those that were too large for one."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from devicemap.data.chunks import Chunk
from devicemap.data.shards import shard_sizes
from devicemap.events import Shard


@dataclass(frozen=True)
class Task:
    """A chunk and its history."""

    chunk: Chunk
    tried: tuple[Shard, ...] = ()
    """Where it failed."""

    only: str | None = None
    """The device whose memory it was cut for."""

    again: bool = False
    """Whether some of its rows failed before."""

    def cut(self, limit: int) -> list[Task]:
        """The task in parts of at most `limit` rows, each with the history of the whole."""
        return [
            replace(self, chunk=piece, tried=tuple(piece.on(shard.device) for shard in self.tried))
            for piece in self.chunk.split(shard_sizes(self.chunk.count, -(-self.chunk.count // limit)))
        ]

    def may_go_to(self, device: str, alive: set[str]) -> bool:
        """Whether a device may try it: the one it was cut for, as long as that lives; else one that has not tried it, or
        any if all that live have."""
        if self.only in alive:
            return device == self.only
        tried = {shard.device for shard in self.tried}
        return device not in tried or tried >= alive


class Queue:
    """Tasks that wait. Nothing here knows of threads: whoever shares it guards it."""

    def __init__(self) -> None:
        self._tasks: list[Task] = []

    def __len__(self) -> int:
        return len(self._tasks)

    def add_first(self, tasks: Iterable[Task]) -> None:
        """Put tasks before all others."""
        self._tasks[:0] = tasks

    def add_last(self, task: Task) -> None:
        """Put a task behind all others."""
        self._tasks.append(task)

    def first(self, device: str, alive: set[str]) -> Task | None:
        """The first task that a device may try; `alive` are all devices that still get chunks."""
        return next((task for task in self._tasks if task.may_go_to(device, alive)), None)

    def remove(self, task: Task) -> None:
        """Take out a task that is here."""
        self._tasks = [other for other in self._tasks if other is not task]

    def drop(self, group: int) -> None:
        """Forget the tasks of a group."""
        self._tasks = [task for task in self._tasks if task.chunk.group != group]
