"""Remote hosts: processes that run `devicemap.cluster.serve`."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import processes

from benchmarks import softgpu


class Server:
    """A host with two CPU devices, or with emulated GPUs."""

    def __init__(self, gpus: int = 0):
        receiver, sender = processes.forks.Pipe(duplex=False)
        self._process = processes.forks.Process(target=_serve, args=(gpus, sender), daemon=True)
        self._process.start()
        sender.close()
        self.address = f"127.0.0.1:{receiver.recv()}"

    @contextmanager
    def stopped(self, seconds: float) -> Iterator[None]:
        """Stop the process by SIGSTOP for the time of a context, at most for `seconds`."""
        resume = partial(os.kill, self._process.pid, signal.SIGCONT)
        timer = threading.Timer(seconds, resume)
        os.kill(self._process.pid, signal.SIGSTOP)
        timer.start()
        try:
            yield
        finally:
            timer.cancel()
            resume()

    def kill(self) -> None:
        """End the process by SIGKILL."""
        self._process.kill()
        self._process.join()


def _serve(gpus: int, sender: Any) -> None:
    from devicemap.cluster import serve  # before its devices are made, nothing may start TensorFlow

    if gpus:
        softgpu.start(gpus, 64 << 20)
    sender.send(int(serve(0, cpus=2).target.rpartition(":")[2]))
    threading.Event().wait()
