"""What needs a process of its own: Python functions that call TensorFlow where there are few threads, and determinism."""

from __future__ import annotations

import processes


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

        def taped(mapper, x):
            with tf.GradientTape() as tape:
                tape.watch(x)
                rows = mapper(x)
            assert np.any(tape.gradient(rows, x))
            return rows

        x = tf.random.normal([24, 8], seed=2)
        for count, options in (
            (1, {}), (2, {}), (4, {"batched": True}), (4, {"batched": True, "batch_size": 5}),
        ):
            mapper = devicemap.DeviceMap(fn, devices=[f"CPU:{i}" for i in range(count)], **options)
            for call in (mapper, lambda x: taped(mapper, x)) if options == {"batched": True} else (mapper,):
                for _ in range(3):
                    np.testing.assert_allclose(call(x), inner(x), rtol=1e-4, atol=1e-5)

        mapper = devicemap.DeviceMap(fn, devices="CPU")
        advice = mapper.explain(x).advice
        assert any("set_inter_op_parallelism_threads" in each for each in advice), advice
        few = mapper.explain(x[:1]).advice
        assert not any("set_inter_op_parallelism_threads" in each for each in few), few
    """)


def test_determinism() -> None:
    processes.run("""
        import numpy as np
        import tensorflow as tf
        tf.config.experimental.enable_op_determinism()
        tf.random.set_seed(1)
        import devicemap
        devicemap.simulate_devices(3)
        x = tf.reshape(tf.range(21.0), [7, 3])
        mapper = devicemap.DeviceMap(lambda row: row * 2.0)
        np.testing.assert_array_equal(mapper(x), x * 2.0)
        np.testing.assert_array_equal(tf.function(lambda x: mapper(x))(x), x * 2.0)
        np.testing.assert_array_equal(devicemap.parallel_map(lambda row: row * 2.0, x, batch_size=2), x * 2.0)
        assert mapper.report.rows == 7
    """)
