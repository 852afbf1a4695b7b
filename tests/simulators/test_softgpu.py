"""The GPUs in software that the laws run on, too: that they are devices as TensorFlow knows them, and tell what they did."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LOAD = """
import time
import numpy as np
import tensorflow as tf
from benchmarks import softgpu
try:
    gpus = softgpu.start(2, 64 << 20)
except softgpu.Unavailable as reason:
    raise SystemExit(f"unavailable: {reason}")
"""
DATA = """
with tf.device("CPU:0"):
    x = tf.constant(np.random.default_rng(0).normal(size=[64, 64]), tf.float32)
"""
START = LOAD + DATA


def _run(program: str, start: str = START) -> None:
    """In a process of its own: devices are made once."""
    code = start + textwrap.dedent(program)
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=300, check=False
    )
    if "unavailable:" in done.stderr:
        pytest.skip(done.stderr.strip().splitlines()[-1])
    assert done.returncode == 0, done.stderr[-3000:]


def test_they_compute_what_the_host_does_and_tell_what_travelled() -> None:
    _run("""
        assert [d.name for d in tf.config.list_logical_devices("GPU")] == ["/device:GPU:0", "/device:GPU:1"]

        def steps(x):
            with tf.device("GPU:0"):
                y = tf.sin(x) @ x
            with tf.device("GPU:1"):
                return tf.nn.relu(y, name="positive"), tf.strings.length("on the host")

        compiled = tf.function(steps)
        np.testing.assert_allclose(compiled(x)[0], np.maximum(np.sin(x.numpy()) @ x.numpy(), 0), rtol=1e-5, atol=1e-5)
        gpus.clear()
        compiled(x)[0].numpy()
        size = 64 * 64 * 4
        told = [(c.kind, c.sender, c.receiver, c.bytes) for c in gpus.copies()]
        assert told[:2] == [("to device", "host", "GPU:0", size), ("between", "GPU:0", "GPU:1", size)], told
        assert {t[:3] for t in told[2:]} == {("to host", "GPU:1", "host")}, told
        assert [c.tensor for c in gpus.copies()][:2] == ["Sin", "matmul"], gpus.copies()
        assert {(run.device, run.op, run.count) for run in gpus.runs()} >= {("GPU:0", "Sin", 1), ("GPU:1", "Relu", 1)}
        from benchmarks.traffic import Copied, CopyLog

        called = CopyLog(gpus).measure(lambda: compiled(x)[0])
        assert called == Copied(to_device=(size, 1), to_host=(size, 1), between=(size, 1)), called
    """)


def test_gradients_and_loops_do_not_race() -> None:
    _run("""
        w = tf.Variable(tf.eye(64))

        def loss(x):
            with tf.device("GPU:1"):
                return tf.reduce_sum(tf.scan(lambda s, e: tf.tanh(tf.linalg.matvec(w, s) + e), x) ** 2)

        def gradient(x):
            with tf.GradientTape() as tape:
                value = loss(x)
            return tape.gradient(value, w)

        with tf.device("CPU:0"):
            compiled = tf.function(gradient)
        first = compiled(x).numpy()
        for _ in range(20):
            np.testing.assert_array_equal(compiled(x), first)
    """)


def test_memory_runs_out() -> None:
    _run("""
        with tf.device("GPU:0"):
            large = tf.zeros([8 << 20])
        assert tf.config.experimental.get_memory_info("GPU:0")["current"] >= 32 << 20
        try:
            with tf.device("GPU:0"):
                tf.zeros([16 << 20])
        except tf.errors.ResourceExhaustedError:
            pass
        else:
            raise AssertionError("64 MiB held 96")
    """)


def test_memory_is_told() -> None:
    _run("""
        import devicemap
        gpus, (cpu,) = devicemap.list_devices("GPU"), devicemap.list_devices("CPU")
        assert [gpu.memory for gpu in gpus] == [64 << 20] * 2 and cpu.memory is None
        too_many = tf.TensorSpec([1 << 20, 64])
        plan = devicemap.DeviceMap(tf.sin, devices=["GPU:1", "CPU:0"]).explain(too_many)
        assert [device.memory_limit_bytes for device in plan.devices] == [64 << 20, None]
        assert "the rows of GPU:1 may take" in plan.advice[0], plan.advice
    """)


def test_plans_say_what_int32_costs() -> None:
    _run("""
        import devicemap

        def buckets(dtype):
            return lambda row: tf.math.floormod(tf.cast(row, dtype) * 3, 5)

        rows = tf.TensorSpec([100, 4])
        plan = devicemap.DeviceMap(buckets(tf.int32), devices="GPU").explain(rows)
        assert [(s.op, s.device, s.reason, s.instead) for s in plan.strays] == [
            ("Mul", "GPU", "int32", "int64"), ("FloorMod", "GPU", "int32", "int64"),
        ], plan.strays
        said = "Mul and FloorMod have no kernel for int32 on GPU itself, and the host computes it: cast to int64"
        assert plan.advice[0] == said, plan.advice
        plan = devicemap.DeviceMap(buckets(tf.int64), devices="GPU").explain(rows)  # what it says
        assert plan.strays == () == plan.advice, plan
    """)


def test_time_is_spent_on_the_stream() -> None:
    _run("""
        gpus.configure(0, kernel_seconds=0.05)
        with tf.device("GPU:0"):
            tf.sin(x)
            began = time.perf_counter()
            y = tf.sin(tf.sin(tf.sin(x)))
            enqueued = time.perf_counter() - began
            y.numpy()
        assert enqueued < 0.1 and time.perf_counter() - began > 0.15, enqueued
        gpus.reset()
        gpus.configure(1, bytes_per_second=64 * 64 * 4 / 0.1)
        began = time.perf_counter()
        with tf.device("GPU:1"):
            tf.identity(x).numpy()
        assert time.perf_counter() - began > 0.15
    """)


def test_kernels_are_those_of_a_cuda_build() -> None:
    _run("""
        with tf.device("GPU:0"):
            picture = tf.cast(tf.abs(x[:, :, None]), tf.uint8)
            assert tf.image.encode_png(picture).device.endswith("CPU:0")
            assert tf.sin(x).device.endswith("GPU:0") and tf.gather_nd(x, [[0]]).backing_device.endswith("GPU:0")
            assert (tf.constant(1) + 2).backing_device.endswith("CPU:0"), "int32 lies in the host's memory"
    """)


def test_convolutions_stay_in_the_order_that_the_cpu_has_kernels_for() -> None:
    _run("""
        images, kernels = tf.reshape(x, [4, 32, 32, 1]), tf.ones([3, 3, 1, 2])

        def convolve(images):
            with tf.device("GPU:1"):
                return tf.nn.relu(tf.nn.bias_add(tf.nn.conv2d(images, kernels, 1, "SAME"), [0.5, -0.5]))

        np.testing.assert_allclose(tf.function(convolve)(images), convolve(images), rtol=1e-5, atol=1e-5)
    """)


def test_work_of_the_simulator_takes_time_of_the_stream() -> None:
    _run("""
        from benchmarks import simulator
        try:
            sim = simulator.load()
        except simulator.Unavailable as reason:
            raise SystemExit(f"unavailable: {reason}")
        gpus.configure(0, speed=2.0)
        rows, seconds = tf.range(4.0), tf.fill([4], 0.1)
        with tf.device("GPU:0"):
            sim.work(rows, seconds).numpy()
            began = time.perf_counter()
            results = sim.work(rows, seconds)
            assert time.perf_counter() - began < 0.1
            np.testing.assert_array_equal(results, 2 * rows + 1)
        assert 0.19 < time.perf_counter() - began < 0.4
    """)


CUT = f"""{LOAD.replace("start(2", "start(3")}
hidden, whole, cut = tf.config.list_physical_devices("GPU")
tf.config.set_visible_devices([whole, cut], "GPU")
parts = [tf.config.LogicalDeviceConfiguration(memory_limit=mebibytes) for mebibytes in (16, 32)]
tf.config.set_logical_device_configuration(cut, parts)
import devicemap
{DATA}"""


def test_they_are_cut_into_logical_ones_with_memory_of_their_own() -> None:
    _run(
        """
        from devicemap.base.devices import choose_devices, gpu_indices
        devices = devicemap.list_devices("GPU")
        assert [device.memory for device in devices] == [64 << 20, 16 << 20, 32 << 20]
        names = [device.description for device in devices]
        assert names == [names[0], f"part 1 of 2 of {names[0]}", f"part 2 of 2 of {names[0]}"]
        assert [*gpu_indices(choose_devices("GPU")).values()] == [1, 2, 2]
        np.testing.assert_allclose(devicemap.parallel_map(tf.sin, x, devices=cut), np.sin(x), rtol=1e-5)
        assert {run.device for run in gpus.runs()} == {"GPU:1", "GPU:2"}, gpus.runs()
        (advice,) = devicemap.DeviceMap(tf.sin).explain(x).advice
        assert advice.startswith("GPU:1 and GPU:2 are parts of one GPU, where large kernels take turns"), advice
        with tf.device("GPU:2"):
            tf.zeros([6 << 20])
        try:
            with tf.device("GPU:1"):
                held = tf.zeros([3 << 20])
                tf.zeros([2 << 20])
        except tf.errors.ResourceExhaustedError:
            pass
        else:
            raise AssertionError("16 MiB held 20")
        """,
        CUT,
    )


def test_logical_ones_of_a_gpu_take_turns() -> None:
    _run(
        """
        size = 64 * 64 * 4

        def measure(*names):
            "Seconds of three kernels on each at a time; how far apart copies to them, and how long one between them."
            def steps(x):
                results = []
                for name in names:
                    with tf.device(name):
                        results.append(tf.sin(tf.sin(tf.sin(x))))
                return results

            call = tf.function(steps)
            gpus.reset()
            [y.numpy() for y in call(x)]
            for gpu in range(3):
                gpus.configure(gpu, kernel_seconds=0.1)
            began = time.perf_counter()
            [y.numpy() for y in call(x)]
            seconds = time.perf_counter() - began
            for gpu in range(3):
                gpus.configure(gpu, bytes_per_second=size / 0.2)
            gpus.clear()
            first, second = call(x)
            with tf.device(names[1]):
                tf.cos(first).numpy()
            starts = [copy.start_seconds for copy in gpus.copies("to device")]
            (between,) = gpus.copies("between")
            assert (between.sender, between.receiver, between.bytes) == (*names, size), between
            return seconds, max(starts) - min(starts), between.end_seconds - between.start_seconds

        (two, copies_to_two, between_two), (one, copies_to_one, between_parts) = (
            measure("GPU:0", "GPU:1"), measure("GPU:1", "GPU:2")
        )
        assert two < 0.5 and one >= 0.6, (two, one)
        assert copies_to_two < 0.1 and copies_to_one > 0.19, (copies_to_two, copies_to_one)
        assert between_two >= 0.2 and between_parts < 0.1, (between_two, between_parts)
        """,
        CUT,
    )


TRAFFIC = f"""{START}
import devicemap

with tf.device("CPU:0"):
    rows, upstream = (tf.constant(np.random.default_rng(0).normal(size=[8, 20, 16]), tf.float32) for _ in range(2))
    weights = tf.Variable(tf.ones([16]))

def gradients(rows, call):
    with tf.GradientTape() as tape:
        tape.watch(rows)
        results = call(rows)
    return tape.gradient(results, [rows, weights], upstream)

def sent(call):
    "Bytes to each GPU, and from each, in the second call; none may go from one to another."
    call(rows)
    tf.nest.map_structure(lambda leaf: leaf.numpy(), call(rows))
    gpus.clear()
    results = call(rows)
    assert all(leaf.backing_device.endswith("CPU:0") for leaf in tf.nest.flatten(results)), results
    tf.nest.map_structure(lambda leaf: leaf.numpy(), results)
    copies = gpus.copies()
    assert not [copy for copy in copies if copy.kind == "between"], copies
    to = [sum(copy.bytes for copy in copies if copy.receiver == gpu) for gpu in ("GPU:0", "GPU:1")]
    return to, [sum(copy.bytes for copy in copies if copy.sender == gpu) for gpu in ("GPU:0", "GPU:1")]

def on_gpus(fn, **options):
    return devicemap.DeviceMap(fn, devices="GPU", output_device="CPU:0", **options)

def scanning(row):
    return tf.scan(lambda state, element: tf.sin(state) * weights + element, row)

any_rows = [tf.TensorSpec([None, 20, 16], tf.float32)]
shard, weight = rows.numpy().nbytes // 2, 16 * 4
"""


def test_each_gets_its_shard_and_what_is_captured_and_sends_its_results() -> None:
    _run(
        """
        mapper = on_gpus(lambda row: tf.sin(row) * weights)
        for call in (mapper, tf.function(lambda r: mapper(r)), tf.function(lambda r: mapper(r), input_signature=any_rows)):
            assert sent(call) == ([shard + weight] * 2, [shard] * 2)
        """,
        TRAFFIC,
    )


def test_a_stream_sends_rows_results_and_what_is_captured_once() -> None:
    _run(
        """
        in_batches = tf.data.Dataset.from_tensor_slices(rows).batch(2)
        for data, batched in ((in_batches, True), (in_batches.unbatch(), False)):
            streams = on_gpus(lambda batch: tf.sin(batch) * weights, batched=batched, batch_size=None if batched else 2)
            for deterministic in (True, False):
                list(streams.stream(data))
                gpus.clear()
                chunks = list(streams.stream(data))
                assert all(chunk.backing_device.endswith("CPU:0") for chunk in chunks)
                copies = gpus.copies()
                assert not [copy for copy in copies if copy.kind == "between"], copies
                sizes = {kind: [copy.bytes for copy in copies if copy.kind == kind] for kind in ("to device", "to host")}
                assert sum(sizes["to host"]) == rows.numpy().nbytes, sizes
                assert sum(sizes["to device"]) == rows.numpy().nbytes + 2 * weight and len(sizes["to device"]) == 4 + 2, sizes
        """,
        TRAFFIC,
    )


def test_of_gradients_only_those_of_rows_and_variables_travel() -> None:
    _run(
        """
        mapper = on_gpus(lambda row: tf.sin(row) * weights)
        each = 2 * shard + weight
        to, back = sent(lambda r: gradients(r, mapper))
        assert to in ([each] * 2, [each + shard] * 2) and back == [each] * 2  # TensorFlow 2.16 sends the rows once more
        to, back = sent(tf.function(lambda r: gradients(r, mapper)))
        returned = 2 * shard + weight  # by way of the first device, where TensorFlow places what a function returns
        assert to in ([each, each], [each + returned, each]) and back in ([each, each], [each + returned, each])
        """,
        TRAFFIC,
    )


def test_what_a_loop_keeps_for_its_gradient_stays_where_it_is() -> None:
    _run(
        """
        for vectorize in ("auto", False):
            mapper = on_gpus(scanning, vectorize=vectorize)
            call = lambda r: gradients(r, mapper)
            to, back = sent(call)
            assert to[0] == to[1] < 1.2 * (3 * shard + weight), to
            assert back[0] == back[1] < 1.2 * (2 * shard + weight), back
            measured = []  # of several calls, as what is freed in time differs
            for _ in range(5):
                for gpu in ("GPU:0", "GPU:1"):
                    tf.config.experimental.reset_memory_stats(gpu)
                call(rows)
                measured.append([tf.config.experimental.get_memory_info(gpu)["peak"] for gpu in ("GPU:0", "GPU:1")])
            peaks = np.median(measured, 0)
            assert peaks.max() < 1.1 * peaks.min(), measured
        """,
        TRAFFIC,
    )


def test_inside_a_function_loops_send_no_more_to_one_than_to_others() -> None:
    _run(
        """
        for vectorize in ("auto", False):
            mapper = on_gpus(scanning, vectorize=vectorize)
            for call in (tf.function(lambda r: mapper(r)), tf.function(lambda r: mapper(r), input_signature=any_rows)):
                to, back = sent(call)
                assert to[0] == to[1] and back[0] == back[1] < 1.1 * shard, (to, back)
        """,
        TRAFFIC,
    )


@pytest.mark.parametrize("home", ["CPU:0", "GPU:0"])
def test_inside_a_function_loops_are_sent_a_variable_once(home: str) -> None:
    """A step of training: forward and backward."""
    _run(
        f"""
        with tf.device("{home}"):
            w = tf.Variable(tf.fill([16, 16], 0.01))
        size = 16 * 16 * 4

        def states(row):
            return tf.scan(lambda state, element: tf.tanh(tf.linalg.matvec(w, state) + element), row)

        for vectorize in ("auto", False):
            mapper = on_gpus(states, vectorize=vectorize)

            @tf.function
            def step(rows):
                with tf.GradientTape() as tape:
                    loss = tf.reduce_sum(mapper(rows) ** 2)
                return tape.gradient(loss, w)

            with tf.device("CPU:0"), tf.GradientTape() as tape:
                loss = tf.reduce_sum(tf.map_fn(states, rows) ** 2)
                expected = tape.gradient(loss, w)
            np.testing.assert_allclose(step(rows), expected, rtol=1e-3, atol=1e-5)
            gpus.clear()
            step(rows).numpy()
            fetched = [copy for copy in gpus.copies() if copy.bytes == size and copy.receiver in ("GPU:0", "GPU:1")]
            assert 1 <= len(fetched) <= 3, fetched  # and the gradient goes by way of the first, as a function returns it
        """,
        TRAFFIC,
    )


def test_rows_one_by_one_send_nothing_in_a_step() -> None:
    _run(
        """
        from collections import Counter
        named = "float32 float16 bfloat16 float64 complex64 int64 bool int32 int8 uint8 int16 uint16 uint32 uint64"
        for dtype in map(tf.as_dtype, named.split()):
            with tf.device("CPU:0"):
                many = tf.cast(tf.reshape(tf.range(60) % 100, [20, 3]), dtype)
                floats = tf.cast(tf.reshape(tf.range(60) % 100, [20, 3]), tf.float32)
            twice = tf.logical_not if dtype == tf.bool else lambda row: tf.bitwise.bitwise_or(row, row)
            twice = (lambda row: row + row) if dtype.is_floating or dtype.is_complex or dtype == tf.int32 else twice
            for fn, data in (
                (twice, many),
                (lambda row: tf.cast(row, tf.float32) * 2.0, many),
                (lambda row: tf.cast(row * 2.0, dtype), floats),
            ):
                mapper = on_gpus(fn, vectorize=False)
                mapper(data)
                gpus.clear()
                np.testing.assert_array_equal(mapper(data), tf.map_fn(fn, data, fn_output_signature=mapper(data).dtype))
                gpus.clear()
                mapper(data)
                counts = Counter((copy.kind, copy.sender, copy.receiver) for copy in gpus.copies())
                assert max(counts.values(), default=0) <= 2 and not gpus.copies("between"), (dtype, counts)
        """,
        TRAFFIC,
    )


CAPTURED = f"""{TRAFFIC}
def bytes_on(gpu):
    return tf.config.experimental.get_memory_info(gpu)["current"]

with tf.device("CPU:0"):
    table = tf.Variable(tf.random.normal([4096, 64]))
    ids = tf.random.uniform([8], 0, 4096, tf.int32)
size = 4096 * 64 * 4
"""


def test_all_maps_share_one_copy_of_a_variable_on_each_device() -> None:
    _run(
        """
        first, second = (on_gpus(lambda row: tf.reduce_sum(table) + row) for _ in range(2))
        gpus.clear()
        first(rows)
        assert [copy.receiver for copy in gpus.copies() if copy.bytes == size] in (["GPU:0", "GPU:1"], ["GPU:1", "GPU:0"])
        with tf.GradientTape() as tape:
            results = second(rows)
        assert tape.gradient(results, table) is not None
        del tape, results
        held = [max(map(bytes_on, ("GPU:0", "GPU:1"))) for call in (first, second) * 3 if call(rows) is not None]
        assert size <= min(held) < 1.1 * size, held  # each second call, TensorFlow still holds the value before
        table.assign_add(tf.ones_like(table))
        np.testing.assert_allclose(second(rows), tf.reduce_sum(table) + rows, rtol=1e-3)
        assert sent(first)[0] == [shard + size] * 2
        in_chunks = on_gpus(lambda row: tf.reduce_sum(table) + row, batch_size=1)
        assert sum(sent(in_chunks)[0]) == 2 * shard + 2 * size, "once per job"
        """,
        CAPTURED,
    )


def test_tables_may_stay_where_they_are() -> None:
    _run(
        """
        for options in ({"batched": True}, {}, {"vectorize": False}, {"batch_size": 3}):
            mapper = on_gpus(lambda i: tf.gather(table, i), in_place=[table], **options)
            mapper(ids)
            gpus.clear()
            found = mapper(ids).numpy()
            assert sum(copy.bytes for copy in gpus.copies()) <= 3 * 8 * 64 * 4, gpus.copies()
            with tf.device("CPU:0"):
                np.testing.assert_array_equal(found, tf.gather(table, ids))
        with tf.device("CPU:0"), tf.GradientTape() as tape:
            total = tf.reduce_sum(on_gpus(lambda i: tf.gather(table, i), in_place=table)(ids))
            gradient = tf.convert_to_tensor(tape.gradient(total, table))
            np.testing.assert_array_equal(tf.reduce_sum(gradient, 1), 64 * tf.math.bincount(ids, minlength=4096))
        assert max(map(bytes_on, ("GPU:0", "GPU:1"))) < size / 4
        """,
        CAPTURED,
    )


def test_what_lies_on_the_host_is_kept_on_each_device() -> None:
    _run(
        """
        found = on_gpus(lambda row: row * 2)(rows)
        assert found.device.endswith("GPU:0") and found.backing_device.endswith("CPU:0")
        mapper = on_gpus(lambda row: row + tf.reduce_sum(found))
        assert sent(mapper) == ([shard] * 2, [shard] * 2)
        """,
        TRAFFIC,
    )


CHUNKS = f"""{START}
import devicemap
from devicemap.errors import FunctionError
from devicemap.types import ChunkFailed, ChunkFinished, ChunkStarted

events = []

def of(kind):
    return [event for event in events if isinstance(event, kind)]

def in_chunks(fn, prefetch=4):
    return devicemap.DeviceMap(fn, batched=True, devices="GPU:0", prefetch=prefetch, progress=events.append)

def most_under_way():
    changes = [(type(event) is ChunkStarted) - (type(event) in (ChunkFinished, ChunkFailed)) for event in events]
    return max(np.cumsum(changes))

def batches(rows, count):
    with tf.device("CPU:0"):
        return tf.data.Dataset.range(rows * count).map(lambda n: tf.cast(n, tf.float32)).batch(rows)
"""


def test_chunks_that_cannot_be_in_flight_together_are_not() -> None:
    _run(
        """
        assert {d.memory for d in devicemap.list_devices("GPU")} == {64 << 20}

        def wide(rows):
            waves = [tf.sin(rows[:, None] + tf.range(65536.0)) for _ in range(3)]
            return tf.reduce_sum(tf.add_n(waves), 1)

        for rows, together in ((4, 4), (64, 1)):  # a row takes about a MiB
            events.clear()
            results = list(in_chunks(wide).stream(batches(rows, 16)))
            assert [len(chunk) for chunk in results] == [rows] * 16
            assert not of(ChunkFailed) and most_under_way() <= together, (most_under_way(), of(ChunkFailed))
            assert together == 1 or most_under_way() > 1
        """,
        CHUNKS,
    )


def test_what_no_chunk_can_do_without_is_cut_before_it_runs() -> None:
    _run(
        """
        events.clear()
        widen = in_chunks(lambda rows: tf.tile(rows[:, None], [1, 1 << 19]))  # results of 2 MiB
        (chunk,) = widen.stream(batches(40, 1))
        np.testing.assert_array_equal(chunk.numpy()[:, :: 1 << 17], np.arange(40)[:, None] + np.zeros([1, 4]))
        assert [len(event.shard) for event in of(ChunkStarted)] == [31, 9] and not of(ChunkFailed), events
        """,
        CHUNKS,
    )


def test_running_out_of_memory_loses_no_row() -> None:
    """Its ops are as wide as a variable says, so that no estimate tells what a row takes: 1 MiB."""
    _run(
        """
        with tf.device("CPU:0"):
            width = tf.Variable(1 << 17)

        def wide(rows):
            spread = tf.tile(rows[:, None], [1, tf.identity(width)])
            return tf.reduce_mean(tf.sin(spread) + tf.cos(spread), 1)

        for rows, prefetch, parts in ((48, 2, 1), (96, 1, 2)):  # two do not fit at a time, and one alone does; not even one
            events.clear()
            mapper = in_chunks(wide, prefetch)
            results = list(mapper.stream(batches(rows, 3)))
            assert [len(chunk) for chunk in results] == [rows] * 3
            n = np.arange(3.0 * rows)
            np.testing.assert_allclose(tf.concat(results, 0), np.sin(n) + np.cos(n), rtol=1e-4, atol=1e-4)
            assert [len(event.shard) for event in of(ChunkFinished)] == [rows // parts] * 3 * parts
            assert len(of(ChunkFailed)) <= prefetch and mapper.report.back_offs == parts - 1, events
        """,
        CHUNKS,
    )


def test_captured_variables_that_do_not_fit_are_named_before_anything_runs() -> None:
    _run(
        """
        with tf.device("CPU:0"):
            table = tf.Variable(tf.zeros([17 << 20]))
        for options in ({}, {"batch_size": 4}):
            ran = []
            options |= {"devices": "GPU:1", "name": "lookup", "progress": ran.append}
            mapper = devicemap.DeviceMap(lambda row: row * table[0], **options)
            try:
                mapper(tf.range(8.0))
            except FunctionError as error:
                assert str(error).startswith(
                    "lookup: no memory for a copy of what fn captures, 71303168 bytes in all, on GPU:1; with in_place="
                ), error
                assert isinstance(error, (tf.errors.ResourceExhaustedError, tf.errors.InternalError)) and not ran
            else:
                raise AssertionError("64 MiB held 68")
        """,
        CHUNKS,
    )


def test_times_are_those_of_the_devices_where_results_stay_on_one() -> None:
    """A kernel takes 0.1 s on one device and 0.2 s on the other; results are gathered on the first."""
    _run(
        """
        def steps(rows):
            return tf.sin(tf.cos(rows))

        def clocked(**options):
            mapper = devicemap.DeviceMap(steps, batched=True, output_device="GPU:0", **options)
            for seconds in (0.0, 0.1):
                gpus.reset()
                gpus.configure(0, kernel_seconds=seconds)
                gpus.configure(1, kernel_seconds=2 * seconds)
                events.clear()
                began = time.perf_counter()
                result = mapper(x)
            seconds = time.perf_counter() - began
            to_host = [copy.bytes for copy in gpus.copies("to host")]  # before anybody looks at the result
            assert result.backing_device.endswith("GPU:0")
            np.testing.assert_allclose(result, np.sin(np.cos(x)), rtol=1e-5, atol=1e-6)
            return mapper.report, seconds, to_host

        report, seconds, to_host = clocked(devices="GPU:0")
        assert report.devices[0].busy_seconds >= 0.2 and seconds >= 0.2 and to_host == [4], (report, seconds, to_host)
        report, seconds, to_host = clocked()
        assert [device.busy_seconds >= least for device, least in zip(report.devices, (0.2, 0.4))] == [True, True], report
        assert to_host == [4, 4, 16], to_host  # and how many rows fn returned on each
        _, _, to_host = clocked(batch_size=32, progress=events.append)
        took = [(event.seconds - event.started_seconds, event.shard.device[-1]) for event in of(ChunkFinished)]
        assert took and all(seconds >= {"0": 0.2, "1": 0.4}[gpu] for seconds, gpu in took), took
        assert to_host == [4] * len(took), to_host
        _, seconds, to_host = clocked(devices="GPU:0", report=False)
        assert seconds < 0.2 and to_host == [], (seconds, to_host)
        """,
        CHUNKS,
    )


def test_copies_overlap_with_kernels() -> None:
    """Copying a chunk to the device takes as long as computing it, 10 ms, and its results are small.

    By the log of copies, which last from the beginning of the first to the end of the last result's.
    """
    _run(
        """
        def overlap(prefetch):
            "How much of the time of copies to the device is also that of kernels."
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
        assert shares[0] < 0.1 < shares[1] + 0.1 < shares[2] and shares[2] > 0.6, shares
        """,
        CHUNKS,
    )


MEMORY = """
import numpy as np
import tensorflow as tf
from benchmarks import softgpu
try:
    softgpu.start(1, 2 << 30)
except softgpu.Unavailable as reason:
    raise SystemExit(f"unavailable: {reason}")
import devicemap
tf.config.optimizer.set_experimental_options({"layout_optimizer": False})  # the host's kernels know one layout
with tf.device("GPU:0"):
    tf.zeros([300 << 20])  # one region of memory, instead of ever larger ones, which are left in pieces

def normal(*shape):
    with tf.device("CPU:0"):
        return tf.random.stateless_normal(shape, [1, 2])

def ragged(rows):
    lengths = np.random.default_rng(0).integers(1, 40, size=rows)
    with tf.device("CPU:0"):
        return tf.RaggedTensor.from_row_lengths(normal(lengths.sum()), lengths)

def peak_bytes(mapper, rows):
    "The least of three: steps of a loop overlap now and then."
    mapper(rows)
    peaks = []
    for _ in range(3):
        tf.config.experimental.reset_memory_stats("GPU:0")
        before = tf.config.experimental.get_memory_info("GPU:0")["current"]
        mapper(rows)
        peaks.append(tf.config.experimental.get_memory_info("GPU:0")["peak"] - before)
    return min(peaks)

def check(fn, rows_of, few, **options):
    "That the plan tells what more rows take more."
    mapper = devicemap.DeviceMap(fn, devices="GPU", output_device="CPU:0", **options)
    measured = (peak_bytes(mapper, rows_of(2 * few)) - peak_bytes(mapper, rows_of(few))) / few
    told = mapper.explain(rows_of(few)).memory_bytes_per_row
    assert told is not None and 0.9 <= told / measured <= 1.2, (fn, told, measured)

w, v = tf.Variable(tf.ones([64, 256])), tf.Variable(tf.ones([256, 32]))
kernel = tf.Variable(tf.ones([3, 3, 3, 8]))

def dense(x):
    return tf.nn.relu(x @ w + 1.0) @ v

def dense_of_row(row):
    return tf.linalg.matvec(v, tf.nn.relu(tf.linalg.matvec(w, row, transpose_a=True)), transpose_a=True)

def convolution(x):
    return tf.reduce_mean(tf.nn.relu(tf.nn.conv2d(x, kernel, 1, "SAME")), [1, 2])

def looping(row):
    return tf.while_loop(lambda i, _: i < 9, lambda i, state: (i + 1, tf.sin(state) + row), (0, row))[1]

def several(row):
    a, b = tf.sin(row), tf.cos(row)
    c = a * b + row
    return tf.reduce_sum(tf.nn.softmax(c) * a) + c

def outer(row):
    return tf.reduce_sum(tf.exp(-((row[:, None] * row[None, :]) ** 2)), 0)
"""


def test_a_row_takes_the_memory_that_the_plan_tells() -> None:
    _run(
        """
        rows, pictures = lambda n: normal(n, 64), lambda n: normal(n, 16, 16, 3)
        check(dense, rows, 1 << 14, batched=True)
        check(dense_of_row, rows, 1 << 14)
        check(dense_of_row, rows, 500, vectorize=False)
        check(convolution, pictures, 1 << 12, batched=True)
        check(looping, rows, 1 << 14)
        check(looping, rows, 1 << 14, batched=True)
        check(several, rows, 1 << 14)
        check(several, rows, 500, vectorize=False)
        check(outer, lambda n: normal(n, 32), 1 << 12)
        layers = tf.keras.layers
        check(
            tf.keras.Sequential(
                [tf.keras.Input([16, 16, 3]), layers.Conv2D(8, 3, activation="relu"), layers.MaxPool2D(),
                 layers.Flatten(), layers.Dense(10, activation="softmax")]
            ), pictures, 1 << 12, batched=True)
        """,
        MEMORY,
    )


def test_a_ragged_row_takes_the_memory_that_the_plan_tells() -> None:
    _run(
        """
        check(lambda row: tf.reduce_sum(tf.sin(row)), ragged, 1000)
        if not tf.__version__.startswith("2.16."):  # which takes the list of results to the device and back in each step
            check(lambda row: tf.sin(row) * 2, ragged, 1000)
        check(lambda batch: tf.reduce_sum(batch * batch, 1), ragged, 1 << 16, batched=True)
        check(lambda batch: tf.reduce_sum(tf.sin(batch.to_tensor()), 1), ragged, 1 << 16, batched=True)
        """,
        MEMORY,
    )


PLANNED = (
    CAPTURED
    + """
from collections import Counter
from devicemap.events import short_name

with tf.device("CPU:0"):
    x = tf.random.normal([12, 32])
    numbers = tf.range(12, dtype=tf.int64)
    narrow = tf.range(12)
    text = tf.strings.as_string(numbers)
    pictures = tf.cast(tf.random.uniform([12, 8, 8, 3], 0, 255, tf.int32), tf.uint8)
    jpegs = tf.stack([tf.io.encode_jpeg(picture) for picture in pictures])
    w = tf.Variable(tf.random.normal([32, 16]))
    tens = tf.lookup.StaticHashTable(tf.lookup.KeyValueTensorInitializer(numbers, numbers * 10), -1)
    of_text = tf.lookup.StaticHashTable(tf.lookup.KeyValueTensorInitializer(text, numbers), -1)
    constant = tf.random.normal([100, 32])
    counter = tf.Variable(0.0)

def looping(row):
    return tf.while_loop(lambda i, s: i < 5, lambda i, s: (i + 1, tf.sin(s) + tf.reduce_sum(w)), (0, row))[1]

def gradient(row):
    with tf.GradientTape() as tape:
        tape.watch(row)
        y = tf.reduce_sum(tf.tanh(tf.linalg.matvec(w, row, transpose_a=True)))
    return tape.gradient(y, row)

def counting(row):
    counter.assign_add(1.0)
    return row

def place(name):
    short = short_name(name)
    return "host" if short.startswith("CPU") else short

def copied(call):
    "Bytes by sender and receiver of the second call."
    call()
    gpus.clear()
    tf.nest.map_structure(lambda leaf: leaf.numpy(), call())
    found = Counter()
    for copy in gpus.copies():
        found[copy.sender, copy.receiver] += copy.bytes
    return found

def check(fn, data, **options):
    "That the plan tells the bytes that the log shows, in one graph and in chunks, and ops that no GPU runs."
    mapper = on_gpus(fn, **options)
    found = copied(lambda: mapper(data))
    plan = mapper.explain(data)
    told = Counter()
    for transfer in plan.transfers:
        assert transfer.bytes_per_call is not None, transfer
        told[place(transfer.sender), place(transfer.receiver)] += transfer.bytes_per_call
    assert +told == found, (fn, told, found)
    strays = {stray.op for stray in plan.strays if stray.reason != "int32"}  # those may run there on other dtypes
    assert not strays & {runs.op for runs in gpus.runs()}, plan.strays
    mapper = on_gpus(fn, batch_size=4, **options)
    found, told = copied(lambda: mapper(data)), Counter()
    for transfer in mapper.explain(data).transfers:
        ends = ("to", "from")[place(transfer.sender) != "host"]
        if transfer.bytes_per_row is None:
            told[ends] += transfer.bytes_per_call
        elif "GPU:0" in (place(transfer.sender), place(transfer.receiver)):  # whichever of the two is idle gets them
            told[ends] += transfer.bytes_per_row * 12
    for ends, of_ends in (("to", lambda sender: sender == "host"), ("from", lambda sender: sender != "host")):
        assert told[ends] == sum(size for (sender, _), size in found.items() if of_ends(sender)), (fn, ends, told, found)
"""
)


def test_the_plan_tells_what_the_log_of_copies_shows() -> None:
    _run(
        """
        check(lambda row: tf.sin(row) * 2, x)
        check(lambda batch: batch @ w, x, batched=True)
        check(lambda a, b: {"scaled": a * tf.cast(b, tf.float32), "as it is": b}, (x, numbers))
        check(lambda i: i * 2, narrow)
        check(lambda i: tf.cast(i, tf.float32) * 2, narrow)
        check(lambda row: tf.cast(row, tf.int32), x)
        check(lambda row: tf.argmax(row, output_type=tf.int32), x)
        check(lambda row: row > 0, x, vectorize=False)
        check(lambda picture: tf.cast(picture, tf.float32) / 255, pictures)
        check(tf.strings.length, text)
        check(lambda s: tf.strings.join([s, "!"]), text)
        check(lambda s: tf.strings.to_number(s) * 2, text)
        check(tf.strings.as_string, x)
        """,
        PLANNED,
    )


def test_the_plan_tells_what_the_log_shows_of_state_and_loops() -> None:
    _run(
        """
        check(lambda i: tens.lookup(i) + 1, numbers)
        check(lambda i: tens.lookup(i) + 1, numbers, batched=True)
        check(lambda s: tf.cast(of_text.lookup(s), tf.float32) / 2, text)
        check(lambda i: tf.gather(table, i), narrow)
        check(lambda i: tf.gather(table, i), narrow, in_place=table)
        check(lambda row: row + constant[3], x)
        check(looping, x)
        check(looping, x, vectorize=False)
        check(lambda batch: looping(batch), x, batched=True)
        check(gradient, x)
        check(counting, x)
        check(lambda row: row + tf.random.normal([32]), x)
        check(lambda row, seed: row + tf.random.stateless_normal([32], seed), x, seed=1)
        check(lambda row: tf.linalg.svd(tf.reshape(row, [4, 8]), compute_uv=False), x)
        mapper = on_gpus(lambda s: tf.image.decode_jpeg(s, 3)[0, 0], fn_output_signature=tf.TensorSpec([3], tf.uint8))
        unknown = [t for t in mapper.explain(jpegs).transfers if t.bytes_per_call is None]
        assert {transfer.what for transfer in unknown} == {"DecodeJpeg"}, unknown  # how large pictures are, they tell
        """,
        PLANNED,
    )
