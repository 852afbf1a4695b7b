"""Read results from disk: every kind of leaf, whole and in slices; missing and damaged rows are errors."""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays
from stored import damage, query, write_chunks, write_nest

from devicemap.data.rows import count_rows, spec_of, take_rows
from devicemap.errors import JournalError, MissingRowsError
from devicemap.store.results import Results, open_results

NUMBERS = ["float16", "float32", "float64", "int8", "int32", "int64", "uint8", "uint64", "bool"]
NUMBERS += ["complex64", "complex128"]
Point = namedtuple("Point", "x y")


def _check_same(actual: Any, expected: Any) -> None:
    """Compare leaves to the last bit. Results are NumPy arrays where `expected` is dense."""
    composite = isinstance(expected, tf.RaggedTensor | tf.SparseTensor)
    assert isinstance(actual, type(expected) if composite else np.ndarray)
    assert not composite or spec_of(actual) == spec_of(expected)
    for one, other in zip(*(tf.nest.flatten(leaf, expand_composites=True) for leaf in (actual, expected)), strict=True):
        one, other = np.asarray(one), np.asarray(other)
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        assert one.tolist() == other.tolist() if one.dtype == object else one.tobytes() == other.tobytes()


strings = st.binary(max_size=4) | st.sampled_from([b"", b"\0", b"a\0\0", b"\0a", "ä".encode()])
shapes = array_shapes(min_dims=1, max_dims=3, min_side=0, max_side=6)
numbers = st.sampled_from(NUMBERS).flatmap(lambda dtype: arrays(dtype, shapes)).map(tf.constant)
texts = arrays(object, shapes, elements=strings).map(lambda values: tf.constant(values, tf.string))
halves = arrays("uint16", shapes).map(lambda bits: tf.bitcast(bits, tf.bfloat16))


def _ragged(rows: list[list[int]], dtype: str, inner: list[int], splits: str, deeper: bool) -> Any:
    shape = [sum(map(len, rows)), *inner]
    values = tf.fill(shape, b"a\0") if dtype == "string" else tf.cast(tf.random.stateless_normal(shape, [0, 1]), dtype)
    ragged = tf.RaggedTensor.from_row_lengths(values, tf.constant([len(row) for row in rows], splits))
    if deeper:  # each row is one row of rows
        ragged = tf.RaggedTensor.from_row_splits(ragged, tf.range(len(rows) + 1, dtype=splits))
    return ragged


raggeds = st.builds(
    _ragged,
    st.lists(st.lists(st.just(0), max_size=3), max_size=6),
    st.sampled_from(["int32", "float64", "complex64", "string", "bool"]),
    st.lists(st.integers(0, 2), max_size=1),
    st.sampled_from(["int32", "int64"]),
    st.booleans(),
)
sparses = arrays("int64", array_shapes(min_dims=2, max_dims=2, min_side=0), elements=st.integers(0, 2)).map(
    tf.sparse.from_dense
)
leaves = numbers | halves | texts | raggeds | sparses


@settings(max_examples=60, deadline=None)
@given(leaf=leaves, data=st.data())
def test_any_part_of_any_chunks(tmp_path_factory: pytest.TempPathFactory, leaf: Any, data: Any) -> None:
    rows = int(count_rows(leaf))
    cuts = sorted(data.draw(st.sets(st.integers(1, rows - 1)))) if rows > 1 else []
    sizes = np.diff([0, *cuts, rows]).tolist() if rows else []
    directory = tmp_path_factory.mktemp("results")
    write_nest(directory, {"it": leaf}, sizes)
    results = open_results(directory)
    assert len(results) == rows
    assert results.complete
    _check_same(results.load()["it"], leaf)
    start, stop = sorted(data.draw(st.tuples(st.integers(0, rows), st.integers(0, rows))))
    _check_same(results[start:stop]["it"], take_rows(leaf, start, stop))
    chunks = list(results)
    assert len(chunks) == len(sizes)
    for chunk, first, size in zip(chunks, [0, *cuts], sizes):
        _check_same(chunk["it"], take_rows(leaf, first, first + size))


def _nest() -> Any:
    return {
        "point": Point(tf.range(7), tf.cast(tf.range(7), tf.bfloat16)),
        "more": (
            tf.strings.as_string(tf.range(7)),
            OrderedDict(k=tf.reshape(tf.range(14.0), [7, 2])),
            {1: tf.range(7), 0: ()},
        ),
        "ragged": tf.RaggedTensor.from_row_lengths(tf.range(21), [0, 1, 2, 3, 4, 5, 6]),
        "sparse": tf.sparse.from_dense(tf.eye(7, 3)),
    }


SIZES = [2, 4, 1]


@pytest.fixture
def written(tmp_path: Path) -> Path:
    write_nest(tmp_path, _nest(), SIZES)
    return tmp_path


def test_structure_and_dataset(written: Path) -> None:
    results = open_results(written)
    loaded = results.load()
    assert (type(loaded["point"]).__name__, loaded["point"]._fields) == ("Point", ("x", "y"))
    assert loaded["more"][0].tolist() == [b"%d" % i for i in range(7)]
    assert tf.nest.flatten(results.structure) == tf.nest.flatten(tf.nest.map_structure(spec_of, _nest()))
    assert type(next(iter(results))["point"]) is type(loaded["point"])
    assert repr(results) == f"Results({str(written)!r}, rows=7, chunks=3, complete=True)"
    dataset = results.as_dataset()
    assert dataset.element_spec == results.structure
    assert int(dataset.cardinality()) == 3
    for _ in range(2):  # it can be read again
        assert [int(element["point"].x.shape[0]) for element in dataset] == SIZES
        for element, chunk in zip(dataset, results):
            for one, other in zip(tf.nest.flatten(element), tf.nest.flatten(chunk)):
                _check_same(one.numpy() if isinstance(one, tf.Tensor) else one, other)


def test_slices(written: Path) -> None:
    results = open_results(written)
    for rows in [slice(None), slice(2, 5), slice(-2, None), slice(3), slice(5, 2), slice(0, 99), slice(1, 6, 1)]:
        assert results[rows]["point"].x.tolist() == list(range(7))[rows]
    for wrong in [3, slice(0, 4, 2), "x"]:
        with pytest.raises(TypeError, match="expected a slice without a step"):
            results[wrong]  # type: ignore[index]


def test_a_part_reads_only_its_chunks(written: Path) -> None:
    results = open_results(written)
    damage(written, 2)
    assert results[0:2]["point"].x.tolist() == [0, 1]
    assert results[6:]["point"].x.tolist() == [6]
    chunks = iter(results)
    assert next(chunks)["point"].x.tolist() == [0, 1]
    for read in (lambda: results[1:3], lambda: next(chunks), results.as_dataset):
        with pytest.raises(MissingRowsError, match=r"rows 2 to 5 in .* are damaged: .*Run write again"):
            read()


def _write_some(directory: Path, rows: int | None, starts: Sequence[int] = (0, 4)) -> Results:
    """Write two rows from each of `starts` on."""
    chunks = [(start, start + 2, [tf.range(start, start + 2)]) for start in starts]
    write_chunks(directory, tf.TensorSpec([None], tf.int32), chunks, rows)
    return open_results(directory)


@pytest.mark.parametrize(
    ("rows", "starts", "missing", "message"),
    [
        (9, (0, 4), [(2, 4), (6, 9)], "rows 2 to 3, 6 to 8"),
        (None, (0, 4), [(2, 4), (6, None)], "rows 2 to 3, from 6 on"),
        (
            *(22, range(0, 20, 3), [(2, 3), (5, 6), (8, 9), (11, 12), (14, 15), (17, 18), (20, 22)]),
            "rows 2 to 2, 5 to 5, 8 to 8, 11 to 11, 14 to 14 and 2 more ranges",
        ),
    ],
)
def test_missing_rows(tmp_path: Path, rows: Any, starts: Sequence[int], missing: Any, message: str) -> None:
    results = _write_some(tmp_path, rows, starts)
    assert (results.missing, results.complete) == (missing, False)
    assert f"rows={rows or '?'}, chunks={len(starts)}, complete=False" in repr(results)
    summary = results.to_dict()
    assert (summary["rows"], summary["chunks"], summary["missing"]) == (rows, len(starts), [*map(list, missing)])
    first, second = starts[:2]
    assert results[second : second + 2].tolist() == [second, second + 1]
    message += " are missing in .*Run write again with the same function and data"
    readers = [results.load, results.as_dataset]
    readers += [] if rows else [lambda: len(results), lambda: results[second:], lambda: results[-1:]]
    for read in readers:
        with pytest.raises(MissingRowsError, match=message):
            read()
    with pytest.raises(MissingRowsError, match=r"rows .* are missing"):
        results[first + 1 : second + 4]
    chunks = iter(results)
    found = [row for _ in range(missing[0][0] // 2) for row in next(chunks).tolist()]
    assert found == list(range(missing[0][0]))
    with pytest.raises(MissingRowsError, match=r"rows .* are missing"):  # also at the end, if that is unknown
        next(chunks)


def test_uneven_inner_shapes(tmp_path: Path) -> None:
    chunks = [(0, 2, [tf.zeros([2, 3])]), (2, 4, [tf.zeros([2, 5])])]
    write_chunks(tmp_path / "dense", tf.TensorSpec([None, None], tf.float32), chunks, 4)
    results = open_results(tmp_path / "dense")
    for read in (results, results.as_dataset()):
        assert [chunk.shape for chunk in read] == [(2, 3), (2, 5)]
    with pytest.raises(JournalError, match=r"rows 0 to 3 in .* cannot be returned at once: .*size 3 .*size 5\. Iter"):
        results.load()
    parts = [tf.sparse.from_dense([[1, 2]]), tf.sparse.from_dense([[0, 0, 3]])]
    chunks = [(i, i + 1, [part]) for i, part in enumerate(parts)]
    write_chunks(tmp_path / "sparse", tf.SparseTensorSpec([None, None], tf.int32), chunks, 2)
    assert tf.sparse.to_dense(open_results(tmp_path / "sparse").load()).numpy().tolist() == [[1, 2, 0], [0, 0, 3]]


def test_large_arrays_are_split(tmp_path: Path) -> None:
    """The bytes of a chunk, into blobs of 256 KiB, the last of which is shorter, or as long."""
    values = tf.random.stateless_uniform([3, 2**18 + 1], [0, 0])
    write_nest(tmp_path, {"odd": values, "even": values[:, 1:]}, [1, 2])
    assert query(tmp_path, "SELECT count(*), max(length(data)) FROM parts") == [(26, 2**18)]
    loaded = open_results(tmp_path).load()
    _check_same(loaded["odd"], values)
    _check_same(loaded["even"], values[:, 1:])


def test_results_can_be_read_while_more_are_written(tmp_path: Path) -> None:
    early = _write_some(tmp_path, 4, [0])
    _write_some(tmp_path, 4, [2])
    assert early.missing == [(2, 4)]
    assert early[:2].tolist() == [0, 1]
    assert open_results(str(tmp_path)).load().tolist() == [0, 1, 2, 3]
