"""Programs with devices of their own, which the ways of some topics need."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from typing import Any


class Program:
    """A process that runs `serve(connection, *arguments)`, a function of a module."""

    def __init__(self, serve: Callable[..., None], *arguments: Any):
        processes = multiprocessing.get_context("spawn")
        self.connection, other = processes.Pipe()
        self._process = processes.Process(target=serve, args=(other, *arguments), daemon=True)
        self._process.start()

    def ask(self, message: str) -> Any:
        """Send a message, and wait for the answer."""
        self.connection.send(message)
        return self.connection.recv()

    def end(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.join()
