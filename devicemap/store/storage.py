"""Files that survive, known by their checksum, locked by whoever writes beside them, and never another file than it seems."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import stat
import sys
import weakref
from collections.abc import Iterator
from io import BufferedReader
from pathlib import Path

from devicemap.errors import JournalError

_CAREFULLY = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)

READ = os.O_RDONLY
READ_AND_CREATE = os.O_RDWR | os.O_CREAT
CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL
"""How a file is opened: to be read; to be read and added to, and made where there is none; made, and by nobody before."""

_DISTRUST = "devicemap makes files alone, so do not trust this directory"


def checksum(data: bytes | bytearray | memoryview) -> str:
    """32 hexadecimal digits that differ where the data differ.

    >>> checksum(b"rows")
    'f2305e3ea413d261c40604673f9fbe7d'
    """
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def open_file(path: Path, flags: int) -> int:
    """Open a regular file in the folder that its path names: no link is followed, and nothing waits for a pipe.

    A file that is opened for writing has no other name, which might be in another folder.

    Raises:
        JournalError: it is a link, a folder, a pipe, a device, or has other names.
        OSError: the operating system refuses it.
    """
    try:
        descriptor = os.open(path, flags | _CAREFULLY, 0o666)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO):
            raise JournalError(f"{path} is a link or a socket; {_DISTRUST}") from error
        raise
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode) or (flags != READ and status.st_nlink > 1):
        os.close(descriptor)
        raise JournalError(f"{path} is a folder, a pipe, a device, or has other names; {_DISTRUST}")
    return descriptor


def reader(path: Path) -> BufferedReader:
    """A regular file, opened to be read."""
    return os.fdopen(open_file(path, READ), "rb")


def write_all(descriptor: int, data: bytes | memoryview, offset: int) -> None:
    """Write all of `data` from `offset` on, in the place of what is there. Where it fails, nothing is left of it there."""
    rest = memoryview(data)
    try:
        os.ftruncate(descriptor, offset)
        os.lseek(descriptor, offset, os.SEEK_SET)
        while rest:  # the operating system may take it in parts
            rest = rest[os.write(descriptor, rest) :]
    except BaseException:
        with contextlib.suppress(OSError):
            os.ftruncate(descriptor, offset)
        raise


def truncate(path: Path, size_bytes: int) -> None:
    """Take away what a file holds from there on."""
    descriptor = open_file(path, READ_AND_CREATE)
    try:
        os.ftruncate(descriptor, size_bytes)
    finally:
        os.close(descriptor)


def sync_folder(path: Path) -> None:
    """Return when the names in a folder are on the disk."""
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


class Lock:
    """A file that is open for reading and writing, and locked until `close`, by this object alone.

    The lock belongs to the open file: it ends when that is closed, and so with the process, however it ends. A process that
    is forked meanwhile closes it at once, for it would keep the lock for longer; there `descriptor` is `None`.
    """

    def __init__(self, path: Path):
        """Raises `BlockingIOError` where the file is locked, in whatever process; else as `open_file`."""
        self.descriptor: int | None = None
        _locks.add(self)
        self.descriptor = open_file(path, READ_AND_CREATE)
        try:
            _lock(self.descriptor)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Let others lock it. Closing twice does nothing."""
        descriptor, self.descriptor = self.descriptor, None
        if descriptor is not None:
            os.close(descriptor)


_locks: weakref.WeakSet[Lock] = weakref.WeakSet()


def _close_in_child() -> None:
    for lock in list(_locks):
        lock.close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_in_child)


def _lock(descriptor: int) -> None:
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
            raise BlockingIOError(error.errno, "the file is locked") from error
        raise


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
