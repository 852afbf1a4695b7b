"""`tf.strings`, and what reads and writes text and records."""

from __future__ import annotations

import tensorflow as tf
from clients.data import COUNTS, VECTORS, integers, normal, texts

_WORDS = texts("a quick fox", "", "jumps  over", "Äpfel 12", "x")
_NUMBERS = texts("1", "-20", "300")
_RAGGED_TEXT = tf.RaggedTensorSpec([None], tf.string)
_RECORDS = tf.stack(
    [
        tf.train.Example(
            features=tf.train.Features(
                feature={
                    "n": tf.train.Feature(int64_list=tf.train.Int64List(value=[i])),
                    "x": tf.train.Feature(float_list=tf.train.FloatList(value=[float(j) for j in range(i % 4)])),
                }
            )
        ).SerializeToString()
        for i in range(len(COUNTS))
    ]
)

OPS = {
    "as_string": (lambda x: tf.strings.as_string(x, precision=3), VECTORS),
    "as_string of integers": (tf.strings.as_string, COUNTS),
    "base64": (lambda s: tf.io.decode_base64(tf.io.encode_base64(s)), _WORDS),
    "bytes_split": (lambda s: tf.size(tf.strings.bytes_split(s)), _WORDS),
    "decode_csv": (lambda s: tuple(tf.io.decode_csv(tf.strings.join([s, ",7"]), [[0], [0]])), _NUMBERS),
    "decode_raw": (lambda s: tf.reduce_sum(tf.cast(tf.io.decode_raw(s, tf.uint8), tf.int32)), _WORDS),
    "decode_raw of a fixed length": (lambda s: tf.io.decode_raw(s, tf.uint8, fixed_length=4), _WORDS),
    "equal": (lambda s: tf.equal(s, "x"), _WORDS),
    "format": (lambda x: tf.strings.format("{} and {}", (x, x[0])), integers(0, 9, 2)),
    "hash buckets": (
        lambda s: (tf.strings.to_hash_bucket_fast(s, 100), tf.strings.to_hash_bucket_strong(s, 100, [1, 2])),
        _WORDS,
    ),
    "hash bucket": (lambda s: tf.strings.to_hash_bucket(s, 100), _WORDS),
    "join": (lambda s: tf.strings.join([s, "and", s], separator=" "), _WORDS),
    "length": (lambda s: (tf.strings.length(s), tf.strings.length(s, unit="UTF8_CHAR")), _WORDS),
    "lower and upper": (lambda s: (tf.strings.lower(s, encoding="utf-8"), tf.strings.upper(s)), _WORDS),
    "ngrams": (
        lambda s: tf.size(tf.strings.ngrams(tf.strings.split(s), 2)),
        _WORDS,
    ),
    "parse_single_example": (
        lambda s: tf.io.parse_single_example(s, {"n": tf.io.FixedLenFeature([], tf.int64)})["n"],
        _RECORDS,
    ),
    "parse_single_example of any length": (
        lambda s: tf.sparse.reduce_sum(tf.io.parse_single_example(s, {"x": tf.io.VarLenFeature(tf.float32)})["x"]),
        _RECORDS,
    ),
    "parse_tensor": (
        lambda x: tf.ensure_shape(tf.io.parse_tensor(tf.io.serialize_tensor(x), tf.float32), [4]),
        VECTORS,
    ),
    "reduce_join": (lambda n: tf.strings.reduce_join(tf.strings.as_string(n), separator="-"), integers(0, 9, 3)),
    "regex_full_match": (lambda s: tf.strings.regex_full_match(s, ".*o.*"), _WORDS),
    "regex_replace": (lambda s: tf.strings.regex_replace(s, "o(.)", r"\1\1"), _WORDS),
    "split": (tf.strings.split, _WORDS, _RAGGED_TEXT),
    "split, counted": (lambda s: tf.size(tf.strings.split(s)), _WORDS),
    "strip": (lambda s: tf.strings.strip(tf.strings.join([" ", s, " "])), _WORDS),
    "substr": (lambda s: tf.strings.substr(s, 0, 3), _WORDS),
    "substr of the row": (lambda s, n: tf.strings.substr(s, 0, n), (_WORDS, integers(0, 4))),
    "to_number": (lambda s: (tf.strings.to_number(s), tf.strings.to_number(s, tf.int64)), _NUMBERS),
    "unicode_decode": (lambda s: tf.reduce_sum(tf.strings.unicode_decode(s, "UTF-8")), _WORDS),
    "unicode_encode": (lambda n: tf.strings.unicode_encode(n, "UTF-8"), integers(65, 90, 3)),
    "unicode_script": (lambda n: tf.strings.unicode_script(n), integers(65, 900, 3)),
    "unicode_split": (
        lambda s: tf.strings.unicode_split(s, "UTF-8"),
        _WORDS,
        _RAGGED_TEXT,
    ),
    "unicode_transcode": (lambda s: tf.strings.unicode_transcode(s, "UTF-8", "UTF-16-BE"), _WORDS),
    "unsorted_segment_join": (
        lambda n: tf.strings.unsorted_segment_join(tf.strings.as_string(n), [1, 0, 1], 2),
        integers(0, 9, 3),
    ),
    "strings in and constants": (lambda s: tf.where(tf.strings.length(s) > 3, s, "short"), _WORDS),
    "fingerprint": (lambda x: tf.fingerprint(tf.bitcast(x, tf.uint8)[None])[0], normal(2)),
    "as numbers of a table": (
        lambda s: tf.cast(tf.strings.length(s), tf.float32) * tf.constant([1.0, 2.0]),
        _WORDS,
    ),
}
