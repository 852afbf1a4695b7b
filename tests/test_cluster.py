"""`devicemap.connect` and `devicemap serve` with hosts in processes of their own: `clusters/hosts.py`."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from pathlib import Path

import processes
import pytest

FILES = Path(__file__).with_name("clusters")


@pytest.mark.slow
def test_on_hosts() -> None:
    """Not by `processes.run`: it makes processes itself, of which each would run the program again."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--confcutdir={FILES}"]
    done = subprocess.run(
        [*command, str(FILES / "hosts.py")], capture_output=True, text=True, check=False, timeout=processes.SECONDS
    )
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("options", [[], ["--open"]])
def test_serve(options: list[str]) -> None:
    """It says where, to whom, and that it has no passwords, and ends at Ctrl-C."""
    command = [sys.executable, "-m", "devicemap", "serve", "--port", "0", *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert re.match(r"\S+:\d+ ", line)
        assert ("this machine" in line) == (not options)
        assert "password" in line
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130
