"""Indices, nested structures, branches, strings and dtypes: shared tables, scattered updates, several arguments."""

from __future__ import annotations

from typing import Any

import tensorflow as tf
from compile.corpus.samples import integers, normal, shared, uniform

TABLE = shared(8, 3)
PHOTOS = shared(8, 6, 6, 2)
SEGMENTS = [0, 0, 1, 2, 2]
VOCABULARY = tf.lookup.StaticHashTable(
    tf.lookup.KeyValueTensorInitializer(["ant", "bee", "cat"], tf.constant([1, 2, 3], tf.int64)), 0
)
CODES = tf.lookup.StaticHashTable(tf.lookup.KeyValueTensorInitializer(tf.range(4), tf.constant([2, 0, 3, 1])), -1)
WORDS = tf.constant(["ant bee", "cat", "dog ant cat", "bee", "bee bee"])


def mixed_up(image: Any, i: Any) -> Any:
    return 0.7 * image + 0.3 * tf.gather(PHOTOS, i), tf.one_hot([i], 8)[0] * 0.3


def interpolated(x: Any) -> Any:
    """Linear, in a shared table."""
    place = tf.clip_by_value(x, 0.0, 6.999)
    i = tf.cast(place, tf.int32)
    part = (place - tf.cast(i, tf.float32))[:, None]
    return TABLE[0] + tf.gather(TABLE, i) * (1.0 - part) + tf.gather(TABLE, i + 1) * part


def nearest_neighbours(x: Any) -> Any:
    distances = tf.reduce_sum(tf.math.squared_difference(TABLE, x), axis=1)
    negative, nearest = tf.math.top_k(-distances, k=3)
    return nearest, tf.reduce_mean(tf.gather(TABLE, nearest), axis=0), -negative


def message_passing(nodes: Any) -> Any:
    """In a graph that all rows share."""
    source, target = tf.constant([0, 0, 1, 2, 3, 4]), tf.constant([1, 2, 2, 3, 4, 0])
    messages = tf.nn.relu(tf.gather(nodes, source) - tf.gather(nodes, target))
    return nodes + tf.math.unsorted_segment_sum(messages, target, num_segments=5)


def permuted(x: Any, order: Any) -> Any:
    return tf.gather(x, order), tf.gather(x, order[::-1], axis=-1), tf.gather_nd(x, order[:2][None])


def slices(x: Any) -> Any:
    return x[:, 1], x[..., None, 2:0:-1], x[-1], tf.strided_slice(x, [0, 1], [4, 4], [2, 1]), x[1:][:2]


def chosen_activation(x: Any, i: Any) -> Any:
    return tf.switch_case(i, [lambda: tf.nn.relu(x), lambda: tf.sin(x), lambda: tf.nn.softmax(x)], default=lambda: x)


def edit_distance(a: Any, b: Any) -> Any:
    row = tf.range(6)
    for i in tf.range(5):
        best = tf.concat([[i + 1], tf.minimum(row[1:] + 1, row[:-1] + tf.cast(b != a[i], tf.int32))], axis=0)
        for j in tf.range(1, 6):
            best = tf.tensor_scatter_nd_min(best, [[j]], [best[j - 1] + 1])
        row = best
    return row[-1]


def particles(state: Any) -> Any:
    bounced = state["v"] * tf.where(state["x"] > 1.0, -1.0, 1.0)
    energy = tf.reduce_sum(state["v"] ** 2) / 2.0
    return {"x": state["x"] + 0.1 * state["v"], "v": bounced}, (energy, tf.reduce_any(state["x"] > 1.0))


def bits(x: Any) -> Any:
    shifted = tf.bitwise.right_shift(x, tf.range(8))
    return tf.bitwise.bitwise_and(shifted, 1), tf.bitwise.bitwise_xor(x, 85)


def flags(a: Any, b: Any) -> Any:
    both = tf.logical_and(a, tf.logical_not(b))
    parity = tf.cast(tf.math.logical_xor(a, b), tf.int8)
    return tf.reduce_all(both | b), tf.math.count_nonzero(both, dtype=tf.int32), parity


def tokens(text: Any) -> Any:
    words = tf.strings.split(tf.strings.lower(text[None]), " ").to_tensor("", shape=[1, 3])[0]
    return VOCABULARY.lookup(words), tf.strings.length(text)


MATRICES, VECTORS = normal(4, 4), normal(3)
FUNCTIONS = {
    "mixed up with a shared image": (mixed_up, (normal(6, 6, 2), integers(high=8))),
    "table interpolated": (interpolated, uniform(4, high=7.0)),
    "nearest neighbours": (nearest_neighbours, VECTORS),
    "message passing": (message_passing, normal(5, 2)),
    "segments": (lambda x: (tf.math.segment_sum(x, SEGMENTS), tf.math.segment_max(x, SEGMENTS)), normal(5)),
    "scattered from zeros": (lambda i, x: tf.scatter_nd(i[:, None], x, [8]), (tf.argsort(normal(6)), normal(6))),
    "counts": (lambda i: tf.tensor_scatter_nd_add(tf.zeros([4]), i[:, None], tf.ones([6])), integers(6, high=4)),
    "chosen from columns": (lambda x, i: tf.gather(x, i, axis=1, batch_dims=1), (MATRICES, integers(4, 2, high=3))),
    "permuted": (permuted, (MATRICES, tf.argsort(normal(4, seed=1)))),
    "slices": (slices, MATRICES),
    "slice from an index": (lambda x, i: tf.reduce_sum(x[i : i + 3]), (normal(8), integers(high=5))),
    "tf.switch_case": (chosen_activation, (VECTORS, integers(high=4))),
    "edit distance": (edit_distance, (integers(5, high=3), integers(5, high=3, seed=1))),
    "particles in a dict": (particles, {"x": VECTORS, "v": normal(3, seed=1)}),
    "bits": (bits, integers(high=200)),
    "bits of a float": (lambda x: tf.bitcast(x, tf.int32), VECTORS),
    "flags": (flags, (normal(6) > 0.0, normal(6, seed=1) > 0.0)),
    "tf.vectorized_map inside": (lambda x: tf.vectorized_map(lambda p: tf.tensordot(p, p, 0), x), normal(4, 3)),
    "running sums and products": (lambda x: tf.cumsum(x, exclusive=True) + tf.math.cumprod(x, reverse=True), VECTORS),
    "running logsumexp": (tf.math.cumulative_logsumexp, VECTORS),
    "unique values": (lambda x: tf.size(tf.unique(x)[0]), integers(6, high=4)),
    "tokens": (tokens, WORDS),
    "numbers in text": (lambda x: tf.strings.to_number(tf.strings.as_string(x)) + 1.0, integers(high=99)),
    "hash of text": (lambda t: tf.strings.to_hash_bucket_fast(t, 16), WORDS),
    "lookup of integers": (lambda x: CODES.lookup(x), integers(3, high=5)),
    "checked": (lambda x: tf.debugging.check_numerics(x, "not finite") * 2.0, VECTORS),
}
