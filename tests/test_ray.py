"""`devicemap.ray`: its columns, and, in a process of its own, a cluster of Ray's with two hosts: `clusters/mapping.py`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import processes
import pytest
import tensorflow as tf

from devicemap.errors import DataError
from devicemap.ray.actors import columns_of, rows_of

FILES = Path(__file__).with_name("clusters")


@pytest.mark.nightly
def test_on_a_cluster() -> None:
    pytest.importorskip("ray.data", reason="Ray Data is not installed")
    processes.run_tests(FILES / "mapping.py")


def test_without_ray() -> None:
    """The module is there, and its call says what to install."""
    processes.run("""
        import sys

        sys.modules["ray"] = None
        import devicemap

        try:
            devicemap.ray.map_batches(1, len, concurrency=1)
        except devicemap.errors.DeviceMapError as error:
            assert "ray[data]" in str(error), error
        else:
            raise AssertionError("nothing was said")
        """)


def table_of(columns: dict[str, Any]) -> Any:
    return pytest.importorskip("ray.data.block").BlockAccessor.batch_to_arrow_block(columns)


def as_list(column: Any) -> Any:
    return column.to_list() if isinstance(column, tf.RaggedTensor) else tf.convert_to_tensor(column).numpy().tolist()


def test_columns_come_and_go() -> None:
    """Of all types that Arrow and TensorFlow both have, the first row being left out; numbers stay where they lie."""
    pa = pytest.importorskip("pyarrow")
    images = np.arange(36, dtype="f").reshape(3, 2, 6)
    lists = {"lists": [[1.0], [], [2.0, 3.0]], "nested": [[["x"]], [], [["y", "z"], []]]}
    columns = {
        "numbers": np.arange(3), "flags": np.array([True, False, True]), "text": np.array(["a", "", "bc"], object),
        "images": images, "sounds": np.array([np.ones([n, 2], "f") for n in (2, 1, 3)], object),
        "pairs": pa.array([[1, 2], [3, 4], [5, 6]], pa.list_(pa.int64(), 2)),
        "pairs of lists": pa.array([[[], [1]], [[2, 3], []], [[4], [5]]], pa.list_(pa.list_(pa.int64()), 2)),
    } | {name: pa.array(column) for name, column in lists.items()}  # fmt: skip
    table = table_of(columns).slice(1)
    rows = rows_of(table)
    assert {name: as_list(rows[name]) for name in lists} == {
        "lists": [[], [2.0, 3.0]], "nested": [[], [[b"y", b"z"], []]]
    }  # fmt: skip
    assert as_list(rows["text"]) == [b"", b"bc"]
    assert rows["sounds"].shape.as_list() == [2, None, 2]
    assert rows["pairs"].shape.as_list() == [2, 2]
    assert as_list(rows["pairs of lists"]) == [[[2, 3], []], [[4], [5]]]
    assert np.shares_memory(rows["numbers"], table["numbers"].chunk(0).to_numpy())
    assert np.shares_memory(rows["images"], images)
    results = {name: each if isinstance(each, tf.RaggedTensor) else tf.constant(each) for name, each in rows.items()}
    results["words"] = tf.constant([["a", "b"], ["c", "d"]])
    found = columns_of(results)
    assert np.shares_memory(found["images"], np.asarray(results["images"]))
    again = rows_of(table_of(found))
    assert {name: as_list(each) for name, each in again.items()} == {
        name: as_list(each) for name, each in results.items()
    }


def test_missing_floating_point_numbers() -> None:
    pa = pytest.importorskip("pyarrow")
    pytest.importorskip("ray.data", reason="Ray Data is not installed")
    assert str(as_list(rows_of(pa.table({"x": [1.0, None]}))["x"])) == "[1.0, nan]"


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"values": [1, None]}, "1 missing values of type int64"),
        ({"values": [["a"], [None]]}, "missing values of type string"),
        *(({"values": values}, "of unknown type") for values in ([None], [[], []], [[[]], []], [[], [None]])),
        ({"values": [{"a": 1}]}, "expected numbers"),
        ({"values": [1, 2], "type": "timestamp[us]"}, "expected numbers"),
    ],
)
def test_columns_that_cannot_come(values: dict[str, Any], words: str) -> None:
    pa = pytest.importorskip("pyarrow")
    pytest.importorskip("ray.data", reason="Ray Data is not installed")
    column = pa.array(values["values"], pa.timestamp("us") if "type" in values else None)
    with pytest.raises(DataError, match=f"column 'x' .*{words}"):
        rows_of(pa.table({"x": column}))
