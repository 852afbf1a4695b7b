"""Join the results of chunks, in the order of rows, in eager code; or yield them as a `tf.data.Dataset`."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from devicemap.errors import DeviceMapError, failure

UNEVEN_ROWS = (
    "Pad to a fixed shape, or return a tf.RaggedTensor. A fn of one row may also have "
    "fn_output_signature=tf.RaggedTensorSpec(...), and a fn of the batches of a dataset needs batched=True"
)
"""Advice for rows that do not fit into one dense tensor."""


def join(parts: Sequence[Any]) -> Any:
    """Join dense, ragged or sparse leaves of neighboring rows into one leaf.

    Raises:
        FunctionError: dense parts differ in their inner shapes.
    """
    first = parts[0]
    if len(parts) == 1:
        return first
    if isinstance(first, tf.SparseTensor):
        return tf.sparse.concat(0, list(parts), expand_nonconcat_dims=True)
    check_inner_shapes(parts)
    if isinstance(first, tf.RaggedTensor) and is_uniform(parts):
        return of_uniform_rows(join([part.values for part in parts]), first, sum(int(part.nrows()) for part in parts))
    return tf.concat(list(parts), axis=0)


def is_uniform(parts: Sequence[Any]) -> bool:
    """Return whether the rows of ragged tensors have the same static length."""
    return parts[0].shape[1] is not None and all(part.shape[1] == parts[0].shape[1] for part in parts)


def of_uniform_rows(values: Any, first: Any, rows: Any) -> Any:
    """Return a ragged tensor of `values`, whose `rows` have the same length as those of the ragged tensor `first`."""
    dtype = first.row_splits.dtype
    length = tf.constant(first.shape[1], dtype)
    return tf.RaggedTensor.from_uniform_row_length(values, length, nrows=tf.cast(rows, dtype), validate=False)


def check_inner_shapes(parts: Sequence[Any]) -> None:
    """Raise `FunctionError` if dense results of shards differ in their inner shapes."""
    shapes = list(dict.fromkeys(str(part.shape[1:]) for part in parts if isinstance(part, tf.Tensor)))
    if len(shapes) > 1:
        raise failure(
            f"fn returned dense results of different inner shapes for different shards: {', '.join(shapes)}; a dense "
            f"tensor cannot hold both. {UNEVEN_ROWS}"
        )


def as_dataset(stream: Callable[[], Iterator[Any]], spec: Any, count: int | None) -> Any:
    """Return a `tf.data.Dataset` that calls `stream()` for each iteration over it.

    TensorFlow never frees the generator of a dataset (tests/laws/test_lifetimes.py). Therefore the generator refers to the
    stream weakly, and the variant tensor of the dataset owns the stream. Datasets, iterators and functions that derive from
    the dataset keep this tensor.
    """
    dataset = tf.data.Dataset.from_generator(_weakly(stream), output_signature=spec)
    if count is not None:
        dataset = dataset.apply(tf.data.experimental.assert_cardinality(count))
    tf.data.experimental.to_variant(dataset)._devicemap_stream = stream
    return dataset


def _weakly(stream: Callable[[], Iterator[Any]]) -> Callable[[], Iterator[Any]]:
    reference = weakref.ref(stream)

    def generate() -> Iterator[Any]:
        known = reference()
        if known is None:
            raise DeviceMapError(
                "the dataset that DeviceMap.as_dataset made is gone, and datasets that a tf.function derives from it do not "
                "keep it alive; keep that dataset as long as you read derived datasets"
            )
        return known()

    return generate
