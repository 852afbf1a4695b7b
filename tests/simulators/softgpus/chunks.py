"""Chunks on a GPU: in its memory, in the time of its kernels, and while others are copied."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from simulators.softgpus.pair import GPUS, gpus, on_gpus, x

import devicemap
from devicemap.errors import FunctionError
from devicemap.types import ChunkFailed, ChunkFinished, Event


def batches(rows: int, count: int) -> tf.data.Dataset:
    with tf.device("CPU:0"):
        return tf.data.Dataset.range(rows * count).map(lambda n: tf.cast(n, tf.float32)).batch(rows)


def lengths(kind: type, events: list[Event]) -> list[int]:
    """Of the chunks of each event of a kind."""
    return [len(event.shard) for event in events if isinstance(event, kind)]


def test_auto_sizes_stay_in_memory() -> None:
    """A row takes about 1 MiB of 64 MiB, and larger chunks would pay. Twice: the second call begins with the size found."""
    events: list[Event] = []

    def wide(rows: Any) -> Any:
        return tf.reduce_mean(tf.sin(tf.tile(rows[:, None], [1, 1 << 17])), 1)

    options = {"devices": "GPU:1", "prefetch": 1, "batch_size": "auto", "progress": events.append}
    mapper = devicemap.DeviceMap(wide, batched=True, **options)
    for _ in range(2):
        events.clear()
        assert len(mapper(batches(64, 8))) == 512
        assert not lengths(ChunkFailed, events)
        assert 16 <= max(lengths(ChunkFinished, events)) <= 64


def test_running_out_of_memory_loses_no_row() -> None:
    """Where one chunk fits, and where not even one does; on a GPU each, as TensorFlow waits ten seconds for memory."""
    with ThreadPoolExecutor(2) as pool:
        for each in [pool.submit(_run_out_of_memory, *how) for how in ((0, 48, 2, 1), (1, 96, 1, 2))]:
            each.result()


def _run_out_of_memory(gpu: int, rows: int, prefetch: int, parts: int) -> None:
    """Its ops are as wide as a variable says, so that the memory of a row, 1 MiB, cannot be estimated."""
    events: list[Event] = []
    with tf.device("CPU:0"):
        width = tf.Variable(1 << 17)

    def wide(rows: Any) -> Any:
        spread = tf.tile(rows[:, None], [1, tf.identity(width)])
        return tf.reduce_mean(tf.sin(spread) + tf.cos(spread), 1)

    options = {"devices": f"GPU:{gpu}", "prefetch": prefetch, "progress": events.append}
    mapper = devicemap.DeviceMap(wide, batched=True, **options)
    results = list(mapper.stream(batches(rows, 3)))
    assert [len(chunk) for chunk in results] == [rows] * 3
    n = np.arange(3.0 * rows)
    np.testing.assert_allclose(tf.concat(results, 0), np.sin(n) + np.cos(n), rtol=1e-4, atol=1e-4)
    assert lengths(ChunkFinished, events) == [rows // parts] * 3 * parts
    assert len(lengths(ChunkFailed, events)) <= prefetch
    assert sum(device.back_offs for device in mapper.report.devices) >= parts - 1


def test_captured_variables_that_do_not_fit_are_named_before_a_row_is_computed() -> None:
    with tf.device("CPU:0"):
        table = tf.Variable(tf.zeros([17 << 20]))

    def named_error(gpu: str, **options: Any) -> tuple[FunctionError, list[Any]]:
        ran: list[Any] = []
        with pytest.raises(FunctionError) as error:
            on_gpus(
                lambda row: row * tf.gather(table, 0), name="lookup", progress=ran.append, **options | {"devices": gpu}
            )(tf.range(8.0))
        return error.value, ran

    with ThreadPoolExecutor(2) as pool:  # TensorFlow waits ten seconds for memory, here on both at the same time
        found = [pool.submit(named_error, GPUS[0]), pool.submit(named_error, GPUS[1], batch_size=4)]
    for gpu, (error, ran) in zip(GPUS, (each.result() for each in found)):
        said = f"lookup: no memory for a copy of what fn captures, 71303168 bytes in all, on {gpu}; with in_place="
        assert str(error).startswith(said)
        assert isinstance(error, (tf.errors.ResourceExhaustedError, tf.errors.InternalError))
        assert not [event for event in ran if isinstance(event, ChunkFinished)]


def test_memory_that_was_used_before_does_not_keep_chunks_small() -> None:
    events: list[Event] = []
    with tf.device("GPU:0"):
        used = [tf.zeros([1 << 20]) for _ in range(10)]  # 40 of 64 MiB
    del used
    mapper = devicemap.DeviceMap(tf.sin, batched=True, devices="GPU:0", batch_size="auto", progress=events.append)
    assert len(mapper(batches(64, 32))) == 2048
    assert max(lengths(ChunkFinished, events)) >= 64


def test_times_are_those_of_the_devices_where_results_stay_on_one() -> None:
    """A kernel takes 0.1 s on one device and 0.2 s on the other; results are gathered on the first."""
    events: list[Event] = []
    with tf.device("CPU:0"):
        data = x[:8]

    def clocked(**options: Any) -> tuple[devicemap.types.Report, float, list[int]]:
        mapper = devicemap.DeviceMap(lambda rows: tf.sin(tf.cos(rows)), batched=True, output_device="GPU:0", **options)
        mapper(data)
        gpus.configure(0, kernel_seconds=0.1)
        gpus.configure(1, kernel_seconds=0.2)
        gpus.clear()
        events.clear()
        began = time.perf_counter()
        result = mapper(data)
        seconds = time.perf_counter() - began
        to_host = [copy.bytes for copy in gpus.copies("to host")]  # before the result is read
        assert result.backing_device.endswith("GPU:0")
        np.testing.assert_allclose(result, np.sin(np.cos(data)), rtol=1e-5, atol=1e-6)
        gpus.reset()
        return mapper.report, seconds, to_host

    report, seconds, to_host = clocked(devices="GPU:0")
    assert report.devices[0].busy_seconds >= 0.2
    assert seconds >= 0.2
    assert to_host == [4]
    report, seconds, to_host = clocked()
    assert [device.busy_seconds >= least for device, least in zip(report.devices, (0.2, 0.4))] == [True, True]
    assert to_host == [4, 4]
    _, _, to_host = clocked(batch_size=4, progress=events.append)
    finished = [event for event in events if isinstance(event, ChunkFinished)]
    assert finished
    for event in finished:
        assert event.seconds - event.started_seconds >= {"0": 0.2, "1": 0.4}[event.shard.device[-1]]
    assert to_host == [4] * len(finished)


def test_copies_overlap_with_kernels() -> None:
    """Copying a chunk to the device takes as long as computing it, 10 ms, and its results are small.

    By the log of copies, which last from the beginning of the first to the end of the last result's.
    """

    def overlap(prefetch: int | None) -> float:
        """How much of the time of copies to the device is also that of kernels."""
        mapper = devicemap.DeviceMap(lambda rows: tf.sin(rows)[:, :1], batched=True, devices="GPU:0", prefetch=prefetch)
        data = tf.data.Dataset.from_tensors(np.zeros([16, 4096], np.float32)).repeat(24)
        gpus.reset()
        list(mapper.stream(data))
        gpus.configure(0, element_seconds=0.005 / 65536, bytes_per_second=4 * 65536 / 0.01)  # 2 kernels
        gpus.clear()
        list(mapper.stream(data))
        copies = gpus.copies()
        copying = sum(copy.end_seconds - copy.start_seconds for copy in copies if copy.kind == "to device")
        kernels = sum(runs.seconds for runs in gpus.runs("GPU:0"))
        span = max(copy.end_seconds for copy in copies) - min(copy.start_seconds for copy in copies)
        return (copying + kernels - span) / copying

    shares = [max(overlap(prefetch) for _ in range(2)) for prefetch in (1, 2, None)]
    assert shares[0] < 0.1 < shares[1] + 0.1 < shares[2], shares
    assert shares[2] > 0.6, shares
