"""What will run where, and what stands in the way of parallelism: a `Plan` to print, or hand on as a dict."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any, Literal

from devicemap.inspect.plan_advice import advise
from devicemap.inspect.plan_text import plan_table
from devicemap.inspect.render import Result, counted


class Handling(Enum):
    """What becomes of something that `fn` captures."""

    IN_PLACE = "read where it lives"
    COPIED = "copied to each other device once per call"
    KEPT = "each other device keeps a copy, since it never changes"
    LOOKED_UP = "looked up where it lives"
    ATOMIC = "updated atomically where it lives, in any order"
    SEED = "a seed of its own for each device and call"
    ORDERED = "written in row order: the devices wait for each other"


@dataclass(frozen=True)
class DevicePlan:
    """One device's part of a call."""

    device: str
    """Full name."""

    kind: str
    """`"GPU"`, `"CPU"`, or another device type."""

    rows: int | None
    """Rows that it gets; `None` where that is decided while it runs, or nobody knows how many there are."""

    shards: int | None
    """Shards that these rows come in, at the same time (a CPU takes one per core where that pays); `None` for chunks."""

    chunks_in_flight: int | None
    """Chunks that may be under way on it at once; `None` in one graph."""

    gpu: int | None
    """The index of the physical GPU that it is, or is a part of; `None` for what is no GPU of this host."""


@dataclass(frozen=True)
class Captured:
    """Something that `fn` uses without getting it as an argument: a variable, a large tensor, a lookup table."""

    name: str
    """What it is called in the code around `fn`, or else its own name."""

    kind: Literal["variable", "tensor", "resource"]
    """A `tf.Variable`, a tensor, or a lookup table or other resource."""

    dtype: str | None
    """Of its elements; `None` for a resource."""

    shape: tuple[int | None, ...] | None
    """`None` for a resource, or where the rank is not known."""

    size_bytes: int | None
    """Its size, `None` where it cannot be told."""

    device: str
    """Where it lives: a full name."""

    handling: Handling
    """How the devices share it."""


@dataclass(frozen=True)
class ControlEdge:
    """One device waits until another has done something, although nothing travels between them."""

    sender: str
    """Full name of the device that is waited for."""

    receiver: str
    """Full name of the device that waits."""


@dataclass(frozen=True)
class RandomOps:
    """Ops of `fn` that draw random numbers."""

    ops: tuple[str, ...]
    """Their types."""

    seeding: str
    """Where their seeds come from, and what that means on several devices."""


@dataclass(frozen=True, repr=False)
class Plan(Result):
    """What a call will do. `print` it for a text; `rich` prints it in colour, and notebooks show it.

    Examples:
        >>> import tensorflow as tf
        >>> from devicemap import DeviceMap
        >>> plan = DeviceMap(lambda row: row * 2, devices=["CPU:0"]).explain(tf.TensorSpec([10, 3]))
        >>> plan.engine, plan.devices[0].rows, plan.vectorized, plan.control_edges
        ('one graph', 10, True, ())
    """

    _derived = ("advice",)

    name: str
    """That of the map."""

    engine: Literal["one graph", "chunks"]
    """The engine: all devices in one graph, or chunks to idle devices. A call on data in memory without `batch_size` is
    planned as one graph; it goes in chunks if it takes longer than about 0.1 s."""

    rows: int | None
    """How many there are, `None` where nobody knows."""

    batch_size: int | str | None
    """Of chunks: the option, and `None` where the batches of a dataset go as they are. In one graph: `None`."""

    devices: tuple[DevicePlan, ...]
    """Each device's part."""

    batched: bool
    """Whether `fn` takes batches."""

    vectorized: bool
    """Whether a `fn` of one row runs over the rows of a device at once."""

    reason: str
    """Why it does, or does not: for instance the op without a tested vectorised form."""

    traces: int
    """How often `fn` is traced for data of this structure: once for all devices, sizes and calls."""

    control_edges: tuple[ControlEdge, ...]
    """One device that waits for another, read from the built graph of the call; each chunk is a graph of one device.

    There are none, unless `ordered` says why. Steps of a loop that acts on a variable on another device are not counted:
    they are a part of what `Handling.ATOMIC` and `Handling.ORDERED` say.
    """

    ordered: tuple[str, ...]
    """The captured variables for whose sake the devices work one after another, in row order."""

    captured: tuple[Captured, ...]
    """What `fn` uses besides its arguments."""

    random_ops: tuple[RandomOps, ...]
    """What draws random numbers, and from which seeds."""

    python_ops: tuple[str, ...]
    """Types of ops that call back into Python, which runs one of them at a time."""

    bytes_per_row: int | None
    """Bytes of one row of the data; `None` if shapes do not determine them (ragged rows, text)."""

    result_bytes_per_row: int | None
    """Bytes of one row of the results, or of the state of a shard in a reduction; `None` if shapes do not determine them."""

    microbatches: int = 1
    """In training: that each device takes its rows in, one after another."""

    @property
    def advice(self) -> tuple[str, ...]:
        """What stands in the way and what to do about it, in plain words; empty where nothing is worth saying."""
        return advise(self)

    @property
    def summary(self) -> str:
        """The plan in one line."""
        rows = "an unknown number of rows" if self.rows is None else counted(self.rows, "row")
        return f"{self.name}: {rows} on {counted(len(self.devices), 'device')}, in {self.engine}"

    def __rich__(self) -> Any:
        return plan_table(self)
