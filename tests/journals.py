"""Write, damage and check a folder of twelve rows in three chunks, in this process or another one. NumPy only."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import devicemap
from devicemap.store import segments
from devicemap.store.chunks import Layout
from devicemap.store.entries import Entry
from devicemap.store.header import Header
from devicemap.store.journal import Journal, open_journal
from devicemap.store.records import JOURNAL, read_journal
from devicemap.store.segments import SegmentReader, segment_name
from devicemap.store.storage import write_all

SPEC = {"dense": "int64", "shape": [None], "stored": "i8"}
FUNCTION = {"graph": "a digest", "parts": ["1 x Square"], "jit_compile": False}
HEADER = Header(
    results=SPEC,
    inputs=SPEC,
    batched=False,
    batch_size=4,
    chunk_rows=None,
    seed=None,
    rows=12,
    function=FUNCTION,
    name="f",
)
CHUNKS = [(0, 4), (4, 8), (8, 12)]


def squares(start: int, stop: int) -> dict[str, Any]:
    """The results of some rows."""
    return {"0.values": np.arange(start, stop) ** 2}


def append(journal: Journal, start: int, stop: int) -> None:
    """Write one chunk."""
    journal.append(start, stop, squares(start, stop), f"digest of {start}")


def write_missing(
    directory: Path, chunks: list[tuple[int, int]] = CHUNKS, finish: bool = True
) -> list[tuple[int, int]]:
    """Write what is missing of the chunks; returns what that was."""
    computed = []
    with open_journal(directory, HEADER) as journal:
        for start, stop in chunks:
            for gap in journal.missing(start, stop):
                append(journal, *gap)
                computed.append(gap)
        if finish:
            journal.finish(12)
    return computed


def check_whole(directory: Path, ranges: list[tuple[int, int]] = CHUNKS) -> None:
    """Check that all rows are stored with the right values, and that the folder holds no other files."""
    contents = read_journal(directory)
    assert contents.ended
    assert contents.rows == ranges[-1][1]
    assert [(entry.start, entry.stop) for entry in contents.entries] == ranges
    assert sorted(os.listdir(directory)) == files_of(directory)
    for entry in contents.entries:
        np.testing.assert_array_equal(read(directory, entry), np.arange(entry.start, entry.stop) ** 2)


def files_of(directory: Path) -> list[str]:
    """The files that a folder must hold: the journal, and the files of the chunks that it lists."""
    return sorted({segment_name(entry.file) for entry in read_journal(directory).entries} | {JOURNAL})


def place_of(directory: Path, chunk: int) -> tuple[Path, slice]:
    """The file and the range of bytes of a chunk."""
    entry = read_journal(directory).entries[chunk]
    return directory / segment_name(entry.file), slice(entry.offset, entry.offset + entry.size_bytes)


def flip(directory: Path, chunk: int, offset: int = 0) -> None:
    """Flip a bit of a chunk."""
    path, place = place_of(directory, chunk)
    data = bytearray(path.read_bytes())
    data[place.start + offset] ^= 1
    path.write_bytes(data)


@contextmanager
def full_disk(chunks: int) -> Iterator[None]:
    """Store this many chunks, and half of each later one: the disk is full then."""
    written: list[int] = []

    def write(descriptor: int, data: Any, offset: int) -> None:
        if len(written) >= chunks:
            os.pwrite(descriptor, data[: len(data) // 2], offset)
            raise OSError(errno.ENOSPC, "No space left on device")
        written.append(offset)
        write_all(descriptor, data, offset)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(segments, "write_all", write)
        yield


def read(directory: Path, entry: Entry) -> Any:
    """The values of a chunk."""
    with SegmentReader(directory, Layout(SPEC)) as reader:
        (arrays,) = reader.read(entry)
        return arrays["values"]


def _snapshot(directory: Path) -> Any:
    """What is in a folder; of what is no file or folder, that it is there."""
    paths = list(directory.rglob("*"))
    contents = {path: path.read_bytes() for path in paths if path.is_file() and not path.is_symlink()}
    return {path: (path.lstat().st_mtime_ns, contents.get(path)) for path in paths}


@contextmanager
def untouched(directory: Path) -> Iterator[None]:
    """Nothing in the folder changes inside of this context."""
    before = _snapshot(directory)
    try:
        yield
    finally:
        assert _snapshot(directory) == before


@pytest.fixture
def written(tmp_path: Path) -> Path:
    """A folder that holds all rows."""
    directory = tmp_path / "written"
    assert write_missing(directory) == CHUNKS
    return directory


_LIGHT = """
import os, sys, types
package = types.ModuleType("devicemap")  # its modules, without its __init__, which imports TensorFlow
package.__path__ = [sys.argv[1]]
sys.modules["devicemap"] = package
import numpy as np
from devicemap.store.journal import open_journal
from devicemap.store.header import Header
assert "tensorflow" not in sys.modules
def header(rows): return Header(**{**HEADER, "rows": rows})
def write(directory, rows):
    computed = 0
    with open_journal(directory, header(rows)) as journal:
        for start in range(0, rows, 4):
            for gap in journal.missing(start, start + 4):
                journal.append(*gap, {"0.values": np.arange(*gap) ** 2}, f"digest of {start}")
                computed += 1
        journal.finish(rows)
    return computed
"""


def run_alone(code: str, *arguments: Any) -> Any:
    """Run code in a process of its own that has the journal and no TensorFlow; returns what it printed, as JSON."""
    header = f"HEADER = {vars(HEADER)!r}\n"
    command = [sys.executable, "-c", header + _LIGHT + code, str(Path(devicemap.__file__).parent), *map(str, arguments)]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True, timeout=100).stdout)
