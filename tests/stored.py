"""Directories of results for tests: write, inspect, damage and compare them."""

from __future__ import annotations

import bisect
import re
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from devicemap import DeviceMap, open_results
from devicemap.data.rows import spec_of, take_rows
from devicemap.errors import JournalError, MissingRowsError
from devicemap.events import ChunkFinished, Event, RowFailed
from devicemap.store.database import DATABASE, Header, StoredChunk, open_for_writing
from devicemap.store.encoding import describe_nest, encode_leaves

DATA = np.arange(64)
ROWS = 12
DENSE = tf.reshape(tf.range(3.0 * ROWS) % 4.0, [ROWS, 3])
NEST = {
    "numbers": tf.reshape(tf.range(24.0), [ROWS, 2]),
    "flags": tf.range(ROWS) % 2 == 0,
    "halves": tf.cast(tf.range(ROWS), tf.bfloat16),
    "texts": tf.strings.as_string(tf.range(ROWS)),
    "ragged": tf.RaggedTensor.from_row_lengths(tf.range(18), [0, 1, 2, 3] * 3),
    "sparse": tf.sparse.from_dense(DENSE),
}


def nest_of(batch: Any) -> Any:
    """Return rows of `NEST`, which has all kinds of leaves, by their numbers."""
    found = {key: tf.gather(leaf, batch) for key, leaf in NEST.items() if key != "sparse"}
    return found | {"sparse": tf.sparse.from_dense(tf.gather(DENSE, batch))}


class ComputedRows(list[int]):
    """The rows that calls compute, failed ones included. `observe` is their `progress`."""

    def observe(self, event: Event) -> None:
        """Add the rows of a chunk that finished, or a row that failed."""
        if isinstance(event, ChunkFinished | RowFailed):
            self.extend(range(event.shard.start, event.shard.stop))


class Counted:
    """A mapper that records which rows it computes, and has chunks of 4 rows."""

    def __init__(self, fn: Callable[..., Any], data: Any = DATA, **options: Any):
        self.computed = ComputedRows()
        self.data = data
        observed = {"batch_size": 4, "progress": self.computed.observe, **options}
        self.mapper = DeviceMap(fn, devices=["CPU:1", "CPU:2"], **observed)

    def write(self, directory: Path, **options: Any) -> list[int]:
        """Write, check that the results are `3 * row + 1`, and return the rows that were computed for it."""
        self.computed.clear()
        results = self.mapper.write(self.data, directory, **options).load()
        np.testing.assert_array_equal(results, 3 * DATA[: len(results)] + 1)
        return sorted(self.computed)

    def reduce(self, reducer: Any, directory: Path | None = None) -> Any:
        """Reduce the rows."""
        self.computed.clear()
        return self.mapper.reduce(self.data, reducer, directory)


def query(directory: Path, statement: str, *values: Any) -> list[Any]:
    """Run SQL on a database; return its rows."""
    with closing(sqlite3.connect(directory / DATABASE)) as connection, connection:
        connection.execute("PRAGMA synchronous=OFF")
        return connection.execute(statement, values).fetchall()


def ranges(directory: Path) -> list[tuple[int, int]]:
    """The `(start, stop)` of the chunks that are stored."""
    return query(directory, "SELECT start, stop FROM chunks ORDER BY start")


def rows_of(directory: Path) -> set[int]:
    """The rows that are stored."""
    return {row for start, stop in ranges(directory) for row in range(start, stop)}


def read_rows(directory: Path) -> dict[int, Any]:
    """What a reader gets for each row of the data, read by itself: its result, or its error. Damaged rows are left out."""
    try:
        results = open_results(directory)
    except JournalError as error:
        if re.search("holds no results yet|FileNotFoundError|unable to open", str(error)):
            return {}
        raise
    found: dict[int, Any] = {failed.row: failed.error for failed in results.failed_rows}
    failed = sorted(found)
    for row in sorted(rows_of(directory) - found.keys()):
        result = row - bisect.bisect(failed, row)
        with suppress(MissingRowsError):
            found[row] = results[result : result + 1][0]
    return found


def damage(directory: Path, start: int) -> list[int]:
    """Flip a bit of the chunk that starts with a row; return the rows of the chunk."""
    ((stop, part),) = query(directory, "SELECT stop, last_part FROM chunks WHERE start = ?", start)
    ((data,),) = query(directory, "SELECT data FROM parts WHERE id = ?", part)
    query(directory, "UPDATE parts SET data = ? WHERE id = ?", bytes([data[0] ^ 1]) + data[1:], part)
    return list(range(start, stop))


@contextmanager
def untouched(directory: Path) -> Iterator[None]:
    """Nothing in the directory changes inside of this context."""

    def snapshot() -> Any:
        paths = list(directory.rglob("*"))
        contents = {path: path.read_bytes() for path in paths if path.is_file() and not path.is_symlink()}
        return {path: (path.lstat().st_mtime_ns, contents.get(path)) for path in paths}

    before = snapshot()
    yield
    assert snapshot() == before


def write_chunks(directory: Path, specs: Any, chunks: Sequence[tuple[int, int, Any]], rows: int | None) -> None:
    """Store `(start, stop, leaves)`, in this order, with a number of rows in the header, as a run that did not finish."""
    with open_for_writing(directory) as writer:
        header = Header({"results": describe_nest(specs), "reducer": None}, rows)
        for start, stop, leaves in chunks:
            writer.put(header, (StoredChunk(start, stop, ""), encode_leaves(leaves)))


def write_nest(directory: Path, nest: Any, sizes: Sequence[int]) -> None:
    """Store a nest of tensors in chunks of `sizes` rows, the last one first."""
    leaves, stops = tf.nest.flatten(nest), np.cumsum(sizes).tolist()
    chunks = [(a, b, [take_rows(leaf, a, b) for leaf in leaves]) for a, b in zip([0, *stops], stops)]
    specs = tf.nest.map_structure(spec_of, nest)
    write_chunks(directory, specs, chunks[::-1], sum(sizes))
    if not chunks:
        with open_for_writing(directory) as writer:
            writer.put(Header({"results": describe_nest(specs), "reducer": None}, 0))
