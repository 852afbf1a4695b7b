"""Utilisation of GPUs in reports, by a scripted NVML."""

from __future__ import annotations

import sys
import types
from typing import Any

import pytest
from histories import device, history, report_of

HISTORY = history([(10, 0.3)] * 10, devices=1)  # 3 s: samples are due at 0.5, 1.0, ...


class FakeNvml(types.ModuleType):
    """As much of `pynvml` as is used; `busy` holds the utilisations that it reports one after another."""

    def __init__(self, busy: list[int], models: str = "HHHH", broken: str = ""):
        super().__init__("pynvml")
        self.busy, self.models, self.broken = iter(busy), models, broken
        self.opened = 0
        self.asked: list[Any] = []

    def __getattribute__(self, name: str) -> Any:
        if name.startswith("nvml") and name == object.__getattribute__(self, "broken"):
            raise RuntimeError(f"{name} is not supported")
        return super().__getattribute__(name)

    def nvmlInit(self) -> None:
        self.opened += 1

    def nvmlShutdown(self) -> None:
        self.opened -= 1

    def nvmlDeviceGetCount(self) -> int:
        return len(self.models)

    def nvmlDeviceGetName(self, handle: Any) -> str:
        return self.models[handle]

    def nvmlDeviceGetHandleByIndex(self, index: int) -> Any:
        return index

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> Any:
        return uuid

    def nvmlDeviceGetUtilizationRates(self, handle: Any) -> Any:
        self.asked.append(handle)
        return types.SimpleNamespace(gpu=next(self.busy))


@pytest.fixture(autouse=True)
def _no_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.delenv("CUDA_DEVICE_ORDER", raising=False)


def _percent(nvml: FakeNvml | None, patch: pytest.MonkeyPatch, index: int = 0, events: Any = HISTORY) -> float | None:
    patch.setitem(sys.modules, "pynvml", nvml)
    (report,) = report_of(events, gpus={device(0): index}).devices
    return report.utilisation_percent


def test_mean_of_a_sample_each_half_second(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = FakeNvml([20, 40, 90, 50, 50])  # at 0.6, 1.2, 1.8, 2.4 and 3.0 s
    assert _percent(nvml, monkeypatch) == 50.0
    assert (len(nvml.asked), nvml.opened) == (5, 0)
    short = FakeNvml([])
    assert _percent(short, monkeypatch, events=history([(10, 0.1)] * 4, devices=1)) is None
    assert short.asked == []


@pytest.mark.parametrize("broken", ["nvmlInit", "nvmlDeviceGetHandleByIndex", "nvmlDeviceGetUtilizationRates"])
def test_errors_of_nvml_do_not_reach_the_call(broken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = FakeNvml([50] * 9, broken=broken)
    assert _percent(nvml, monkeypatch) is None
    assert nvml.opened == 0


def test_without_nvidia_ml_py(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _percent(None, monkeypatch) is None


@pytest.mark.parametrize(
    ("visible", "order", "models", "asked"),
    [
        (None, None, "HH", [1]),
        ("3,2", None, "HHHH", [2]),
        ("GPU-a,GPU-b", None, "AH", ["GPU-b"]),
        ("MIG-a,MIG-b", None, "HH", []),
        ("0", None, "HH", []),
        (None, None, "AH", []),  # CUDA numbers the fastest first, and the order of models is unknown
        (None, "PCI_BUS_ID", "AH", [1]),
    ],
)
def test_it_asks_for_the_gpu_that_cuda_means(
    visible: str | None, order: str | None, models: str, asked: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    if order is not None:
        monkeypatch.setenv("CUDA_DEVICE_ORDER", order)
    nvml = FakeNvml([50] * 9, models)
    assert _percent(nvml, monkeypatch, index=1) == (50.0 if asked else None)
    assert nvml.asked[:1] == asked
