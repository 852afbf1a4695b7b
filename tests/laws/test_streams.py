"""`DeviceMap.stream` and `as_dataset` on data, devices and consumers."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
import threads

import devicemap
from devicemap.errors import FunctionError
from devicemap.types import CallFinished, ChunkFinished, Event

X = tf.reshape(tf.range(60, dtype=tf.float32), [20, 3])
BATCHES = [4, 1, 7, 8]


def _samples() -> Any:
    return tf.data.Dataset.from_tensor_slices(X)


def _batches(rows: Any = X, sizes: list[int] = BATCHES) -> Any:
    """A dataset of uneven batches, of unknown cardinality."""

    def read() -> Iterator[Any]:
        yield from tf.split(rows, sizes)

    spec = tf.TensorSpec([None, *rows.shape[1:]], rows.dtype)
    return tf.data.Dataset.from_generator(read, output_signature=spec)


@pytest.mark.parametrize(
    ("data", "options", "sizes"),
    [
        (X, {"batch_size": 6}, [6, 6, 6, 2]),
        (_samples(), {"batch_size": 6}, [6, 6, 6, 2]),
        (_batches(), {"batched": True}, BATCHES),
        (_batches(), {"batched": True, "batch_size": 5}, [4, 1, 5, 2, 5, 3]),
        (X, {}, None),
        (_samples(), {}, None),
        (_batches(), {"batched": True, "batch_size": "auto"}, None),
        (X[:0], {"batch_size": 6}, []),
        (_samples().take(0), {}, []),
    ],
)
def test_chunks_come_in_order(devices: list[str], data: Any, options: dict[str, Any], sizes: list[int] | None) -> None:
    mapper = devicemap.DeviceMap(lambda x: {"twice": x * 2}, devices=devices, **options)
    for _ in range(2):
        chunks = list(mapper.stream(data))
        if sizes is not None:
            assert [len(chunk["twice"]) for chunk in chunks] == sizes
        rows = np.concatenate([chunk["twice"] for chunk in chunks] or [np.zeros([0, 3])])
        np.testing.assert_array_equal(rows, X * 2 if sizes != [] else np.zeros([0, 3]))
    assert threads.running() == []


def test_ragged_samples_and_strings() -> None:
    words = tf.data.Dataset.from_generator(
        lambda: (["a b", "c", "d e f"][:n] for n in (1, 3, 0, 2)), output_signature=tf.TensorSpec([None], tf.string)
    )
    mapper = devicemap.DeviceMap(
        lambda row: tf.strings.length(row), fn_output_signature=tf.RaggedTensorSpec([None], tf.int32), batch_size=2
    )
    assert [chunk.to_list() for chunk in mapper.stream(words)] == [[[3], [3, 1, 5]], [[], [3, 1]]]


def test_leaving_a_dataset_does_not_wait_for_its_end() -> None:
    left, ended = threading.Event(), threading.Event()

    def read() -> Iterator[int]:
        try:
            yield from range(1000)
        finally:
            if left.wait(60):
                ended.set()

    numbers = tf.data.Dataset.from_generator(read, output_signature=tf.TensorSpec([], tf.int64))
    for _ in devicemap.DeviceMap(lambda n: n * n, batch_size=1).stream(numbers):
        break
    left.set()
    assert ended.wait(60)
    gc.collect()
    threads.wait_until_ended()


def test_a_call_that_ends_while_a_dataset_is_read() -> None:
    """The reading cannot be stopped. It replaces neither the error of the call nor its report."""
    go_on = threading.Event()

    def read() -> Iterator[int]:
        yield from range(4)
        assert go_on.wait(60)
        yield 4

    def fail(n: Any) -> Any:
        with tf.control_dependencies([tf.debugging.assert_none_equal(n, 3)]):
            return tf.identity(n)

    numbers = tf.data.Dataset.from_generator(read, output_signature=tf.TensorSpec([], tf.int32))
    mapper = devicemap.DeviceMap(fail, devices=["CPU:0"], batch_size=2, prefetch=1)  # one chunk after another
    with pytest.raises(FunctionError, match="failed on row 3"):
        mapper(numbers)
    assert "failed on row 3" in mapper.report.error
    stream = mapper.stream(numbers)
    assert next(stream).numpy().tolist() == [0, 1]
    stream.close()
    go_on.set()
    threads.wait_until_ended()


@pytest.mark.parametrize("options", [{"batch_size": 1}, {"batched": True}, {"batched": True, "batch_size": "auto"}])
def test_a_dataset_that_raises_half_way(options: dict[str, Any]) -> None:
    batched = "batched" in options
    rows = np.arange(42).reshape([21, 2] if batched else [42])  # the last chunk of 8 rows meets the error

    def read() -> Iterator[Any]:
        yield from rows
        raise OSError("the disk")

    spec = tf.TensorSpec([None] if batched else [], tf.int64)
    numbers = tf.data.Dataset.from_generator(read, output_signature=spec)
    mapper = devicemap.DeviceMap(lambda n: n * n, **options)
    delivered: list[Any] = []
    with pytest.raises(tf.errors.OpError, match="the disk"):
        delivered.extend(mapper.stream(numbers))
    assert np.concatenate(delivered).tolist() == [n * n for n in range(42)]
    assert "the disk" in str(mapper.report.error)


def test_each_chunk_has_its_own_inner_shape() -> None:
    shapes = [[2, 3], [2, 4]]
    changing = tf.data.Dataset.from_generator(
        lambda: map(np.zeros, shapes), output_signature=tf.TensorSpec([None, None], tf.float64)
    )
    mapper = devicemap.DeviceMap(lambda b: b, batched=True)
    assert [chunk.shape.as_list() for chunk in mapper.stream(changing)] == shapes


def test_two_streams_of_one_mapper_at_once() -> None:
    events: list[Event] = []
    mapper = devicemap.DeviceMap(lambda n: n * n, devices=["CPU:0", "CPU:1"], batch_size=3, progress=events.append)
    for a, b in zip(mapper.stream(tf.range(30)), mapper.stream(tf.range(30))):
        np.testing.assert_array_equal(a, b)
    assert sum(len(event.shard) for event in events if isinstance(event, ChunkFinished)) == 60
    assert isinstance(events[-1], CallFinished)
    assert (mapper.report.engine, mapper.report.rows) == ("chunks", 30)


def test_as_a_dataset(devices: list[str]) -> None:
    mapper = devicemap.DeviceMap(lambda x: (x * 2, tf.reduce_sum(x)), devices=devices, batch_size=6)
    dataset = mapper.as_dataset(X)
    assert dataset.element_spec == (tf.TensorSpec([None, 3], tf.float32), tf.TensorSpec([None], tf.float32))
    assert int(dataset.cardinality()) == 4
    for _ in range(2):  # each iteration maps again
        rows, sums = next(iter(dataset.unbatch().batch(20)))
        np.testing.assert_array_equal(rows, X * 2)
        np.testing.assert_allclose(sums, tf.reduce_sum(X, 1))
    assert [len(rows) for rows, _ in dataset.prefetch(2).repeat(2)] == [6, 6, 6, 2] * 2
    iterator = iter(dataset)
    next(iterator)
    del iterator
    gc.collect()
    threads.wait_until_ended()  # tf.data closes the generator in a thread of its own


def test_as_a_dataset_with_first_rows() -> None:
    mapper = devicemap.DeviceMap(lambda x: x * 2, batch_size=6, deterministic=False)
    dataset = mapper.as_dataset(_samples())
    assert dataset.element_spec == (tf.TensorSpec([], tf.int64), tf.TensorSpec([None, 3], tf.float32))
    found = {int(start): chunk for start, chunk in dataset}
    assert sorted(found) == [0, 6, 12, 18]
    for start, chunk in found.items():
        np.testing.assert_array_equal(chunk, X[start : start + 6] * 2)
