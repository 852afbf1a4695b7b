"""Streams of results as `tf.data.Dataset`s."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from devicemap.errors import DeviceMapError


def as_dataset(stream: Callable[[], Iterator[Any]], spec: Any, count: int | None) -> Any:
    """Return a `tf.data.Dataset` that calls `stream()` for each iteration over it.

    TensorFlow never frees the generator of a dataset (tests/laws/test_lifetimes.py). Therefore the generator refers to the
    stream weakly, and the variant tensor of the dataset owns the stream. Datasets, iterators and functions that derive from
    the dataset keep this tensor.
    """
    reference = weakref.ref(stream)

    def generate() -> Iterator[Any]:
        known = reference()
        if known is None:
            raise DeviceMapError(
                "the dataset that DeviceMap.as_dataset made is gone, and datasets that a tf.function derives from it do not "
                "keep it alive; keep that dataset as long as you read derived datasets"
            )
        return known()

    dataset = tf.data.Dataset.from_generator(generate, output_signature=spec)
    if count is not None:
        dataset = dataset.apply(tf.data.experimental.assert_cardinality(count))
    tf.data.experimental.to_variant(dataset)._devicemap_stream = stream
    return dataset
