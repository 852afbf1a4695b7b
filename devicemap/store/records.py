"""What the journal of a folder of results says: its lines, and what is believed of them. Bytes in, values out.

The first line is the header. Each further line is a finished chunk, or the number of rows where a run got to the end.
Each is JSON, and ends with its own checksum. Later lines count more than earlier ones about the same rows.
"""

from __future__ import annotations

import bisect
import errno
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any

from devicemap.errors import JournalError, MissingRowsError
from devicemap.store.storage import checksum, disk_errors

JOURNAL = "journal.jsonl"
"""The name of the journal in its folder."""

START_ANEW = "Write to another directory, or delete this one to start anew"
"""What to do about a folder that is refused."""

_FORMAT = 1
_BEGINNING = b'{"devicemap journal": '


@dataclass(frozen=True)
class Header:
    """What the results in a folder are results of. All but `function` must be the same when the folder is used again."""

    results: Any
    """The nest of the results' specs, as `encoding.describe_nest` writes it."""

    inputs: Any
    """The nest of the data's specs, written the same way."""

    batched: bool
    """The option."""

    batch_size: int | str | None
    """The option."""

    chunk_rows: int | None
    """Rows of the first chunk, where the data decides that: a dataset of batches without `batch_size`."""

    seed: int | None
    """The option."""

    rows: int | None
    """How many rows the data has, `None` where nobody knew when the call began."""

    function: str
    """The name of the function, to tell people."""


@dataclass(frozen=True)
class Entry:
    """A chunk that the journal says is finished."""

    start: int
    """Global index of the first row."""

    stop: int
    """Global index after the last row."""

    size_bytes: int
    """The size of its file."""

    checksum: str
    """`storage.checksum` of its file."""

    inputs: str
    """`digests.RowDigest` of the rows that it was computed from."""

    @property
    def file(self) -> str:
        """The name of its file."""
        return f"rows-{self.start:012}-{self.stop:012}.npz"


@dataclass(frozen=True)
class Contents:
    """What a journal says."""

    header: Header | None
    """`None` where the run that created the journal died before it wrote anything."""

    entries: tuple[Entry, ...]
    """The finished chunks in the order of their rows; they do not overlap."""

    rows: int | None
    """How many rows there are in all, `None` where no run got to the end and the data did not tell."""

    ended: bool
    """Whether a run got to the end."""

    size_bytes: int
    """How long the journal is up to its last good line."""


def header_line(header: Header) -> bytes:
    """The first line of a journal."""
    return write_line({"devicemap journal": _FORMAT, **vars(header)})


def write_line(record: Mapping[str, Any]) -> bytes:
    """A record as a line of JSON whose last entry is the checksum of what stands before it."""
    body = json.dumps(record).encode()[:-1]
    return body + _tail(body) + b"\n"


def read_line(line: bytes) -> dict[str, Any] | None:
    """The record in a line without its end, `None` where that is not exactly what `write_line` made."""
    size = len(_tail(b""))
    body, tail = line[:-size], line[-size:]
    return json.loads(body + b"}") if tail == _tail(body) else None


def _tail(body: bytes) -> bytes:
    return b', "checksum": "' + checksum(body).encode() + b'"}'


def parse_journal(data: bytes, directory: Path) -> Contents:
    """What is believed of a journal's bytes.

    Raises:
        JournalError: it is not a journal of devicemap, its header is damaged, or it has another format.
    """
    begun = data.rstrip(b"\0")  # some file systems fill what was not synced before a power failure with zeros
    if b"\n" not in begun and (begun.startswith(_BEGINNING) or _BEGINNING.startswith(begun)):
        return Contents(None, (), None, False, 0)
    if not data.startswith(_BEGINNING):
        raise JournalError(f"{directory / JOURNAL} is not a journal of devicemap, or is damaged. {START_ANEW}")
    first, *lines = data.split(b"\n")[:-1]
    head = read_line(first)
    if head is None:
        raise JournalError(
            f"the first line of {directory / JOURNAL} is damaged, so nobody knows what the results beside it are "
            f"results of. {START_ANEW}"
        )
    if head.pop("devicemap journal") != _FORMAT:
        raise JournalError(
            f"{directory} was written by another version of devicemap. {START_ANEW}, or use that version"
        )
    header = Header(**head)
    records: list[dict[str, Any]] = []
    position = size_bytes = len(first) + 1
    for line in lines:
        position += len(line) + 1
        record = read_line(line)
        if record is not None:
            records.append(record)
            size_bytes = position
    entries: list[Entry] = []
    totals = [record["rows"] for record in records if "rows" in record]
    for record in reversed(records):
        if "rows" not in record:
            entry = Entry(**record)
            if missing_rows(entries, entry.start, entry.stop) == [(entry.start, entry.stop)]:
                insert_entry(entries, entry)  # else the chunk was found to be damaged, and later lines replace it
    return Contents(header, tuple(entries), totals[-1] if totals else header.rows, bool(totals), size_bytes)


def read_journal(directory: Path) -> Contents:
    """What the journal of a folder says, without a look at the chunks.

    Raises:
        JournalError: there is none, or it cannot be read.
    """
    with disk_errors(f"reading {directory / JOURNAL}", "Is this a directory that devicemap has written to?"):
        return parse_journal((directory / JOURNAL).read_bytes(), directory)


def read_chunk(directory: Path, entry: Entry) -> bytes:
    """The file of a chunk.

    Raises:
        MissingRowsError: it is not there, or not the one that the journal speaks of.
        JournalError: it cannot be read for another reason.
    """
    again = "Run write again with the same function and data: it computes them, and only them, again"
    rows = f"rows {entry.start} to {entry.stop - 1}"
    with disk_errors(f"reading {directory / entry.file}", "It holds " + rows):
        try:
            data = (directory / entry.file).read_bytes()
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.EIO):
                raise
            raise MissingRowsError(f"{rows} are missing: {error}. {again}") from error
    if len(data) != entry.size_bytes or checksum(data) != entry.checksum:
        raise MissingRowsError(f"{rows} are damaged: {directory / entry.file} is not what was written. {again}")
    return data


def insert_entry(entries: list[Entry], entry: Entry) -> None:
    """Put an entry at its place; none of its rows are in `entries`."""
    first, after_last = _overlapping(entries, entry.start, entry.stop)
    assert first == after_last
    entries.insert(first, entry)


def missing_rows(entries: Sequence[Entry], start: int, stop: int) -> list[tuple[int, int]]:
    """The `(start, stop)` of what is not finished of rows `start` to `stop - 1`; entries as in `Contents`.

    >>> missing_rows([Entry(2, 4, 0, "", ""), Entry(4, 6, 0, "", "")], 0, 8)
    [(0, 2), (6, 8)]
    """
    gaps = []
    first, last = _overlapping(entries, start, stop)
    for entry in entries[first:last]:
        if start < entry.start:
            gaps.append((start, entry.start))
        start = entry.stop
    if start < stop:
        gaps.append((start, stop))
    return gaps


def _overlapping(entries: Sequence[Entry], start: int, stop: int) -> tuple[int, int]:
    """The range of the entries that have some of the rows; empty and at their place where there are none."""
    first = bisect.bisect_right(entries, start, key=attrgetter("stop"))
    return first, bisect.bisect_left(entries, stop, key=attrgetter("start"))
