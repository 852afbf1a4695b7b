"""Digests of the rows of a call, with which a resumed run compares them."""

from __future__ import annotations

import numpy as np
import tensorflow as tf

from devicemap.store.encoding import digest

LEAVES = {
    "numbers": tf.reshape(tf.range(24), [8, 3]),
    "strings": tf.constant([b"", b"a", b"ab\0", b"\0", b"c", b"", b"a\0\0", b"b"]),
    "bfloat16": tf.cast(tf.range(8), tf.bfloat16),
    "ragged": tf.RaggedTensor.from_row_lengths(tf.range(9), [0, 3, 1, 0, 0, 2, 3, 0]),
    "ragged strings": tf.RaggedTensor.from_row_lengths(tf.strings.as_string(tf.range(9)), [0, 3, 1, 0, 0, 2, 3, 0]),
    "ragged twice": tf.ragged.constant([[[1], [2, 3]], [], [[]], [[4]], [], [[5, 6], []], [], [[7]]]),
    "sparse": tf.sparse.from_dense(np.arange(24).reshape(8, 3) % 3),
    "no elements": tf.zeros([8, 0]),
}


def test_digests_differ() -> None:
    ragged = tf.RaggedTensor.from_row_lengths
    others = [
        tf.reshape(tf.range(24), [8, 3, 1]),
        tf.range(8),
        tf.constant([b"", b"a", b"ab", b"\0\0", b"c", b"", b"a\0\0", b"b"]),
        ragged(tf.range(9), [3, 0, 1, 0, 0, 2, 3, 0]),
        ragged(tf.range(9)[::-1], [0, 3, 1, 0, 0, 2, 3, 0]),
        tf.ragged.constant([[[1], [2, 3]], [], [], [[4]], [], [[5, 6], []], [], [[7]]]),
        tf.sparse.from_dense(np.arange(24).reshape(8, 3) % 4),
        tf.SparseTensor(LEAVES["sparse"].indices, LEAVES["sparse"].values, [8, 4]),
        tf.sparse.to_dense(LEAVES["sparse"]),
        tf.zeros([8, 0, 1]),
    ]
    numbers, strings = LEAVES["numbers"], LEAVES["strings"]
    nests = [*([leaf] for leaf in [*LEAVES.values(), *others]), [numbers, strings], [strings, numbers]]
    assert len({digest(leaves) for leaves in nests}) == len(nests)
