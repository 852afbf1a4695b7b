"""What the journal of a folder of results says: its lines, and what is believed of them. Bytes in, values out.

The first line is the header, a dict. Each further line is a finished chunk, as the list of the fields of its `Entry`, or the
number of rows, as a dict, where a run got to the end. Each is JSON, and ends with its own checksum, which tells damage, not
forgery: what is in a line is taken for what anybody may have written. Later lines count more than earlier ones about the
same rows.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from devicemap.errors import JournalError
from devicemap.store.entries import Entry, latest
from devicemap.store.header import Header
from devicemap.store.storage import checksum, disk_errors, reader

JOURNAL = "journal.jsonl"
"""The name of the journal in its folder."""

START_ANEW = "Write to another directory, or delete this one to start anew"
"""What to do about a folder that is refused."""

_FORMAT = 2
_BEGINNING = b'{"devicemap journal": '

_LONGEST_HEADER = 2**22
_LONGEST_LINE = 2**9
_MOST = 2**48
"""What no journal goes beyond: bytes of its first line and of others; rows, files, and bytes of one."""


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
    line = write_line({"devicemap journal": _FORMAT, **vars(header)})
    if len(line) > _LONGEST_HEADER:
        raise JournalError(f"what the results are results of takes {len(line)} bytes; at most {_LONGEST_HEADER} can be")
    return line


def write_line(record: Mapping[str, Any] | Sequence[Any]) -> bytes:
    """A record as a line of JSON whose last entry is the checksum of what stands before it."""
    body = json.dumps(record).encode()[:-1]
    return body + _tail(body) + b"\n"


def read_line(line: bytes) -> Any:
    """The record in a line without its end, `None` where that is not exactly what `write_line` made."""
    size = _TAIL_BYTES.get(line[:1], len(line))
    body, tail = line[:-size], line[-size:]
    if not body or tail != _tail(body):
        return None
    try:
        text = (body + tail[-1:]).decode()
        record, end = _decode(text)
    except (ValueError, RecursionError):
        return None
    return record if end == len(text) else None


def _tail(body: bytes) -> bytes:
    key, end = ('"checksum": ', "}") if body.startswith(b"{") else ("", "]")
    return f', {key}"{checksum(body)}"{end}'.encode()


_TAIL_BYTES = {start: len(_tail(start)) for start in (b"{", b"[")}
_decode = json.JSONDecoder().raw_decode  # json.loads takes twice as long for a line


def read_journal(directory: Path) -> Contents:
    """What the journal of a folder says, without a look at the chunks.

    Raises:
        JournalError: there is none, or it cannot be read.
    """
    path = directory / JOURNAL
    with disk_errors(f"reading {path}", "Is this a directory that devicemap has written to?"), reader(path) as file:
        return parse_journal(file, directory)


def parse_journal(file: BinaryIO, directory: Path) -> Contents:
    """What is believed of a journal, read from its start.

    Raises:
        JournalError: it is not a journal of devicemap, its header is damaged, or it has another format.
    """
    first = file.readline(_LONGEST_HEADER)
    if not first.endswith(b"\n"):
        begun = first.rstrip(b"\0")  # some file systems fill what was not synced before a power failure with zeros
        if begun.startswith(_BEGINNING) or _BEGINNING.startswith(begun):
            return Contents(None, (), None, False, 0)
    header = _read_header(first, directory)
    entries, totals, position = [], [], len(first)
    size_bytes = position
    while (line := file.readline(_LONGEST_LINE)).endswith(b"\n"):
        position += len(line)
        record = read_line(line[:-1])
        if _is_entry(record):
            if header.rows is not None and record[1] > header.rows:
                raise JournalError(
                    f"{directory} holds more rows than the {header.rows} that it says to hold. {START_ANEW}"
                )
            entries.append(Entry._make(record))
        elif isinstance(record, dict) and _is_count(record.get("rows")) and header.rows in (None, record["rows"]):
            totals.append(record["rows"])
        else:
            continue
        size_bytes = position
    kept = latest(entries)
    ended = bool(totals) and (not kept or kept[-1].stop <= totals[-1])
    return Contents(header, tuple(kept), totals[-1] if ended else header.rows, ended, size_bytes)


def _read_header(line: bytes, directory: Path) -> Header:
    """The header in the first line of a journal, of which nothing but the nests and the fingerprint is still unknown."""
    path = directory / JOURNAL
    if not line.startswith(_BEGINNING):
        raise JournalError(f"{path} is not a journal of devicemap, or is damaged. {START_ANEW}")
    head = read_line(line[:-1])
    if not isinstance(head, dict):
        raise JournalError(
            f"the first line of {path} is damaged, so nobody knows what the results beside it are results of. {START_ANEW}"
        )
    if head.pop("devicemap journal") != _FORMAT:
        raise JournalError(
            f"{directory} was written by another version of devicemap, in another format. {START_ANEW}, or use that version"
        )
    kinds: dict[str, Any] = {
        "results": dict, "inputs": dict, "batched": bool, "batch_size": int | str | None, "chunk_rows": int | None,
        "seed": int | None, "rows": int | None, "function": dict, "name": str,
        "reducer": list | None,
    }  # fmt: skip
    wrong = {*head} ^ {*kinds} or {name for name, kind in kinds.items() if not isinstance(head[name], kind)}
    if wrong or not (head["rows"] is None or _is_count(head["rows"])):
        which = ", ".join(sorted(wrong or {"rows"}))
        raise JournalError(f"the first line of {path} is none that devicemap writes, by its {which:.80}. {START_ANEW}")
    return Header(**head)


def _is_entry(record: Any) -> bool:
    if not (isinstance(record, list) and len(record) == len(Entry._fields)):
        return False
    start, stop, file, offset, size_bytes, its_checksum, inputs = record
    if not type(start) is type(stop) is type(file) is type(offset) is type(size_bytes) is int:
        return False
    if not (0 <= start < stop <= _MOST and 0 <= file <= _MOST and 0 <= offset <= _MOST and 0 <= size_bytes <= _MOST):
        return False
    return type(its_checksum) is type(inputs) is str


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value <= _MOST
