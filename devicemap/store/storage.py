"""Files that survive: whole or not there at all, known by their checksum, and locked by whoever writes beside them."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import io
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from devicemap.errors import JournalError

READ_AND_CREATE = os.O_RDWR | os.O_CREAT | getattr(os, "O_BINARY", 0)
"""How a file is opened that is read, added to, and made where there is none."""

_WRITE = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | getattr(os, "O_BINARY", 0)


def pack_arrays(arrays: Mapping[str, np.ndarray[Any, Any]]) -> memoryview:
    """A compressed `.npz` file. The same arrays make the same bytes; none may be of dtype object."""
    assert all(not array.dtype.hasobject for array in arrays.values())
    buffer = io.BytesIO()
    np.savez_compressed(buffer, **dict[str, Any](arrays))
    return buffer.getbuffer()


def unpack_arrays(data: bytes) -> dict[str, np.ndarray[Any, Any]]:
    """The arrays of a `.npz` file, without pickles."""
    with np.load(io.BytesIO(data), allow_pickle=False) as archive:
        return {name: archive[name] for name in archive.files}


def checksum(data: bytes | memoryview) -> str:
    """32 hexadecimal digits that differ where the data differ.

    >>> checksum(b"rows")
    'f2305e3ea413d261c40604673f9fbe7d'
    """
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def write_all(descriptor: int, data: bytes | memoryview) -> None:
    """Write all of `data`; the operating system may take it in parts."""
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(descriptor, rest) :]


def write_synced(path: Path, data: bytes | memoryview) -> None:
    """Write a file, and return when it is on the disk. It may be there in part where this fails."""
    descriptor = os.open(path, _WRITE, 0o666)
    try:
        write_all(descriptor, data)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_folder(path: Path) -> None:
    """Return when the names in a folder are on the disk: a file that was renamed is under its old name before."""
    if sys.platform == "win32":  # folders cannot be opened there
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:  # file systems that cannot do that say so in one of these ways, and keep names anyway
        if error.errno not in (errno.EINVAL, errno.EBADF):
            raise
    finally:
        os.close(descriptor)


def lock(descriptor: int) -> bool:
    """Lock an open file for this descriptor alone; `False` where another one, in whatever process, holds it.

    The lock belongs to the open file: it ends when that is closed, and so with the process, however it ends. Only a
    process that was forked without `exec` and outlives this one keeps it for longer.
    """
    try:
        if sys.platform == "win32":
            import msvcrt

            # Windows keeps others from reading what is locked, so this is a byte that no journal reaches.
            os.lseek(descriptor, 2**40, os.SEEK_SET)
            msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)
        else:
            import fcntl

            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES, errno.EDEADLK):
            return False
        raise
    return True


@contextlib.contextmanager
def disk_errors(doing: str, advice: str) -> Iterator[None]:
    """Turn an error of the operating system into a `JournalError` that says what was being done, and what to do."""
    try:
        yield
    except JournalError:
        raise
    except OSError as error:
        explained = JournalError(f"{doing} failed: {type(error).__name__}: {error}. {advice}")
        explained.errno = error.errno
        raise explained from error
