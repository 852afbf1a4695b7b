"""What needs a process of its own: Python functions that call TensorFlow where there are few threads, and determinism."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SECONDS = 120
"""What hangs, hangs for ever."""

CALLED = """
import sys
import numpy as np
import tensorflow as tf
count, batch_size, batched, taped = eval(sys.argv[1])
tf.config.threading.set_inter_op_parallelism_threads(2)
cpu = tf.config.list_physical_devices("CPU")[0]
tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * count)
import devicemap

weights = tf.Variable(tf.random.normal([8, 8], seed=1))

@tf.function
def inner(x):
    for _ in range(5):
        x = tf.tanh(tf.linalg.matvec(weights, x))
    return x

def fn(row):
    return tf.ensure_shape(tf.py_function(lambda a: inner(a), [row], tf.float32), row.shape)

mapper = devicemap.DeviceMap(fn, batched=batched, batch_size=batch_size)
x = tf.random.normal([24, 8], seed=2)
for _ in range(3):
    with tf.GradientTape() if taped else tf.init_scope() as tape:
        if taped:
            tape.watch(x)
        rows = mapper(x)
    if taped:
        assert np.any(tape.gradient(rows, x))
np.testing.assert_allclose(rows, inner(x), rtol=1e-4, atol=1e-5)
print("right")
"""

DETERMINISTIC = """
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
print("right")
"""


def _run(program: str, *arguments: str) -> None:
    environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=SECONDS, check=False,
    )  # fmt: skip
    assert done.stdout == "right\n", done.stderr[-2000:]


@pytest.mark.parametrize(
    ("devices", "batch_size", "batched", "taped"),
    [
        (1, None, False, False),
        (2, None, False, False),
        (4, None, True, False),
        (4, None, True, True),
        (4, 5, True, False),
    ],
)
def test_python_that_calls_a_tf_function_finds_a_thread(
    devices: int, batch_size: int | None, batched: bool, taped: bool
) -> None:
    _run(CALLED, repr((devices, batch_size, batched, taped)))


def test_determinism() -> None:
    _run(DETERMINISTIC)
