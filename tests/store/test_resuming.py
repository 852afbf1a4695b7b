"""Data that a resumed run reads again: digests, refused changes, and the rows that are left to compute."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from devicemap.data.rows import as_rows, count_rows, take_rows
from devicemap.data.sources import Chunk, MemorySource
from devicemap.errors import JournalError
from devicemap.store.database import StoredChunk
from devicemap.store.encoding import digest
from devicemap.store.write import UnfinishedRows

FOLDER = Path("out")
DATA = tf.range(20)
LEAVES = {
    "numbers": tf.reshape(tf.range(24), [8, 3]),
    "strings": tf.constant([b"", b"a", b"ab\0", b"\0", b"c", b"", b"a\0\0", b"b"]),
    "bfloat16": tf.cast(tf.range(8), tf.bfloat16),
    "ragged": tf.RaggedTensor.from_row_lengths(tf.range(9), [0, 3, 1, 0, 0, 2, 3, 0]),
    "ragged strings": tf.RaggedTensor.from_row_lengths(tf.strings.as_string(tf.range(9)), [0, 3, 1, 0, 0, 2, 3, 0]),
    "ragged twice": tf.ragged.constant([[[1], [2, 3]], [], [[]], [[4]], [], [[5, 6], []], [], [[7]]]),
    "sparse": tf.sparse.from_dense(np.arange(24).reshape(8, 3) % 3),
    "no elements": tf.zeros([8, 0]),
}


def _stored(leaves: Sequence[Any], bounds: Sequence[tuple[int, int]]) -> list[StoredChunk]:
    """Chunks that were computed from some rows."""
    return [StoredChunk(a, b, digest([take_rows(leaf, a, b) for leaf in leaves])) for a, b in bounds]


class Reading:
    """A source of chunks, which records the rows where those that were read start."""

    specs, key, reads, chunk_rows = None, None, True, None

    def __init__(self, chunks: Iterable[tuple[int, Sequence[Any]]]):
        """From the first row of each chunk, and its leaves."""
        self._chunks = [Chunk(start, int(count_rows(leaves[0])), tuple(leaves)) for start, leaves in chunks]
        self.rows = sum(chunk.count for chunk in self._chunks)
        self.read: list[int] = []

    def take(self, rows: int) -> Chunk | None:
        if not self._chunks:
            return None
        self.read.append(self._chunks[0].start)
        return self._chunks.pop(0)

    def rows_left(self) -> int:
        return sum(chunk.count for chunk in self._chunks)

    def close(self) -> None:
        pass


def _cut(leaves: Sequence[Any], bounds: Sequence[tuple[int, int]]) -> Reading:
    return Reading((start, [take_rows(leaf, start, stop) for leaf in leaves]) for start, stop in bounds)


def _pairs(size: int, stop: int = 20) -> list[tuple[int, int]]:
    return [(start, min(start + size, stop)) for start in range(0, stop, size)]


def test_digests_differ() -> None:
    ragged = tf.RaggedTensor.from_row_lengths
    others = [
        tf.reshape(tf.range(24), [8, 3, 1]),
        tf.range(8),
        tf.constant([b"", b"a", b"ab", b"\0\0", b"c", b"", b"a\0\0", b"b"]),
        ragged(tf.range(9), [3, 0, 1, 0, 0, 2, 3, 0]),
        ragged(tf.range(9)[::-1], [0, 3, 1, 0, 0, 2, 3, 0]),
        tf.ragged.constant([[[1], [2, 3]], [], [], [[4]], [], [[5, 6], []], [], [[7]]]),
        tf.sparse.from_dense(np.arange(24).reshape(8, 3) % 4),
        tf.SparseTensor(LEAVES["sparse"].indices, LEAVES["sparse"].values, [8, 4]),
        tf.sparse.to_dense(LEAVES["sparse"]),
        tf.zeros([8, 0, 1]),
    ]
    numbers, strings = LEAVES["numbers"], LEAVES["strings"]
    nests = [*([leaf] for leaf in [*LEAVES.values(), *others]), [numbers, strings], [strings, numbers]]
    assert len({digest(leaves) for leaves in nests}) == len(nests)


@settings(max_examples=100, deadline=None)
@given(st.data(), st.lists(st.sampled_from(sorted(LEAVES)), min_size=1, max_size=3), st.integers(1, 8), st.booleans())
def test_what_is_left_is_what_is_missing(data: Any, names: list[str], size: int, in_memory: bool) -> None:
    """Whatever was finished, and however the data is cut when it is read again."""
    leaves = tuple(LEAVES[name] for name in names)
    cuts = list(pairwise([0, *sorted(data.draw(st.sets(st.integers(1, 7)))), 8]))
    stored = _stored(leaves, sorted(data.draw(st.lists(st.sampled_from(cuts), unique=True))))
    whole: Any = MemorySource(as_rows(leaves), size) if in_memory else _cut(leaves, _pairs(size, 8))
    source = UnfinishedRows(whole, stored, 8, FOLDER)
    done = {row for start, stop, *_ in stored for row in range(start, stop)}
    rows = []
    while (chunk := source.take(1)) is not None:
        expected = [take_rows(leaf, chunk.start, chunk.start + chunk.count) for leaf in leaves]
        assert digest(chunk.leaves) == digest(expected)
        rows += range(chunk.start, chunk.start + chunk.count)
    assert rows == [row for row in range(8) if row not in done]
    assert (source.rows, source.rows_read) == (len(rows), 8)


def test_rows_of_other_shapes_and_fewer_rows_are_refused() -> None:
    wider = Reading([(0, [tf.zeros([7, 2])]), (7, [tf.zeros([20, 3])])])
    fewer = _cut([DATA], _pairs(5, 19))
    for source, stored, message in (
        (wider, (5, 10), "rows 5 to 9 were not the same.*delete this one to start again"),
        (fewer, (15, 20), "of 20 rows or more, and the data has 19 now"),
    ):
        unfinished = UnfinishedRows(source, _stored([DATA], [stored]), 20, FOLDER)
        with pytest.raises(JournalError, match=f"out holds results of other data: {message}"):
            list(iter(lambda: unfinished.take(1), None))
