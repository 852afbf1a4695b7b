"""A plan tells the bytes that the log of copies shows, in one graph and in chunks, and the ops that no GPU runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import tensorflow as tf
from simulators.softgpus.pair import copies_of, gpus, on_gpus

from devicemap.events import short_name

with tf.device("CPU:0"):
    x = tf.random.stateless_normal([12, 32], [0, 0])
    numbers = tf.range(12, dtype=tf.int64)
    narrow = tf.range(12)
    text = tf.strings.as_string(numbers)
    pictures = tf.random.stateless_uniform([12, 8, 8, 3], [0, 0], 0, 255, tf.int32)
    pictures = tf.cast(pictures, tf.uint8)
    jpegs = tf.map_fn(tf.io.encode_jpeg, pictures, fn_output_signature=tf.string)
    w = tf.Variable(tf.random.stateless_normal([32, 16], [0, 1]))
    table = tf.Variable(tf.random.stateless_normal([4096, 64], [0, 2]))
    tens = tf.lookup.StaticHashTable(tf.lookup.KeyValueTensorInitializer(numbers, numbers * 10), -1)
    of_text = tf.lookup.StaticHashTable(tf.lookup.KeyValueTensorInitializer(text, numbers), -1)
    constant = tf.random.stateless_normal([100, 32], [0, 3])
    counter = tf.Variable(0.0)


def looping(row: Any) -> Any:
    return tf.while_loop(lambda i, s: i < 5, lambda i, s: (i + 1, tf.sin(s) + tf.reduce_sum(w)), (0, row))[1]


def gradient(row: Any) -> Any:
    with tf.GradientTape() as tape:
        tape.watch(row)
        y = tf.reduce_sum(tf.tanh(tf.linalg.matvec(w, row, transpose_a=True)))
    return tape.gradient(y, row)


def counting(row: Any) -> Any:
    counter.assign_add(1.0)
    return row


CASES: dict[str, tuple[Callable[..., Any], Any, dict[str, Any]]] = {
    "rows": (lambda row: tf.sin(row) * 2, x, {}),
    "a variable": (lambda batch: batch @ w, x, {"batched": True}),
    "a nest": (lambda a, b: {"scaled": a * tf.cast(b, tf.float32), "as it is": b}, (x, numbers), {}),
    "int32": (lambda i: i * 2, narrow, {}),
    "from int32": (lambda i: tf.cast(i, tf.float32) * 2, narrow, {}),
    "to int32": (lambda row: tf.cast(row, tf.int32), x, {}),
    "int32 found": (lambda row: tf.argmax(row, output_type=tf.int32), x, {}),
    "bool": (lambda row: row > 0, x, {"vectorize": False}),
    "pictures": (lambda picture: tf.cast(picture, tf.float32) / 255, pictures, {}),
    "text to int32": (tf.strings.length, text, {}),
    "text to text": (lambda s: tf.strings.join([s, "!"]), text, {}),
    "text to numbers": (lambda s: tf.strings.to_number(s) * 2, text, {}),
    "to text": (tf.strings.as_string, x, {}),
    "a lookup": (lambda i: tens.lookup(i) + 1, numbers, {}),
    "a lookup of batches": (lambda i: tens.lookup(i) + 1, numbers, {"batched": True}),
    "a lookup of text": (lambda s: tf.cast(of_text.lookup(s), tf.float32) / 2, text, {}),
    "a table": (lambda i: tf.gather(table, i), narrow, {}),
    "a table in place": (lambda i: tf.gather(table, i), narrow, {"in_place": table}),
    "a constant": (lambda row: row + constant[3], x, {}),
    "a loop": (looping, x, {}),
    "a loop in a loop": (looping, x, {"vectorize": False}),
    "a loop of batches": (looping, x, {"batched": True}),
    "a gradient": (gradient, x, {}),
    "a count": (counting, x, {}),
    "noise": (lambda row: row + tf.random.normal([32]), x, {}),
    "seeded noise": (lambda row, seed: row + tf.random.stateless_normal([32], seed), x, {"seed": 1}),
    "svd": (lambda row: tf.linalg.svd(tf.reshape(row, [4, 8]), compute_uv=False), x, {}),
}


def place(name: str) -> str:
    short = short_name(name)
    return "host" if short.startswith("CPU") else short


def copied(mapper: Callable[[Any], Any], data: Any) -> Counter[tuple[str, str]]:
    """Bytes by sender and receiver of the second call."""
    mapper(data)
    found: Counter[tuple[str, str]] = Counter()
    for copy in copies_of(lambda: mapper(data)):
        found[copy.sender, copy.receiver] += copy.bytes
    return found


@pytest.mark.parametrize("case", CASES)
def test_the_plan_tells_what_the_log_of_copies_shows(case: str) -> None:
    fn, data, options = CASES[case]
    mapper = on_gpus(fn, **options)
    found = copied(mapper, data)
    plan = mapper.explain(data)
    told: Counter[Any] = Counter()
    for transfer in plan.transfers:
        assert transfer.bytes_per_call is not None
        told[place(transfer.sender), place(transfer.receiver)] += transfer.bytes_per_call
    assert +told == found
    strays = {stray.op for stray in plan.strays if stray.reason != "int32"}  # those may run there on other dtypes
    assert not strays & {runs.op for runs in gpus.runs()}

    mapper = on_gpus(fn, batch_size=4, **options)
    found, told = copied(mapper, data), Counter()
    for transfer in mapper.explain(data).transfers:
        ends = ("to", "from")[place(transfer.sender) != "host"]
        if transfer.bytes_per_row is None:
            told[ends] += transfer.bytes_per_call
        elif "GPU:0" in (place(transfer.sender), place(transfer.receiver)):  # whichever of the two is idle gets them
            told[ends] += transfer.bytes_per_row * 12
    assert told["to"] == sum(size for (sender, _), size in found.items() if sender == "host")
    assert told["from"] == sum(size for (sender, _), size in found.items() if sender != "host")


def test_how_large_pictures_are_is_not_known() -> None:
    mapper = on_gpus(lambda s: tf.image.decode_jpeg(s, 3)[0, 0], fn_output_signature=tf.TensorSpec([3], tf.uint8))
    unknown = [transfer for transfer in mapper.explain(jpegs).transfers if transfer.bytes_per_call is None]
    assert {transfer.what for transfer in unknown} == {"DecodeJpeg"}
