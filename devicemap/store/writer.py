"""Write chunks to the database of a directory, in a thread that commits all that is in its queue as one transaction.

Only this thread uses the connections. A forked process has no such thread and so never closes its copies of them; SQLite would
roll back the transaction of the parent.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

from devicemap.errors import JournalError
from devicemap.store.chunks import StoredChunk, chunk_of, failed_row
from devicemap.store.database import Database, Header, database_errors, open_for_writing
from devicemap.store.encoding import Arrays

QUEUE_BYTES = 2**28
"""Callers of `append` wait while more bytes than this are not committed."""

_ADVICE = "All committed chunks are kept: run again to compute the missing ones"

_Write = Callable[[Database], None]


class Writer:
    """A directory that is open for writing, and locked until `close`; a context manager. Thread-safe.

    Opening it changes nothing in a directory with results.
    """

    def __init__(self, directory: Path):
        """Open the directory. Another writer, other contents and damage are a `JournalError`."""
        self._directory = directory
        self._process = os.getpid()
        self._changed = threading.Condition()
        self._queue: list[tuple[_Write, int]] = []
        self._bytes = 0
        self._waiting = self._closed = False
        self._error: BaseException | None = None
        self._first: _Write | None = None
        opened: Future[tuple[Header | None, list[StoredChunk]]] = Future()
        self._thread = threading.Thread(target=self._run, args=(opened,), name="devicemap writer")
        self._thread.start()
        try:
            self.header, self.stored = opened.result()
        except BaseException:
            self.close()
            raise

    def begin(self, header: Header, kept: Sequence[StoredChunk]) -> None:
        """Set the header and the stored chunks to keep, which are written together with the first chunk."""
        dropped = {*self.stored} - {*kept}
        self._first = partial(Database.replace_header, header=header, dropped=dropped)
        self._next_header, self.stored = header, [*kept]

    def append(self, start: int, stop: int, inputs: str, arrays: Arrays) -> None:
        """Queue the results of rows `start` to `stop - 1`, and the digest of their inputs; wait while the queue is full.

        Raises `JournalError` if the disk has failed before, or the writer is closed.
        """
        size_bytes = sum(array.nbytes for array in arrays.values())
        self._put(partial(Database.insert, chunk=chunk_of(start, stop, inputs, arrays), arrays=arrays), size_bytes)

    def append_failed(self, row: int, inputs: str, device: str, error: str) -> None:
        """Queue a row without results, the digest of its inputs, and where and why it failed. Raises as `append`."""
        self._put(partial(Database.insert, chunk=failed_row(row, inputs, device, error), arrays={}), 0)

    def finish(self, rows: int) -> None:
        """Record the number of rows, and wait until everything is committed. Raises as `append`."""
        header = self._next_header._replace(rows=rows)
        if header != self.header:
            self._put(partial(Database.replace_header, header=header), 0)
        with self._changed:
            self._changed.wait_for(lambda: not self._waiting or self._error or self._closed)
            self._check()

    def close(self) -> None:
        """Commit what is in the queue, and release the lock. Does nothing the second time, and in a forked process."""
        if os.getpid() != self._process:
            return
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join()

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _put(self, write: _Write, size_bytes: int) -> None:
        with self._changed:
            room = QUEUE_BYTES - size_bytes
            self._changed.wait_for(lambda: self._bytes <= max(room, 0) or self._error or self._closed)
            self._check()
            if self._first is not None:
                self._queue.append((self._first, 0))
                self._first, self.header = None, self._next_header
            self._queue.append((write, size_bytes))
            self._waiting, self._bytes = True, self._bytes + size_bytes
            self._changed.notify_all()

    def _check(self) -> None:
        if self._error is not None:
            raise self._error
        if self._closed:
            raise JournalError(f"{self._directory} was closed, and takes no more results")

    def _run(self, opened: Future[Any]) -> None:
        """Open the directory, and commit batches until `close`: the target of the thread."""
        try:
            advice = "It must be a directory that can be written to and locked"
            opening = database_errors(f"opening {self._directory} to write results", advice)
            with opening, open_for_writing(self._directory) as database:
                opened.set_result(database.contents())
                with database_errors(f"writing to {self._directory}", _ADVICE):
                    self._commit_batches(database)
        except BaseException as error:
            if not opened.done():
                opened.set_exception(error)
            with self._changed:
                self._error = error
                self._changed.notify_all()

    def _commit_batches(self, database: Database) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._queue or self._closed)
                batch, self._queue = self._queue, []
            if not batch:
                return
            database.commit(write for write, _ in batch)
            with self._changed:
                self._bytes -= sum(size for _, size in batch)
                self._waiting = bool(self._queue)
                self._changed.notify_all()
