"""Threads that the library starts."""

from __future__ import annotations

import threading
import time


def running() -> list[str]:
    """The names of the library's threads."""
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("devicemap")]


def wait_until_ended() -> None:
    """Wait for the threads of ops that were running when their call ended, up to 10 seconds.

    Not with `Thread.join`: if it was interrupted, it takes a running thread for ended.
    """
    deadline = time.monotonic() + 10
    while running():
        assert time.monotonic() < deadline, running()
        time.sleep(0.01)
