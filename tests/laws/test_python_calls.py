"""Settings of the whole process: few threads where Python calls TensorFlow, modes of TensorFlow, and NumPy's behaviour."""

from __future__ import annotations

import json

import processes
import pytest


def test_python_that_calls_a_tf_function_finds_a_thread() -> None:
    processes.run("""
        import numpy as np
        import tensorflow as tf
        tf.config.threading.set_inter_op_parallelism_threads(2)
        cpu = tf.config.list_physical_devices("CPU")[0]
        tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 4)
        import devicemap

        weights = tf.Variable(tf.random.normal([8, 8], seed=1))

        @tf.function
        def inner(x):
            for _ in range(5):
                x = tf.tanh(tf.linalg.matvec(weights, x))
            return x

        def fn(row):
            return tf.ensure_shape(tf.py_function(lambda a: inner(a), [row], tf.float32), row.shape)

        x = tf.random.normal([24, 8], seed=2)
        for options in ({}, {"batched": True}, {"batched": True, "batch_size": 5}):
            mapper = devicemap.DeviceMap(fn, devices="CPU", **options)
            for _ in range(3):
                np.testing.assert_allclose(mapper(x), inner(x), rtol=1e-4, atol=1e-5)
            if options == {"batched": True}:
                with tf.GradientTape() as tape:
                    tape.watch(x)
                    rows = mapper(x)
                assert np.any(tape.gradient(rows, x))

        mapper = devicemap.DeviceMap(fn, devices="CPU")
        advice = mapper.explain(x).advice
        assert any("set_inter_op_parallelism_threads" in each for each in advice), advice
        few = mapper.explain(x[:1]).advice
        assert not any("set_inter_op_parallelism_threads" in each for each in few), few

        import keras

        class Calls(keras.layers.Layer):
            def call(self, rows):
                return fn(rows)

        def trained(parallel):
            keras.utils.set_random_seed(1)
            model = keras.Sequential([keras.Input([8]), keras.layers.Dense(8), Calls(), keras.layers.Dense(1)])
            model.compile("sgd", "mse", jit_compile=False)
            if parallel:
                devicemap.parallelize(model, "CPU")
            return [model.train_on_batch(x, tf.zeros([24, 1])) for _ in range(3)]

        np.testing.assert_allclose(trained(True), trained(False), rtol=1e-4)
    """)


@pytest.mark.parametrize(
    ("setting", "engine"), [("enable_op_determinism()", "one graph"), ("set_synchronous_execution(False)", "chunks")]
)
def test_modes_of_tensorflow(setting: str, engine: str) -> None:
    processes.run("""
        import sys
        import numpy as np
        import tensorflow as tf
        eval(f"tf.config.experimental.{sys.argv[1]}")
        tf.random.set_seed(1)
        import devicemap
        devicemap.simulate_devices(3)
        x = tf.reshape(tf.range(300.0), [100, 3])
        mapper = devicemap.DeviceMap(lambda row: row * 2.0)
        np.testing.assert_array_equal(mapper(x), x * 2.0)
        np.testing.assert_array_equal(tf.function(lambda x: mapper(x))(x), x * 2.0)
        np.testing.assert_array_equal(devicemap.parallel_map(lambda row: row * 2.0, x, batch_size=2), x * 2.0)
        assert (mapper.report.engine, mapper.report.rows) == (sys.argv[2], 100)
    """, setting, engine)  # fmt: skip


_NUMPY_MODE = """
import json, sys
import numpy as np, tensorflow as tf
tf.experimental.numpy.experimental_enable_numpy_behavior(**json.loads(sys.argv[1]))
import devicemap
devicemap.simulate_devices(3)
x = tf.reshape(tf.range(10, dtype=tf.float32), [5, 2])
ragged = tf.RaggedTensor.from_row_lengths(tf.range(6), [1, 2, 0, 3, 0])
for options in ({"devices": ["CPU:0"]}, {"devices": ["CPU:2", "CPU:0"]}, {"batch_size": 2}):
    call = lambda fn, data, **more: devicemap.parallel_map(fn, data, **options, **more)
    for more in ({}, {"vectorize": False}, {"batched": True}):
        np.testing.assert_array_equal(call(lambda row: row + 1, x, **more), x + 1)
    assert call(lambda row: row, ragged).to_list() == ragged.to_list()
    seeds = call(lambda row, seed: seed, x, seed=2**32 - 1)
    assert seeds.numpy().view(np.uint32).tolist() == [[2**32 - 1, row] for row in range(5)]
    assert call(lambda row: row, x[:0], seed=None).shape == [0, 2]
    dataset = tf.data.Dataset.from_tensor_slices(x)
    np.testing.assert_array_equal(call(lambda row, seed: row, dataset, seed=7), x)
    if "devices" in options:
        for spec in (x.shape, [None, 2]):
            inside = tf.function(lambda x: call(lambda row, seed: (row, seed), x, seed=2**32 - 1), autograph=False,
                                 input_signature=[tf.TensorSpec(spec, tf.float32)])
            np.testing.assert_array_equal(inside(x)[1].numpy().view(np.uint32)[:, 1], range(5))
"""


@pytest.mark.nightly
@pytest.mark.parametrize("mode", [{}, {"dtype_conversion_mode": "safe"}], ids=str)
def test_numpy_behaviour(mode: dict[str, str]) -> None:
    """It cannot be switched off again, so it needs a process of its own."""
    processes.run(_NUMPY_MODE, json.dumps(mode))
