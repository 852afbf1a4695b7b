"""`devicemap serve`, and `devicemap.connect` to hosts in their own processes (`clusters/hosts.py`)."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import threading
from multiprocessing.connection import Connection
from pathlib import Path

import processes
import pytest

from devicemap import connect
from devicemap.cli import main
from devicemap.errors import DeviceError

FILES = Path(__file__).with_name("clusters")


@pytest.mark.nightly
def test_on_hosts() -> None:
    """Run pytest in a subprocess. `processes.run` does not work: the servers would run the program again."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--confcutdir={FILES}"]
    done = subprocess.run(
        [*command, str(FILES / "hosts.py")], capture_output=True, text=True, check=False, timeout=processes.SECONDS
    )
    assert done.returncode == 0, done.stdout


def test_addresses_where_no_host_answers() -> None:
    with pytest.raises(DeviceError, match=r"no TensorFlow server answers at a\.\.b:1 "):
        connect({"worker": ["a..b:1"]})

    def greet() -> None:
        with server.accept()[0] as client:
            client.sendall(b"SSH-2.0-OpenSSH_9.6\r\n")

    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=greet).start()
        address = f"127.0.0.1:{server.getsockname()[1]}"
        with pytest.raises(DeviceError, match=f"no TensorFlow server answers at {address}"):
            connect({"worker": [address]})


def test_serve() -> None:
    """It prints its address and a warning that it has no password, and ends at Ctrl-C."""
    said, saying = processes.forks.Pipe(duplex=False)
    process = processes.forks.Process(target=_command, args=(saying, "serve", "--port", "0", "--open"))
    process.start()
    saying.close()
    assert process.pid is not None
    try:
        with open(said.fileno(), closefd=False) as output:
            line = output.readline()
        assert re.match(r"\S+:\d+ ", line)
        assert "all networks, without a password" in line
        os.kill(process.pid, signal.SIGINT)
        process.join(60)
        assert process.exitcode == 130
    finally:
        process.kill()


def _command(output: Connection, *arguments: str) -> None:
    os.dup2(output.fileno(), 1)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.exit(main([*arguments]))
