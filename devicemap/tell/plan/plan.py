"""What will run where, and what stands in the way of parallelism: a `Plan` to print, or hand on as a dict."""

from __future__ import annotations

import os
from dataclasses import dataclass
from enum import Enum
from typing import Any, Literal

from devicemap.tell.plan.advice import advise
from devicemap.tell.plan.drawing import save_traffic
from devicemap.tell.plan.memory import Memory, Planned
from devicemap.tell.plan.tables import plan_table
from devicemap.tell.render import Result, counted


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

    memory_bytes: int | None
    """The memory that its rows take at once, those of all chunks in flight: see `Plan.memory_bytes_per_row`."""

    memory_limit_bytes: int | None
    """What TensorFlow may use on it, `None` where it has no limit of its own or does not tell."""

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
class Transfer:
    """What goes from one device to another in a call."""

    what: str
    """`"rows"`, `"results"`, or the name of something captured."""

    sender: str
    """Full name of a device."""

    receiver: str
    """Full name of another device."""

    tensors: int | None
    """How many tensors per call, `None` where that is decided while it runs."""

    bytes_per_call: int | None
    """Their bytes in one call, `None` where they cannot be told (ragged rows, text, unknown shapes or rows)."""

    bytes_per_row: int | None
    """Of rows and results: bytes for each row; `None` for results that are reduced, of which each shard sends one."""


@dataclass(frozen=True)
class ControlEdge:
    """One device waits until another has done something, although nothing travels between them."""

    sender: str
    """Full name of the device that is waited for."""

    receiver: str
    """Full name of the device that waits."""


@dataclass(frozen=True)
class StrayOp:
    """An op of `fn` that does not run on the device of its rows."""

    op: str
    """Its type."""

    device: str
    """The kind of device that it leaves, or, for other reasons, where it goes."""

    reason: Literal["no kernel", "int32", "placed by fn", "with a resource"]
    """Whether the kind of device has no kernel for it, or one for int32 that runs on the host, a `tf.device` in `fn` says
    otherwise, or it asks a table there or writes a summary."""

    instead: str | None = None
    """A dtype that the device has a kernel of its own for, where it has none for int32."""


@dataclass(frozen=True)
class RandomOps:
    """Ops of `fn` that draw random numbers."""

    ops: tuple[str, ...]
    """Their types."""

    seeding: str
    """Where their seeds come from, and what that means on several devices."""


@dataclass(frozen=True, repr=False)
class Plan(Planned, Result):
    """What a call will do. `print` it for a text; `rich` prints it in colour, and notebooks show it.

    Examples:
        >>> import tensorflow as tf
        >>> from devicemap import DeviceMap
        >>> plan = DeviceMap(lambda row: row * 2, devices=["CPU:0"]).explain(tf.TensorSpec([10, 3]))
        >>> plan.way, plan.devices[0].rows, plan.vectorized, plan.control_edges
        ('one graph', 10, True, ())
    """

    _derived = ("bytes_per_call", "advice")

    name: str
    """That of the map."""

    way: Literal["one graph", "chunks"]
    """How the rows run: all devices in one graph, or chunks to idle devices."""

    balanced: bool
    """Whether devices take their next rows as they are done with others: in chunks, and in one graph where the call is long."""

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
    """Why it does, or does not: for instance the op that is not proven to give the same vectorised."""

    traces: int
    """How often `fn` is traced for data of this structure: once for all devices, sizes and calls."""

    control_edges: tuple[ControlEdge, ...]
    """One device that waits for another, read from the built graph of the call; each chunk is a graph of one device.

    There are none, unless `ordered` says why. Steps of a loop that acts on a variable on another device are not counted:
    they are a part of what `Handling.ATOMIC` and `Handling.ORDERED` say.
    """

    ordered: tuple[str, ...]
    """The captured variables for whose sake the devices work one after another, in row order."""

    strays: tuple[StrayOp, ...]
    """Ops that leave the device of their rows."""

    transfers: tuple[Transfer, ...]
    """What goes between devices, without the few bytes that say how many rows a shard has.

    What `fn` does not use of it, TensorFlow may leave out.
    """

    captured: tuple[Captured, ...]
    """What `fn` uses besides its arguments."""

    random_ops: tuple[RandomOps, ...]
    """What draws random numbers, and from which seeds."""

    python_ops: tuple[str, ...]
    """Types of ops that call back into Python, which runs one of them at a time."""

    memory_bytes_per_row: int | None
    """What one more row adds to the most memory that is taken at once on a device, from the shapes in the traced function.

    The rows of a shard arrive, the ops run in the order of TensorFlow's executor, each tensor is freed when the last op that
    takes it has run, elementwise ops write over what nobody else needs, and results leave as soon as they are there. A loop
    holds its state and its lists, and from a branch the larger side counts. Rows of ragged data count with the lengths that
    they have. Not in it is what a kernel takes for itself, what TensorFlow's allocator loses between tensors, what gradients
    need, and what does not grow with the rows. `None` where a shape is not known before it runs, as of sparse data and of
    specs of ragged data, and where XLA compiles `fn`.
    """

    memory: tuple[Memory, ...]
    """What the call takes of the memory of each device; `peak_bytes` of each tells it for so many rows of the call, or, in
    chunks, of each chunk. Empty for chunks of a `fn` that draws random numbers with seeds."""

    microbatches: int = 1
    """In training: that each device takes its rows in, one after another."""

    @property
    def bytes_per_call(self) -> int | None:
        """All that goes between devices in a call, `None` where it cannot be told."""
        sizes = [transfer.bytes_per_call for transfer in self.transfers]
        return None if None in sizes else sum(size or 0 for size in sizes)

    @property
    def advice(self) -> tuple[str, ...]:
        """What stands in the way and what to do about it, in plain words; empty where nothing is worth saying."""
        return advise(self)

    @property
    def summary(self) -> str:
        """The plan in one line."""
        rows = "an unknown number of rows" if self.rows is None else counted(self.rows, "row")
        balanced = "; a long call balances itself" if self.balanced and self.way == "one graph" else ""
        return f"{self.name}: {rows} on {counted(len(self.devices), 'device')}, in {self.way}{balanced}"

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Draw what goes from device to device into a `.png`, `.svg` or `.pdf`: a matrix of bytes; needs matplotlib."""
        save_traffic(self, path)

    def __rich__(self) -> Any:
        return plan_table(self)
