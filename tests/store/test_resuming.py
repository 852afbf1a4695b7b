"""Data that a resumed run reads again: digests, refused changes, and the rows left to compute."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
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
from devicemap.store.digests import RowDigest, digest_ranges, digest_rows
from devicemap.store.header import Header
from devicemap.store.journal import Journal, open_journal
from devicemap.store.resume import Unfinished, check_rows, checked, unfinished

SPEC = {"dense": "int32", "shape": [None], "stored": "i4"}
HEADER = Header(SPEC, SPEC, False, "auto", None, None, None, {"graph": ""}, "f")

LEAVES = {
    "numbers": tf.reshape(tf.range(24), [8, 3]),
    "scalars": tf.range(8.0),
    "strings": tf.constant([b"", b"a", b"ab\0", b"\0", b"c", b"", b"a\0\0", b"b"]),
    "bfloat16": tf.cast(tf.range(8), tf.bfloat16),
    "ragged": tf.RaggedTensor.from_row_lengths(tf.range(9), [0, 3, 1, 0, 0, 2, 3, 0]),
    "ragged strings": tf.RaggedTensor.from_row_lengths(tf.strings.as_string(tf.range(9)), [0, 3, 1, 0, 0, 2, 3, 0]),
    "ragged twice": tf.ragged.constant([[[1], [2, 3]], [], [[]], [[4]], [], [[5, 6], []], [], [[7]]]),
    "sparse": tf.sparse.from_dense(np.arange(24).reshape(8, 3) % 3),
    "no elements": tf.zeros([8, 0]),
}


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from(sorted(LEAVES)), min_size=1, max_size=3), st.sets(st.integers(0, 8)))
def test_a_digest_does_not_depend_on_the_pieces(names: list[str], cuts: set[int]) -> None:
    leaves = [LEAVES[name] for name in names]
    digest = RowDigest()
    bounds = [0, *sorted(cuts), 8]
    for start, stop in pairwise(bounds):
        digest.update([take_rows(leaf, start, stop) for leaf in leaves])
    assert digest.hexdigest() == digest_rows(leaves)


@pytest.mark.parametrize("name", LEAVES)
def test_digests_of_many_ranges_are_those_of_each(name: str) -> None:
    """However many chunks a folder has, its data is encoded once, and not for each of them."""
    ranges = [(start, stop) for stop in range(9) for start in range(stop)]
    alone = [digest_rows([take_rows(LEAVES[name], *rows), LEAVES["scalars"][slice(*rows)]]) for rows in ranges]
    assert list(digest_ranges([LEAVES[name], LEAVES["scalars"]], ranges)) == alone


def test_a_digest_is_the_same_tomorrow() -> None:
    """It is written down: a change of it makes every folder that exists one of other data."""
    if sys.byteorder == "little":
        assert digest_rows([LEAVES["numbers"], LEAVES["strings"]]) == "0f4d91096fe9d2bbebd9dd84839ccea1"


def test_digests_differ() -> None:
    ragged = tf.RaggedTensor.from_row_lengths
    others = [
        tf.reshape(tf.range(24), [8, 3, 1]),
        tf.range(8),
        tf.range(8, dtype=tf.int64),
        tf.bitcast(tf.range(8), tf.float32),
        tf.constant([b"", b"a", b"ab", b"\0\0", b"c", b"", b"a\0\0", b"b"]),
        ragged(tf.range(9), [3, 0, 1, 0, 0, 2, 3, 0]),
        ragged(tf.range(9)[::-1], [0, 3, 1, 0, 0, 2, 3, 0]),
        tf.ragged.constant([[[1], [2, 3]], [], [], [[4]], [], [[5, 6], []], [], [[7]]]),
        tf.sparse.from_dense(np.arange(24).reshape(8, 3) % 4),
        tf.SparseTensor(LEAVES["sparse"].indices, LEAVES["sparse"].values, [8, 4]),
        tf.sparse.to_dense(LEAVES["sparse"]),
        tf.zeros([8, 0, 1]),
    ]
    digests = [digest_rows([leaf]) for leaf in [*LEAVES.values(), *others]]
    digests += [
        digest_rows([LEAVES["scalars"], LEAVES["strings"]]),
        digest_rows([LEAVES["strings"], LEAVES["scalars"]]),
    ]
    assert len(set(digests)) == len(digests) == len(LEAVES) + len(others) + 2


def test_the_order_of_rows_among_sparse_entries_does_not_matter() -> None:
    sparse = LEAVES["sparse"]
    rows = np.argsort(-sparse.indices.numpy()[:, 0], kind="stable")
    backwards = tf.SparseTensor(sparse.indices.numpy()[rows], sparse.values.numpy()[rows], sparse.dense_shape)
    assert digest_rows([backwards]) == digest_rows([sparse])


DATA = tf.range(20)


def _chunks(data: Any, sizes: Sequence[int], read: list[int] | None = None) -> Iterator[Chunk]:
    start = 0
    for size in sizes:
        if read is not None:
            read.append(start)
        yield Chunk(start, size, (data[start : start + size],))
        start += size
    assert start == len(data)


def _journal(directory: Path, finished: Sequence[tuple[int, int]], rows: int | None = None) -> Journal:
    journal = open_journal(directory, HEADER)
    for start, stop in finished:
        journal.append(start, stop, {"0.values": DATA[start:stop].numpy()}, digest_rows([DATA[start:stop]]))
    if rows is not None:
        journal.finish(rows)
    return journal


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_exactly_the_missing_rows_are_left(tmp_path_factory: pytest.TempPathFactory, data: Any) -> None:
    """Whatever was finished, and however the data is cut when it is read again."""

    def bounds() -> list[int]:
        return [0, *sorted(data.draw(st.sets(st.integers(1, 19)))), 20]

    first, again = bounds(), bounds()
    ranges = list(pairwise(first))
    finished = data.draw(st.lists(st.sampled_from(ranges), unique=True))
    with _journal(tmp_path_factory.mktemp("journal"), finished) as journal:
        check_rows(as_rows(DATA), journal)
        left = list(unfinished(checked(_chunks(DATA, np.diff(again).tolist()), journal), journal))
    rows = [row for chunk in left for row in range(chunk.start, chunk.start + chunk.count)]
    done = {row for start, stop in finished for row in range(start, stop)}
    assert rows == [row for row in range(20) if row not in done]
    for chunk in left:
        assert chunk.leaves[0].numpy().tolist() == list(range(chunk.start, chunk.start + chunk.count))
        assert int(count_rows(chunk.leaves[0])) == chunk.count


def test_chunks_that_are_missing_as_a_whole_are_handed_on(tmp_path: Path) -> None:
    chunks = list(_chunks(DATA, [5] * 4))
    with _journal(tmp_path, [(5, 10)]) as journal:
        left = list(unfinished(chunks, journal))
    assert [chunk.start for chunk in left] == [0, 10, 15]
    assert all(chunk.leaves is chunks[chunk.start // 5].leaves for chunk in left)


def test_data_is_not_cut_for_each_finished_chunk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cutting takes 0.07 ms, so 12 s for a folder of 160 000 chunks."""
    cuts: list[int] = []

    def counted(leaf: Any, start: int, stop: int) -> Any:
        cuts.append(start)
        return take_rows(leaf, start, stop)

    monkeypatch.setattr("devicemap.store.resume.take_rows", counted)
    with _journal(tmp_path, [(i, i + 1) for i in range(20)]) as journal:
        check_rows(as_rows(DATA), journal)
    assert cuts == [0]


def test_other_rows_are_refused_before_anything_runs(tmp_path: Path) -> None:
    message = r"holds results of other data: rows 5 to 9 were not the same .* delete this one to start anew"
    with _journal(tmp_path, [(5, 10), (15, 20)]) as journal:
        other = tf.tensor_scatter_nd_update(DATA, [[7]], [0])
        with pytest.raises(JournalError, match=message):
            check_rows(as_rows(other), journal)
        for sizes in [[5] * 4, [1] * 20, [20], [8, 12]]:
            read: list[int] = []
            left = unfinished(checked(_chunks(other, sizes, read), journal), journal)
            with pytest.raises(JournalError, match=message):
                next(left)
            assert max(read) < 10  # no further than the difference
        later = tf.tensor_scatter_nd_update(DATA, [[17]], [0])
        left = unfinished(checked(_chunks(later, [5] * 4), journal), journal)
        assert [next(left).start, next(left).start] == [0, 10]
        with pytest.raises(JournalError, match="rows 15 to 19 were not the same"):
            next(left)
        unfinished_rows = tf.tensor_scatter_nd_update(DATA, [[2], [12]], [0, 0])
        check_rows(as_rows(unfinished_rows), journal)
        left = unfinished(checked(_chunks(unfinished_rows, [5] * 4), journal), journal)
        assert [chunk.start for chunk in left] == [0, 10]


@pytest.mark.parametrize("rows", [0, 9])
def test_fewer_rows_are_refused(tmp_path: Path, rows: int) -> None:
    with _journal(tmp_path, [(5, 10)]) as journal:
        with pytest.raises(JournalError, match=f"other data: of at least 10 rows, and the data has {rows} now"):
            list(checked(_chunks(DATA[:rows], [1] * rows), journal))
        with pytest.raises(JournalError, match="rows 5 to 9 were not the same"):
            check_rows(as_rows(DATA[:rows]), journal)


def test_another_number_of_rows_is_refused(tmp_path: Path) -> None:
    with _journal(tmp_path, [(0, 10)], rows=10) as journal:
        with pytest.raises(JournalError, match="of 10 rows, and the data has at least 15 now"):
            list(unfinished(checked(_chunks(DATA, [5] * 4), journal), journal))
        assert list(unfinished(checked(_chunks(DATA[:10], [5] * 2), journal), journal)) == []


def test_a_new_folder_delays_no_chunk(tmp_path: Path) -> None:
    read: list[int] = []
    with _journal(tmp_path, []) as journal:
        left = unfinished(checked(_chunks(DATA, [5] * 4, read), journal), journal)
        assert next(left).start == 0
        assert read == [0]
        assert [chunk.start for chunk in left] == [5, 10, 15]


def test_finished_rows_are_skipped_in_large_pieces(tmp_path: Path) -> None:
    """A device that asks for few rows, as in a new call with batch_size="auto", does not read finished rows so slowly."""
    taken: list[int] = []

    class Counting(MemorySource):
        def take(self, rows: int) -> Chunk | None:
            taken.append(rows)
            return super().take(rows)

    finished = [(i, i + 1) for i in range(2, 1000)]
    with _journal(tmp_path, []) as journal:
        for start, stop in finished:
            journal.append(start, stop, {"0.values": np.zeros([1], np.int32)}, "")
        left = Unfinished(Counting(as_rows(tf.zeros([1010])), None), journal, compared=True)
        chunks, counts = [], []
        while (counts.append(left.rows_left()), chunk := left.take(1))[1] is not None:
            chunks.append((chunk.start, chunk.count))
    assert chunks == [(0, 1), (1, 1), *((start, 1) for start in range(1000, 1010))]
    assert counts == [*range(12, -1, -1)]
    assert len(taken) < 20
