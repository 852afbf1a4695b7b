"""Digests of input rows: what a finished chunk was computed from, so that other data is told from the same.

They are of the values and their dtypes, not of chunks: rows that are read again in other pieces have the same digest.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from devicemap.store.chunks import Array
from devicemap.store.encoding import encode_array


class RowDigest:
    """A digest of rows that come in pieces: where they are cut makes no difference, everything else does.

    >>> whole, parts = RowDigest(), RowDigest()
    >>> whole.update([tf.range(5)])
    >>> parts.update([tf.range(2)]), parts.update([tf.range(2, 5)])
    (None, None)
    >>> whole.hexdigest() == parts.hexdigest()
    True
    """

    def __init__(self) -> None:
        self._hashes: dict[str, Any] = {}

    def update(self, leaves: Sequence[Any]) -> None:
        """Go on with the next rows: eager leaves of shape `[rows, ...]`."""
        for i, leaf in enumerate(leaves):
            for part, array in _parts_by_row(leaf).items():
                name = f"{i}.{leaf.dtype.name}.{part}"
                if name not in self._hashes:
                    self._hashes[name] = hashlib.blake2b(digest_size=16)
                self._hashes[name].update(np.asarray(array, order="C").reshape(-1).view(np.uint8))

    def hexdigest(self) -> str:
        """32 hexadecimal digits."""
        names = "".join(f"{name} {part.hexdigest()}\n" for name, part in sorted(self._hashes.items()))
        return hashlib.blake2b(names.encode(), digest_size=16).hexdigest()


def digest_rows(leaves: Sequence[Any]) -> str:
    """The digest of rows that come in one piece."""
    digest = RowDigest()
    digest.update(leaves)
    return digest.hexdigest()


def _parts_by_row(leaf: Any) -> dict[str, Array]:
    """Arrays that say all about a leaf, each such that those of neighbouring rows, joined, are those of all the rows."""
    if isinstance(leaf, tf.RaggedTensor):
        values, rows = leaf.flat_values.numpy(), int(leaf.nrows())
        splits = enumerate(leaf.nested_row_splits)
        lengths = {f"lengths{i}": np.diff(splits.numpy()).astype(np.int64) for i, splits in splits}
        return encode_array(values) | lengths | {"shape": _repeated(values.shape[1:], rows)}
    if isinstance(leaf, tf.SparseTensor):
        shape, indices = leaf.dense_shape.numpy(), leaf.indices.numpy()
        order = np.argsort(indices[:, 0], kind="stable")
        counts = np.bincount(indices[:, 0], minlength=shape[0]).astype(np.int64)
        where = {"counts": counts, "indices": indices[order, 1:], "shape": _repeated(shape[1:], shape[0])}
        return encode_array(leaf.values.numpy()[order]) | where
    values = leaf.numpy()
    return encode_array(values) | {"shape": _repeated(values.shape[1:], len(values))}


def _repeated(shape: Any, rows: int) -> Array:
    return np.tile(np.asarray(shape, np.int64), (rows, 1))
