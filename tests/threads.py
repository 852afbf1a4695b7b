"""Threads that the library starts."""

from __future__ import annotations

import threading
import time


def running() -> list[str]:
    """The names of the library's threads, apart from those that wait for `tf.data` to close a dataset."""
    names = [thread.name for thread in threading.enumerate()]
    return [name for name in names if name.startswith("devicemap") and name != "devicemap dataset"]


def wait_until_ended() -> None:
    """Wait for the threads of ops that were running when their call ended, up to 10 seconds.

    Not with `Thread.join`: if it was interrupted, it takes a running thread for ended.
    """
    deadline = time.monotonic() + 10
    while running():
        assert time.monotonic() < deadline, running()
        time.sleep(0.01)
