"""Captured variables: tables and weights that live on one device, and that `fn` reads once, in a loop, or in many calls.

The hand-written blocks read a variable where it lives, for each read; devicemap brings it to each device once per call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import tensorflow as tf

import devicemap
from benchmarks import peers
from benchmarks.conftest import Scale
from benchmarks.measuring import Compare
from benchmarks.traffic import Meter

WORDS, WIDTH, STEPS = 1000, 64, 64
"""Of the tables, 256 kB each; and how long sequences are."""

BLOCKS = "graph blocks"
ROWS_FIRST = "graph blocks, rows copied first"
ALL_FIRST = "graph blocks, rows and table copied first"

Fn = Callable[[Any], Any]


@pytest.mark.parametrize("lookups", [128, 8192, 65536])
def test_lookups(compare: Compare, meter: Meter, real_devices: list[str], lookups: int) -> None:
    """A call looks up some rows of a table, or many more than it has: the mean of 16 of them for each row of data."""
    table = make_table(real_devices)

    def fn(bags: Any) -> Any:
        return tf.reduce_mean(tf.gather(table, bags), axis=1)

    ways = blocks_and_ours({BLOCKS: fn}, real_devices, make_words(lookups // 16, 16))
    compare(ways, f"{lookups} lookups in 256 kB", rounds=15, calls=5, meter=meter)


@pytest.mark.parametrize("rows", [64, 1024])
def test_decoding(compare: Compare, meter: Meter, real_devices: list[str], rows: int) -> None:
    """A lookup in each of 64 steps, of a word that depends on the state so far."""
    ways = blocks_and_ours(make_decoders(real_devices), real_devices, make_words(rows, STEPS))
    case = f"{rows} sequences, a lookup in 256 kB in each of {STEPS} steps"
    compare(ways, case, rounds=15, meter=meter)


def test_recurrent_cell(compare: Compare, meter: Meter, real_devices: list[str]) -> None:
    """A Keras cell, whose weights are read in each of 64 steps."""
    with tf.device(real_devices[0]):
        cell = tf.keras.layers.GRUCell(WIDTH)
        cell.build((None, WIDTH))
    kilobytes = round(sum(tf.size(weight).numpy() for weight in cell.weights) * 4 / 1000)

    def fn(sequences: Any) -> Any:
        state = tf.zeros([tf.shape(sequences)[0], WIDTH])
        for step in tf.range(STEPS):
            _, (state,) = cell(sequences[:, step], [state])
        return state

    with tf.device("CPU:0"):
        sequences = tf.random.stateless_normal([64, STEPS, WIDTH], [2, 2])
    ways = blocks_and_ours({BLOCKS: fn, ROWS_FIRST: lambda rows: fn(tf.identity(rows))}, real_devices, sequences)
    case = f"64 sequences, a GRU cell of {kilobytes} kB in each of {STEPS} steps"
    compare(ways, case, rounds=15, meter=meter)


@pytest.mark.parametrize("kind", ["decoded", "scored"])
def test_chunks(compare: Compare, meter: Meter, real_devices: list[str], scale: Scale, kind: str) -> None:
    """A job of many batches; the blocks are called for each. Looked up in a loop, or multiplied by the whole table."""
    batches, batch_size = 2 if scale.quick else 32, 64
    rows = batches * batch_size * len(real_devices)
    if kind == "decoded":
        blocks, data = make_decoders(real_devices), make_words(rows, STEPS)
    else:
        table = make_table(real_devices)
        with tf.device("CPU:0"):
            data = tf.random.stateless_normal([rows, WIDTH], [3, 3])
        blocks = {BLOCKS: lambda vectors: tf.reduce_max(tf.matmul(vectors, table, transpose_b=True), axis=1)}
    ways = blocks_and_ours(blocks, real_devices, data, batch_size)
    case = f"{batches} batches of {rows // batches} rows, {kind} with 256 kB"
    compare(ways, case, rounds=7, meter=meter)


def blocks_and_ours(
    blocks: dict[str, Fn], devices: list[str], data: Any, batch_size: int | None = None
) -> dict[str, Callable[[], Any]]:
    """The ways: one call on all rows; or the blocks once for each batch, of `batch_size` rows for each device."""
    functions = {name: peers.graph_blocks(block, devices, "tf.concat") for name, block in blocks.items()}
    if batch_size is not None:
        functions = {name: in_batches(function, batch_size * len(devices)) for name, function in functions.items()}
    ours = "devicemap" if batch_size is None else f"devicemap, batch_size={batch_size}"
    functions[ours] = devicemap.DeviceMap(blocks[BLOCKS], devices=devices, batched=True, batch_size=batch_size)
    return {name: lambda function=function: function(data) for name, function in functions.items()}


def in_batches(function: Fn, rows: int) -> Fn:
    return lambda data: tf.concat([function(data[i : i + rows]) for i in range(0, len(data), rows)], 0)


def make_decoders(devices: list[str]) -> dict[str, Fn]:
    """What takes words `[rows, STEPS]` and gives the last state `[rows, WIDTH]`, with more and more care."""
    variable = make_table(devices)

    def decode(words: Any, table: Any) -> Any:
        state = tf.zeros([tf.shape(words)[0], WIDTH])
        for step in tf.range(STEPS):
            word = (words[:, step] + tf.argmax(state, 1, tf.int32)) % WORDS
            state = tf.tanh(state + tf.gather(table, word))
        return state

    return {
        BLOCKS: lambda words: decode(words, variable),
        ROWS_FIRST: lambda words: decode(tf.identity(words), variable),
        ALL_FIRST: lambda words: decode(tf.identity(words), tf.identity(variable)),
    }


def make_table(devices: list[str]) -> tf.Variable:
    with tf.device(devices[0]):
        return tf.Variable(tf.random.stateless_normal([WORDS, WIDTH], [0, 0]))


def make_words(rows: int, columns: int) -> Any:
    with tf.device("CPU:0"):
        return tf.random.stateless_uniform([rows, columns], [1, 1], 0, WORDS, tf.int32)
