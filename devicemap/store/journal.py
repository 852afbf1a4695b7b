"""Results on disk, the writing side: a folder of chunks, and a journal that says which of them are finished.

    out/
      journal.jsonl         the header; a line per finished chunk; the number of rows, when all are there
      chunks-000000.bin     chunks, one after another, in the order in which they were finished
      chunks-000001.bin     those of the next run, or those after 64 MiB

What is believed: a line of the journal that has its checksum, and a chunk that has the size and checksum that its line says,
and fits the header. A chunk is written and synced before its line is written and synced. So a process that dies, or a disk
that is full, leaves at most a chunk without a line, and half a last line. Neither is believed; the next run takes away half a
line, and what stands in files behind the last chunk that is believed, before it writes.

Lines are only ever added, and later lines count more than earlier ones about the same rows. Opening a folder changes
nothing in it but creates the journal in an empty one, because that is the file that is locked: whoever finds that the
folder is about something else can still leave it as it was.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path

from devicemap.errors import JournalError, MissingRowsError
from devicemap.store.chunks import Array, Layout, pack_arrays
from devicemap.store.entries import Entry, insert_entry, missing_rows
from devicemap.store.header import Header, listed, other_call, other_function
from devicemap.store.records import JOURNAL, START_ANEW, Contents, header_line, parse_journal, write_line
from devicemap.store.segments import SEGMENT, SegmentReader, SegmentWriter, untold
from devicemap.store.storage import Lock, checksum, disk_errors, reader, sync_folder, truncate, write_all

_GO_ON = "All chunks that were finished before are kept: run again, it computes what is missing"


def open_journal(directory: str | os.PathLike[str], header: Header, trusted: bool = False) -> Journal:
    """Open a folder for writing: a new or empty one, or one that an earlier run of the same call has left.

    Every chunk that the journal says is finished is read once, and checked. Nothing is written yet.

    Args:
        directory: the folder.
        header: what is to be written there.
        trusted: whether results of another function that reads the same variables are taken for those of this one.

    Raises:
        JournalError: the folder holds something else, or results of another call, or is being written to.
    """
    path = Path(directory)
    with disk_errors(f"opening {path} to write results", "It must be a directory that can be written to and locked"):
        _refuse_foreign(path)
        path.mkdir(parents=True, exist_ok=True)
        try:
            lock = Lock(path / JOURNAL)
        except BlockingIOError as error:
            raise JournalError(
                f"{path} is being written to, by another call or another process. Wait until that has ended, or "
                "write to another directory"
            ) from error
        try:
            with reader(path / JOURNAL) as file:
                contents = _continued(path, parse_journal(file, path), header, trusted)
            with _reader_of(path, header) as segments:
                whole = [entry for entry in contents.entries if _is_whole(segments, entry)]
            return Journal(path, header, contents, whole, lock)
        except BaseException:
            lock.close()
            raise


class Journal:
    """A folder that is open for writing, and locked until `close`. Made by `open_journal`; thread-safe.

    Closing it while a thread is inside `append` is safe too: that chunk is either kept whole, or not at all.
    """

    def __init__(self, directory: Path, header: Header, contents: Contents, entries: list[Entry], file: Lock):
        self.directory = directory
        self.header = header
        self._rows = contents.rows
        self._ended = contents.ended
        self._entries = entries
        self._end = contents.size_bytes
        self._file = file
        self._segments = SegmentWriter(directory)
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

    def read(self) -> Iterator[list[dict[str, Array]]]:
        """The arrays of each leaf of the chunks that are finished, in the order of their rows.

        Raises:
            MissingRowsError, JournalError: one of them has been damaged meanwhile, or cannot be read.
        """
        with _reader_of(self.directory, self.header) as segments:
            for entry in self.entries:
                yield segments.read(entry)

    def append(self, start: int, stop: int, arrays: Mapping[str, Array], inputs: str) -> None:
        """Keep the results of rows `start` to `stop - 1`, which were missing. When this returns they are on the disk.

        Args:
            arrays: as `encoding.encode_leaves` makes them.
            inputs: the digest of the rows that they were computed from.

        Raises:
            JournalError: the disk failed (its `errno` says how), or the journal is closed.
        """
        data = pack_arrays(arrays)
        digest = checksum(data)
        with disk_errors(f"writing rows {start} to {stop - 1} to {self.directory}", _GO_ON), self._lock:
            assert missing_rows(self._entries, start, stop) == [(start, stop)]
            self._begin()
            file, offset = self._segments.append(data)
            entry = Entry(start, stop, file, offset, len(data), digest, inputs)
            self._add(write_line(entry))
            insert_entry(self._entries, entry)

    def finish(self, rows: int) -> None:
        """Say that all is done: `rows` rows, none of which is missing.

        Raises:
            JournalError: the disk failed, or the journal is closed.
        """
        with disk_errors(f"ending the journal in {self.directory}", _GO_ON), self._lock:
            assert not missing_rows(self._entries, 0, rows)
            self._begin()
            if not self._ended or self._rows != rows:
                self._add(write_line({"rows": rows}))
            self._ended, self._rows = True, rows

    def close(self) -> None:
        """Let others write to the folder. Closing twice does nothing, nor does it in a process that was forked meanwhile."""
        if self._file.descriptor is None:  # there, nobody may ever give back the mutex
            return
        with self._lock:
            self._segments.close()
            self._file.close()

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _begin(self) -> None:
        """Before the first write: take away what an interrupted run left, and write the header where there is none."""
        if self._file.descriptor is None:
            raise JournalError(f"the journal in {self.directory} is closed, and takes no more results")
        if self._begun:
            return
        for path, end in untold(self.directory, self._entries).items():
            if end:
                truncate(path, end)
            else:
                path.unlink()
        if not self._end:
            sync_folder(self.directory.absolute().parent)
            sync_folder(self.directory)
            self._add(header_line(self.header))
        self._begun = True

    def _add(self, line: bytes) -> None:
        """Add a line to the journal, in the place of what a failed attempt or a killed run has left there."""
        assert self._file.descriptor is not None
        write_all(self._file.descriptor, line, self._end)
        os.fsync(self._file.descriptor)
        self._end += len(line)


def _refuse_foreign(path: Path) -> None:
    """Raise where something else than a journal is in the way."""
    if not path.exists():
        return
    if not path.is_dir():
        raise JournalError(f"{path} is a file; expected a directory for results, a new or an empty one")
    names = sorted(os.listdir(path))
    if names and JOURNAL not in names:
        raise JournalError(
            f"{path} holds {listed(names)}, and no journal of devicemap. Write to a new or an empty directory"
        )


def _continued(path: Path, contents: Contents, header: Header, trusted: bool) -> Contents:
    """What a call can go on from; nothing, where the folder holds no results yet, of whatever call.

    Raises:
        JournalError: the folder holds results of another call.
    """
    anew = Contents(None, (), header.rows, False, 0)
    there = contents.header
    if there is None:
        others = sorted(name for name in os.listdir(path) if name != JOURNAL)
        if others:
            raise JournalError(f"{path} holds {listed(others)}, but the journal there has no beginning. {START_ANEW}")
        return anew
    found = other_call(there, header)
    what, advice = "another call", START_ANEW
    same_variables = there.function.get("variables") == header.function.get("variables")
    if not (found or (trusted and same_variables)):
        found = other_function(there.function, header.function)
        what = "another function" if same_variables else "another function or other variables"
        if same_variables and header.reducer is None:
            advice += "; if that makes no difference to results, give trust_function=True (--trust-function)"
    if not found:
        return contents
    if not (contents.entries or contents.ended or any(map(SEGMENT.fullmatch, os.listdir(path)))):
        return anew
    raise JournalError(f"{path} holds results of {what}, of {there.name!r:.100}: {'; '.join(found)}. {advice}")


def _reader_of(path: Path, header: Header) -> SegmentReader:
    return SegmentReader(path, Layout(header.results, states=header.reducer is not None))


def _is_whole(segments: SegmentReader, entry: Entry) -> bool:
    try:
        segments.read(entry)
    except MissingRowsError:
        return False
    return True
