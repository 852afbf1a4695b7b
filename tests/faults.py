"""Faults of SQLite: statements that raise an error, and operations on the disk.

For the disk, the default VFS of SQLite opens files whose methods can fail. `sqlite3_vfs` and `sqlite3_io_methods` are public
names of SQLite (sqlite.org/c3ref/io_methods.html).
"""

from __future__ import annotations

import _sqlite3
import ctypes
import sqlite3
from collections.abc import Container, Iterator
from contextlib import AbstractContextManager, contextmanager
from ctypes import CFUNCTYPE, POINTER, c_char_p, c_int, c_int64, c_void_p
from functools import partial
from typing import Any

import pytest

_FILE = POINTER(c_void_p)
_OPEN = CFUNCTYPE(c_int, c_void_p, c_void_p, _FILE, c_int, POINTER(c_int))
_IO = CFUNCTYPE(c_int, _FILE, c_void_p, c_int, c_int64)
_TRUNCATE = CFUNCTYPE(c_int, _FILE, c_int64)
_SYNC = CFUNCTYPE(c_int, _FILE, c_int)

_METHODS = {"read": (2, _IO, 266), "write": (3, _IO, 778), "truncate": (4, _TRUNCATE, 1546), "sync": (5, _SYNC, 1034)}
"""Position in `sqlite3_io_methods`, type, and the `SQLITE_IOERR_` that a fault returns."""

_CANTOPEN, _FULL, _IO_METHODS_SIZE = 14, 13, 19


class _Vfs(ctypes.Structure):
    _fields_ = [
        *(("version", c_int), ("file_size", c_int), ("path_size", c_int)),
        *(("next", c_void_p), ("name", c_char_p), ("data", c_void_p), ("open", _OPEN)),
    ]


def _library() -> Any:
    """Return the SQLite that Python uses: TensorFlow's own, if TensorFlow was imported before `sqlite3`."""
    for path in (None, _sqlite3.__file__):
        library = ctypes.CDLL(path)
        version = getattr(library, "sqlite3_libversion", None)
        if version is not None:
            version.restype = c_char_p
            if version().decode() == sqlite3.sqlite_version:
                return library
    raise LookupError("the SQLite library that Python uses was not found")


class Faulty:
    """Counts what happens from 1 on, and lets it fail at some of these numbers."""

    def __init__(self) -> None:
        self.count = 0
        self._failing: Container[int] = ()

    def _fails(self) -> bool:
        self.count += 1
        return self.count in self._failing

    @contextmanager
    def failing(self, numbers: Container[int]) -> Iterator[None]:
        """Count from 1 again; what has one of these numbers fails inside of this context."""
        self.count, self._failing = 0, numbers
        with self._mounted():
            yield
        self._failing = ()

    def _mounted(self) -> AbstractContextManager[None]:
        raise NotImplementedError


class Statements(Faulty):
    """Statements that Python passes to SQLite raise an error."""

    def __init__(self, error: type[BaseException]) -> None:
        super().__init__()
        self._error = error

    @contextmanager
    def _mounted(self) -> Iterator[None]:
        faulty = self

        class Connection(sqlite3.Connection):
            def execute(self, *arguments: Any) -> Any:
                if faulty._fails():
                    raise faulty._error
                return super().execute(*arguments)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sqlite3, "connect", partial(sqlite3.connect, factory=Connection))
            yield


class Disk(Faulty):
    """Operations of SQLite on files fail. On a full disk, only writes are counted, which fail for lack of space."""

    def __init__(self, full: bool = False) -> None:
        super().__init__()
        self._full = full
        self._tables: dict[int, tuple[Any, list[Any]]] = {}

    def _replaced(self, name: str, original: Any, code: int) -> Any:
        def method(*arguments: Any) -> int:
            if (name == "write" or not self._full) and self._fails():
                return _FULL if self._full else code
            return 0 if name == "sync" else original(*arguments)  # a test needs no data on the platter

        return method

    def _methods(self, address: int) -> Any:
        """Return a copy of a table of methods, some of which can fail."""
        if address not in self._tables:
            table = (c_void_p * _IO_METHODS_SIZE).from_buffer_copy(
                ctypes.string_at(address, ctypes.sizeof(c_void_p) * _IO_METHODS_SIZE)
            )
            methods = []
            for name, (position, kind, code) in _METHODS.items():
                methods.append(kind(self._replaced(name, kind(table[position]), code)))
                table[position] = ctypes.cast(methods[-1], c_void_p).value
            self._tables[address] = table, methods  # which C refers to
        return self._tables[address][0]

    @contextmanager
    def _mounted(self) -> Iterator[None]:
        """Files that SQLite opens inside of this context are on this disk. All are closed before it ends."""
        find = _library().sqlite3_vfs_find
        find.argtypes, find.restype = [c_char_p], POINTER(_Vfs)
        vfs = find(None).contents
        original = ctypes.cast(vfs.open, c_void_p).value
        open_file = _OPEN(original)

        def opening(vfs_: Any, name: Any, file: Any, flags: int, out: Any) -> int:
            if not self._full and self._fails():
                file[0] = None  # no methods: SQLite does not close it
                return _CANTOPEN
            code = open_file(vfs_, name, file, flags, out)
            if code == 0:
                file[0] = ctypes.cast(self._methods(file[0]), c_void_p).value
            return code

        vfs.open = replacement = _OPEN(opening)
        try:
            yield
        finally:
            vfs.open = open_file
            del replacement
