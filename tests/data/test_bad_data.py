"""Invalid data: errors name the leaf and what to pass instead, before fn is traced."""

from __future__ import annotations

import collections
import datetime
import re
from collections import namedtuple
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from ways import CHUNKED, ONE, SEVERAL, Counter, Options, X, ways

import devicemap
from devicemap.errors import DataError

Pair = namedtuple("Pair", "a b")


class Frame:
    """A data frame as in pandas, with text and numbers."""

    columns = ("name", "number")

    def __array__(self, *_: Any, **__: Any) -> Any:
        return np.array([["a", 1]], object)


class Picture:
    """An image as in PIL."""

    __array_interface__ = np.zeros([2, 2], np.uint8).__array_interface__


BAD_DATA: list[tuple[str, Any, str]] = [
    ("unequal", (X, X[:4]), r"^the leaves of data have different numbers of rows: data\[0\] has 6, data\[1\] has 4\. "),
    ("unequal in a named tuple", Pair(X, {"k": X[:1]}), r"data\.a has 6, data\.b\['k'\] has 1"),
    ("unequal ragged", (X, tf.ragged.constant([[1], []])), r"data\[0\] has 6, data\[1\] has 2"),
    ("unequal sparse", (X, tf.sparse.eye(3)), r"data\[0\] has 6, data\[1\] has 3"),
    ("scalar", 3.0, r"^data is a scalar \(float32\); every leaf needs rows as its first axis"),
    ("scalar leaf", {"x": X, "k": np.float32(2)}, r"^data\['k'\] is a scalar \(float32\)"),
    ("generator", (row for row in [1.0]), r"^data is a generator, which can be read only once .* pass list\("),
    ("iterator", (X, iter([1, 2])), r"^data\[1\] is a list_iterator, which .* tf\.data\.Dataset\.from_generator"),
    ("empty tuple", (), r"^data is \(\), a nest without leaves; expected at least one tensor to map over$"),
    ("nested empty", ({}, ()), r"^data is \(\{\}, \(\)\), a nest without leaves"),
    ("None", None, r"^data is None; expected a tensor, an array or a list with rows as its first axis$"),
    ("None leaf", (X, None), r"^data\[1\] is None; expected a tensor"),
    ("string", "rows", r"^data is 'rows'; expected a tensor"),
    ("bytes", b"rows", r"^data is b'rows'; expected a tensor"),
    ("function", tf.sin, r"^data is <.*>; expected a tensor"),
    ("uneven lists", [[1], [2, 3]], r"^data is a list that does not convert .*; tf\.ragged\.constant makes rows "),
    ("set", {"x": {1, 2}}, r"^data\['x'\] is a set that does not convert to a tensor"),
    ("objects", np.array([object(), None]), r"^data is a ndarray of shape \(2,\) .*; give it a dtype with \.astype"),
    ("times", np.array(["2020-01-01"], "M8[D]"), r"; TensorFlow has no dtype for times: pass "),
    ("masked", {"x": np.ma.masked_equal([1, 2], 2)}, r"^data\['x'\] is a masked array, .* pass array\.filled\("),
    ("frame", Frame(), r"^data is a Frame that .*; columns of different dtypes are a dict: dict\(frame\)$"),
    ("dicts", [{"a": 1}, {"a": 2}], r"; a dict of columns has rows: \{key: \[row\[key\] for row in rows\] "),
    ("pictures", [Picture(), Picture()], r"; make one array of its entries: np\.stack\(\[np\.asarray\(entry\) "),
    ("keys of mixed types", (X, {"k": {"a": X, 1: X}}), r"a dict whose keys cannot be sorted .* of one type$"),
    ("dataset in a nest", (X, tf.data.Dataset.range(6)), r"^data\[1\] is a Dataset inside a nest; zip datasets with "),
]


@pytest.mark.parametrize("way", [ONE, SEVERAL, CHUNKED["several devices, chunks"]], ids=["one", "several", "chunks"])
@pytest.mark.parametrize(("data", "message"), [case[1:] for case in BAD_DATA], ids=[case[0] for case in BAD_DATA])
def test_bad_data(data: Any, message: str, way: Options) -> None:
    fn = Counter()
    with pytest.raises(DataError, match=message) as caught:
        devicemap.DeviceMap(fn, **way)(data)
    assert isinstance(caught.value, ValueError)
    assert fn.count == 0


_nested = tf.data.Dataset.range(4).window(2)
_infinite = tf.data.Dataset.range(3).repeat()
_any_rank = tf.data.Dataset.from_generator(lambda: iter([]), output_signature=tf.TensorSpec(None, tf.int32))
BAD_DATASETS: list[tuple[str, Any, Options, str]] = [
    ("batches of scalars", tf.data.Dataset.range(4), {"batched": True}, r"has .* a scalar .* \.batch\(n\) "),
    ("of datasets", _nested, {}, r"has elements with DatasetSpec.*; expected dense, ragged or sparse tensors"),
    ("unknown rank", _any_rank, {}, r"has elements of unknown rank .* output_signature, or map tf\.ensure_"),
    ("batches of unknown rank", _any_rank, {"batched": True}, r"has elements of unknown rank "),
    ("infinite", _infinite, {}, r"is infinite, .* a part of it with \.take\(n\), or map it as a stream$"),
    ("infinite batches", _infinite.batch(2), {"batched": True}, r"is infinite, "),
]


@pytest.mark.parametrize(
    ("dataset", "options", "message"), [case[1:] for case in BAD_DATASETS], ids=[case[0] for case in BAD_DATASETS]
)
def test_bad_datasets(dataset: Any, options: Options, message: str) -> None:
    fn = Counter()
    with pytest.raises(DataError, match=f"^the dataset {message}"):
        devicemap.DeviceMap(fn, **SEVERAL, **options)(dataset)
    assert fn.count == 0


def test_data_in_several_arguments() -> None:
    for mapped in (devicemap.DeviceMap(tf.add, **ONE), lambda *data: devicemap.parallel_map(tf.add, *data, **ONE)):
        with pytest.raises(
            DataError, match=r"^data came as 2 arguments; pass a tuple of 2, as in \(x, y\)\. Options have"
        ):
            mapped(X, X)


def test_an_array_that_masks_nothing_goes_through() -> None:
    np.testing.assert_array_equal(devicemap.parallel_map(tf.negative, np.ma.masked_equal([1, 2], 3), **ONE), [-1, -2])


def test_a_part_of_an_infinite_dataset() -> None:
    result = devicemap.parallel_map(lambda i: i * 2, _infinite.take(7), **SEVERAL)
    np.testing.assert_array_equal(result, [0, 2, 4, 0, 2, 4, 0])


@ways
@pytest.mark.parametrize("batched", [False, True])
@pytest.mark.parametrize(
    "data",
    [collections.defaultdict(list, b=[1, 2, 3, 4, 5], a=[6, 7, 8, 9, 0]), collections.Counter(b=X[:5], a=-X[:5])],
    ids=["defaultdict", "Counter"],
)
def test_other_mappings_are_dicts(data: Any, batched: bool, way: Options) -> None:
    result = devicemap.parallel_map(lambda rows: {"all": rows, "b": rows["b"] * 2}, data, **way, batched=batched)
    assert type(result) is type(result["all"]) is dict
    assert set(result["all"]) == {"a", "b"}
    for key in "ab":
        np.testing.assert_array_equal(result["all"][key], data[key])
    np.testing.assert_array_equal(result["b"], 2 * np.asarray(data["b"]))


def test_a_batch_of_a_dataset_with_unequal_leaves() -> None:
    dataset = tf.data.Dataset.from_tensors((tf.zeros([3]), tf.zeros([2])))
    with pytest.raises(DataError, match=r"different numbers of rows: data\[0\] has 3, data\[1\] has 2"):
        devicemap.DeviceMap(lambda a, b: a, **SEVERAL, batched=True)(dataset)


def test_a_dataset_inside_a_function() -> None:
    fn = Counter()
    mapper = devicemap.DeviceMap(fn, **SEVERAL)
    with pytest.raises(
        DataError, match=r"data cannot be mapped chunk by chunk inside a tf.function; do it outside, or pass tensors"
    ):
        tf.function(lambda: mapper(tf.data.Dataset.range(4)), autograph=False)()
    assert fn.count == 0


def test_unknown_rank_inside_a_function() -> None:
    fn = Counter()
    mapper = devicemap.DeviceMap(fn, **SEVERAL)
    function = tf.function(mapper, input_signature=[tf.TensorSpec(None, tf.int32)], autograph=False)
    with pytest.raises(DataError, match=r"data is of unknown rank \(int32\); every leaf needs rows as its first axis"):
        function(tf.range(3))
    assert fn.count == 0


def test_an_error_of_the_input() -> None:
    """It is no error of fn's, and comes through as it is."""

    def rows() -> Any:
        yield 1.0
        raise KeyError("broken input")

    dataset = tf.data.Dataset.from_generator(rows, output_signature=tf.TensorSpec([], tf.float32))
    with pytest.raises(tf.errors.UnknownError, match=re.escape("KeyError: 'broken input'")):
        devicemap.parallel_map(lambda row: row, dataset, **SEVERAL, batch_size=1)


class _Readable:
    """An object with items that NumPy or TensorFlow read as a whole."""

    def __getitem__(self, i: int) -> float:
        return [1.0, 2.0][i]

    def __len__(self) -> int:
        return 2


class _WithInterface(_Readable):
    def __init__(self) -> None:
        self._array = np.array([1.0, 2.0])
        self.__array_interface__ = self._array.__array_interface__


class _WithTensor(_Readable):
    def __tf_tensor__(self, dtype: Any = None, name: Any = None) -> Any:
        return tf.constant([1.0, 2.0], dtype)


@pytest.mark.parametrize("data", [_WithInterface(), _WithTensor()])
def test_objects_with_items_that_are_arrays(data: Any) -> None:
    assert devicemap.parallel_map(lambda x: x, data, devices="CPU:0").numpy().tolist() == [1, 2]


class _Sparse(_Readable):
    def toarray(self) -> Any:
        return np.eye(2)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (_Sparse(), r"data is a _Sparse, a sparse matrix; pass its \.toarray\(\)"),
        ([datetime.timedelta(1)], r"np.asarray\(times, 'timedelta64\[ns\]'\)"),
        (np.array([1], "timedelta64[s]"), r"np.asarray\(times, 'timedelta64\[ns\]'\)"),
        ([datetime.date(2024, 1, 1)], r"np.asarray\(times, 'datetime64\[ns\]'\)"),
        (np.array(None, object), r"give it a dtype"),
        (np.array([[1], [2, 3]], object), r"tf.ragged.constant makes rows of different lengths"),
        (np.array([(1, 2.0)], [("a", int), ("b", float)]), r"{name: array\[name\] for name in array.dtype.names}"),
        ([np.zeros(3), np.zeros(5)], r"2 shapes, such as \[3\] and \[5\]: tf.ragged.stack makes rows"),
        ([tf.zeros(3), tf.zeros(5)], r"2 shapes, such as \[3\] and \[5\]: tf.ragged.stack makes rows"),
        ([tf.zeros([3, 2]), np.zeros([4, 2])], r"output_signature=tf.TensorSpec\(\[None, 2\], tf.float32\)"),
        ([np.zeros([3, 2]), np.zeros([4])], r"such as \[3, 2\] and \[4\]: give them one shape"),
        ([tf.sparse.eye(2), tf.sparse.eye(3)], r"data is a list that does not convert"),
        ([tf.ragged.constant([[1], [2, 3]])] * 2, r"tf.ragged.stack makes one"),
        ([datetime.time(1)], r"to a Tensor\.\)$"),
        ([None], r"to a Tensor\.\)$"),
    ],
)
def test_advice_for_data_that_does_not_convert(data: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        devicemap.parallel_map(lambda x: x, data, devices="CPU:0")
