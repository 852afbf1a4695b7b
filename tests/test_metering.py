"""Utilisation and memory of GPUs, by a scripted NVML."""

from __future__ import annotations

import sys
import types
from typing import Any

import pytest
from histories import device

from devicemap.reporting.metering import GpuMeter, GpuUsage, nvml_identity
from devicemap.types import CallFinished, CallStarted, ChunkFinished, ChunkStarted, Event, Shard


class FakeNvml(types.ModuleType):
    """As much of `pynvml` as is used; `busy` holds the utilisations that it tells one after another."""

    def __init__(self, busy: list[int], models: tuple[str, ...] = ("H", "H", "H", "H"), broken: str = ""):
        super().__init__("pynvml")
        self.busy, self.models, self.broken = iter(busy), models, broken
        self.opened, self.asked = 0, []  # type: ignore[var-annotated]

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

    def nvmlDeviceGetMemoryInfo(self, handle: Any) -> Any:
        return types.SimpleNamespace(used=len(self.asked) * 2**20)


@pytest.fixture(autouse=True)
def _no_cuda_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.delenv("CUDA_DEVICE_ORDER", raising=False)


def _call(*finished_seconds: float, end: float) -> list[Event]:
    shard = Shard(device(0), 0, 1)
    chunks = [
        event for at in finished_seconds for event in (ChunkStarted(at, shard, 0.0), ChunkFinished(at, shard, 0.0))
    ]
    return [CallStarted(0.0, None, (device(0),)), *chunks, CallFinished(end, None)]


def _usage(
    nvml: FakeNvml | None, events: list[Event], gpus: dict[str, int], patch: pytest.MonkeyPatch
) -> tuple[GpuUsage, ...]:
    patch.setitem(sys.modules, "pynvml", nvml)
    meter = GpuMeter(gpus)
    for event in events:
        meter(event)
    return meter.usage


def test_it_samples_at_most_every_half_second(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = FakeNvml([20, 40, 90])
    usage = _usage(nvml, _call(0.1, 0.6, 0.7, 1.2, 1.3, end=1.8), {device(0): 0}, monkeypatch)
    assert usage == (GpuUsage(device(0), 50.0, 3 * 2**20),)
    assert nvml.opened == 0


def test_it_does_not_open_nvml_for_a_short_call(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = FakeNvml([], broken="nvmlInit")
    assert _usage(nvml, _call(0.1, 0.2, end=0.3), {device(0): 0}, monkeypatch) == ()


def test_a_call_in_one_graph_is_sampled_at_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    usage = _usage(FakeNvml([70, 80]), _call(end=2.0), {device(0): 0, device(1): 1}, monkeypatch)
    assert [(each.device, each.utilisation_percent) for each in usage] == [(device(0), 70.0), (device(1), 80.0)]


@pytest.mark.parametrize(
    "broken",
    [
        "nvmlInit",
        "nvmlDeviceGetHandleByIndex",
        "nvmlDeviceGetUtilizationRates",
        "nvmlDeviceGetMemoryInfo",
        "nvmlShutdown",
    ],
)
def test_no_trouble_reaches_the_call(broken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = FakeNvml([50] * 9, broken=broken)
    usage = _usage(nvml, _call(0.6, 1.2, end=2.0), {device(0): 0}, monkeypatch)
    assert len(usage) == (broken == "nvmlShutdown")
    assert nvml.opened == (broken == "nvmlShutdown")


def test_without_nvidia_ml_py_or_gpus_there_is_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _usage(None, _call(0.6, end=2.0), {device(0): 0}, monkeypatch) == ()
    nvml = FakeNvml([50])
    assert _usage(nvml, _call(0.6, end=2.0), {}, monkeypatch) == ()
    assert nvml.asked == []


@pytest.mark.parametrize(
    ("visible", "order", "models", "asked"),
    [
        (None, None, "HH", [1]),
        ("3,2", None, "HHHH", [2]),
        ("GPU-a,GPU-b", None, "AH", ["GPU-b"]),
        ("MIG-a,MIG-b", None, "HH", []),
        ("0", None, "HH", []),
        (None, None, "AH", []),  # CUDA counts the fastest first: nobody knows which is which
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
    nvml = FakeNvml([50], tuple(models))
    _usage(nvml, _call(0.6, end=0.7), {device(0): 1}, monkeypatch)
    assert nvml.asked == asked


def test_nvml_identity() -> None:
    environment = {"CUDA_VISIBLE_DEVICES": "2, GPU-x,MIG-y"}
    assert [nvml_identity(index, environment) for index in range(4)] == [2, "GPU-x", None, None]
    assert nvml_identity(5, {}) == 5
