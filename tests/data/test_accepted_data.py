"""Data that is accepted although it resembles data that is refused (tests/test_messages.py)."""

from __future__ import annotations

import collections
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from ways import ONE, SEVERAL, Items, Options, X, ways

import devicemap


class WithInterface(Items):
    """NumPy reads it as a whole."""

    def __init__(self) -> None:
        self._array = np.array([1.0, 2.0])
        self.__array_interface__ = self._array.__array_interface__


class WithTensor(Items):
    """TensorFlow reads it as a whole."""

    def __tf_tensor__(self, dtype: Any = None, name: Any = None) -> Any:
        return tf.constant([1.0, 2.0], dtype)


ACCEPTED: list[tuple[Any, list[Any]]] = [
    (WithInterface(), [1, 2]),
    (WithTensor(), [1, 2]),
    (np.ma.masked_equal([1, 2], 3), [1, 2]),  # masks nothing
    (tf.data.Dataset.range(3).repeat().take(7), [0, 1, 2, 0, 1, 2, 0]),
]


def test_accepted_data() -> None:
    for data, wanted in ACCEPTED:
        np.testing.assert_array_equal(devicemap.parallel_map(lambda row: row, data, **SEVERAL), wanted)


LISTS: list[list[Any]] = [
    [1, 2**31],
    [1, 2.5],
    [1j, 2],
    [True, False],
    ["a", b"b"],
    [[[1], [2]], [[3], [4]]],
    [[], []],
    [[1.0], [np.float64(2)]],
    [np.float64(1), 2],
    [tf.constant([1, 2]), [3, 4]],
    [(1, 2), (3, 4)],
]


def test_lists_become_the_tensors_of_tensorflow() -> None:
    for data in LISTS:
        found, wanted = devicemap.parallel_map(tf.identity, data, **SEVERAL), tf.convert_to_tensor(data)
        assert (found.dtype, found.shape) == (wanted.dtype, wanted.shape)
        np.testing.assert_array_equal(found, wanted)


def test_images_of_different_sizes_as_a_dataset() -> None:
    """Do what the message about a list of them says."""
    images = [np.zeros([3, 4, 3], np.uint8), np.ones([5, 4, 3], np.uint8)]
    signature = tf.TensorSpec([None, None, 3], tf.uint8)
    dataset = tf.data.Dataset.from_generator(lambda: iter(images), output_signature=signature)
    sums = devicemap.parallel_map(lambda image: tf.reduce_sum(tf.cast(image, tf.int32)), dataset, **ONE)
    assert sums.numpy().tolist() == [0, 60]


def _default(**leaves: Any) -> Any:
    return collections.defaultdict(list, leaves)


@pytest.mark.in_ci(4)
@ways
@pytest.mark.parametrize("batched", [False, True])
@pytest.mark.parametrize("kind", [collections.Counter, _default])
def test_other_mappings_are_dicts(kind: Any, batched: bool, way: Options) -> None:
    data = kind(b=X[:5], a=-X[:5])
    result = devicemap.parallel_map(lambda rows: {"all": rows, "b": rows["b"] * 2}, data, **way, batched=batched)
    assert type(result) is type(result["all"]) is dict
    assert set(result["all"]) == {"a", "b"}
    for key in "ab":
        np.testing.assert_array_equal(result["all"][key], data[key])
    np.testing.assert_array_equal(result["b"], 2 * data["b"])


def test_options_that_are_integers_of_numpy() -> None:
    def fn(row: Any, seed: Any) -> Any:
        return row + tf.random.stateless_normal([2], seed)

    wanted = devicemap.parallel_map(fn, X, **ONE, batch_size=4, seed=2**32 - 1)
    for integer in (np.int64, np.uint32):
        options = {"batch_size": integer(4), "seed": integer(2**32 - 1)}
        np.testing.assert_array_equal(devicemap.parallel_map(fn, X, **SEVERAL, **options), wanted)
