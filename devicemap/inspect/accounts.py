"""What each device did in a call, in numbers: events -> a `DeviceReport` per device. Pure."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial

from devicemap.events import CallStarted, ChunkRetried, ChunkStarted, DeviceLost, Event
from devicemap.inspect.gpu_usage import GpuUsage
from devicemap.inspect.timeline import Span, union_seconds


@dataclass(frozen=True)
class DeviceReport:
    """What one device did in one call."""

    device: str
    """Full name."""

    rows: int
    """Rows whose results came from it."""

    calls: int
    """How often it ran the function: chunks, or shards of the one graph, that finished or failed."""

    busy_seconds: float
    """How long at least one chunk was under way on it. In one graph after
    `tf.config.experimental.enable_op_determinism()`, the whole call: there are no clocks then."""

    idle_seconds: float
    """The rest of the call's time."""

    waiting_seconds: float
    """How much of the idle time it waited for rows to be read."""

    retries: int
    """How often it got rows that had failed before, there or elsewhere."""

    back_offs: int
    """How many of the retries came after it ran out of memory, with fewer rows at a time."""

    lost: bool
    """Whether it kept failing, and got no more chunks."""

    utilisation_percent: float | None
    """In how much of the time a kernel ran on the GPU, 0 to 100, by NVML's samples; `None` where there are none."""

    memory_bytes: int | None
    """The most memory that was in use on the GPU, by any program; `None` where nothing was sampled."""

    @property
    def rows_per_busy_second(self) -> float | None:
        """How fast it was while it worked; `None` where it did not, or nobody knows how long."""
        return self.rows / self.busy_seconds if self.rows and self.busy_seconds else None


def account(
    events: Sequence[Event], spans: Sequence[Span], *, end_seconds: float, usage: Iterable[GpuUsage]
) -> tuple[DeviceReport, ...]:
    """A `DeviceReport` for each device: first those that the call began with, in their order, then any others.

    Args:
        events: those of one call; `spans` are what `spans_of` makes of them.
    """
    (started,) = (event for event in events if isinstance(event, CallStarted))
    wall_seconds = end_seconds - started.seconds
    within = partial(_within, started.seconds, end_seconds)
    retries = [event for event in events if isinstance(event, ChunkRetried)]
    retried = Counter(event.shard.device for event in retries)
    back_offs = Counter(event.shard.device for event in retries if event.attempt == 1)
    lost = {event.device for event in events if isinstance(event, DeviceLost)}
    usage_of = {each.device: each for each in usage}
    waits = defaultdict(list)
    for event in events:
        if isinstance(event, ChunkStarted):
            waits[event.shard.device].append(within(event.seconds - event.waited_seconds, event.seconds))

    def on(device: str) -> DeviceReport:
        own = [span for span in spans if span.shard.device == device]
        busy = [within(span.started_seconds, span.finished_seconds) for span in own]
        busy_seconds = min(wall_seconds, union_seconds(busy))
        idle_seconds = wall_seconds - busy_seconds
        gpu = usage_of.get(device)
        return DeviceReport(
            device=device,
            rows=sum(len(span.shard) for span in own if span.outcome == "finished"),
            calls=sum(span.outcome != "unfinished" for span in own),
            busy_seconds=busy_seconds,
            idle_seconds=idle_seconds,
            # Chunks that wait while another one is under way on their device do not make it wait.
            waiting_seconds=min(idle_seconds, max(0.0, union_seconds(busy + waits[device]) - busy_seconds)),
            retries=retried[device],
            back_offs=back_offs[device],
            lost=device in lost,
            utilisation_percent=gpu.utilisation_percent if gpu else None,
            memory_bytes=gpu.memory_bytes if gpu else None,
        )

    devices = dict.fromkeys([*started.devices, *(span.shard.device for span in spans), *sorted(lost)])
    return tuple(map(on, devices))


def _within(begin: float, end: float, start: float, stop: float) -> tuple[float, float]:
    """The part of an interval inside the call: events may be stamped by other threads than the one that began it."""
    start = min(max(start, begin), end)
    return start, min(max(stop, start), end)
