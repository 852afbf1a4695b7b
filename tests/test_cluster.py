"""`devicemap.connect` and `devicemap serve` with hosts in processes of their own: `clusters/hosts.py`."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from multiprocessing.connection import Connection
from pathlib import Path

import processes
import pytest

from devicemap.cli import main

FILES = Path(__file__).with_name("clusters")


@pytest.mark.nightly
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
    said, saying = processes.forks.Pipe(duplex=False)
    process = processes.forks.Process(target=_command, args=(saying, "serve", "--port", "0", *options))
    process.start()
    saying.close()
    assert process.pid is not None
    try:
        with open(said.fileno(), closefd=False) as output:
            line = output.readline()
        assert re.match(r"\S+:\d+ ", line)
        assert ("this machine" in line) == (not options)
        assert "password" in line
        os.kill(process.pid, signal.SIGINT)
        process.join(60)
        assert process.exitcode == 130
    finally:
        process.kill()


def _command(output: Connection, *arguments: str) -> None:
    os.dup2(output.fileno(), 1)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.exit(main([*arguments]))
