"""They are devices as TensorFlow knows them: what runs on them, in which time, and what they say of themselves."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from simulators.softgpus.pair import GPUS, gpus, on_gpus, x

from devicemap.errors import FunctionError
from devicemap.types import ChunkFinished


def test_they_compute_what_the_host_does_and_tell_what_travelled() -> None:
    assert [d.name for d in tf.config.list_logical_devices("GPU")] == ["/device:GPU:0", "/device:GPU:1"]

    @tf.function
    def steps(x: Any) -> Any:
        with tf.device("GPU:0"):
            y = tf.sin(x) @ x
        with tf.device("GPU:1"):
            return tf.nn.relu(y, name="positive"), tf.strings.length("on the host")

    np.testing.assert_allclose(steps(x)[0], np.maximum(np.sin(x.numpy()) @ x.numpy(), 0), rtol=1e-5, atol=1e-5)
    gpus.clear()
    steps(x)[0].numpy()
    size = 64 * 64 * 4
    told = [(c.kind, c.sender, c.receiver, c.bytes) for c in gpus.copies()]
    assert told[:2] == [("to device", "host", "GPU:0", size), ("between", "GPU:0", "GPU:1", size)]
    assert {t[:3] for t in told[2:]} == {("to host", "GPU:1", "host")}
    assert [c.tensor for c in gpus.copies()][:2] == ["Sin", "matmul"]
    assert {(run.device, run.op, run.count) for run in gpus.runs()} >= {("GPU:0", "Sin", 1), ("GPU:1", "Relu", 1)}


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


def test_kernels_are_those_of_a_cuda_build() -> None:
    with tf.device("GPU:0"):
        picture = tf.cast(tf.abs(x[:, :, None]), tf.uint8)
        assert tf.image.encode_png(picture).device.endswith("CPU:0")
        assert tf.sin(x).device.endswith("GPU:0")
        assert tf.gather_nd(x, [[0]]).backing_device.endswith("GPU:0")
        assert (tf.constant(1) + 2).backing_device.endswith("CPU:0"), "int32 is in the host's memory"


def test_convolutions_stay_in_the_order_that_the_cpu_has_kernels_for() -> None:
    images, kernels = tf.reshape(x, [4, 32, 32, 1]), tf.ones([3, 3, 1, 2])

    def convolve(images: Any) -> Any:
        with tf.device("GPU:1"):
            return tf.nn.relu(tf.nn.bias_add(tf.nn.conv2d(images, kernels, 1, "SAME"), [0.5, -0.5]))

    np.testing.assert_allclose(tf.function(convolve)(images), convolve(images), rtol=1e-5, atol=1e-5)
