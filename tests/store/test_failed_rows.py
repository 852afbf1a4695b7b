"""`write` and reductions with a directory and `on_error="skip"`: what is stored of failing rows, and when they run again."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from stored import query

from devicemap import DeviceMap, open_results
from devicemap.errors import FunctionError, JournalError
from devicemap.store.database import checksum

ROWS = 40
X = np.arange(ROWS, dtype=np.int32)
BAD = {
    "none": [],
    "first and last": [0, ROWS - 1],
    "neighbours over chunks": [3, 4, 5, 6],
    "every other": [*range(0, ROWS, 2)],
    "all": [*range(ROWS)],
}


def _mapper(bad: list[int], fn: Callable[[Any], Any] = tf.identity, **options: Any) -> DeviceMap:
    """A map of `fn` that fails on some rows."""

    def checked(rows: Any) -> Any:
        odd = tf.debugging.assert_none_equal(rows[..., None], tf.constant(bad, rows.dtype), message="odd row")
        with tf.control_dependencies([odd]):
            return fn(tf.identity(rows))

    return DeviceMap(checked, **{"batch_size": 4, "on_error": "skip", **options})


def _describe(rows: Any) -> Any:
    return {"twice": rows * 2, "text": tf.strings.as_string(rows * 2)}


@pytest.mark.parametrize("bad", BAD.values(), ids=BAD)
@pytest.mark.parametrize("batched", [False, True])
@pytest.mark.parametrize("dataset", [False, True])
@pytest.mark.filterwarnings("ignore:.*all 40 rows failed:RuntimeWarning")
def test_failing_rows_are_stored(
    tmp_path: Path, devices: list[str], bad: list[int], batched: bool, dataset: bool
) -> None:
    data = tf.data.Dataset.from_tensor_slices(X) if dataset else X
    data = data.batch(6) if dataset and batched else data
    results = _mapper(bad, _describe, batched=batched, devices=devices).write(data, tmp_path / "out")
    good = np.delete(X, bad)
    assert len(results) == len(good)
    assert results.complete
    assert [failed.row for failed in results.failed_rows] == bad
    assert all("odd row" in failed.error and failed.device.endswith(tuple(devices)) for failed in results.failed_rows)
    np.testing.assert_array_equal(results.row_numbers(), good)
    assert results.row_numbers().dtype == np.int64
    np.testing.assert_array_equal(results.load()["twice"], good * 2)
    for start, stop in [(0, 5), (3, 4), (5, 17), (17, 17), (-3, None)]:
        part = results[start:stop]
        np.testing.assert_array_equal(part["twice"], (good * 2)[start:stop])
        assert part["text"].tolist() == [str(n).encode() for n in (good * 2)[start:stop]]
    assert [n for chunk in results for n in chunk["twice"]] == [*good * 2]
    assert [int(row["twice"]) for row in results.as_dataset().unbatch()] == [*good * 2]
    assert len(results.as_dataset()) == len([*results])
    summary = json.loads(json.dumps(results.to_dict()))
    assert (summary["rows"], summary["complete"], summary["missing"]) == (len(good), True, [])
    assert [failed["row"] for failed in summary["failed_rows"]] == bad


def test_failed_neighbours_run_again_in_one_chunk(tmp_path: Path) -> None:
    _mapper([5, 6]).write(X, tmp_path)
    results = _mapper([]).write(X, tmp_path, retry_failed=True, trust_function=True)
    assert results.failed_rows == ()
    np.testing.assert_array_equal(results.load(), X)


def test_a_damaged_failed_row(tmp_path: Path) -> None:
    _mapper([5, 6]).write(X, tmp_path)
    query(tmp_path, "DELETE FROM chunks WHERE start = 6")
    (values,) = query(tmp_path, "SELECT inputs, shapes, device, error FROM chunks WHERE start = 5")
    right_checksum = f"stop = 7, checksum = {checksum(5, 7, *values, 0)}"  # but the row may cover no other row
    for change in ("error = 'another'", "device = 1", "error = NULL", "inputs = 'x'", "stop = 7", right_checksum):
        query(tmp_path, f"UPDATE chunks SET {change} WHERE start = 5")
        with pytest.raises(JournalError):
            open_results(tmp_path)[:10]
        query(
            tmp_path,
            "UPDATE chunks SET stop = 6, inputs = ?, shapes = ?, device = ?, error = ? WHERE start = 5",
            *values,
        )


@pytest.mark.parametrize("reducer", ["mean", "max"])
def test_reductions_with_a_directory(tmp_path: Path, devices: list[str], reducer: str) -> None:
    def reduced(bad: list[int], on_error: str = "skip") -> Any:
        return _mapper(bad, devices=devices, on_error=on_error).reduce(tf.cast(X, tf.float32), reducer, tmp_path)

    good = np.delete(X, [4, 5, 22]).astype(np.float32)
    wanted = getattr(np, reducer)(good)
    np.testing.assert_allclose(reduced([4, 5, 22]), wanted)
    with pytest.warns(
        RuntimeWarning, match=r"3 row\(s\) failed in earlier runs and are left out; the first: row 4: Inv"
    ):
        np.testing.assert_allclose(reduced([4, 5, 22]), wanted)
    with pytest.raises(FunctionError, match=r"row 4|row 5|row 22"):
        reduced([4, 5, 22], "raise")
