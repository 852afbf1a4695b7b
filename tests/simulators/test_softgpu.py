"""Tests on emulated GPUs, in processes of their own, because TensorFlow creates its devices once per process.

`pytest --confcutdir=tests/simulators/softgpus tests/simulators/softgpus/traffic.py` runs one file by itself.
"""

from __future__ import annotations

from pathlib import Path

import processes
import pytest

from benchmarks import softgpu

FILES = Path(__file__).with_name("softgpus")
REPORTS = Path(__file__).parents[2] / "build"
NIGHTLY = ("chunks", "traffic", "training", "pipelines", "largest_batch")
"""Files that share a process need GPUs of the same number and size."""


@pytest.mark.timeout(processes.SECONDS + 60)
@pytest.mark.parametrize(
    "files", ["guarantees", *(pytest.param(files, marks=pytest.mark.nightly) for files in NIGHTLY)]
)
def test_on_emulated_gpus(files: str) -> None:
    """`guarantees` has one smoke test per guarantee; the other files test each guarantee closely."""
    try:
        softgpu.compile_library()
    except softgpu.Unavailable as reason:
        pytest.skip(str(reason))
    report = REPORTS / f"emulated-gpus-{files.replace(' ', '-')}.xml"
    processes.run_tests(*(FILES / f"{name}.py" for name in files.split()), options=["-m", "", f"--junitxml={report}"])
