"""Streams of results as `tf.data.Dataset`s."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from devicemap.data.structure import as_nodes, as_objects, tuples_for_lists
from devicemap.errors import DeviceMapError


def as_dataset(stream: Callable[[], Iterator[Any]], spec: Any, count: int | None) -> Any:
    """Return a `tf.data.Dataset` that calls `stream()` for each iteration over it.

    TensorFlow never frees the generator of a dataset (tests/laws/test_lifetimes.py). Therefore the generator refers to the
    stream weakly, and the variant tensor of the dataset owns the stream. Datasets, iterators and functions that derive from
    the dataset keep this tensor.

    Args:
        stream: returns an iterator of chunks.
        spec: the nest of `tf.TypeSpec`s of a chunk, with nodes for objects.
        count: the number of chunks if it is known.
    """
    reference, spec = weakref.ref(stream), tuples_for_lists(spec)

    def generate() -> Iterator[Any]:  # Dataset.from_generator accepts only tuples and dicts as structure
        known = reference()
        if known is None:
            raise DeviceMapError(
                "the dataset that DeviceMap.as_dataset made is gone, and datasets that a tf.function derives from it do not "
                "keep it alive; keep that dataset as long as you read derived datasets"
            )
        return (tuple(tf.nest.flatten(as_nodes(chunk))) for chunk in known())

    @tf.autograph.experimental.do_not_convert
    def packed(*leaves: Any) -> Any:
        return as_objects(tf.nest.pack_sequence_as(spec, leaves))

    dataset = tf.data.Dataset.from_generator(generate, output_signature=tuple(tf.nest.flatten(spec)))
    if count is not None:
        dataset = dataset.apply(tf.data.experimental.assert_cardinality(count))
    dataset = dataset.map(packed)
    tf.data.experimental.to_variant(dataset)._devicemap_stream = stream
    return dataset
