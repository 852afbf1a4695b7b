"""Connections to SQLite, whose waits for locks of other programs can be interrupted."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

LOCKED = "database is locked"


class Connection(sqlite3.Connection):
    """Waits for locks in Python, where signal handlers run. After an error of a handler, it does not wait again."""

    lock_seconds = 300.0

    def execute(self, *arguments: Any) -> sqlite3.Cursor:
        seconds, self.lock_seconds = self.lock_seconds, 0.0
        deadline = time.monotonic() + seconds
        while True:
            try:
                cursor = super().execute(*arguments)
            except sqlite3.Error as error:
                if str(error) != LOCKED or time.monotonic() >= deadline:
                    self.lock_seconds = seconds
                    raise
            else:
                self.lock_seconds = seconds
                return cursor


@contextmanager
def connected(
    path: Path, mode: str, pragmas: Sequence[str], lock_seconds: float = Connection.lock_seconds
) -> Iterator[sqlite3.Connection]:
    """Connect to a database, and close the connection at the end. A statement waits for a lock for `lock_seconds`."""
    connection = sqlite3.connect(
        f"{path.absolute().as_uri()}?mode={mode}",
        timeout=min(0.1, lock_seconds),
        isolation_level=None,
        check_same_thread=False,
        factory=Connection,
        uri=True,
    )
    connection.lock_seconds = lock_seconds
    with closing(connection):
        for pragma in pragmas:
            connection.execute(f"PRAGMA {pragma}")
        yield connection
