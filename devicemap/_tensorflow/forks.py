"""Processes that were forked after TensorFlow was initialised."""

from __future__ import annotations

import threading
from pathlib import Path

from devicemap._tensorflow import Private, with_fallback

_context = Private("tensorflow.python.eager.context", "context_safe")
_THREADS = Path("/proc/self/task")


@with_fallback(lambda: False, _context)
def lost_threads() -> bool:
    """Return whether TensorFlow is initialised in this process without its threads (on Linux).

    A forked process has the memory of its parent, but not its threads. Functions then wait forever (test_forks).
    """
    if getattr(_context.context_safe(), "_context_handle", None) is None or not _THREADS.is_dir():
        return False
    try:
        names = [(thread / "comm").read_text() for thread in _THREADS.iterdir()]
    except OSError:  # a thread ended while it was read, so there are threads
        return False
    # Other versions of TensorFlow may name threads differently, but still have more threads than Python.
    return len(names) <= threading.active_count() and not any(name.startswith("tf_") for name in names)
