"""Utilisation of GPUs in reports, by a scripted NVML."""

from __future__ import annotations

import sys
from typing import Any
from unittest.mock import Mock

import pytest
from histories import device, history, report_of

HISTORY = history([(10, 0.3)] * 10, devices=1)  # 3 s: samples are due at 0.5, 1.0, ...
CUDA = "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"


@pytest.fixture(autouse=True)
def _no_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in CUDA:
        monkeypatch.delenv(name, raising=False)


def _nvml(busy: list[int], models: str = "HHHH") -> Mock:
    """As much of `pynvml` as is used. It reports the utilisations in `busy`."""
    nvml = Mock()
    nvml.nvmlDeviceGetCount.return_value = len(models)
    nvml.nvmlDeviceGetName.side_effect = models.__getitem__
    nvml.nvmlDeviceGetHandleByIndex.side_effect = nvml.nvmlDeviceGetHandleByUUID.side_effect = lambda handle: handle
    nvml.nvmlDeviceGetUtilizationRates.side_effect = [Mock(gpu=percent) for percent in busy]
    return nvml


def _asked(nvml: Mock) -> list[Any]:
    """The handles whose utilisation was read."""
    return [call.args[0] for call in nvml.nvmlDeviceGetUtilizationRates.call_args_list]


def _percent(nvml: Any, patch: pytest.MonkeyPatch, index: int = 0, events: Any = HISTORY) -> float | None:
    patch.setitem(sys.modules, "pynvml", nvml)
    (report,) = report_of(events, gpus={device(0): index}).devices
    return report.utilisation_percent


def test_mean_of_a_sample_each_half_second(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = _nvml([20, 40, 90, 50, 50])  # at 0.6, 1.2, 1.8, 2.4 and 3.0 s
    assert _percent(nvml, monkeypatch) == 50.0
    assert (len(_asked(nvml)), nvml.nvmlInit.call_count, nvml.nvmlShutdown.call_count) == (5, 1, 1)
    short = _nvml([])
    assert _percent(short, monkeypatch, events=history([(10, 0.1)] * 4, devices=1)) is None
    assert _asked(short) == []


def test_errors_of_nvml_do_not_reach_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _percent(None, monkeypatch) is None  # without nvidia-ml-py
    for broken in ("nvmlInit", "nvmlDeviceGetHandleByIndex", "nvmlDeviceGetUtilizationRates"):
        nvml = _nvml([50] * 9)
        getattr(nvml, broken).side_effect = ZeroDivisionError
        assert _percent(nvml, monkeypatch) is None
        assert nvml.nvmlShutdown.call_count == (broken != "nvmlInit")


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
    nvml = _nvml([50] * 9, models)
    assert _percent(nvml, monkeypatch, index=1) == (50.0 if asked else None)
    assert _asked(nvml)[:1] == asked
