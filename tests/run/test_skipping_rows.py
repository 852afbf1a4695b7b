"""`on_error="skip"`: failing rows are left out and reported, and all other rows are computed."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import devicemap
from devicemap.types import ChunkFailed, ChunkStarted, Event, RowFailed

ROWS = 40
X = tf.reshape(tf.range(2.0 * ROWS), [ROWS, 2])
BAD = {
    "none": [],
    "neighbours": [3, 4, 5],
    "first and last": [0, ROWS - 1],
    "every other": [*range(0, ROWS, 2)],
    "all": [*range(ROWS)],
}


def _checked(bad: list[int]) -> Callable[[Any], Any]:
    """Return a function of a row or a batch that fails on these rows."""
    numbers = tf.constant([2.0 * row for row in bad] or [-1.0])

    def fn(rows: Any) -> Any:
        first = tf.reshape(rows, [-1, 2])[:, :1]
        with tf.control_dependencies([tf.debugging.assert_none_equal(first, numbers, message="odd row")]):
            return {"sum": tf.reduce_sum(rows, -1), "rows": tf.identity(rows)}

    return fn


def _good(bad: list[int]) -> np.ndarray:
    return np.delete(X.numpy(), bad, 0)


def _failed(mapper: devicemap.DeviceMap) -> list[int]:
    return [failed.row for failed in mapper.report.failed_rows]


@pytest.mark.parametrize("bad", BAD.values(), ids=BAD)
@pytest.mark.parametrize("batched", [False, True])
@pytest.mark.parametrize("batch_size", [None, 1, 7, "auto"])
def test_all_other_rows_are_computed(devices: list[str], bad: list[int], batched: bool, batch_size: Any) -> None:
    options = {"devices": devices, "batched": batched, "batch_size": batch_size}
    mapper = devicemap.DeviceMap(_checked(bad), **options, on_error="skip")
    all_failed = pytest.warns(RuntimeWarning, match="all 40 rows failed and are")
    with all_failed if len(bad) == ROWS else contextlib.nullcontext():
        results, wanted = mapper(X), _good(bad)
    np.testing.assert_array_equal(results["rows"], wanted)
    np.testing.assert_array_equal(results["sum"], wanted.sum(1))
    report = mapper.report
    assert (_failed(mapper), report.rows, report.error) == (bad, ROWS - len(bad), None)
    assert mapper.explain(X).engine == report.engine == "chunks"
    assert "\nfailing rows: left out, and listed in report.failed_rows\n" in str(mapper.explain(X))
    assert (" that failed; the first: row " in str(report)) == bool(bad)
    for failed in report.failed_rows:
        assert failed.error.startswith("InvalidArgumentError: ")
        assert "odd row" in failed.error
        assert failed.device.endswith(tuple(devices))


@pytest.mark.parametrize("deterministic", [True, False])
def test_streams_datasets_and_reductions(devices: list[str], deterministic: bool) -> None:
    bad = [*range(8, 16), 21]
    options: dict[str, Any] = {"devices": devices, "batch_size": 4, "on_error": "skip"}
    mapper = devicemap.DeviceMap(_checked(bad), deterministic=deterministic, **options)
    chunks = [*mapper.stream(tf.data.Dataset.from_tensor_slices(X))]
    if not deterministic:
        chunks = [chunk for _, chunk in sorted(chunks, key=lambda pair: int(pair[0]))]
    assert len(chunks) == 8  # of ten, two had no good row
    np.testing.assert_array_equal(tf.concat([chunk["rows"] for chunk in chunks], 0), _good(bad))
    rows = [row["rows"] for row in devicemap.DeviceMap(_checked(bad), **options).as_dataset(X).unbatch()]
    np.testing.assert_array_equal(rows, _good(bad))
    for reducer in ("sum", "mean", "max"):
        wanted = getattr(np, reducer)(_good(bad), 0)
        np.testing.assert_allclose(mapper.reduce(X, reducer)["rows"], wanted, rtol=1e-5)
        assert _failed(mapper) == bad


def test_events_and_a_warning() -> None:
    events: list[Event] = []
    message = r"^mine: 2 rows failed and are left out; the first: row [34] on CPU:.: Invalid"
    with pytest.warns(RuntimeWarning, match=message):
        devicemap.parallel_map(_checked([3, 4]), X, on_error="skip", name="mine", progress=events.append)
    with pytest.warns(RuntimeWarning, match=message):
        devicemap.parallel_reduce(_checked([3, 4]), X, "sum", on_error="skip", name="mine")
    failed = [event.shard for event in events if isinstance(event, RowFailed)]
    assert sorted((shard.start, shard.stop) for shard in failed) == [(3, 4), (4, 5)]
    assert any(isinstance(event, ChunkFailed) for event in events)


def test_rows_that_the_data_cannot_give() -> None:
    broken = tf.data.Dataset.from_tensor_slices(tf.range(9)).map(lambda n: 1 // (n - 5))
    with pytest.raises(tf.errors.OpError, match="division by zero") as raised:
        devicemap.parallel_map(lambda n: n, broken, on_error="skip")
    assert any("dataset.ignore_errors()" in note for note in raised.value.__notes__)


# Python code with faults by a script: which rows it fails with, and how often


def _map(check: Callable[[list[int]], None], rows: int, **options: Any) -> tuple[list[int], devicemap.DeviceMap]:
    """Map a function that calls `check` with the numbers of rows in a batch. Return those of the results, and the mapper."""

    def python(rows: Any) -> Any:
        check(rows.numpy().tolist())
        return rows

    fn = lambda rows: tf.ensure_shape(tf.py_function(python, [rows], rows.dtype), rows.shape)
    mapper = devicemap.DeviceMap(fn, batched=True, on_error="skip", **options)
    return mapper(tf.range(rows)).numpy().tolist(), mapper


def test_a_chunk_is_halved_only_around_failing_rows() -> None:
    calls: list[int] = []

    def check(rows: list[int]) -> None:
        calls.append(len(rows))
        if 5 in rows:
            raise ValueError("odd row")

    results, mapper = _map(check, 32, devices="CPU:0", batch_size=16)
    assert len(results) == 31
    assert (mapper.report.devices[0].back_offs, mapper.report.advice) == (0, ())  # it is no lack of memory
    assert calls == [16, 8, 4, 4, 2, 1, 1, 2, 8, 16]  # each part without row 5 runs once


@pytest.mark.parametrize("batch_size", [None, 1, 5])
def test_rows_that_fail_on_all_devices_cost_no_device(devices: list[str], batch_size: int | None) -> None:
    def check(rows: list[int]) -> None:
        if min(rows) < 100:
            raise sqlite3.OperationalError("unreadable")

    results, mapper = _map(check, 130, devices=devices, batch_size=batch_size)
    assert results == [*range(100, 130)]
    assert _failed(mapper) == [*range(100)]
    assert not any(device.lost for device in mapper.report.devices)


@pytest.mark.parametrize("bad", [[0], [17], [17, 18, 19, 40], [*range(0, 640, 64)]])
def test_a_row_without_memory_does_not_make_later_chunks_small(devices: list[str], bad: list[int]) -> None:
    """A row that needs more memory than there is says nothing about the rows after it."""

    def check(rows: list[int]) -> None:
        if {*rows} & {*bad}:
            raise MemoryError("too much")  # arrives as a ResourceExhaustedError

    events: list[Event] = []
    results, mapper = _map(check, 640, batch_size=64, devices=devices, progress=events.append)
    assert results == np.delete(np.arange(640), bad).tolist()
    assert _failed(mapper) == bad
    assert sum(isinstance(event, ChunkStarted) for event in events) < 10 + 20 * len(bad) * len(devices)
    events.clear()
    mapper(tf.range(1000, 1640))
    assert sum(isinstance(event, ChunkStarted) for event in events) == 10
