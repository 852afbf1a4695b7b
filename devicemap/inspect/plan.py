"""The result of `DeviceMap.explain`: the plan of a call, with its text of at most one screen."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Literal

from rich.console import Group
from rich.text import Text

from devicemap.events import short_name
from devicemap.inspect.render import Result, counted, listed, page, size_text, table

_SHOWN = 3
"""The most reasons that are shown."""

_LARGE_BYTES = 2**20
"""Copies of fewer bytes take less time than a call. A judgement; no benchmark chose it."""


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
class CapturedValue:
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

    remedy: str
    """What to try so that rows do not run one by one; empty if they do not, or with `vectorize=False`."""

    traces: int
    """Number of times that `fn` was traced so far for data of this structure."""

    captured: tuple[CapturedValue, ...]
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
        """Obstacles to parallelism, with remedies, the most expensive first."""
        return tuple(_advice(self))

    def __rich__(self) -> Any:
        rows = "an unknown number of rows" if self.rows is None else counted(self.rows, "row")
        title = f"{self.name}: {rows} on {counted(len(self.devices), 'device')}, in {self.engine}"
        facts = Group(*map(Text, _facts(self)))
        return page(title, table([*_devices(self)]), facts, notes=[f"* {line}" for line in self.advice])


def _quoted(names: Sequence[str]) -> str:
    """Return the first two of some names, and the number of the others."""
    others = [f"{len(names) - 2} more"] if len(names) > 2 else []
    return listed([*(f"`{name}`" for name in names[:2]), *others])


def _advice(plan: Plan) -> Iterator[str]:
    several, rows, size = len(plan.devices) > 1, plan.rows, plan.batch_size
    # The number of devices that the call may use: some functions cannot use all of them.
    used = sum(0 not in (device.rows, device.shards, device.chunks_in_flight) for device in plan.devices)
    if several and plan.ordered:
        keras = any(name.rpartition("/")[2].startswith("moving_") for name in plan.ordered)
        remedy = "call batch normalization with training=False" if keras else "use assign_add, or return the new value"
        yield f"the devices work one after another, because fn writes {_quoted(plan.ordered)} in row order: {remedy}"
    if several and plan.fixed_seeds:
        yield (
            f"one device computes all rows, because the seeds of {listed(plan.fixed_seeds)} are the same in every trace: use "
            "the option seed= with tf.random.stateless_* ops"
        )
    if several and plan.python_ops:
        # Each running call of Python holds one of TensorFlow's threads, so that there may be fewer slots than devices.
        few = used < min(len(plan.devices), len(plan.devices) if rows is None else rows)
        threads = (
            f" ({counted(used, 'device')}: see tf.config.threading.set_inter_op_parallelism_threads)" if few else ""
        )
        yield f"{listed(plan.python_ops)} calls Python, one call at a time for all devices{threads}: use TensorFlow ops instead"
    if isinstance(size, int) and rows and min(rows, size) > 1 and rows <= size * (used - 1):
        chunks = -(-rows // size)
        yield f"{counted(rows, 'row')} make {counted(chunks, 'chunk')} for {used} devices: use a smaller batch_size"
    parts = defaultdict(list)
    for device in plan.devices:
        parts[device.gpu].append(short_name(device.device))
    for gpu, names in parts.items():
        if gpu is not None and len(names) > 1:
            yield f"{listed(names)} are parts of one GPU, where large kernels take turns: they may be no faster than one"
    if plan.remedy and not plan.ordered:
        yield f"rows run one by one because {plan.reason}: {plan.remedy}"
    copied = sum(each.size_bytes or 0 for each in plan.captured if each.handling is Handling.COPIED)
    sizes = (rows or 0) * ((plan.bytes_per_row or 0) + (plan.result_bytes_per_row or 0))
    if plan.engine == "one graph" and rows and copied > max(_LARGE_BYTES, sizes):
        yield (
            f"each call copies {size_text(copied)} of variables to each other device, more than the {size_text(sizes)} of its "
            "rows and results: pass more rows per call"
        )


def _devices(plan: Plan) -> Iterator[dict[str, str]]:
    """Yield a row for each run of devices with equal parts."""
    for part, group in itertools.groupby(plan.devices, lambda each: (each.rows, each.shards, each.chunks_in_flight)):
        names = [short_name(each.device) for each in group]
        rows, shards, chunks = ("" if number is None else str(number) for number in part)
        each = " each" if len(plan.devices) > 1 else ""
        yield {
            "devices": ", ".join(names if len(names) < 4 else [*names[:2], "...", names[-1]]),
            f"rows{each}": rows,
            f"shards{each}": shards,
            f"chunks in flight{each}": chunks,
        }


def _facts(plan: Plan) -> Iterator[str]:
    reasons = plan.reason.split("; ")
    more = f"; and {len(reasons) - _SHOWN} more" if len(reasons) > _SHOWN else ""
    how = "vectorised" if plan.vectorized else "one by one"
    yield "rows: fn takes batches" if plan.batched else f"rows: {how}, because {'; '.join(reasons[:_SHOWN])}{more}"
    if plan.ordered:
        line = next((f", as in {each.line}" for each in plan.captured if each.line), "")
        yield f"order: kept, because fn writes {_quoted(plan.ordered)} in row order{line}"
    else:
        yield "order: not kept, no device waits for another"
    sizes = ["?" if size is None else size_text(size) for size in (plan.bytes_per_row, plan.result_bytes_per_row)]
    yield "sizes: {} per row, {} per row of results".format(*sizes)
    for handling in dict.fromkeys(each.handling for each in plan.captured):
        values = [each for each in plan.captured if each.handling is handling]
        values.sort(key=lambda each: each.size_bytes or 0, reverse=True)
        size = sum(each.size_bytes or 0 for each in values)
        names = f"`{values[0].name}`" if len(values) == 1 else f"{len(values)} values, largest `{values[0].name}`"
        yield f"captured: {names}{f', {size_text(size)}' * bool(size)}: {handling.value}"
    if plan.python_ops:
        yield f"Python: called by {listed(plan.python_ops)}, one call at a time"
    if plan.on_error == "skip":
        yield "failing rows: left out, and listed in report.failed_rows"
    if plan.microbatches > 1:
        yield f"microbatches: {plan.microbatches} per device, one after another"
    if plan.gathered_for:
        yield f"outputs: gathered for {listed(plan.gathered_for)}"
    yield f"traces of fn: {plan.traces}"
