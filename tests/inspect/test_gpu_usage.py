"""Utilisation of GPUs in reports, by a scripted NVML."""

from __future__ import annotations

import sys
import types
from typing import Any

import pytest
from histories import device, history, report_of

HISTORY = history([(10, 0.3)] * 10, devices=1)  # 3 s: samples are due at 0.5, 1.0, ...
CUDA = "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"


@pytest.fixture(autouse=True)
def _no_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in CUDA:
        monkeypatch.delenv(name, raising=False)


class FakeNvml(types.SimpleNamespace):
    """As much of `pynvml` as is used; `busy` holds the utilisations that it reports one after another."""

    def __init__(self, busy: list[int], models: str = "HHHH", broken: str = ""):
        utilisations = iter(busy)
        self.opened, self.asked = 0, []
        self.nvmlInit, self.nvmlShutdown = (lambda by=by: self._count(by) for by in (1, -1))
        self.nvmlDeviceGetCount = lambda: len(models)
        self.nvmlDeviceGetName = lambda handle: models[handle]
        self.nvmlDeviceGetHandleByIndex = self.nvmlDeviceGetHandleByUUID = lambda handle: handle
        self.nvmlDeviceGetUtilizationRates = lambda handle: self._ask(handle, utilisations)
        if broken:
            setattr(self, broken, lambda *arguments: 1 / 0)

    def _count(self, by: int) -> None:
        self.opened += by

    def _ask(self, handle: Any, utilisations: Any) -> Any:
        self.asked.append(handle)
        return types.SimpleNamespace(gpu=next(utilisations))


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


def test_errors_of_nvml_do_not_reach_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _percent(None, monkeypatch) is None  # without nvidia-ml-py
    for broken in ("nvmlInit", "nvmlDeviceGetHandleByIndex", "nvmlDeviceGetUtilizationRates"):
        nvml = FakeNvml([50] * 9, broken=broken)
        assert _percent(nvml, monkeypatch) is None
        assert nvml.opened == 0


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
    for name, value in zip(CUDA, (visible, order)):
        if value is not None:
            monkeypatch.setenv(name, value)
    nvml = FakeNvml([50] * 9, models)
    assert _percent(nvml, monkeypatch, index=1) == (50.0 if asked else None)
    assert nvml.asked[:1] == asked
