"""The SQLite database of a directory of results: its files, its tables, and checks of all data that is read.

    results.sqlite            header: one row, the call that computes the results
                              chunks: one row per finished chunk, with a checksum
                              parts: the bytes of the chunks
    results.sqlite-journal    empty, except during a commit and after a kill
    lock.sqlite               empty; a writer holds its exclusive lock, and does not block readers

SQLite rolls back a commit that was interrupted, but does not detect changed bytes. So chunks and the header have checksums.
The author of a directory is not trusted. Rows of `parts` are never deleted, because SQLite would reuse their pages, and lists
of free pages in a damaged file are not trusted either.
"""

from __future__ import annotations

import bisect
import errno
import json
import math
import sqlite3
import stat
import zlib
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from operator import attrgetter
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple

import tensorflow as tf

from devicemap.errors import JournalError, MissingRowsError
from devicemap.store.connection import LOCKED, connected
from devicemap.store.encoding import START_AGAIN, WRONG_VALUES, Array, bytes_of, decode_leaves

DATABASE, _JOURNAL, LOCK = "results.sqlite", "results.sqlite-journal", "lock.sqlite"
"""The names of the files."""

_VERSION = 2_000
"""The `PRAGMA user_version`: the first version of devicemap that reads this format, here 0.2.0, in base 1000."""

_TABLES = (
    "header (call TEXT, rows INTEGER, checksum INTEGER)",
    "chunks (start INTEGER PRIMARY KEY, stop INTEGER, inputs TEXT, shapes TEXT, device TEXT, error TEXT, first_part INTEGER, "
    "last_part INTEGER, checksum INTEGER)",
    "parts (id INTEGER PRIMARY KEY, data BLOB)",
)
_PART_BYTES = 2**18
"""Size of a part. Parts stay in CPU caches: with 4 MiB, `benchmarks/test_store.py` loads half as fast."""

_QUEUE_BYTES = 2**28
"""The most bytes of chunks that wait to be committed while devices compute."""

_READ_PARTS = f"""SELECT data FROM parts
WHERE id BETWEEN ? AND ? AND typeof(data) = 'blob' AND length(data) <= {_PART_BYTES} ORDER BY id"""

_READER = "trusted_schema=OFF", "cell_size_check=ON", "mmap_size=0", "query_only=ON"
_WRITER = (*_READER[:3], "page_size=65536", "journal_mode=TRUNCATE", "synchronous=FULL", "cache_spill=OFF")
_READ_ONLY = "attempt to write a readonly database"
_SUPER_JOURNAL = bytes.fromhex("d9d505f920a163d7")
"""The end of a journal that names a super-journal, which SQLite would delete. Only transactions on several files have one."""


class Header(NamedTuple):
    """The call that computes the results in a directory."""

    call: dict[str, Any]
    """JSON: specs of results and inputs, options, and the fingerprint of the function."""

    rows: int | None
    """Number of rows of the data, `None` if it is unknown so far."""


class StoredChunk(NamedTuple):
    """A row of the table of chunks: rows of the data with results, or one row that failed."""

    start: int
    stop: int
    inputs: str
    """The digest of the rows of the data."""

    shapes: str = "[]"
    """JSON: the shapes of its arrays."""

    device: str | None = None
    error: str | None = None
    """The error of a row that failed; otherwise `None`. `device` is where it failed."""

    first_part: int = 0
    last_part: int = 0
    checksum: int = 0
    """CRC-32 of the columns before `first_part`, and of the bytes of the arrays. BLAKE2b takes 2.5 times as long."""


def checksum(*values: Any) -> int:
    """Return the CRC-32 of JSON values."""
    return zlib.crc32(json.dumps(values).encode())


def overlapping(chunks: Sequence[StoredChunk], start: int, stop: int) -> Sequence[StoredChunk]:
    """Return the chunks that have some of rows `start` to `stop - 1`. `chunks` is sorted."""
    first = bisect.bisect_right(chunks, start, key=attrgetter("stop"))
    return chunks[first : bisect.bisect_left(chunks, stop, key=attrgetter("start"))]


@contextmanager
def _database_errors(doing: str, advice: str) -> Iterator[None]:
    """Turn errors of SQLite and the operating system into a `JournalError`, with an `errno` if one is known."""
    try:
        yield
    except JournalError:
        raise
    except (*WRONG_VALUES, sqlite3.Error, OSError) as error:
        explained = JournalError(f"{doing} failed: {type(error).__name__}: {error}. {advice}")
        of_sqlite = {"database or disk is full": errno.ENOSPC, "disk I/O error": errno.EIO}
        explained.errno = getattr(error, "errno", of_sqlite.get(str(error)))
        raise explained from error


@contextmanager
def open_database(directory: Path) -> Iterator[Database]:
    """Connect to a database for reading, after checks of its files and tables. A reader rolls back an interrupted commit."""
    with _database_errors(f"reading results in {directory}", "Is this a directory that devicemap has written to?"):
        _check_files(directory)
        with connected(directory / DATABASE, "rw", _READER) as connection:
            try:
                database = Database(directory, connection)
            except sqlite3.OperationalError as error:
                if str(error) != _READ_ONLY:
                    raise
                raise JournalError(
                    f"{directory} is read-only, and a commit to it was interrupted. Its owner must open it once, by "
                    "open_results, to roll the commit back"
                ) from error
            yield database


class Database:
    """The tables of a directory. Not thread-safe."""

    def __init__(self, directory: Path, connection: sqlite3.Connection):
        self._path, self._connection = directory / DATABASE, connection
        tables = connection.execute("SELECT sql FROM sqlite_master ORDER BY rowid").fetchall()
        ((version,),) = connection.execute("PRAGMA user_version")
        if tables and version not in (0, _VERSION):
            reader = ".".join(str(version // 1000**digit % 1000) for digit in (2, 1, 0))
            advice = f"Read them with devicemap {reader}, or write to another directory"
            raise JournalError(f"{self._path} holds results in the format of devicemap {reader}. {advice}")
        if tables and (version, tables) != (_VERSION, [(f"CREATE TABLE {table}",) for table in _TABLES]):
            raise JournalError(f"{self._path} is damaged, or not a database of devicemap. {START_AGAIN}")
        self._is_empty = not tables

    def contents(self) -> tuple[Header | None, list[StoredChunk]]:
        """Return the header, `None` before the first commit, and all chunks in the order of rows."""
        if self._is_empty:
            return None, []
        with self._connection:
            self._connection.execute("BEGIN")
            headers = self._connection.execute("SELECT * FROM header LIMIT 2").fetchall()
            chunks = list(map(StoredChunk._make, self._connection.execute("SELECT * FROM chunks ORDER BY start")))
        try:
            ((call, rows, check),) = headers
            header, row, last = Header(dict(json.loads(call)), rows), 0, math.inf if rows is None else rows
            right = check == checksum(call, rows)
            for chunk in chunks:
                right &= type(chunk.stop) is int and row <= chunk.start < chunk.stop <= last
                if chunk.error is not None:
                    right &= (chunk.stop, chunk.checksum) == (chunk.start + 1, checksum(*chunk[:6], 0))
                row = chunk.stop
        except WRONG_VALUES:
            right = False
        if not right:
            raise JournalError(f"{self._path} is damaged. {START_AGAIN}")
        return header, chunks

    def leaves(self, chunk: StoredChunk, specs: Sequence[Any], rows: int | None = None) -> list[Any]:
        """Return the result leaves of a chunk: dense ones as arrays, others as tensors.

        `rows` is 1 for states of reductions. Raises `MissingRowsError` for a damaged chunk.
        """
        rows = chunk.stop - chunk.start if rows is None else rows
        try:
            return decode_leaves(self._bytes(chunk), json.loads(chunk.shapes), specs, rows)
        except (*WRONG_VALUES, sqlite3.Error, OSError, tf.errors.OpError) as error:
            if str(error) == LOCKED:
                raise
            raise MissingRowsError(
                f"rows {chunk.start} to {chunk.stop - 1} in {self._path.parent} are damaged: {error!s:.200}. Run write again "
                "with the same function and data: it computes them, and only them, again"
            ) from error

    def _bytes(self, chunk: StoredChunk) -> bytearray:
        data, check, most = bytearray(), 0, self._path.lstat().st_size
        with closing(self._connection.execute(_READ_PARTS, (chunk.first_part, chunk.last_part))) as parts:
            for (part,) in parts:
                data += part
                check = zlib.crc32(part, check)  # while the part is in CPU caches
                if len(data) > most:
                    raise ValueError("they are larger than the file")
        if checksum(*chunk[:6], check) != chunk.checksum:
            raise ValueError("their bytes are not those that were written")
        return data


class Writer(Database):
    """The tables of a directory that is locked for writing. Any thread may add chunks; `flush` commits them together."""

    def __init__(self, directory: Path, connection: sqlite3.Connection):
        super().__init__(directory, connection)
        self.header, self.stored = self.contents()
        self._next_header = self.header
        self._waiting: list[tuple[StoredChunk, Sequence[Array]]] = []
        self._committing = Lock()

    def put(self, header: Header, *chunks: tuple[StoredChunk, Sequence[Array]]) -> None:
        """Set the header, and queue chunks, which replace failed rows and damaged chunks, for the next `flush`.

        The call waits for the disk, and may raise `JournalError`, only if more than `_QUEUE_BYTES` are queued.
        """
        self._next_header = header
        self._waiting += chunks
        if sum(array.nbytes for _, arrays in [*self._waiting] for array in arrays) > _QUEUE_BYTES:
            self.flush()

    def flush(self) -> None:
        """Commit all queued chunks in one transaction. Raises `JournalError` if the disk fails."""
        advice = "All committed chunks are kept: run again to compute the missing ones"
        errors = _database_errors(f"writing to {self._path.parent}", advice)
        with self._committing, errors, self._connection as connection:
            batch, header = self._waiting[:], self._next_header
            if not batch and header == self.header:
                return
            connection.execute("BEGIN IMMEDIATE")
            if header is not None and header != self.header:
                for table in _TABLES:
                    connection.execute(f"CREATE TABLE IF NOT EXISTS {table}")
                connection.execute(f"PRAGMA user_version={_VERSION}")
                row = json.dumps(header.call), header.rows
                connection.execute("DELETE FROM header")
                connection.execute("INSERT INTO header VALUES (?, ?, ?)", (*row, checksum(*row)))
            for chunk, arrays in batch:
                self._insert(chunk, arrays)
            connection.execute("COMMIT")
            self.header = header
            del self._waiting[: len(batch)]

    def _insert(self, chunk: StoredChunk, arrays: Sequence[Array]) -> None:
        for old in overlapping(self.stored, chunk.start, chunk.stop):
            self._connection.execute("DELETE FROM chunks WHERE start = ? AND stop = ?", old[:2])
        ((first,),) = self._connection.execute("SELECT ifnull(max(id), 0) + 1 FROM parts")
        data = b"".join(map(bytes_of, arrays))
        parts = [data[offset : offset + _PART_BYTES] for offset in range(0, len(data), _PART_BYTES)]
        self._connection.executemany("INSERT INTO parts VALUES (?, ?)", enumerate(parts, first))
        described = *chunk[:3], json.dumps([array.shape for array in arrays]), chunk.device, chunk.error
        where, check = (first, first + len(parts) - 1), checksum(*described, zlib.crc32(data))
        self._connection.execute("REPLACE INTO chunks VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)", (*described, *where, check))


@contextmanager
def open_for_writing(directory: Path) -> Iterator[Writer]:
    """Create a directory, and lock its database for writing. Commit queued chunks at the end, also after an error.

    Raises `JournalError` if the directory is damaged or holds other files, and if another writer in any process has the lock.
    """
    if len(directory.parts) > 1 and directory.parts[0].endswith(":"):  # Path shortens "gs://" to "gs:/"
        raise JournalError(
            f"{directory} is a URL; write the results to a local directory, and copy it when the run ends"
        )
    advice = "It must be a directory that can be written to and locked"
    with ExitStack() as stack:
        with _database_errors(f"opening {directory} to write results", advice):
            directory.mkdir(parents=True, exist_ok=True)
            _check_files(directory)
            names = sorted({path.name for path in directory.iterdir()} - {LOCK})
            if names and DATABASE not in names:
                raise JournalError(
                    f"{directory} holds {', '.join(names[:3])}, and no results of devicemap. Write to a new or empty directory"
                )
            try:
                lock = connected(directory / LOCK, "rwc", ["journal_mode=MEMORY"], lock_seconds=0)  # no journal file
                stack.enter_context(lock).execute("BEGIN EXCLUSIVE")
            except sqlite3.OperationalError as error:
                if str(error) != LOCKED:
                    raise
                raise JournalError(
                    f"{directory} is being written to, by another call or another process. Wait until it finishes, or write to "
                    "another directory"
                ) from error
            writer = Writer(directory, stack.enter_context(connected(directory / DATABASE, "rwc", _WRITER)))

        def commit(kind: Any, *_: Any) -> None:
            try:
                writer.flush()
            except JournalError:
                if kind is not KeyboardInterrupt:
                    raise

        stack.push(commit)
        yield writer


def _check_files(directory: Path) -> None:
    """Raise `JournalError` unless SQLite can open the files of a directory without access to files outside.

    The databases are not opened, because closing a file drops all POSIX locks that SQLite holds on it in this process.
    """
    for path in directory.iterdir():
        if path.name.startswith((DATABASE, LOCK)):
            status, problem = path.lstat(), None
            ours = path.name in (DATABASE, _JOURNAL) or (path.name == LOCK and status.st_size == 0)
            if not (ours and stat.S_ISREG(status.st_mode) and status.st_nlink == 1):
                problem = "is a link, not a regular file, or not from devicemap"
            elif path.name == _JOURNAL and path.read_bytes().endswith(_SUPER_JOURNAL):
                problem = "names another file to delete"
            if problem:
                raise JournalError(f"{path} {problem}, so do not trust this directory. {START_AGAIN}")
