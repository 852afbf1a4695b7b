"""Results of chunks -> rows in order, in eager code."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from devicemap.errors import failure

UNEVEN_ROWS = (
    "Return a tf.RaggedTensor, give fn_output_signature=tf.RaggedTensorSpec(...), or pad to a fixed shape; if the data "
    "is a dataset of batches, set batched=True"
)
"""What to do where a dense tensor cannot hold all results."""


def join(parts: Sequence[Any]) -> Any:
    """Join neighbouring rows in eager code; the same as `gather` without its graph."""
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
    """Whether rows of ragged tensors have one length, which is known."""
    return parts[0].shape[1] is not None and all(part.shape[1] == parts[0].shape[1] for part in parts)


def of_uniform_rows(values: Any, first: Any, rows: Any) -> Any:
    """So many rows of all `values`, as long as those of the ragged tensor `first` are."""
    dtype = first.row_splits.dtype
    length = tf.constant(first.shape[1], dtype)
    return tf.RaggedTensor.from_uniform_row_length(values, length, nrows=tf.cast(rows, dtype), validate=False)


def check_inner_shapes(parts: Sequence[Any]) -> None:
    """Raise where dense results of shards, eager ones, do not fit together."""
    shapes = list(dict.fromkeys(str(part.shape[1:]) for part in parts if isinstance(part, tf.Tensor)))
    if len(shapes) > 1:
        raise failure(
            f"fn returned dense results of different inner shapes for different shards: {', '.join(shapes)}; a dense "
            f"tensor cannot hold both. {UNEVEN_ROWS}"
        )
