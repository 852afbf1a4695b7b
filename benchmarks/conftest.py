"""The devices of a run, made once per process; how much a run measures; the simulator."""

from __future__ import annotations

import contextlib
import subprocess
from dataclasses import dataclass
from typing import Any

import pytest

from benchmarks import hardware, softgpu, traffic
from benchmarks.simulator import Simulator, Unavailable
from benchmarks.simulator.fixtures import sim as sim


@dataclass(frozen=True)
class Scale:
    """How much a run measures."""

    quick: bool
    """Whether each case only has to run, and to give its answer."""

    devices: int
    """How many devices there are."""

    rounds: int
    """How often each way takes its turn."""

    job_seconds: float
    """The ideal time of a simulated job."""


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("devices")
    group.addoption("--devices", type=int, default=8, help="how many devices the benchmarks run on (8)")
    group.addoption("--softgpus", action="store_true", help="on emulated GPUs")
    group.addoption(
        "--quick", action="store_true", help="small cases, once: that the suite works, not how fast things are"
    )


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--softgpus"):
        with contextlib.suppress(Unavailable):  # what needs them is skipped, and says why
            softgpu.start(config.getoption("--devices"))
    hardware.cut_devices(config.getoption("--devices"))


def pytest_benchmark_update_machine_info(config: pytest.Config, machine_info: dict[str, Any]) -> None:
    """What the tables say of the machine, in place of its name and address."""
    machine_info.clear()
    machine_info["description"] = hardware.describe()


def pytest_benchmark_update_commit_info(config: pytest.Config, commit_info: dict[str, Any]) -> None:
    """Which code it was, without the branch's name. Results that were written before are no local changes of it."""
    command = ["git", "status", "--porcelain", "--", ".", ":!benchmarks/results"]
    with contextlib.suppress(FileNotFoundError):  # a machine without git
        changed = subprocess.run(command, cwd=config.rootpath, capture_output=True, text=True, check=False)
        commit_info["dirty"] = bool(changed.returncode or changed.stdout.strip())
    for key in set(commit_info) - {"id", "time", "dirty"}:
        del commit_info[key]


@pytest.fixture(scope="session")
def scale(pytestconfig: pytest.Config) -> Scale:
    devices = pytestconfig.getoption("--devices")
    if pytestconfig.getoption("--quick"):
        return Scale(quick=True, devices=devices, rounds=1, job_seconds=0.05)
    return Scale(quick=False, devices=devices, rounds=5, job_seconds=1.0)


@pytest.fixture
def emulated_gpus(pytestconfig: pytest.Config) -> softgpu.SoftGPUs:
    """The emulated GPUs of `--softgpus`."""
    if not pytestconfig.getoption("--softgpus"):
        pytest.skip("needs --softgpus")
    try:
        return softgpu.start(pytestconfig.getoption("--devices"))
    except Unavailable as reason:
        pytest.skip(str(reason))


@pytest.fixture
def meter() -> traffic.Meter:
    """Counts the bytes that are sent between devices; requested before the graphs are made, which it has to see."""
    try:
        return traffic.load()
    except Unavailable as reason:
        pytest.skip(str(reason))


@pytest.fixture
def accelerators(sim: Simulator, scale: Scale) -> list[str]:
    """Names of the simulated accelerators."""
    return hardware.simulated_devices(scale.devices)


@pytest.fixture
def real_devices(scale: Scale) -> list[str]:
    """Names of the devices that compute: GPUs where there are any."""
    return hardware.all_devices()[: scale.devices]
