"""Data that is accepted although it resembles data that is refused (tests/test_messages.py)."""

from __future__ import annotations

import collections
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from ways import ONE, SEVERAL, Items, Options, X, ways

import devicemap

ARRAY = np.array([1.0, 2.0])


def _readable(**protocol: Any) -> Any:
    """An object with items, which NumPy or TensorFlow reads as a whole."""
    return type("Readable", (Items,), protocol)()


ACCEPTED: list[tuple[Any, list[Any]]] = [
    (_readable(__array_interface__=ARRAY.__array_interface__), [1, 2]),
    (_readable(__tf_tensor__=lambda self, dtype=None, name=None: tf.constant([1.0, 2.0], dtype)), [1, 2]),
    (np.ma.masked_equal([1, 2], 3), [1, 2]),  # masks nothing
    (tf.data.Dataset.range(3).repeat().take(7), [0, 1, 2, 0, 1, 2, 0]),
]


def test_accepted_data() -> None:
    for data, wanted in ACCEPTED:
        np.testing.assert_array_equal(devicemap.parallel_map(lambda row: row, data, **SEVERAL), wanted)


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
