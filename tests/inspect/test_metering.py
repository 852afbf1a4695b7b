"""Utilisation and memory of GPUs, by a scripted NVML."""

from __future__ import annotations

import sys
import threading
import types
from collections.abc import Iterator
from contextlib import nullcontext
from importlib.machinery import ModuleSpec
from typing import Any

import pytest
from histories import device

from devicemap.inspect import gpu_usage as meter
from devicemap.inspect.gpu_usage import GpuMeter, GpuUsage
from devicemap.inspect.recorder import GraphCall


class FakeNvml(types.ModuleType):
    """As much of `pynvml` as is used; `busy` holds the utilisations that it tells one after another."""

    def __init__(self, busy: list[int], models: tuple[str, ...] = ("H", "H", "H", "H"), broken: str = ""):
        super().__init__("pynvml")
        self.__spec__ = ModuleSpec("pynvml", None)
        self.busy, self.models, self.broken = iter(busy), models, broken
        self.begun = self.opened = 0
        self.asked: list[Any] = []

    def __getattribute__(self, name: str) -> Any:
        if name.startswith("nvml") and name == object.__getattribute__(self, "broken"):
            raise RuntimeError(f"{name} is not supported")
        return super().__getattribute__(name)

    def nvmlInit(self) -> None:
        self.begun += 1
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
def _samples_at_once(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.delenv("CUDA_DEVICE_ORDER", raising=False)
    monkeypatch.setattr(meter, "_INTERVAL_SECONDS", 0.001)
    meter.can_be_found.cache_clear()
    yield
    meter.can_be_found.cache_clear()


def _usage(nvml: FakeNvml | None, gpus: dict[str, int], patch: pytest.MonkeyPatch) -> tuple[GpuUsage, ...]:
    """Of a call that lasts until the script is at its end."""
    patch.setitem(sys.modules, "pynvml", nvml)
    with GpuMeter(gpus) as meter:
        _wait()
    return meter.usage


def _wait() -> None:
    for thread in threading.enumerate():
        if thread.name == "devicemap meter":
            thread.join(10)
            assert not thread.is_alive()


def test_mean_utilisation_and_peak_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = FakeNvml([20, 40, 90])
    assert _usage(nvml, {device(0): 0}, monkeypatch) == (GpuUsage(device(0), 50.0, 3 * 2**20),)
    assert nvml.opened == 0


@pytest.mark.parametrize("fails", [False, True])
def test_a_call_in_one_graph_is_sampled_in_its_midst(fails: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = FakeNvml([70, 80, 90, 100])
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    kept: list[GraphCall] = []
    with (
        pytest.raises(ZeroDivisionError) if fails else nullcontext(),
        GraphCall(2, [device(0), device(1)], 0, {device(0): 0, device(1): 1}, [], kept.append),
    ):
        _wait()  # for the end of the script, while the graph runs
        assert len(nvml.asked) == 5
        if fails:
            raise ZeroDivisionError
    assert [each.utilisation_percent for each in kept[0].report().devices] == [80.0, 90.0]


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
    usage = _usage(nvml, {device(0): 0}, monkeypatch)
    assert len(usage) == (broken == "nvmlShutdown")
    assert nvml.opened == (broken == "nvmlShutdown")


def test_without_nvidia_ml_py_or_gpus_there_is_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[Any] = []
    monkeypatch.setattr(threading.Thread, "start", started.append)
    assert _usage(None, {device(0): 0}, monkeypatch) == ()
    meter.can_be_found.cache_clear()
    assert _usage(FakeNvml([50]), {}, monkeypatch) == ()
    assert not started


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
    _usage(nvml, {device(0): 1}, monkeypatch)
    assert nvml.asked[:1] == asked
