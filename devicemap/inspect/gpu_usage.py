"""GPU utilisation during a call, read from NVML if `nvidia-ml-py` is installed."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

_INTERVAL_SECONDS = 0.5
"""The shortest time between two samples. NVML averages over up to one second before a sample."""


class GpuUsage:
    """Samples of GPU utilisation, taken when chunks finish. There are none in calls of less than 0.5 s.

    Without the library, a driver or the permission to use it, there are no samples and no errors. NVML counts all programs
    that use a GPU. It does not report the utilisation of MIG parts.
    """

    def __init__(self, gpus: Mapping[str, int]):
        """`gpus`: TensorFlow's index of the physical GPU, by full name of the logical GPU."""
        self._gpus = gpus
        self._nvml: Any = None
        self._handles: dict[str, Any] = {}
        self._sums: dict[str, tuple[int, int]] = {}
        self._next_seconds = _INTERVAL_SECONDS

    def sample(self, seconds: float) -> None:
        """Sample all GPUs `seconds` after the call began, unless the last sample is recent."""
        if seconds < self._next_seconds or not self._gpus:
            return
        self._next_seconds = seconds + _INTERVAL_SECONDS
        try:
            if self._nvml is None:
                import pynvml

                pynvml.nvmlInit()
                self._nvml = pynvml
                self._handles = _handles_of(pynvml, self._gpus)
            for device, handle in self._handles.items():
                count, total = self._sums.get(device, (0, 0))
                self._sums[device] = count + 1, total + self._nvml.nvmlDeviceGetUtilizationRates(handle).gpu
        except Exception:  # NVMLError of any kind: no driver, no permission, an old GPU
            self.close()

    def percent(self, device: str) -> float | None:
        """Return the mean utilisation of a device, 0 to 100; `None` without samples."""
        count, total = self._sums.get(device, (0, 0))
        return total / count if count else None

    def close(self) -> None:
        """Release NVML, and take no more samples."""
        nvml, self._nvml, self._gpus = self._nvml, None, {}
        if nvml is not None:
            nvml.nvmlShutdown()


def _handles_of(nvml: Any, gpus: Mapping[str, int]) -> dict[str, Any]:
    """Return the NVML handles of GPUs. `CUDA_VISIBLE_DEVICES` hides and reorders GPUs for TensorFlow, but not for NVML."""
    count = nvml.nvmlDeviceGetCount()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(count)))).split(",")
    by_index, by_uuid = nvml.nvmlDeviceGetHandleByIndex, nvml.nvmlDeviceGetHandleByUUID
    # By default, CUDA numbers the fastest GPU first, and NVML numbers by PCI bus. The order is equal for GPUs of one model.
    models = {nvml.nvmlDeviceGetName(by_index(index)) for index in range(count)}
    same_order = len(models) < 2 or os.environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID"
    handles = {}
    for device, index in gpus.items():
        entry = visible[index].strip() if index < len(visible) else ""
        if entry.startswith("GPU-"):
            handles[device] = by_uuid(entry)
        elif entry.isdecimal() and same_order:
            handles[device] = by_index(int(entry))
    return handles
