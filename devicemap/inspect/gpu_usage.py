"""How busy GPUs are by NVIDIA's own count, where `nvidia-ml-py` is installed. Never in the way of a call."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_INTERVAL_SECONDS = 0.5
"""How far apart samples are. NVML's figure covers up to the last second, so more of them would tell no more,
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
    """Samples utilisation and memory of GPUs for as long as a call lasts: a context.

    A thread does that, as a call in one graph leaves no other, and only where `nvidia-ml-py` is installed. It gives up quietly
    at the first trouble: without driver or permission there is nothing to tell.
    """

    def __init__(self, gpus: Mapping[str, int]):
        """`gpus`: for the full name of each logical GPU, TensorFlow's (and CUDA's) index of the physical one."""
        self._gpus = gpus
        self._samples: dict[str, tuple[int, int, int]] = {}
        self._ended = threading.Event()

    def __enter__(self) -> GpuMeter:
        if self._gpus and can_be_found():
            with contextlib.suppress(RuntimeError):  # no more threads
                threading.Thread(target=self._run, name="devicemap meter", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()  # and nobody waits for the thread, which may be inside NVML

    @property
    def usage(self) -> tuple[GpuUsage, ...]:
        """What was told so far, for the devices that anything was told of."""
        return tuple(GpuUsage(device, busy / count, most) for device, (count, busy, most) in [*self._samples.items()])

    def _run(self) -> None:
        if self._ended.wait(_INTERVAL_SECONDS):
            return
        with contextlib.suppress(Exception):  # of any kind: a figure in a report is not worth a call
            import pynvml

            pynvml.nvmlInit()
            try:
                self._sample(pynvml, _handles(pynvml, self._gpus))
            finally:
                pynvml.nvmlShutdown()

    def _sample(self, nvml: Any, handles: Mapping[str, Any]) -> None:
        while handles:
            for device, handle in handles.items():
                utilisation = nvml.nvmlDeviceGetUtilizationRates(handle).gpu
                memory = nvml.nvmlDeviceGetMemoryInfo(handle).used
                count, busy, most = self._samples.get(device, (0, 0, 0))
                self._samples[device] = count + 1, busy + int(utilisation), max(most, int(memory))
            if self._ended.wait(_INTERVAL_SECONDS):
                return


@functools.cache
def can_be_found() -> bool:
    """Whether `nvidia-ml-py` is installed; asked once in a process."""
    try:
        return importlib.util.find_spec("pynvml") is not None
    except ValueError:  # a module without a spec has taken its place
        return False


def _handles(nvml: Any, gpus: Mapping[str, int]) -> dict[str, Any]:
    """NVML's handles of those of the GPUs that it can be asked about."""
    by_index, by_uuid = nvml.nvmlDeviceGetHandleByIndex, nvml.nvmlDeviceGetHandleByUUID
    # CUDA counts the fastest first, unless it is told otherwise: of several models, an index may mean another one to NVML.
    same_order = os.environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID" or (
        len({nvml.nvmlDeviceGetName(by_index(index)) for index in range(nvml.nvmlDeviceGetCount())}) < 2
    )
    handles = {}
    for device, index in gpus.items():
        known = nvml_identity(index, os.environ)
        if isinstance(known, str):
            handles[device] = by_uuid(known)
        elif known is not None and same_order:
            handles[device] = by_index(known)
    return handles


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
