"""How busy GPUs are by NVIDIA's own count, where `nvidia-ml-py` is installed. Never in the way of a call."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from devicemap.types import CallFinished, CallStarted, ChunkFinished, Event

_INTERVAL_SECONDS = 0.5
"""How far apart samples are, at least. NVML's figure covers up to the last second, so more of them would tell no more,
and one that is taken earlier would tell of the time before the call."""


@dataclass(frozen=True)
class GpuUsage:
    """What NVML told of one GPU during a call. It counts all programs that use the GPU."""

    device: str
    """Full name of the logical device. Several on one GPU share its figures."""

    utilisation_percent: float
    """In how much of the time a kernel ran: the mean of all samples, 0 to 100."""

    memory_bytes: int
    """The most memory that was in use. TensorFlow reserves nearly all at once, unless memory growth is set."""


class GpuMeter:
    """Samples utilisation and memory of GPUs when chunks finish; a listener to the events of one call.

    It starts no thread, samples at most every half second, and gives up quietly at the first trouble: without
    `nvidia-ml-py`, driver or permission there is nothing to tell.
    """

    def __init__(self, gpus: Mapping[str, int]):
        """`gpus`: for the full name of each logical GPU, TensorFlow's (and CUDA's) index of the physical one."""
        self._gpus = gpus
        self._samples: dict[str, list[tuple[int, int]]] = {}
        self._due_seconds = _INTERVAL_SECONDS
        self._nvml: Any = None
        self._handles: dict[str, Any] = {}
        self._given_up = not gpus

    def __call__(self, event: Event) -> None:
        if self._given_up:
            return
        try:
            if isinstance(event, CallStarted):
                self._due_seconds = event.seconds + _INTERVAL_SECONDS
            elif isinstance(event, (ChunkFinished, CallFinished)) and event.seconds >= self._due_seconds:
                self._due_seconds = event.seconds + _INTERVAL_SECONDS
                self._sample()
        except Exception:  # of any kind: a figure in a report is not worth a call
            self._given_up = True
        finally:
            if self._given_up or isinstance(event, CallFinished):
                self._close()

    @property
    def usage(self) -> tuple[GpuUsage, ...]:
        """What was told so far, for the devices that anything was told of."""
        return tuple(
            GpuUsage(device, sum(busy for busy, _ in samples) / len(samples), max(memory for _, memory in samples))
            for device, samples in self._samples.items()
        )

    def _sample(self) -> None:
        if self._nvml is None:
            self._open()
        for device, handle in self._handles.items():
            utilisation = self._nvml.nvmlDeviceGetUtilizationRates(handle).gpu
            memory = self._nvml.nvmlDeviceGetMemoryInfo(handle).used
            self._samples.setdefault(device, []).append((int(utilisation), int(memory)))

    def _open(self) -> None:
        import pynvml

        pynvml.nvmlInit()
        self._nvml = pynvml
        identities = {device: nvml_identity(index, os.environ) for device, index in self._gpus.items()}
        if _indices_may_differ(pynvml, os.environ):
            identities = {device: known for device, known in identities.items() if isinstance(known, str)}
        for device, identity in identities.items():
            if isinstance(identity, int):
                self._handles[device] = pynvml.nvmlDeviceGetHandleByIndex(identity)
            elif identity is not None:
                self._handles[device] = pynvml.nvmlDeviceGetHandleByUUID(identity)

    def _close(self) -> None:
        nvml, self._nvml, self._handles = self._nvml, None, {}
        if nvml is not None:
            try:
                nvml.nvmlShutdown()
            except Exception:  # as above
                self._given_up = True


def nvml_identity(index: int, environment: Mapping[str, str]) -> int | str | None:
    """What NVML knows CUDA's GPU `index` by: an index or a UUID; `None` where it cannot be told.

    NVML counts all GPUs of the machine, CUDA those that `CUDA_VISIBLE_DEVICES` lists. NVML tells no utilisation of the
    parts that MIG cuts a GPU into.

    >>> nvml_identity(0, {}), nvml_identity(0, {"CUDA_VISIBLE_DEVICES": "3,1"})
    (0, 3)
    """
    if "CUDA_VISIBLE_DEVICES" not in environment:
        return index
    visible = [entry.strip() for entry in environment["CUDA_VISIBLE_DEVICES"].split(",")]
    entry = visible[index] if index < len(visible) else ""
    if entry.isdecimal():
        return int(entry)
    return entry if entry.startswith("GPU-") else None


def _indices_may_differ(nvml: Any, environment: Mapping[str, str]) -> bool:
    """Whether CUDA may count the GPUs in another order than NVML: fastest first, unless it is told otherwise."""
    if environment.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID":
        return False
    handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
    return len({nvml.nvmlDeviceGetName(handle) for handle in handles}) > 1
