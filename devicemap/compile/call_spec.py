"""The value that identifies the graph of a call."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

ANY_ORDER = 2
"""The order of gradients of a graph that gradients of any order go through."""


class Engine(Enum):
    """How a graph is called: in three ways by the graph engine, in one by the chunk engine."""

    GRAPH = "one graph, called from eager code"
    INLINE = "one graph, as a part of the user's tf.function"
    REWRITTEN = "one graph, as a part of a function that XLA compiles or that is vectorised"
    CHUNKS = "one function per device, called by the scheduler for each chunk"


@dataclass(frozen=True)
class CallSpec:
    """Identifies a graph of a `CompiledMap`. Only functions with fixed seeds have several graphs per spec."""

    slots: tuple[int, ...]
    """Indices of the slots that get a shard each; exactly one for `CHUNKS`."""

    engine: Engine = Engine.GRAPH

    gradient_order: int = 0
    """The highest order of gradients that tapes may request, at most `ANY_ORDER`."""

    empty_shards: bool = False
    """Whether a shard may have no rows. Its device is then not called."""

    @classmethod
    def of_shards(
        cls, shards: int, engine: Engine = Engine.GRAPH, gradient_order: int = 0, empty_shards: bool = False
    ) -> CallSpec:
        """Return the spec of a graph with a shard for each of the first slots."""
        return cls(tuple(range(shards)), engine, gradient_order, empty_shards)

    @property
    def differentiable(self) -> bool:
        """Whether gradients go through the graph."""
        return self.gradient_order > 0

    @property
    def is_inside(self) -> bool:
        """Whether the graph is a part of another function."""
        return self.engine in (Engine.INLINE, Engine.REWRITTEN)
