"""Damaged and forged directories: each is refused with a `JournalError`, or its rows are right; nothing outside is touched."""

from __future__ import annotations

import json
import os
import random
import shutil
import sqlite3
import zlib
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from stored import NEST, ROWS, nest_of, query, ranges, untouched

import devicemap
from devicemap.data.rows import take_rows
from devicemap.errors import JournalError
from devicemap.store.database import DATABASE, LOCK, checksum

MAPPER = devicemap.DeviceMap(nest_of, batched=True, batch_size=4, devices=["CPU:1"])


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All kinds of leaves in three chunks."""
    directory = tmp_path_factory.mktemp("original")
    MAPPER.write(tf.range(ROWS), directory)
    return directory


@pytest.fixture
def written(original: Path, tmp_path: Path) -> Path:
    """A copy of the directory."""
    return Path(shutil.copytree(original, tmp_path / "written"))


def _parts(leaves: list[Any]) -> list[Any]:
    return [np.asarray(part) for part in tf.nest.flatten(leaves, expand_composites=True)]


EXPECTED = {
    rows: _parts([take_rows(leaf, *rows) for leaf in tf.nest.flatten(NEST)])
    for rows in [(0, 4), (4, 8), (8, ROWS), (0, ROWS)]
}


def _check_rows(actual: Any, start: int, stop: int) -> None:
    """The rows are right to the last bit."""
    for one, other in zip(_parts(tf.nest.flatten(actual)), EXPECTED[start, stop], strict=True):
        assert (one.dtype, one.shape, one.tolist()) == (other.dtype, other.shape, other.tolist())


# Links, pipes, other files and other tables


def _check_refused(message: str, written: Path) -> None:
    """Reading and writing are refused; no link is followed, no pipe blocks, and nothing is created or written."""
    for use in (devicemap.open_results, lambda path: MAPPER.write(tf.range(ROWS), path)):
        with untouched(written.parent), pytest.raises(JournalError, match=message):
            use(written)


REPLACEMENTS: dict[str, Callable[[Path, Path], object]] = {
    "link": lambda path, outside: (shutil.move(path, outside), path.symlink_to(outside)),
    "dangling link": lambda path, outside: (path.unlink(), path.symlink_to(outside)),
    "hard link": lambda path, outside: os.link(path, outside),
    "pipe": lambda path, outside: (path.unlink(), os.mkfifo(path)),
    "directory": lambda path, outside: (path.unlink(), path.mkdir()),
    "device": lambda path, outside: (path.unlink(), path.symlink_to("/dev/zero")),
}


@pytest.mark.parametrize("replacement", REPLACEMENTS)
@pytest.mark.parametrize("name", [DATABASE, f"{DATABASE}-journal", LOCK])
def test_what_is_not_a_regular_file(name: str, replacement: str, written: Path, tmp_path: Path) -> None:
    REPLACEMENTS[replacement](written / name, tmp_path / "outside")
    _check_refused(f"{name} is a link, not a regular file, or not from devicemap", written)


def test_a_link_to_the_directory_and_another_journal_mode_are_harmless(written: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(written)
    with untouched(written):
        _check_rows(MAPPER.write(tf.range(ROWS), tmp_path / "link").load(), 0, ROWS)
    query(written, "PRAGMA journal_mode=WAL")
    _check_rows(devicemap.open_results(written).load(), 0, ROWS)
    _check_rows(MAPPER.write(tf.range(ROWS), written).load(), 0, ROWS)
    assert sorted(os.listdir(written)) == [LOCK, DATABASE, f"{DATABASE}-journal"]


def test_other_files_and_tables(original: Path, tmp_path: Path) -> None:
    for i, name in enumerate([f"{DATABASE}-wal", f"{DATABASE}-shm", f"{LOCK}-journal", f"{LOCK}-wal", LOCK]):
        written = Path(shutil.copytree(original, tmp_path / str(i) / "out"))
        shutil.copy(written / DATABASE, written / name)
        _check_refused(f"{name} is .*not from devicemap", written)
    for statement in (
        "CREATE VIEW other AS SELECT 1",
        "CREATE TRIGGER other AFTER INSERT ON chunks BEGIN DELETE FROM header; END",
        "CREATE INDEX other ON chunks (stop)",
        "ALTER TABLE chunks ADD COLUMN other",
        "DROP TABLE parts",
    ):
        written = Path(shutil.copytree(original, tmp_path / statement / "out"))
        query(written, statement)
        _check_refused("not a database of devicemap", written)


def test_a_journal_that_names_a_file_to_delete(written: Path, tmp_path: Path) -> None:
    """SQLite deletes a second journal if no other journal names it."""
    (tmp_path / "victim").touch()
    victim, magic = str(tmp_path / "victim").encode(), bytes.fromhex("d9d505f920a163d7")
    numbers = [0, 0, 4, 512, 65536, 0x40000000 // 65536 + 1, len(victim), sum(victim)]
    *header, first, size, check = (number.to_bytes(4, "big") for number in numbers)
    record = first + victim + size + check + magic
    (written / f"{DATABASE}-journal").write_bytes((magic + b"".join(header)).ljust(512, b"\0") + record)
    _check_refused("names another file to delete", written)


# Random changes: bytes of the file, and rows of its tables, without and with new checksums


def _change_bytes(directory: Path, draw: random.Random) -> None:
    """Change a few bytes, mostly, or cut the file, or erase or repeat a block."""
    data = bytearray((directory / DATABASE).read_bytes())
    change, size, start = draw.randrange(6), draw.choice([512, 4096, 65536]), draw.randrange(len(data))
    if change == 0:
        del data[draw.choice([start, 2**16 * draw.randrange(5)]) :]
    elif change == 1:
        data[start : start + size] = bytes(len(data[start : start + size]))
    elif change == 2:
        one, other = (size * draw.randrange(len(data) // size) for _ in range(2))
        data[one : one + size] = data[other : other + size]
    else:
        used = np.flatnonzero(np.frombuffer(data, np.uint8))
        for _ in range(draw.randrange(1, 4)):
            place = int(draw.choice(used)) + draw.choice([0, 0, 1])
            data[min(place, len(data) - 1)] = draw.choice([0, 1, 127, 255, draw.randrange(256)])
    (directory / DATABASE).write_bytes(data)


NASTY: list[Any] = [None, "", "x", "[4]", "[2, 4]", "[[4]]", "[[4, 2]]", b"", b"x", 1e308]
NASTY += [-1, 0, 1, 3, 4, 5, 8, 12, 2**31, 2**48, 2**63 - 1]
COLUMNS = [("chunks", name) for name in ("start", "stop", "inputs", "shapes", "checksum", "first_part", "last_part")]
COLUMNS += [("parts", name) for name in ("id", "data")]
COLUMNS += [("header", name) for name in ("call", "rows", "checksum")]


def _change_an_entry(directory: Path, draw: random.Random) -> None:
    table, column = draw.choice(COLUMNS)
    one, other = (draw.choice(query(directory, f"SELECT rowid FROM {table}"))[0] for _ in range(2))
    change = draw.randrange(6)
    with suppress(sqlite3.IntegrityError):
        if change == 0:
            query(directory, f"DELETE FROM {table} WHERE rowid = ?", one)
        elif change == 1:
            copied = f"(SELECT {column} FROM {table} WHERE rowid = ?)"
            query(directory, f"UPDATE {table} SET {column} = {copied} WHERE rowid = ?", other, one)
        elif change == 2:
            query(directory, f"INSERT INTO {table} ({column}) VALUES (?)", draw.choice(NASTY))
        else:
            query(directory, f"UPDATE {table} SET {column} = ? WHERE rowid = ?", draw.choice(NASTY), one)


FORGED: list[Any] = [None, True, "", "x", "resource", "string", "int4", -1, 0, 1, 3, 2**31, 2**48, 2**63, 1e308]
FORGED += [float("nan"), [], [None], [[]], [None, -1], [0, 2**62], {}, {"dense": "int64"}, {"value": 1}, {"tuple": []}]
FORGED += [{"namedtuple": "a b", "fields": []}]


def _places(value: Any) -> list[tuple[Any, Any]]:
    """Every place in a nest of JSON, as a container and a key."""
    keys = list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else []
    return [place for key in keys for place in ((value, key), *_places(value[key]))]


def _forge_header(directory: Path, draw: random.Random) -> None:
    ((text, rows),) = query(directory, "SELECT call, rows FROM header")
    call = json.loads(text)
    container, key = draw.choice([*_places(call["results"]), (call, "results"), (call, "reducer")])
    container[key] = draw.choice(FORGED)
    rows = draw.choice([rows, rows, None, 0, 11, 13])
    text = json.dumps(call)
    query(directory, "UPDATE header SET call = ?, rows = ?, checksum = ?", text, rows, checksum(text, rows))


def _forge_chunk(directory: Path, draw: random.Random) -> None:
    """Change the bytes or shapes of the last chunk, and its number of rows."""
    columns = "start, stop, inputs, shapes, last_part"
    ((start, stop, inputs, text, part),) = query(directory, f"SELECT {columns} FROM chunks WHERE start = 8")
    ((data,),) = query(directory, "SELECT data FROM parts WHERE id = ?", part)
    changed, shapes = bytearray(data), json.loads(text)
    if draw.random() < 0.5:
        changed[draw.randrange(len(changed))] = draw.choice([0, 1, 2, 127, 255])
    else:
        size = draw.randrange(9)
        forged = [[size], [size, 2], [], [0, 2**40], [size, 1, 1], [-1], [-2, -2], [2**62, 4], ["x"], None, 4, [2.0]]
        container, key = draw.choice(_places(shapes))
        container[key] = draw.choice([*forged, size, size, size, -1])
        changed = draw.choice([changed, changed[: len(changed) // 2], changed + bytes(8 * size)])
    stop, text = draw.choice([stop, stop, 9, 11]), json.dumps(shapes)
    query(directory, "UPDATE parts SET data = ? WHERE id = ?", bytes(changed), part)
    check = checksum(start, stop, inputs, text, None, None, zlib.crc32(changed))
    query(directory, "UPDATE chunks SET stop = ?, shapes = ?, checksum = ? WHERE start = ?", stop, text, check, start)


def _check_fits(chunk: Any, structure: Any) -> None:
    rows = set()
    for leaf, spec in zip(tf.nest.flatten(chunk), tf.nest.flatten(structure), strict=True):
        rows.add(int(leaf.shape[0]))
        assert spec.shape.is_compatible_with(leaf.shape)
        assert tf.as_dtype(leaf.dtype if leaf.dtype != object else tf.string) == spec.dtype
        if isinstance(leaf, tf.SparseTensor):
            assert np.all((leaf.indices >= 0) & (leaf.indices < leaf.dense_shape))
        elif isinstance(leaf, tf.RaggedTensor):
            leaf.to_list()
    assert len(rows) <= 1


FORGERIES = [_forge_header, _forge_chunk]
MUTATIONS = [_change_bytes, _change_an_entry] * 2 + FORGERIES


@pytest.mark.parametrize("mutations", [300, pytest.param(1200, marks=pytest.mark.nightly)])
def test_damage_never_gives_a_wrong_row(mutations: int, original: Path, tmp_path: Path) -> None:
    """What can be read fits the description of the results, and is right unless its checksum was forged.

    So is what a later run completes.
    """
    draw, counts = random.Random(18), Counter[tuple[bool, str]]()
    directory = Path(shutil.copytree(original, tmp_path / "out"))
    for number in range(mutations):
        for name in (DATABASE, f"{DATABASE}-journal"):
            shutil.copy(original / name, directory)
        mutate = MUTATIONS[number % 6]
        mutate(directory, draw)
        forged = mutate in FORGERIES
        try:
            results = devicemap.open_results(directory)
            for chunk, (start, stop) in zip(results, ranges(directory)):
                _check_fits(chunk, results.structure) if forged else _check_rows(chunk, start, stop)
            for chunk in (results.load(), results[0:3], *(results.as_dataset() if forged else ())):
                _check_fits(chunk, results.structure)
            counts[forged, "read"] += 1
        except JournalError:
            counts[forged, "refused"] += 1
        if forged or number % 20 < 2:
            with suppress(JournalError):
                continued = MAPPER.write(tf.range(ROWS), directory)
                forged or _check_rows(continued.load(), 0, ROWS)
                counts[forged, "continued"] += 1
    assert len(counts) == 6
    assert min(counts.values()) > mutations / 100, counts


def test_a_damaged_failed_row(tmp_path: Path) -> None:
    fn = lambda row: tf.debugging.check_numerics(1 / (row - 5), "row 5")
    devicemap.DeviceMap(fn, devices=["CPU:1"], batch_size=4, on_error="skip").write(tf.range(12.0), tmp_path)
    query(tmp_path, "DELETE FROM chunks WHERE start = 6")
    (values,) = query(tmp_path, "SELECT inputs, shapes, device, error FROM chunks WHERE start = 5")
    right_checksum = f"stop = 7, checksum = {checksum(5, 7, *values, 0)}"  # but the row may cover no other row
    for change in ("error = 'another'", "device = 1", "error = NULL", "inputs = 'x'", "stop = 7", right_checksum):
        query(tmp_path, f"UPDATE chunks SET {change} WHERE start = 5")
        with pytest.raises(JournalError):
            devicemap.open_results(tmp_path)[:10]
        restored = "stop = 6, inputs = ?, shapes = ?, device = ?, error = ?"
        query(tmp_path, f"UPDATE chunks SET {restored} WHERE start = 5", *values)


def test_more_rows_than_memory(written: Path) -> None:
    """The last chunk pretends to have 2**47 rows."""
    ((text,),) = query(written, "SELECT call FROM header")
    query(written, "UPDATE header SET rows = ?, checksum = ?", 2**47, checksum(text, 2**47))
    query(written, "UPDATE chunks SET stop = ? WHERE start = 8", 2**47)
    with pytest.raises(JournalError, match=r"[Uu]nable to allocate|rows 8 to"):
        devicemap.open_results(written).load()
