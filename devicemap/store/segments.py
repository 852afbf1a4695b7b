"""The files that chunks share: `chunks-000000.bin` and so on, each written once, from its start on, by one run.

Nothing is ever written over a chunk that is finished, nor behind those of an earlier run: a run makes files of its own.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterable
from io import BufferedReader
from pathlib import Path

from devicemap.errors import JournalError, MissingRowsError
from devicemap.store.chunks import Array, Layout
from devicemap.store.entries import Entry
from devicemap.store.storage import CREATE, checksum, open_file, reader, sync_folder, write_all

SEGMENT = re.compile(r"chunks-(\d{6,})\.bin")
"""The names of the files."""

_FULL_BYTES = 2**26
"""A file of this size, and more, takes no further chunk: it is the unit in which a folder is copied, and space given back."""


def segment_name(number: int) -> str:
    """The name of a file."""
    return f"chunks-{number:06}.bin"


def untold(directory: Path, entries: Iterable[Entry]) -> dict[Path, int]:
    """The files that go on behind the last of these chunks in them: where that ends, or 0 where none of them is in it."""
    ends: dict[int, int] = {}
    for entry in entries:
        ends[entry.file] = max(ends.get(entry.file, 0), entry.offset + entry.size_bytes)
    by_name = {segment_name(number): end for number, end in ends.items()}
    there = [path for path in directory.iterdir() if SEGMENT.fullmatch(path.name)]
    found = {path: by_name.get(path.name, 0) for path in there}
    return {path: end for path, end in found.items() if not end or path.lstat().st_size > end}


class SegmentWriter:
    """Writes chunks one after another, to new files. Not for use by two threads at once."""

    def __init__(self, directory: Path):
        self._directory = directory
        self._number = -1
        self._descriptor: int | None = None
        self._end = 0

    def append(self, data: bytes) -> tuple[int, int]:
        """Write a chunk; when this returns it is on the disk. Returns the number of its file, and where it begins there."""
        if self._descriptor is None or self._end >= _FULL_BYTES:
            self._begin()
        assert self._descriptor is not None
        write_all(self._descriptor, data, self._end)
        os.fsync(self._descriptor)
        start, self._end = self._end, self._end + len(data)
        return self._number, start

    def close(self) -> None:
        """Closing twice does nothing."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)

    def _begin(self) -> None:
        self.close()
        there = [int(match[1]) for match in map(SEGMENT.fullmatch, os.listdir(self._directory)) if match]
        number = max(there, default=-1) + 1
        path = self._directory / segment_name(number)
        descriptor = open_file(path, CREATE)
        try:
            sync_folder(self._directory)
        except BaseException:
            os.close(descriptor)
            path.unlink(missing_ok=True)
            raise
        self._number, self._descriptor, self._end = number, descriptor, 0


class SegmentReader:
    """Reads chunks, and believes none that is not the one of its journal and its header; a context. Not thread-safe."""

    def __init__(self, directory: Path, layout: Layout):
        self._directory = directory
        self._layout = layout
        self._file: BufferedReader | None = None  # the one that was read from last
        self._number = -1
        self._file_bytes = 0

    def read(self, entry: Entry) -> list[dict[str, Array]]:
        """The arrays of each leaf.

        Raises:
            MissingRowsError: its file is not there, or does not hold what the journal and the header say.
            JournalError: it cannot be read for another reason, or is no file.
        """
        try:
            return self._layout.unpack(self._bytes(entry), entry.stop - entry.start)
        except (OSError, ValueError) as error:
            raise self._explained(entry, error) from error

    def close(self) -> None:
        """Close the file that was read from last. Closing twice does nothing."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def __enter__(self) -> SegmentReader:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _bytes(self, entry: Entry) -> bytearray:
        """What stands in the place of the chunk. Raises `ValueError` where that is not what was written there."""
        if self._file is None or self._number != entry.file:
            self.close()
            self._file = reader(self._directory / segment_name(entry.file))
            self._number, self._file_bytes = entry.file, os.fstat(self._file.fileno()).st_size
        if entry.offset + entry.size_bytes > self._file_bytes:
            raise ValueError("it ends too early")
        if not self._layout.allows(entry.stop - entry.start, entry.size_bytes):
            raise ValueError(f"{entry.size_bytes} bytes cannot be so many rows")
        data = bytearray(entry.size_bytes)
        self._file.seek(entry.offset)
        if self._file.readinto(data) != len(data) or checksum(data) != entry.checksum:
            raise ValueError("it is not what was written")
        return data

    def _explained(self, entry: Entry, error: OSError | ValueError) -> OSError:
        rows, path = f"rows {entry.start} to {entry.stop - 1}", self._directory / segment_name(entry.file)
        again = "Run again with the same function and data: it computes them, and only them, again"
        if isinstance(error, ValueError):
            return MissingRowsError(f"{rows} are damaged: {path}: {error}. {again}")
        if isinstance(error, JournalError):
            return error
        if error.errno in (errno.ENOENT, errno.EIO):
            return MissingRowsError(f"{rows} are missing: {error}. {again}")
        explained = JournalError(f"reading {rows} from {path} failed: {type(error).__name__}: {error}")
        explained.errno = error.errno
        return explained
