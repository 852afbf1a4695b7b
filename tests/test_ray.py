"""`devicemap.ray` on a cluster of Ray's with two hosts, in a process of its own: `clusters/mapping.py`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import processes
import pytest

FILES = Path(__file__).with_name("clusters")
RUN = """
import contextlib, sys
import pytest

with contextlib.redirect_stdout(sys.stderr):
    sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", *sys.argv[1:]]))
"""


def test_on_a_cluster() -> None:
    pytest.importorskip("ray.data", reason="Ray Data is not installed")
    processes.run(RUN, f"--confcutdir={FILES}", str(FILES / "mapping.py"))


def test_without_ray() -> None:
    """The module is there, and its call says what to install."""
    program = (
        "import sys; sys.modules['ray'] = None; import devicemap; devicemap.ray.map_batches(1, len, concurrency=1)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert "DeviceMapError" in done.stderr
    assert "ray[data]" in done.stderr
