"""Shards of rows, and the events of a call."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Shard:
    """Neighbouring rows that one device computes at once."""

    device: str
    """Full name of the device."""

    start: int
    """Global index of the first row."""

    stop: int
    """Global index after the last row."""

    def __len__(self) -> int:
        return self.stop - self.start

    def __str__(self) -> str:
        rows = f"row {self.start}" if len(self) == 1 else f"rows {self.start} to {self.stop - 1}"
        return f"{rows} on {short_name(self.device)}"


def short_name(device: str) -> str:
    """Return the short name of a device, which `devices=` accepts. The name of a remote device has its job and task.

    >>> short_name("/job:localhost/replica:0/task:0/device:GPU:1")
    'GPU:1'
    >>> short_name("/job:worker/replica:0/task:2/device:GPU:1")
    '/job:worker/task:2/GPU:1'
    """
    host, _, name = device.rpartition("device:")
    job, _, task = host.partition("/replica:0")
    return name if job in ("", "/", "/job:localhost") else f"{job}{task}{name}"


@dataclass(frozen=True)
class Event:
    """Base class of events. A callable `progress` gets the events of a call, one at a time, in order."""

    seconds: float
    """Time in seconds since the call began."""


@dataclass(frozen=True)
class CallStarted(Event):
    """A call began: its first event."""

    rows: int | None
    """Number of rows to map, `None` if unknown."""

    devices: tuple[str, ...]
    """Full names of its devices."""


@dataclass(frozen=True)
class ChunkStarted(Event):
    """A device started a chunk. A device may compute several chunks at once."""

    shard: Shard
    """Its rows and its device."""

    waited_seconds: float
    """How long the device was idle before, because the rows of the chunk were being read."""


@dataclass(frozen=True)
class ChunkFinished(Event):
    """A device finished a chunk."""

    shard: Shard
    """Its rows and its device."""

    started_seconds: float
    """When the device started the chunk, in seconds since the call began."""


@dataclass(frozen=True)
class ChunkFailed(Event):
    """An attempt to compute a chunk failed."""

    shard: Shard
    """Its rows and its device."""

    started_seconds: float
    """When the device started it, in seconds since the call began."""

    error: BaseException
    """The error of the function or the device."""


@dataclass(frozen=True)
class ChunkRetried(Event):
    """A device starts rows that failed before: a chunk, or a part of it."""

    shard: Shard
    """Its rows and its device."""

    attempt: int
    """Number of the attempt, from 1. Failures for lack of memory do not count."""

    out_of_memory: bool = False
    """Whether the chunk did not fit into the memory of this device."""


@dataclass(frozen=True)
class RowFailed(Event):
    """With `on_error="skip"`: a row failed by itself and is left out, or a task failed."""

    shard: Shard
    """The row and the device."""

    error: BaseException
    """The error of the function or the device."""


@dataclass(frozen=True)
class DeviceLost(Event):
    """A device failed repeatedly, or its host is unavailable. It gets no more chunks in this call."""

    device: str
    """Full name."""

    error: BaseException
    """Its last error."""


@dataclass(frozen=True)
class CallFinished(Event):
    """A call ended: its last event."""

    error: BaseException | None
    """The error that ended it, `None` if all rows were mapped."""


@dataclass(frozen=True)
class FailedRow:
    """A row that failed by itself and was left out."""

    row: int
    """Its index in the data."""

    device: str
    """Full name of the device that tried it last."""

    error: str
    """The class and the message of its error."""
