"""Results on disk, the writing side: a folder of chunks, and a journal that says which of them are finished.

    out/
      journal.jsonl                            the header; a line per finished chunk; the number of rows, when all are there
      rows-000000000000-000000000032.npz       the results of rows 0 to 31
      rows-000000000032-000000000064.npz

What is believed: a line of the journal that has its checksum, and a chunk whose file has the size and checksum that its
line says. A chunk is written under another name, synced, renamed, and its folder synced, before its line is written and
synced. So a process that dies, or a disk that is full, leaves at most a file without a line, a temporary file, and half
a last line. None of them is believed, and the next run takes them away before it writes.

Lines are only ever added, and later lines count more than earlier ones about the same rows. Opening a folder changes
nothing in it but creates the journal in an empty one, because that is the file that is locked: whoever finds that the
folder is about something else can still leave it as it was.
"""

from __future__ import annotations

import contextlib
import os
import re
import threading
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np

from devicemap.errors import JournalError, MissingRowsError
from devicemap.store.records import (
    JOURNAL,
    START_ANEW,
    Contents,
    Entry,
    Header,
    header_line,
    insert_entry,
    missing_rows,
    parse_journal,
    read_chunk,
    write_line,
)
from devicemap.store.storage import (
    READ_AND_CREATE,
    checksum,
    disk_errors,
    lock,
    pack_arrays,
    sync_folder,
    write_all,
    write_synced,
)

_GO_ON = "All chunks that were finished before are kept: run write again, and it computes what is missing"
_OURS = re.compile(r"rows-\d{12,}-\d{12,}\.npz(\.\d+\.tmp)?")


def open_journal(directory: str | os.PathLike[str], header: Header) -> Journal:
    """Open a folder for writing: a new or empty one, or one that an earlier run of the same call has left.

    Every chunk that the journal says is finished is read once, and its checksum compared. Nothing is written yet.

    Raises:
        JournalError: the folder holds something else, or results of another call, or is being written to.
    """
    path = Path(directory)
    with disk_errors(f"opening {path} to write results", "It must be a directory that can be written to and locked"):
        _refuse_foreign(path)
        path.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path / JOURNAL, READ_AND_CREATE, 0o666)
        try:
            if not lock(descriptor):
                raise JournalError(
                    f"{path} is being written to, by another call or another process. Wait until that has ended, or "
                    "write to another directory"
                )
            contents = parse_journal((path / JOURNAL).read_bytes(), path)
            contents = _continued(path, contents, header)
            whole = [entry for entry in contents.entries if _is_whole(path, entry)]
            return Journal(path, header, contents, whole, descriptor)
        except BaseException:
            os.close(descriptor)
            raise


class Journal:
    """A folder that is open for writing, and locked until `close`. Made by `open_journal`; thread-safe.

    Closing it while a thread is inside `append` is safe too: that chunk is either kept whole, or not at all.
    """

    def __init__(self, directory: Path, header: Header, contents: Contents, entries: list[Entry], descriptor: int):
        self.directory = directory
        self.header = header
        self._rows = contents.rows
        self._ended = contents.ended
        self._entries = entries
        self._end = contents.size_bytes
        self._descriptor: int | None = descriptor
        self._lock = threading.Lock()
        self._begun = False

    @property
    def entries(self) -> tuple[Entry, ...]:
        """The chunks that are finished, in the order of their rows."""
        with self._lock:
            return tuple(self._entries)

    @property
    def rows(self) -> int | None:
        """How many rows there are in all, `None` where no run got to the end and the data did not tell."""
        return self._rows

    def missing(self, start: int, stop: int) -> list[tuple[int, int]]:
        """The `(start, stop)` of what is not finished of rows `start` to `stop - 1`."""
        with self._lock:
            return missing_rows(self._entries, start, stop)

    def append(self, start: int, stop: int, arrays: Mapping[str, np.ndarray[Any, Any]], inputs: str) -> None:
        """Keep the results of rows `start` to `stop - 1`, which were missing. When this returns they are on the disk.

        Args:
            arrays: as `encoding.encode_leaves` makes them.
            inputs: the digest of the rows that they were computed from.

        Raises:
            JournalError: the disk failed (its `errno` says how), or the journal is closed.
        """
        data = pack_arrays(arrays)
        entry = Entry(start, stop, len(data), checksum(data), inputs)
        temporary = self.directory / f"{entry.file}.{threading.get_ident()}.tmp"
        with disk_errors(f"writing rows {start} to {stop - 1} to {self.directory}", _GO_ON):
            self._begin()
            try:
                write_synced(temporary, data)
                with self._lock:
                    assert missing_rows(self._entries, start, stop) == [(start, stop)]
                    descriptor = self._open_descriptor()
                    os.replace(temporary, self.directory / entry.file)
                    sync_folder(self.directory)
                    self._add(descriptor, write_line(vars(entry)))
                    insert_entry(self._entries, entry)
            except BaseException:
                with contextlib.suppress(OSError):
                    temporary.unlink(missing_ok=True)
                raise

    def finish(self, rows: int) -> None:
        """Say that all is done: `rows` rows, none of which is missing.

        Raises:
            JournalError: the disk failed, or the journal is closed.
        """
        with disk_errors(f"ending the journal in {self.directory}", _GO_ON):
            self._begin()
            with self._lock:
                assert not missing_rows(self._entries, 0, rows)
                if not self._ended or self._rows != rows:
                    self._add(self._open_descriptor(), write_line({"rows": rows}))
                self._ended, self._rows = True, rows

    def close(self) -> None:
        """Let others write to the folder. Closing twice does nothing."""
        with self._lock:
            if self._descriptor is not None:
                os.close(self._descriptor)
                self._descriptor = None

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _begin(self) -> None:
        """Before the first write: take away what an interrupted run left, and write the header where there is none."""
        with self._lock:
            descriptor = self._open_descriptor()
            if self._begun:
                return
            kept = {entry.file for entry in self._entries}
            for name in os.listdir(self.directory):
                if _OURS.fullmatch(name) and name not in kept:
                    (self.directory / name).unlink()
            if not self._end:
                sync_folder(self.directory.absolute().parent)
                sync_folder(self.directory)
                self._add(descriptor, header_line(self.header))
            self._begun = True

    def _add(self, descriptor: int, line: bytes) -> None:
        """Add a line to the journal, in the place of what a failed attempt or a killed run has left there."""
        os.ftruncate(descriptor, self._end)
        os.lseek(descriptor, self._end, os.SEEK_SET)
        write_all(descriptor, line)
        os.fsync(descriptor)
        self._end += len(line)

    def _open_descriptor(self) -> int:
        if self._descriptor is None:
            raise JournalError(f"the journal in {self.directory} is closed, and takes no more results")
        return self._descriptor


def _refuse_foreign(path: Path) -> None:
    """Raise where something else than a journal is in the way."""
    if not path.exists():
        return
    if not path.is_dir():
        raise JournalError(f"{path} is a file; expected a directory for results, a new or an empty one")
    names = sorted(os.listdir(path))
    if names and JOURNAL not in names:
        raise JournalError(
            f"{path} holds {_some(names)}, and no journal of devicemap. Write to a new or an empty directory"
        )


def _continued(path: Path, contents: Contents, header: Header) -> Contents:
    """What a call can go on from; nothing, where the folder holds no results yet, of whatever call.

    Raises:
        JournalError: the folder holds results of another call.
    """
    anew = Contents(None, (), header.rows, False, 0)
    if contents.header is None:
        others = sorted(name for name in os.listdir(path) if name != JOURNAL)
        if others:
            raise JournalError(f"{path} holds {_some(others)}, but the journal there has no beginning. {START_ANEW}")
        return anew
    for name in (field.name for field in fields(Header)):
        there, here = getattr(contents.header, name), getattr(header, name)
        if there != here:
            if not (contents.entries or contents.ended or any(map(_OURS.fullmatch, os.listdir(path)))):
                return anew
            raise JournalError(
                f"{path} holds results of another call, of {contents.header.function!r}: {name} was {there!r} there, "
                f"and is {here!r} now. {START_ANEW}"
            )
    return contents


def _some(names: list[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more


def _is_whole(path: Path, entry: Entry) -> bool:
    try:
        read_chunk(path, entry)
    except MissingRowsError:
        return False
    return True
