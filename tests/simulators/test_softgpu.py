"""The GPUs in software that the laws run on, too: that they are devices as TensorFlow knows them, and tell what they did.

`pytest --confcutdir=tests/simulators/softgpus tests/simulators/softgpus/traffic.py` runs one of the files, as those tests do.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = Path(__file__).with_name("softgpus")


@pytest.mark.parametrize("files", ["devices chunks", "traffic plans", "cut", "memory"])
def test_on_gpus_in_software(files: str) -> None:
    """In a process of its own for each number and size of GPUs, since devices are made once."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--confcutdir={FILES}"]
    command += [str(FILES / f"{name}.py") for name in files.split()]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    if done.returncode == pytest.ExitCode.NO_TESTS_COLLECTED:
        pytest.skip(done.stdout[-1000:])
    assert done.returncode == 0, done.stdout[-6000:]
