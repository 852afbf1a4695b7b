"""`devicemap check` on emulated GPUs, and on both kinds of devices."""

from __future__ import annotations

import pytest
from simulators.softgpus.pair import gpus as gpus

from devicemap.cli import main


@pytest.mark.parametrize("devices", ["GPU", "GPU:1,CPU:0,GPU:0"])
def test_check(devices: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "--devices", devices, "--seconds", "0.001"]) == 0
    assert "All guarantees hold on these devices." in capsys.readouterr().out
