"""What goes from the memory of a device to the host's, and back, noted as a graph is run through."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import tensorflow as tf

from devicemap.compile.cost.constants import Value
from devicemap.compile.cost.liveness import Op


@dataclass(frozen=True)
class Crossing:
    """A tensor that goes from the memory of a device to the host's, or back."""

    what: str
    """The op that makes it on the host, or that takes it there, or something captured."""

    to_device: bool

    size_bytes: int | None
    """Of all times; `None` where it cannot be told."""


@dataclass
class Ledger:
    """The crossings of one graph, each with the op that it was for."""

    _entries: list[tuple[Op | None, Crossing]] = field(default_factory=list)
    _left: set[int] = field(default_factory=set)

    def add(self, crossing: Crossing) -> None:
        """Note one for the op that is noted next."""
        self._entries.append((None, crossing))

    def cross(self, value: Value, what: str, to_device: bool) -> None:
        """A tensor goes from memory to memory."""
        shape, dtype = value.tensor.shape, value.tensor.dtype
        if dtype not in (tf.resource, tf.variant, tf.string):
            size = int(shape.num_elements()) * int(dtype.size) if shape.is_fully_defined() else None
            self.add(Crossing(what, to_device, size))

    def leave(self, value: Value, what: str) -> None:
        """An op takes a tensor of the device on the host; others may have done so before."""
        if not value.on_host and value.number not in self._left:
            self._left.add(value.number)
            self.cross(value, what, to_device=False)

    def belong_to(self, op: Op) -> None:
        """What crossed last was for this op."""
        self._entries = [(op if known is None else known, each) for known, each in self._entries]

    def of(self, ops: Iterable[Any]) -> list[Crossing]:
        """What these ops let cross. Rows that come are not counted: they have no maker."""
        ids = {id(op) for op in ops}
        return [each for op, each in self._entries if id(op) in ids and each.what]
