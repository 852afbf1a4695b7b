"""Rows of all kinds of leaves."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

ROWS = 12
DENSE = tf.reshape(tf.range(3.0 * ROWS) % 4.0, [ROWS, 3])
NEST = {
    "numbers": tf.reshape(tf.range(24.0), [ROWS, 2]),
    "flags": tf.range(ROWS) % 2 == 0,
    "halves": tf.cast(tf.range(ROWS), tf.bfloat16),
    "texts": tf.strings.as_string(tf.range(ROWS)),
    "ragged": tf.RaggedTensor.from_row_lengths(tf.range(18), [0, 1, 2, 3] * 3),
    "sparse": tf.sparse.from_dense(DENSE),
}


def nest_of(batch: Any) -> Any:
    """Return rows of `NEST`, by their numbers."""
    found = {key: tf.gather(leaf, batch) for key, leaf in NEST.items() if key != "sparse"}
    return found | {"sparse": tf.sparse.from_dense(tf.gather(DENSE, batch))}
