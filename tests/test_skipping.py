"""A test that is skipped because something is missing fails with `CI=true`, and nowhere else."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = """
import pytest

def test_missing():
    pytest.importorskip("no_such_package")

def test_impossible():
    pytest.skip("not applicable: complex numbers have no order")

@pytest.mark.xfail(reason="known")
def test_known():
    assert False
"""
MODULE = """
import pytest

pytest.importorskip("no_such_package")
"""


@pytest.mark.parametrize(
    ("ci", "outcome"), [("", "3 skipped, 1 xfailed"), ("true", "1 failed, 1 skipped, 1 xfailed, 1 error")]
)
def test_missing_tools(tmp_path: Path, ci: str, outcome: str) -> None:
    imports = "from skipping import pytest_make_collect_report, pytest_runtest_makereport"
    for name, text in (("conftest", imports), ("test_some", TESTS), ("test_module", MODULE)):
        (tmp_path / f"{name}.py").write_text(text)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "no:cacheprovider",
        "--continue-on-collection-errors",
        str(tmp_path),
    ]
    environment = {**os.environ, "CI": ci, "PYTHONPATH": str(Path(__file__).parent)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert outcome in done.stdout, done.stdout
    assert bool(done.returncode) == bool(ci)
