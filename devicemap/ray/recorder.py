"""What the actors of a job did: events of all of them -> one `Report`."""

from __future__ import annotations

import os
import time
from collections import deque
from dataclasses import replace
from typing import Any

from devicemap.events import CallFinished, CallStarted, ChunkFailed, ChunkFinished, DeviceLost, Event
from devicemap.ray.library import library
from devicemap.tell.report.recorder import without_traceback
from devicemap.tell.report.report import Report

_KEPT_BLOCKS = 10_000
"""A report of more tells of the latest."""


class Recorder:
    """Listens to the actors of `map_batches` and `reduce`, and makes one report of what they did.

    It is passed as the option `progress`, and lives in an actor without a CPU on the host that makes it. Each actor tells it of
    a block when that is done: about a millisecond of the actor's time, and what lies between the hosts. A recorder of several
    jobs tells of them all.

    Raises:
        DeviceMapError: Ray Data is not installed.

    Examples:
        Devices are named by host and process, as `/job:10.0.0.2/task:4711/GPU:0`:

            recorder = devicemap.ray.Recorder()
            devicemap.ray.map_batches(images, fn, concurrency=4, progress=recorder).write_parquet("results")
            print(recorder.report)
            recorder.report.save_trace("trace.json")
    """

    def __init__(self) -> None:
        ray = library()
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        class Blocks:  # pickled by value, so that its process need not import TensorFlow
            def __init__(self, most: int):
                self.kept: deque[Any] = deque(maxlen=most)

            def add(self, block: Any) -> None:
                self.kept.append(block)

            def all(self) -> list[Any]:
                return [*self.kept]

        ray.is_initialized() or ray.init()
        # Ray puts an actor without a CPU on any host where this is but a wish, and it would be lost with that one.
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        self._blocks = ray.remote(num_cpus=0, scheduling_strategy=here)(Blocks).remote(_KEPT_BLOCKS)
        self._events: list[Event] = []

    def __call__(self, event: Event) -> None:
        """Hear of an event, in the process in which it happens."""
        if isinstance(event, CallStarted):
            self._events, self._began_at = [], time.time()
        self._events.append(without_traceback(event))
        if isinstance(event, CallFinished):
            host = f"/job:{library().util.get_node_ip_address()}/replica:0/task:{os.getpid()}"
            told = self._blocks.add.remote((host, self._began_at, self._events))
            library().wait([told])  # or a report that is asked for at the end of the job might lack it

    @property
    def report(self) -> Report | None:
        """What happened so far, from the beginning of the first block; `None` before that is done.

        Rows of a block are numbered behind those of the blocks that were done before it. A block that was done again, as its
        host was lost, counts again. Times of different hosts are as far apart as their clocks.
        """
        blocks = library().get(self._blocks.all.remote())
        if not blocks:
            return None
        began_at = min(at for _, at, _ in blocks)
        events: list[Event] = []
        devices: dict[str, None] = {}
        error, rows = None, 0
        for host, at, (started, *happened, finished) in blocks:
            devices |= dict.fromkeys(_on(host, device) for device in started.devices)
            events += (_moved(event, host, at - began_at, rows) for event in happened)
            rows, error = rows + started.rows, error or finished.error
        events.sort(key=lambda event: event.seconds)
        ended = max(at - began_at + told[-1].seconds for _, at, told in blocks)
        return Report.of([CallStarted(0.0, None, (*devices,)), *events, CallFinished(ended, error)])


def _on(host: str, device: str) -> str:
    return f"{host}/device:{device.partition('/device:')[2]}"


def _moved(event: Any, host: str, seconds: float, rows: int) -> Event:
    """An event of a block among those of the others."""
    changed: dict[str, Any] = {"seconds": event.seconds + seconds}
    if isinstance(event, ChunkFinished | ChunkFailed):
        changed["started_seconds"] = event.started_seconds + seconds
    if isinstance(event, DeviceLost):
        return replace(event, **changed, device=_on(host, event.device))
    shard = event.shard
    moved = replace(shard, device=_on(host, shard.device), start=shard.start + rows, stop=shard.stop + rows)
    return replace(event, **changed, shard=moved)
