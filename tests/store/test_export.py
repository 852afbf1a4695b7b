"""Results as `.npy` and Parquet files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from stored import damage

from devicemap import DeviceMap
from devicemap.errors import DataError, MissingRowsError, OptionError
from devicemap.types import Results

N = np.arange(10)


def _pair(n: Any) -> dict[str, Any]:
    return {"x": tf.cast(n, tf.float32) / 3, "n": n, "text": tf.strings.as_string(n), "matrix": tf.fill([2, 3], n)}


def _written(fn: Any, directory: Path, data: Any = N, **options: Any) -> Results:
    return DeviceMap(fn, **{"batch_size": 3, **options}).write(data, directory / "out")


def _ragged(rows: Any) -> Any:
    return tf.RaggedTensor.from_row_lengths(tf.range(tf.reduce_sum(rows)), rows)


@pytest.mark.parametrize("dtype", [bool, np.int8, np.uint64, np.float16, np.float64, np.complex64])
@pytest.mark.parametrize("rows", [0, 1, 10])
@pytest.mark.parametrize("shape", [(), (2, 3), (0,)])
def test_npy(tmp_path: Path, dtype: Any, rows: int, shape: tuple[int, ...]) -> None:
    values = np.arange(rows * int(np.prod(shape))).reshape(rows, *shape).astype(dtype)
    results = _written(tf.identity, tmp_path, values)
    results.to_npy(tmp_path / "x.npy")
    loaded = np.load(tmp_path / "x.npy")
    assert loaded.dtype == dtype
    np.testing.assert_array_equal(loaded, values, strict=True)
    assert [path.name for path in tmp_path.iterdir() if path.name != "out"] == ["x.npy"]


def _lists(loaded: Any) -> dict[str, Any]:
    columns = loaded if isinstance(loaded, dict) else {"result": loaded}
    return {
        name: each.to_list() if hasattr(each, "to_list") else np.asarray(each).tolist()
        for name, each in columns.items()
    }


PARQUET: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "columns": (_pair, N, {}),
    "ragged rows": (_ragged, N[:7].astype(np.int32), {"batched": True}),
    "no ragged rows": (_ragged, N[:0].astype(np.int32), {"batched": True}),
    **{f"rows of shape {shape}": (tf.identity, np.zeros([4, *shape]), {}) for shape in ((0,), (3, 0), (0, 3))},
}


@pytest.mark.parametrize(("fn", "data", "options"), PARQUET.values(), ids=PARQUET)
def test_parquet(tmp_path: Path, fn: Any, data: Any, options: dict[str, Any]) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    results = _written(fn, tmp_path, data, **options)
    results.to_parquet(tmp_path / "x.parquet")
    table = parquet.read_table(tmp_path / "x.parquet")
    assert table.to_pydict() == _lists(results.load())
    assert fn is not _ragged or str(table.schema.field("result").type).startswith("list<")
    assert parquet.ParquetFile(tmp_path / "x.parquet").num_row_groups <= 1  # of four chunks


def test_parquet_of_rows_whose_shape_differs_between_chunks(tmp_path: Path) -> None:
    """One chunk has rows of length 2, another of length 4: the column has one type."""
    parquet = pytest.importorskip("pyarrow.parquet")
    data = tf.data.Dataset.from_generator(
        lambda: (np.ones([2, n], np.int32) for n in (2, 4)), output_signature=tf.TensorSpec([None, None], tf.int32)
    )
    results = DeviceMap(lambda rows: rows + 1, batched=True).write(data, tmp_path / "out")
    results.to_parquet(tmp_path / "x.parquet")
    assert parquet.read_table(tmp_path / "x.parquet").column("result").to_pylist() == [[2, 2]] * 2 + [[2] * 4] * 2


@pytest.mark.parametrize("convert", [np.asarray, tf.constant, DeviceMap(tf.identity), DeviceMap(tf.identity).explain])
def test_results_are_not_converted_to_arrays(tmp_path: Path, convert: Any) -> None:
    with pytest.raises(
        (TypeError, DataError),
        match=r"results.load\(\) returns all rows, and results.as_dataset\(\) the chunks as batches",
    ):
        convert(_written(tf.identity, tmp_path))


REFUSED = {
    "npy of a dict": ("to_npy", _pair, r"returns 'result': \{.*a \.npy file cannot hold; it holds one dense"),
    "npy of bfloat16": ("to_npy", lambda n: tf.cast(n, tf.bfloat16), r"bfloat16.*\.npy file"),
    "parquet of complex numbers": ("to_parquet", lambda n: tf.cast(n, tf.complex64), r"complex64.*\.parquet file"),
    "parquet of a tuple": ("to_parquet", lambda n: (n, n), r"'result': \(.*\.parquet file"),
}


@pytest.mark.parametrize(("method", "fn", "message"), REFUSED.values(), ids=REFUSED)
def test_what_a_file_cannot_hold(tmp_path: Path, method: str, fn: Any, message: str) -> None:
    results = _written(fn, tmp_path)
    with pytest.raises(OptionError, match=message):
        getattr(results, method)(tmp_path / "x")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("method", ["to_npy", "to_parquet"])
def test_damaged_rows_and_a_missing_folder(tmp_path: Path, method: str) -> None:
    pytest.importorskip("pyarrow")
    results = _written(tf.identity, tmp_path)
    path, other = tmp_path / "x", tmp_path / "x.tmp"
    other.write_text("not ours")
    path.symlink_to("real")
    getattr(results, method)(path)
    assert other.read_text() == "not ours"
    assert path.is_symlink()
    complete = path.read_bytes()
    damage(tmp_path / "out", 6)
    for directory in (tmp_path, Path()):
        with pytest.raises(OptionError, match="is a directory"):
            getattr(results, method)(directory)
    with pytest.raises(MissingRowsError, match="rows 6 to 8"):
        getattr(results, method)(path)
    assert path.read_bytes() == complete
    assert sorted(found.name for found in tmp_path.iterdir()) == ["out", "real", "x", "x.tmp"]
    with pytest.raises(FileNotFoundError):
        getattr(results, method)(tmp_path / "nowhere" / "x")
