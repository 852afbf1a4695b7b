"""The result of `DeviceMap.explain`: the plan of a call."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any, Literal

from devicemap.inspect.advice import advise_before
from devicemap.inspect.plan_text import plan_text
from devicemap.inspect.render import Result


class Handling(Enum):
    """How devices share a captured value."""

    IN_PLACE = "read on its own device"
    COPIED = "copied to each other device once per call"
    KEPT = "constant, each device keeps a copy"
    LOOKED_UP = "read by all devices on its own device"
    ATOMIC = "updated by all devices on its own device, in any order"
    SEED = "a separate seed for each device and call"
    ORDERED = "written in row order, one device after another"


@dataclass(frozen=True)
class DevicePlan:
    """The part of one device in a call."""

    device: str
    """Full name."""

    rows: int | None
    """Number of its rows; `None` for chunks, and if the number of rows is unknown."""

    shards: int | None
    """Number of its shards, which run at the same time; `None` for chunks."""

    chunks_in_flight: int | None
    """The most chunks in flight; `None` in one graph."""

    gpu: int | None
    """Index of the physical GPU that contains it; `None` for other devices and hosts."""


@dataclass(frozen=True)
class Captured:
    """A variable, tensor, lookup table or other resource that `fn` uses without getting it as an argument."""

    name: str
    """Its own name, or else its name in the code around `fn`."""

    size_bytes: int | None
    """Its size, `None` if unknown."""

    device: str
    """Full name of its device."""

    handling: Handling
    """How the devices share it."""

    line: str | None = None
    """The line of the user's code that writes it in row order."""


@dataclass(frozen=True, repr=False)
class Plan(Result):
    """The plan of a call. `print(plan)` shows it on one screen. `to_dict` contains all captured values.

    Examples:
        >>> import tensorflow as tf
        >>> from devicemap import DeviceMap
        >>> plan = DeviceMap(lambda row: row * 2, devices=["CPU:0"]).explain(tf.TensorSpec([10, 3]))
        >>> plan.engine, plan.devices[0].rows, plan.vectorized, plan.bytes_per_row
        ('one graph', 10, True, 12)
    """

    _derived = "ordered", "advice"

    name: str
    """Name of the map."""

    engine: Literal["one graph", "chunks"]
    """`"one graph"`: all devices in one graph. `"chunks"`: chunks to idle devices. Calls on data in memory without
    `batch_size` are planned as one graph. Those that take more than about 0.1 s use chunks."""

    rows: int | None
    """Number of rows, `None` if unknown."""

    batch_size: int | str | None
    """The option, for chunks; `None` for the batches of a dataset, and in one graph."""

    devices: tuple[DevicePlan, ...]
    """The part of each device."""

    batched: bool
    """Whether `fn` takes batches."""

    vectorized: bool
    """Whether a `fn` of one row runs over all rows of a device at once."""

    reason: str
    """The reason for `vectorized`, for instance an op that cannot be vectorised, with the line of the user's code."""

    traces: int
    """Number of times that `fn` was traced so far for data of this structure."""

    captured: tuple[Captured, ...]
    """The values that `fn` uses besides its arguments."""

    python_ops: tuple[str, ...]
    """Types of ops that call Python. Python runs one call at a time."""

    fixed_seeds: tuple[str, ...]
    """Types of random ops with the same seeds in every trace, so that one device computes all rows."""

    bytes_per_row: int | None
    """Bytes of one row of the data; `None` if shapes do not determine them (ragged rows, strings)."""

    result_bytes_per_row: int | None
    """Bytes of one row of the results, or of the state of a shard in a reduction; `None` as above."""

    microbatches: int = 1
    """In training: number of microbatches that each device runs one after another."""

    gathered_for: tuple[str, ...] = ()
    """In training: losses, metrics or methods of the model that need the outputs of all rows on one device. Metrics are known
    after the first step."""

    on_error: str = "raise"
    """The option: `"skip"` leaves out failing rows."""

    @property
    def ordered(self) -> tuple[str, ...]:
        """Names of the captured variables that make the devices work one after another, in row order."""
        return tuple(each.name for each in self.captured if each.handling is Handling.ORDERED)

    @property
    def advice(self) -> tuple[str, ...]:
        """Obstacles to parallelism, with remedies."""
        return advise_before(self)

    def __rich__(self) -> Any:
        return plan_text(self)
