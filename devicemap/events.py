"""Rows on devices, and what happens to them in a call: frozen values without tensors, which the modules hand to each other."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Shard:
    """Neighbouring rows that one device computes in one call."""

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
    """A device's name as people read it, and as `devices=` takes it: without this host, and with the task of another one.

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
    """Something that happened in a call. The option `progress` hands events to a callable, one at a time, in order."""

    seconds: float
    """When, in seconds since the call began."""


@dataclass(frozen=True)
class CallStarted(Event):
    """A call began; the first event of each."""

    rows: int | None
    """How many rows it has to map, `None` where nobody knows yet."""

    devices: tuple[str, ...]
    """Full names of the devices it runs on."""


@dataclass(frozen=True)
class ChunkStarted(Event):
    """A chunk was handed to a device. Several may be under way on one device."""

    shard: Shard
    """Its rows and its device."""

    waited_seconds: float
    """How long the device stood idle before, because the next rows were not read yet."""


@dataclass(frozen=True)
class ChunkFinished(Event):
    """The results of a chunk are there."""

    shard: Shard
    """Its rows and its device."""

    started_seconds: float
    """When it was handed to the device, in seconds since the call began."""


@dataclass(frozen=True)
class ChunkFailed(Event):
    """An attempt to compute a chunk failed."""

    shard: Shard
    """Its rows and its device."""

    started_seconds: float
    """When it was handed to the device, in seconds since the call began."""

    error: BaseException
    """What the function or the device raised."""


@dataclass(frozen=True)
class ChunkRetried(Event):
    """Rows that failed go to a device again: all of a chunk, or a part where it did not fit into the device's memory."""

    shard: Shard
    """The rows, and the device that takes them now."""

    attempt: int
    """Which attempt this is for these rows, counted from 1, and anew after running out of memory."""


@dataclass(frozen=True)
class DeviceLost(Event):
    """A device kept failing or its host is unavailable, and it gets no more chunks in this call."""

    device: str
    """Full name."""

    error: BaseException
    """Its last error."""


@dataclass(frozen=True)
class CallFinished(Event):
    """A call ended; the last event of each."""

    error: BaseException | None
    """What ended it early, `None` where all rows were mapped."""
