"""Digests of input rows: what a finished chunk was computed from, so that other data is told from the same.

They are of the values and their dtypes, not of chunks: rows that are read again in other pieces have the same digest.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Iterator, Sequence
from operator import itemgetter
from typing import Any

import numpy as np
import tensorflow as tf

from devicemap.store.chunks import Array
from devicemap.store.encoding import encode_array
from devicemap.store.storage import checksum


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
        for name, data, _ in _parts(leaves):
            if name not in self._hashes:
                self._hashes[name] = hashlib.blake2b(digest_size=16)
            self._hashes[name].update(data)

    def hexdigest(self) -> str:
        """32 hexadecimal digits."""
        return _digest_of((name, part.hexdigest()) for name, part in sorted(self._hashes.items()))


def digest_rows(leaves: Sequence[Any]) -> str:
    """The digest of rows that come in one piece."""
    digest = RowDigest()
    digest.update(leaves)
    return digest.hexdigest()


def digest_ranges(leaves: Sequence[Any], ranges: Iterable[tuple[int, int]]) -> Iterator[str]:
    """The digests of some `(start, stop)` of the rows, each as `digest_rows` tells it of those rows that are there alone."""
    parts = [(name, data, starts.tolist()) for name, data, starts in sorted(_parts(leaves), key=itemgetter(0))]
    for start, stop in ranges:
        yield _digest_of((name, checksum(data[_at(starts, start) : _at(starts, stop)])) for name, data, starts in parts)


def _digest_of(parts: Iterable[tuple[str, str]]) -> str:
    return checksum("".join([f"{name} {digest}\n" for name, digest in parts]).encode())


def _at(starts: list[int], row: int) -> int:
    return starts[row] if row < len(starts) else starts[-1]


def _parts(leaves: Sequence[Any]) -> Iterator[tuple[str, memoryview, Array]]:
    """Bytes that say all about the leaves, by name, and where those of each row begin, and of the last one end.

    Those of neighbouring rows, joined, are those of all the rows.
    """
    for i, leaf in enumerate(leaves):
        for part, (array, starts) in _arrays_by_row(leaf).items():
            entry_bytes = array.itemsize * math.prod(array.shape[1:])
            data = np.asarray(array, order="C").reshape(-1).view(np.uint8).data
            yield f"{i}.{leaf.dtype.name}.{part}", data, starts.astype(np.int64) * entry_bytes


def _arrays_by_row(leaf: Any) -> dict[str, tuple[Array, Array]]:
    """Arrays that say all about a leaf, each with the places on its first axis where its rows begin, and the last one ends."""
    if isinstance(leaf, tf.RaggedTensor):
        values, starts = leaf.flat_values.numpy(), np.arange(int(leaf.nrows()) + 1)
        parts = _repeated(values.shape[1:], len(starts) - 1)
        for i, splits in enumerate(leaf.nested_row_splits):
            parts[f"lengths{i}"] = np.diff(splits.numpy()).astype(np.int64), starts
            starts = splits.numpy()[starts]
        return _values(values, starts) | parts
    if isinstance(leaf, tf.SparseTensor):
        shape, indices = leaf.dense_shape.numpy(), leaf.indices.numpy()
        order = np.argsort(indices[:, 0], kind="stable")
        counts = np.bincount(indices[:, 0], minlength=shape[0]).astype(np.int64)
        starts = _sums(counts)
        where = {"counts": (counts, np.arange(len(counts) + 1)), "indices": (indices[order, 1:], starts)}
        return _values(leaf.values.numpy()[order], starts) | where | _repeated(shape[1:], shape[0])
    values = leaf.numpy()
    return _values(values, np.arange(len(values) + 1)) | _repeated(values.shape[1:], len(values))


def _values(values: Array, starts: Array) -> dict[str, tuple[Array, Array]]:
    encoded = encode_array(values)
    parts = {name: (array, starts) for name, array in encoded.items()}
    if "bytes" in encoded:
        parts["bytes"] = encoded["bytes"], _sums(encoded["lengths"].ravel())[starts * math.prod(values.shape[1:])]
    return parts


def _repeated(shape: Any, rows: int) -> dict[str, tuple[Array, Array]]:
    return {"shape": (np.tile(np.asarray(shape, np.int64), (rows, 1)), np.arange(rows + 1))}


def _sums(counts: Array) -> Array:
    return np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
