"""Other hosts: processes that serve, which can be killed, stopped, and brought back."""

from __future__ import annotations

import os
import signal
import threading
from typing import Any

import processes

from benchmarks import softgpu


class Server:
    """One of them, with two CPU devices, or so many GPUs in software."""

    def __init__(self, gpus: int = 0):
        self._gpus = gpus
        self._port = 0
        self._start()

    def _start(self) -> None:
        self._listening, telling = processes.forks.Pipe(duplex=False)
        self._process = processes.forks.Process(target=_serve, args=(self._port, self._gpus, telling), daemon=True)
        self._process.start()
        telling.close()

    def address(self) -> str:
        """Where it listens, once it does."""
        self._port = self._port or self._listening.recv()
        return f"127.0.0.1:{self._port}"

    def lose(self, how: signal.Signals) -> None:
        """`SIGKILL` or `SIGSTOP`."""
        assert self._process.pid is not None
        os.kill(self._process.pid, how)
        if how is signal.SIGKILL:
            self._process.join()

    def bring_back(self) -> None:
        """At the same address, whatever has become of it."""
        if self._process.is_alive():
            self.lose(signal.SIGCONT)
        else:
            self._start()
            self._listening.recv()

    def end(self) -> None:
        self._process.kill()
        self._process.join()


def _serve(port: int, gpus: int, telling: Any) -> None:
    from devicemap.cluster import serve  # before its devices are made, nothing may start TensorFlow

    if gpus:
        softgpu.start(gpus, 64 << 20)
    server = serve(port, cpus=2)
    telling.send(int(server.target.rpartition(":")[2]))
    threading.Event().wait()
