"""The devices of a run, made once per process; how much a run measures; the simulator."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pytest

import devicemap
from benchmarks import hardware, measuring, softgpu, traffic
from benchmarks.simulator import Simulator, Unavailable
from benchmarks.simulator.fixtures import sim as sim

ROUNDS = 5
"""How often each way takes its turn, unless a topic says otherwise."""


@dataclass(frozen=True)
class Scale:
    """How much a run measures."""

    quick: bool
    """Whether each case only has to run, and to give its answer."""

    devices: int
    """How many devices there are."""

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
        return Scale(quick=True, devices=devices, job_seconds=0.05)
    return Scale(quick=False, devices=devices, job_seconds=1.0)


@pytest.fixture
def compare(request: pytest.FixtureRequest, benchmark: Any, scale: Scale) -> measuring.Compare:
    """Times ways for the topic that the file is named after. In a short run, each way takes one turn."""
    topic = request.path.stem.removeprefix("test_")

    def compared(ways: Mapping[str, measuring.Way], case: str, rounds: int = ROUNDS, **options: Any) -> Any:
        options = {"topic": topic, "devices": scale.devices} | options
        return measuring.compare(benchmark, ways, case=case, rounds=1 if scale.quick else rounds, **options)

    return compared


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
    """Names of the logical CPU devices, which the simulator turns into accelerators."""
    return [device.name for device in devicemap.list_devices("CPU")][: scale.devices]


@pytest.fixture
def real_devices(scale: Scale) -> list[str]:
    """Names of the devices that compute: GPUs where there are any."""
    return hardware.all_devices()[: scale.devices]
