"""The SQLite database of a directory of results: its files, its tables, and checks of all that is read.

    results.sqlite            header: one row, what the results are results of
                              chunks: one row per finished chunk, with a checksum
                              arrays: the arrays of the chunks; large ones are split
    results.sqlite-journal    empty, except during a commit and after a kill
    lock.sqlite               empty; a writer holds its exclusive lock, and does not block readers

SQLite rolls back a commit that was interrupted, but does not detect changed bytes: chunks and the header have checksums. The
author of a directory is not trusted. Rows of `arrays` are never deleted, because SQLite would reuse their pages, and lists of
pages in a damaged file are not trusted either.
"""

from __future__ import annotations

import errno
import json
import math
import os
import sqlite3
import stat
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from devicemap.errors import JournalError, MissingRowsError
from devicemap.store.chunks import StoredChunk, bytes_of, checksum, chunk_of
from devicemap.store.encoding import START_AGAIN, Array, Arrays, decode_leaves, parts_of

DATABASE, LOCK = "results.sqlite", "lock.sqlite"
"""The names of the files."""

SCHEMA = (
    "CREATE TABLE header (format INTEGER, call TEXT, rows INTEGER, checksum INTEGER)",
    "CREATE TABLE chunks (start INTEGER PRIMARY KEY, stop INTEGER, inputs TEXT, checksum INTEGER, first_array INTEGER, "
    "last_array INTEGER, device TEXT, error TEXT)",
    "CREATE TABLE arrays (id INTEGER PRIMARY KEY, leaf INTEGER, name TEXT, shape TEXT, data BLOB)",
)
_FORMAT = 3
_PART_BYTES = 2**18
"""Larger arrays are split, so that parts stay in CPU caches: with 4 MiB, `benchmarks/test_store.py` loads half as fast."""

_MOST_ROWS = 2**48
_BUSY_SECONDS = 300.0
_LOCKED = "database is locked"

_READER = "trusted_schema=OFF", "cell_size_check=ON", "mmap_size=0", "query_only=ON"
_WRITER = (*_READER[:3], "page_size=65536", "journal_mode=TRUNCATE", "synchronous=FULL", "cache_spill=OFF")
_SUPER_JOURNAL = bytes.fromhex("d9d505f920a163d7")
"""The end of a journal that names a second journal, which SQLite would delete. Only transactions on several files have one."""

_READ_ARRAYS = f"""SELECT leaf, name, shape, data FROM arrays
WHERE id BETWEEN ? AND ? AND typeof(data) = 'blob' AND length(data) <= {_PART_BYTES} ORDER BY id"""


class Header(NamedTuple):
    """What the results in a directory are results of."""

    call: dict[str, Any]
    """JSON: specs of results and inputs, options, and the fingerprint of the function."""

    rows: int | None
    """Number of rows of the data, `None` if it is unknown so far."""


@contextmanager
def database_errors(doing: str, advice: str) -> Iterator[None]:
    """Turn errors of SQLite and the operating system into a `JournalError`, with an `errno` if one is known."""
    try:
        yield
    except JournalError:
        raise
    except (sqlite3.Error, OSError, UnicodeDecodeError) as error:
        explained = JournalError(f"{doing} failed: {type(error).__name__}: {error}. {advice}")
        of_sqlite = {"database or disk is full": errno.ENOSPC, "disk I/O error": errno.EIO}
        explained.errno = getattr(error, "errno", of_sqlite.get(str(error)))
        raise explained from error


@contextmanager
def open_database(directory: Path, advice: str = START_AGAIN) -> Iterator[Database]:
    """Connect to the database of a directory for reading, after checks of its files and tables; errors have the `advice`.

    A reader holds no lock between calls. It rolls back a commit that was interrupted.
    """
    with database_errors(f"reading results in {directory}", advice):
        _check_files(directory)
        with closing(_connect(directory / DATABASE, "rw", _BUSY_SECONDS, _READER)) as connection:
            yield Database(directory, connection)


@contextmanager
def open_for_writing(directory: Path) -> Iterator[Database]:
    """Create a directory, and connect to its database with the lock of a writer.

    Raises `JournalError` for a directory of something else, and if another writer has the lock, in whatever process.
    """
    directory.mkdir(parents=True, exist_ok=True)
    _check_files(directory)
    names = sorted({path.name for path in directory.iterdir()} - {LOCK})
    if names and DATABASE not in names:
        listed = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
        raise JournalError(
            f"{directory} holds {listed}, and no results of devicemap. Write to a new or empty directory"
        )
    try:
        connection = _connect(directory / LOCK, "rwc", 0, ["journal_mode=MEMORY"])  # no second file
        connection.execute("BEGIN EXCLUSIVE")
    except sqlite3.OperationalError as error:
        if str(error) != _LOCKED:
            raise
        raise JournalError(
            f"{directory} is being written to, by another call or another process. Wait until it finishes, or write to "
            "another directory"
        ) from error
    with closing(connection), closing(_connect(directory / DATABASE, "rwc", _BUSY_SECONDS, _WRITER)) as database:
        yield Database(directory, database)


class Database:
    """The tables of a directory. Not for use by two threads at once."""

    def __init__(self, directory: Path, connection: sqlite3.Connection):
        self._directory, self._connection = directory, connection
        self._has_tables()
        self._size_bytes = (directory / DATABASE).lstat().st_size

    def contents(self) -> tuple[Header | None, list[StoredChunk]]:
        """Return the header, `None` before the first commit, and all chunks in the order of rows."""
        with self._connection:
            self._connection.execute("BEGIN")
            if not self._has_tables():
                return None, []
            headers = self._connection.execute("SELECT * FROM header LIMIT 2").fetchall()
            chunks = list(map(StoredChunk._make, self._connection.execute("SELECT * FROM chunks ORDER BY start")))
        try:
            ((version, call, rows, check),) = headers
            if version != _FORMAT or check != checksum(version, call, rows):
                raise ValueError("header")
            header, row, last = Header(dict(json.loads(call)), rows), 0, _MOST_ROWS if rows is None else rows
            for chunk in chunks:
                if type(chunk.stop) is not int or not row <= chunk.start < chunk.stop <= last:
                    raise ValueError("chunks")
                failed_row_check = chunk.start + 1, checksum(*chunk[:3], *chunk[6:])
                if chunk.error is not None and (chunk.stop, chunk.checksum) != failed_row_check:
                    raise ValueError("failed rows")
                row = chunk.stop
        except (RecursionError, TypeError, ValueError) as error:
            path = self._directory / DATABASE
            raise JournalError(f"{path} is damaged, or from another version ({error!s:.200}). {START_AGAIN}") from error
        return header, chunks

    def leaves(
        self, chunk: StoredChunk, specs: Sequence[Any], rows: int | None = None, into: Arrays | None = None
    ) -> list[Any]:
        """Return the result leaves of a chunk: dense ones as arrays, others as tensors.

        Their number of rows may be given, as for states of reductions, and contiguous arrays to fill. A damaged chunk is a
        `MissingRowsError`.
        """
        try:
            arrays, check = {}, 0
            with closing(self._connection.execute(_READ_ARRAYS, chunk[4:6])) as found:
                for key, dtype in parts_of(specs).items():
                    arrays[key], check = self._next(found, key, dtype, check, (into or {}).get(key))
            if chunk_of(*chunk[:3], arrays, check).checksum != chunk.checksum:
                raise ValueError("their bytes are not those that were written")
            return decode_leaves(arrays, specs, chunk.stop - chunk.start if rows is None else rows)
        except (ArithmeticError, MemoryError, RecursionError, TypeError, ValueError, sqlite3.Error) as error:
            if str(error) == _LOCKED:
                raise
            raise MissingRowsError(
                f"rows {chunk.start} to {chunk.stop - 1} in {self._directory} are damaged: {error!s:.200}. Run write again "
                "with the same function and data: it computes them, and only them, again"
            ) from error

    def _next(
        self, rows: sqlite3.Cursor, key: tuple[int, str], dtype: Any, check: int, into: Array | None
    ) -> tuple[Array, int]:
        """Return the array in the next rows of a query, and the checksum of the bytes so far."""
        data, filled, sizes = None, 0, []
        while data is None or filled < len(data):
            row = rows.fetchone()
            if row is None or row[:2] != key:
                raise ValueError(f"array {key} is missing or too short")
            if data is None:
                sizes = json.loads(row[2])
                size_bytes = math.prod(sizes) * dtype.itemsize
                if not 0 <= size_bytes <= self._size_bytes:
                    raise ValueError(f"array {key} has the shape {sizes!s:.80}, larger than the file")
                data = np.empty(size_bytes, np.uint8) if into is None else into.reshape(-1).view(np.uint8)
            data[filled : filled + len(row[3])] = np.frombuffer(row[3], np.uint8)
            filled += len(row[3])
            check = zlib.crc32(row[3], check)  # while it is in the caches
        return data.view(dtype).reshape(sizes), check

    def commit(self, writes: Iterable[Callable[[Database], None]]) -> None:
        """Call functions that write, in one transaction."""
        with self._connection:
            self._connection.execute("BEGIN IMMEDIATE")
            for write in writes:
                write(self)

    def replace_header(self, header: Header, dropped: Iterable[StoredChunk] = ()) -> None:
        """Write a header, and create the tables if necessary; drop damaged chunks, but not their arrays."""
        if not self._has_tables():
            for statement in SCHEMA:
                self._connection.execute(statement)
        row = _FORMAT, json.dumps(header.call), header.rows
        self._connection.execute("DELETE FROM header")
        self._connection.execute("INSERT INTO header VALUES (?, ?, ?, ?)", (*row, checksum(*row)))
        self._connection.executemany("DELETE FROM chunks WHERE start = ?", [chunk[:1] for chunk in dropped])

    def insert(self, chunk: StoredChunk, arrays: Arrays) -> None:
        """Add a chunk, with new identifiers for its arrays, in place of rows in it that failed before."""
        failed = "DELETE FROM chunks WHERE start BETWEEN ? AND ? AND error IS NOT NULL"
        self._connection.execute(failed, (chunk.start, chunk.stop - 1))
        ((last,),) = self._connection.execute("SELECT ifnull(max(id), 0) FROM arrays")
        first = last + 1
        for (leaf, name), array in arrays.items():
            shape, data = json.dumps(array.shape), bytes_of(array)
            for offset in range(0, len(data) or 1, _PART_BYTES):
                part = data[offset : offset + _PART_BYTES] or b""  # SQLite would store NULL for an empty array
                last += 1
                self._connection.execute("INSERT INTO arrays VALUES (?, ?, ?, ?, ?)", (last, leaf, name, shape, part))
        self._connection.execute(
            "INSERT INTO chunks VALUES (?, ?, ?, ?, ?, ?, ?, ?)", (*chunk[:4], first, last, *chunk[6:])
        )

    def _has_tables(self) -> bool:
        found = self._connection.execute("SELECT sql FROM sqlite_master ORDER BY rowid").fetchall()
        if found and found != [(statement,) for statement in SCHEMA]:
            raise JournalError(
                f"{self._directory / DATABASE} is not a database that this version of devicemap writes. {START_AGAIN}"
            )
        return bool(found)


def _check_files(directory: Path) -> None:
    """Raise `JournalError` unless SQLite can open the files of a directory without touching a file outside.

    The databases are not opened: closing one would drop all locks that SQLite holds of it in this process (POSIX).
    """
    if (directory / "journal.jsonl").exists():
        raise JournalError(f"{directory} was written by an earlier version of devicemap. {START_AGAIN}")
    for name in (f"{name}{suffix}" for name in (DATABASE, LOCK) for suffix in ("", "-journal", "-wal", "-shm")):
        path = directory / name
        try:
            status = path.lstat()
        except FileNotFoundError:
            continue
        journal = name == f"{DATABASE}-journal"
        ours = name == DATABASE or journal or (name == LOCK and status.st_size == 0)
        if not (ours and stat.S_ISREG(status.st_mode) and status.st_nlink == 1):
            raise JournalError(
                f"{path} is a link, not a regular file, or not from devicemap, so do not trust this directory. {START_AGAIN}"
            )
        if journal and status.st_size >= len(_SUPER_JOURNAL):
            with open(path, "rb") as file:
                file.seek(-len(_SUPER_JOURNAL), os.SEEK_END)
                if file.read() == _SUPER_JOURNAL:
                    raise JournalError(f"{path} names another file to delete, so do not trust this directory")


def _connect(path: Path, mode: str, busy_seconds: float, pragmas: Iterable[str]) -> sqlite3.Connection:
    uri = f"{path.absolute().as_uri()}?mode={mode}"
    connection = sqlite3.connect(uri, timeout=busy_seconds, isolation_level=None, check_same_thread=False, uri=True)
    for pragma in pragmas:
        connection.execute(f"PRAGMA {pragma}")
    return connection
