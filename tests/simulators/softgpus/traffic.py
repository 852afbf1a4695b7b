"""What a call copies: rows, results, and each captured variable once, by the log of copies."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from simulators.softgpus.pair import GPUS, copies_of, gpus, on_gpus, rows, scanning, sent, shard, wave, weight, weights

with tf.device("CPU:0"):
    upstream = tf.random.stateless_normal(rows.shape, [0, 2])
    ids = tf.random.stateless_uniform([8], [0, 3], 0, 4096, tf.int32)


@pytest.fixture
def table() -> tf.Variable:
    with tf.device("CPU:0"):
        return tf.Variable(tf.random.stateless_normal([4096, 64], [0, 4]))


TABLE_BYTES = 4096 * 64 * 4


def bytes_on(gpu: str) -> int:
    return tf.config.experimental.get_memory_info(gpu)["current"]


def of_any_length(call: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return tf.function(lambda r: call(r), input_signature=[tf.TensorSpec([None, 20, 16])])


def gradients(rows: Any, call: Callable[[Any], Any]) -> Any:
    with tf.GradientTape() as tape:
        tape.watch(rows)
        results = call(rows)
    return tape.gradient(results, [rows, weights], upstream)


def test_inside_a_function_each_gets_its_shard_and_what_is_captured_and_sends_its_results() -> None:
    mapper = on_gpus(wave)
    assert sent(tf.function(lambda r: mapper(r))) == ([shard + weight] * 2, [shard] * 2)
    assert sent(of_any_length(mapper)) == ([shard + weight + 1] * 2, [shard] * 2)  # and whether there are rows


def careful(rows: Any) -> Any:
    tf.debugging.assert_less(rows, 1e9)
    return tf.sin(rows) * weights


def telling(rows: Any) -> Any:
    tf.print("rows", output_stream="file:///dev/null")
    return tf.sin(rows) + weights


@pytest.mark.parametrize("fn", [wave, careful, telling], ids=["reads", "asserts", "prints"])
@pytest.mark.parametrize("options", [{"batched": True}, {}, {"vectorize": False}], ids=str)
def test_inside_a_function_results_that_wait_for_something_go_to_the_host_at_once(fn: Any, options: Any) -> None:
    """For what reads, acts and checks, and for the number of rows that came back."""
    mapper = on_gpus(fn, **options)
    assert sent(tf.function(lambda r: mapper(r))) == sent(mapper)


@pytest.mark.parametrize("batched", [True, False])
@pytest.mark.parametrize("deterministic", [True, False])
def test_a_stream_sends_rows_results_and_what_is_captured_once(batched: bool, deterministic: bool) -> None:
    data = tf.data.Dataset.from_tensor_slices(rows).batch(2)
    data, options = (data, {"batched": True}) if batched else (data.unbatch(), {"batch_size": 2})
    mapper = on_gpus(wave, deterministic=deterministic, **options)

    def chunks() -> list[Any]:
        return [item if deterministic else item[1] for item in mapper.stream(data)]

    chunks()
    copies = copies_of(chunks)
    sizes = {kind: [c.bytes for c in copies if c.kind == kind] for kind in ("between", "to host", "to device")}
    assert not sizes["between"]
    assert sum(sizes["to host"]) == 2 * shard
    assert sum(sizes["to device"]) == 2 * shard + 2 * weight
    assert len(sizes["to device"]) == 4 + 2


def test_of_gradients_only_those_of_rows_and_variables_travel() -> None:
    mapper = on_gpus(wave)
    each = 2 * shard + weight
    to, back = sent(lambda r: gradients(r, mapper))
    assert to in ([each] * 2, [each + shard] * 2)  # TensorFlow 2.16 sends the rows once more
    assert back == [each] * 2
    to, back = sent(tf.function(lambda r: gradients(r, mapper)))
    returned = 2 * shard + weight  # through the first device, where TensorFlow places what a function returns
    assert to in ([each, each], [each + returned, each])
    assert back in ([each, each], [each + returned, each])


@pytest.mark.parametrize("vectorize", ["auto", False])
def test_what_a_loop_keeps_for_its_gradient_stays_where_it_is(vectorize: Any) -> None:
    mapper = on_gpus(scanning, vectorize=vectorize)
    to, back = sent(lambda r: gradients(r, mapper))
    assert to[0] == to[1] < 1.2 * (3 * shard + weight)
    assert back[0] == back[1] < 1.2 * (2 * shard + weight)
    measured = []  # of several calls, as what is freed in time differs
    for _ in range(5):
        for gpu in GPUS:
            tf.config.experimental.reset_memory_stats(gpu)
        gradients(rows, mapper)
        measured.append([tf.config.experimental.get_memory_info(gpu)["peak"] for gpu in GPUS])
    peaks = np.median(measured, 0)
    assert peaks.max() < 1.1 * peaks.min(), measured


@pytest.mark.parametrize("vectorize", ["auto", False])
def test_inside_a_function_loops_send_no_more_to_one_than_to_others(vectorize: Any) -> None:
    mapper = on_gpus(scanning, vectorize=vectorize)
    for call in (tf.function(lambda r: mapper(r)), of_any_length(mapper)):
        to, back = sent(call)
        assert to[0] == to[1]
        assert back[0] == back[1] < 1.1 * shard


doubled = tf.function(lambda x: 2 * tf.sin(x))


def after_a_call(x: Any) -> Any:
    return tf.while_loop(lambda _: True, lambda x: (x + tf.cos(x),), [doubled(x)], maximum_iterations=3)[0]


def in_a_loop(x: Any) -> Any:
    return tf.while_loop(lambda _: True, lambda x: (after_a_call(x),), [x], maximum_iterations=3)[0]


def before_a_call(x: Any) -> Any:
    return doubled(tf.while_loop(lambda _: True, lambda x: (tf.cos(x),), [x], maximum_iterations=3)[0])


@pytest.mark.parametrize("fn", [after_a_call, in_a_loop, tf.function(after_a_call), before_a_call])
@pytest.mark.parametrize("options", [{"batched": True}, {"vectorize": False}], ids=str)
def test_loops_beside_calls_stay_on_their_device(fn: Any, options: Any) -> None:
    mapper = on_gpus(fn, **options)
    for call in (mapper, tf.function(lambda r: gradients(r, mapper)[0])):
        call(rows)
        gpus.clear()
        call(rows)
        assert not gpus.copies("between")


@pytest.mark.parametrize(("home", "vectorize"), [("CPU:0", False), ("GPU:0", "auto")])
def test_inside_a_function_loops_are_sent_a_variable_once(home: str, vectorize: Any) -> None:
    """A step of training: forward and backward."""
    with tf.device(home):
        w = tf.Variable(tf.fill([16, 16], 0.01))

    def states(row: Any) -> Any:
        return tf.scan(lambda state, element: tf.tanh(tf.linalg.matvec(w, state) + element), row)

    def step(rows: Any, mapped: Callable[[Any], Any]) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(mapped(rows) ** 2)
        return tape.gradient(loss, w)

    with tf.device("CPU:0"):
        expected = tf.function(step)(rows, lambda rows: tf.map_fn(states, rows))
    mapper = on_gpus(states, vectorize=vectorize)
    call = tf.function(lambda rows: step(rows, mapper))
    np.testing.assert_allclose(call(rows), expected, rtol=1e-3, atol=1e-5)
    gpus.clear()
    call(rows).numpy()
    fetched = [copy for copy in gpus.copies() if copy.bytes == 16 * 16 * 4 and copy.receiver in GPUS]
    assert 1 <= len(fetched) <= 3, fetched  # and the gradient goes through the first, as a function returns it


DTYPES = "float32 float16 bfloat16 float64 complex64 int64 bool int32 int8 uint8 int16 uint16 uint32 uint64"


@pytest.mark.parametrize("dtype", map(tf.as_dtype, DTYPES.split()), ids=lambda dtype: dtype.name)
def test_rows_one_by_one_send_nothing_in_a_step(dtype: tf.DType) -> None:
    """Except int32, which GPUs compute on the host: a row may be copied to the device, which the host does not wait for."""
    with tf.device("CPU:0"):
        floats = tf.cast(tf.reshape(tf.range(60) % 100, [20, 3]), tf.float32)
        many = tf.cast(floats, dtype)
    twice = tf.logical_not if dtype == tf.bool else lambda row: tf.bitwise.bitwise_or(row, row)
    if dtype.is_floating or dtype.is_complex or dtype == tf.int32:
        twice = lambda row: row + row
    for fn, data in (
        (twice, many),
        (lambda row: tf.cast(row, tf.float32) * 2.0, many),
        (lambda row: tf.cast(row * 2.0, dtype), floats),
    ):
        mapper = on_gpus(fn, vectorize=False)
        mapper(data)
        copies = copies_of(lambda: mapper(data))
        counts = Counter((copy.kind, copy.sender, copy.receiver) for copy in copies)
        to_device = 10 if dtype == tf.int32 else 2  # rows of a shard
        assert all(n <= (to_device if kind == "to device" else 2) for (kind, *_), n in counts.items()), counts
        assert not [copy for copy in copies if copy.kind == "between"]
        with tf.device("CPU:0"):
            np.testing.assert_array_equal(mapper(data), fn(data))  # each takes elements by themselves


def test_a_device_holds_a_copy_of_a_variable_during_a_call_only(table: tf.Variable) -> None:
    first, second = (on_gpus(lambda row: tf.reduce_sum(table) + row) for _ in range(2))
    before = max(map(bytes_on, GPUS))
    first(rows)
    assert sorted(copy.receiver for copy in gpus.copies() if copy.bytes == TABLE_BYTES) == ["GPU:0", "GPU:1"]
    with tf.GradientTape() as tape:
        results = second(rows)
    assert tape.gradient(results, table) is not None
    del tape, results
    held = [max(map(bytes_on, GPUS)) - before for call in (first, second) * 3 if call(rows) is not None]
    assert max(held) < 0.1 * TABLE_BYTES
    table.assign_add(tf.ones_like(table))
    np.testing.assert_allclose(second(rows), tf.reduce_sum(table) + rows, rtol=1e-3)
    assert sent(first)[0] == [shard + TABLE_BYTES] * 2
    in_chunks = on_gpus(lambda row: tf.reduce_sum(table) + row, batch_size=1)
    assert sum(sent(in_chunks)[0]) == 2 * shard + 2 * TABLE_BYTES, "once per job"


@pytest.mark.parametrize("options", [{"batched": True}, {}, {"vectorize": False}, {"batch_size": 3}], ids=str)
def test_tables_may_stay_where_they_are(table: tf.Variable, options: dict[str, Any]) -> None:
    mapper = on_gpus(lambda i: tf.gather(table, i), in_place=[table], **options)
    found = mapper(ids)
    with tf.device("CPU:0"):
        np.testing.assert_array_equal(found, tf.gather(table, ids))
        assert sum(copy.bytes for copy in copies_of(lambda: mapper(ids))) <= 3 * 8 * 64 * 4
        if not options:
            with tf.GradientTape() as tape:
                total = tf.reduce_sum(mapper(ids))
            gradient = tf.convert_to_tensor(tape.gradient(total, table))
            np.testing.assert_array_equal(tf.reduce_sum(gradient, 1), 64 * tf.math.bincount(ids, minlength=4096))
    assert max(map(bytes_on, GPUS)) < TABLE_BYTES / 4


def test_what_lies_on_the_host_is_kept_on_each_device() -> None:
    found = on_gpus(lambda row: row * 2)(rows)
    assert found.device.endswith("GPU:0")
    assert found.backing_device.endswith("CPU:0")
    assert sent(on_gpus(lambda row: row + tf.reduce_sum(found))) == ([shard] * 2, [shard] * 2)
