"""Forged folders with valid checksums: what is not a folder of results raises a `JournalError`, and does no harm."""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from journals import CHUNKS, HEADER, check_whole, untouched, write_missing
from journals import written as written

import devicemap
from devicemap.data.rows import count_rows, spec_of, take_rows
from devicemap.errors import JournalError
from devicemap.store.encoding import describe_nest, encode_leaves
from devicemap.store.header import Header
from devicemap.store.journal import open_journal
from devicemap.store.records import JOURNAL, read_journal, write_line
from devicemap.store.segments import segment_name
from devicemap.store.storage import checksum

SEGMENT = segment_name(0)

# Links, pipes and folders in place of files


def _link(path: Path, outside: Path) -> None:
    shutil.move(path, outside)
    path.symlink_to(outside)


def _dangling_link(path: Path, outside: Path) -> None:
    path.unlink()
    path.symlink_to(outside)


def _hard_link(path: Path, outside: Path) -> None:
    os.link(path, outside)


def _pipe(path: Path, outside: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def _folder(path: Path, outside: Path) -> None:
    path.unlink()
    path.mkdir()


def _endless(path: Path, outside: Path) -> None:
    path.unlink()
    path.symlink_to("/dev/zero")


FILES: list[Callable[[Path, Path], None]] = [_link, _dangling_link, _pipe, _folder, _endless]


@pytest.mark.parametrize("replace", [*FILES, _hard_link])
def test_a_journal_that_is_no_file(tmp_path: Path, replace: Callable[[Path, Path], None]) -> None:
    """No link is followed, no pipe blocks, and nothing is created or written. A hard link may be read."""
    directory, outside = tmp_path / "written", tmp_path / "outside"
    write_missing(directory)
    replace(directory / JOURNAL, outside)
    with untouched(tmp_path):
        with pytest.raises(JournalError):
            write_missing(directory)
        if replace is not _hard_link:
            with pytest.raises(JournalError):
                read_journal(directory)


@pytest.mark.parametrize("replace", FILES)
def test_chunks_in_what_is_no_file(written: Path, tmp_path: Path, replace: Callable[[Path, Path], None]) -> None:
    replace(written / SEGMENT, tmp_path / "outside")
    with untouched(written), pytest.raises(JournalError):
        write_missing(written)
    with pytest.raises(JournalError):
        devicemap.open_results(written).load()


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.symlink_to("/dev/full"), Path.touch])
def test_a_file_in_the_place_of_new_chunks(written: Path, make: Callable[[Path], Any]) -> None:
    """A run creates its own files, and does not write to existing ones."""
    lines = (written / JOURNAL).read_bytes().splitlines(keepends=True)
    (written / JOURNAL).write_bytes(b"".join(lines[:2]))
    make(written / segment_name(1))
    assert write_missing(written) == CHUNKS[1:]
    check_whole(written)


# Invalid sizes


def _forge(directory: Path, change: Callable[[list[Any]], None]) -> None:
    """Change the lines of the journal, as JSON, and give them valid checksums."""
    records = [json.loads(line) for line in (directory / JOURNAL).read_text().splitlines()]
    for i, record in enumerate(records):
        records[i] = record[:-1] if isinstance(record, list) else {k: v for k, v in record.items() if k != "checksum"}
    change(records)
    (directory / JOURNAL).write_bytes(b"".join(map(write_line, records)))


def _rewrite(directory: Path, line: int, data: bytes) -> None:
    """Append other bytes to the file, for the chunk of a line."""
    offset = (directory / SEGMENT).stat().st_size
    with open(directory / SEGMENT, "ab") as file:
        file.write(data)

    def change(records: list[Any]) -> None:
        records[line][3:6] = [offset, len(data), checksum(data)]

    _forge(directory, change)


@pytest.mark.parametrize("rows", [1, 5, 2**48 - 8])
def test_chunks_of_another_number_of_rows(written: Path, rows: int) -> None:
    """One row is not broadcast to ten, and no memory is allocated for 2**48 rows."""

    def change(records: list[Any]) -> None:
        records[0]["rows"] = records[-1]["rows"] = records[3][1] = 8 + rows

    _forge(written, change)
    results = devicemap.open_results(written)
    for read in (results.load, lambda: [*iter(results)]):
        with pytest.raises(JournalError, match=r"rows 8 to|allocate"):
            read()


@pytest.mark.parametrize("rows", [0, 4])
@pytest.mark.parametrize("header_rows", [True, False], ids=["in the header", "at the end"])
@pytest.mark.parametrize("lines", ["kept", "gone"])
def test_fewer_rows_than_there_are(written: Path, rows: int, header_rows: bool, lines: str) -> None:
    """A smaller number of rows does not hide chunks, with or without their lines in the journal."""

    def change(records: list[Any]) -> None:
        records[0]["rows"] = rows if header_rows else None
        records[-1]["rows"] = rows
        if lines == "gone":
            del records[1 + rows // 4 : -1]

    _forge(written, change)
    with pytest.raises(JournalError):
        devicemap.open_results(written).load()


def test_a_file_with_a_hole_is_not_read(written: Path) -> None:
    """The header says how large a chunk is: a larger one is not read."""
    os.truncate(written / SEGMENT, 2**40)
    _forge(written, lambda records: records[1].__setitem__(4, 2**40))
    assert write_missing(written) == [(0, 4)]
    check_whole(written)


def test_an_endless_journal_is_not_read(written: Path) -> None:
    with open(written / JOURNAL, "ab") as file:
        file.truncate(2**40)
    check_whole(written)
    (written / JOURNAL).unlink()
    (written / JOURNAL).touch()
    os.truncate(written / JOURNAL, 2**40)
    with pytest.raises(JournalError):
        write_missing(written)


# Random changes

NEST = {
    "numbers": tf.reshape(tf.range(24.0), [12, 2]),
    "flags": tf.range(12) % 2 == 0,
    "halves": tf.cast(tf.range(12), tf.bfloat16),
    "texts": tf.strings.as_string(tf.range(12)),
    "ragged": tf.RaggedTensor.from_row_lengths(tf.range(18), [0, 1, 2, 3] * 3),
    "sparse": tf.sparse.from_dense(tf.eye(12, 3)),
}
NASTY: list[Any] = [None, True, -1, 0, 1, 3, 2**31, 2**48, 2**63, 2**64, 1e308, float("nan")]
NASTY += ["", "x", "resource", "string", "float64", "int4", [], [None], [[]], [None, -1], [0, 2**62]]
NASTY += [{}, {"dense": "int64"}, {"value": 1}, {"tuple": []}, {"namedtuple": "a b", "fields": []}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write three chunks of all kinds of leaves."""
    directory = tmp_path_factory.mktemp("folder")
    with open_journal(directory, _header()) as journal:
        for start, stop in CHUNKS:
            leaves = [take_rows(leaf, start, stop) for leaf in tf.nest.flatten(NEST)]
            journal.append(start, stop, encode_leaves(leaves), "")
        journal.finish(12)
    return directory


def _header() -> Header:
    return Header(**{**vars(HEADER), "results": describe_nest(tf.nest.map_structure(spec_of, NEST))})


def _places(value: Any) -> list[tuple[Any, Any]]:
    """List every place in a nest of JSON, as a container and a key."""
    keys = list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else []
    return [place for key in keys for place in ((value, key), *_places(value[key]))]


def _mutate(directory: Path, draw: random.Random) -> None:
    """Change a folder as an author of the format could."""

    def change_value(records: list[Any]) -> None:
        container, key = draw.choice(_places(records[draw.choice([0, 0, draw.randrange(len(records))])]))
        container[key] = draw.choice([*NASTY, draw.randrange(-9, 99)])

    def change_lines(records: list[Any]) -> None:
        i, j = draw.randrange(1, len(records)), draw.randrange(len(records))
        records[i:i] = draw.choice([[records[j]], [{"rows": draw.choice(NASTY)}], [[0] * draw.randrange(9)]])

    def change_bytes(path: Path, start: int, stop: int) -> bytes:
        data = bytearray(path.read_bytes()[start:stop])
        for _ in range(draw.randrange(1, 4)):
            data[draw.randrange(len(data))] = draw.choice([0, 1, 127, 255, draw.randrange(256), *b"[]{}0,9"])
        return bytes(data[: draw.choice([len(data), len(data), draw.randrange(len(data))])])

    which = draw.randrange(5)
    if which == 0:
        _forge(directory, change_lines)
    elif which <= 2:
        _forge(directory, change_value)
    elif which == 3:
        (directory / JOURNAL).write_bytes(change_bytes(directory / JOURNAL, 0, 2**20))
    else:
        line = draw.randrange(3)
        entry = read_journal(directory).entries[line]
        first = draw.choice([entry.size_bytes, 60])  # its shapes, or all of it
        start, stop = entry.offset, entry.offset + entry.size_bytes
        changed = change_bytes(directory / SEGMENT, start, start + first)
        _rewrite(directory, 1 + line, changed + (directory / SEGMENT).read_bytes()[start + first : stop])


def test_many_forged_folders(folder: Path, tmp_path: Path) -> None:
    """Each folder is refused, or its contents fit the structure that it declares."""
    draw, count = random.Random(18), 200
    read, refused = 0, 0
    for i in range(count):
        directory = tmp_path / str(i)
        shutil.copytree(folder, directory)
        _mutate(directory, draw)
        try:
            results = devicemap.open_results(directory)
            for chunk in results:
                _check_chunk(chunk, results)
            tf.nest.map_structure(np.shape, results[0:3])
            loaded = results.load()
            if read % 9 == 0:
                rows = sum(int(count_rows(tf.nest.flatten(chunk)[0])) for chunk in results.as_dataset())
                assert rows == len(results), loaded
            read += 1
        except JournalError:
            refused += 1
        try:
            with open_journal(directory, _header()) as journal:
                journal.missing(0, 12)
        except JournalError:
            pass
        shutil.rmtree(directory)
    assert read > count / 20
    assert refused > count / 2


def _check_chunk(chunk: Any, results: Any) -> None:
    rows = {
        int(count_rows(tf.constant(leaf) if isinstance(leaf, np.ndarray) else leaf)) for leaf in tf.nest.flatten(chunk)
    }
    assert len(rows) <= 1
    for leaf, spec in zip(tf.nest.flatten(chunk), tf.nest.flatten(results.structure)):
        assert spec.shape.is_compatible_with(leaf.shape)
        assert tf.as_dtype(leaf.dtype if leaf.dtype != object else tf.string) == spec.dtype
        if isinstance(leaf, tf.SparseTensor):
            tf.sparse.to_dense(tf.sparse.reorder(leaf), validate_indices=False)
        elif isinstance(leaf, tf.RaggedTensor):
            leaf.to_list()
