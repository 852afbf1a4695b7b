"""Many functions, models and short calls, nightly: memory grows by less than 5 % after the first tenth.

Each runs in a new process, whose memory is its resident set (Linux) after a garbage collection. In a fork, that would grow as
pages of its parent are touched.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import ctypes, gc, sys
from pathlib import Path
import keras, numpy as np, tensorflow as tf
import devicemap

devicemap.simulate_devices(3)
data = np.arange(64, dtype="f")
rows = np.random.default_rng(0).normal(size=(24, 6)).astype("f")
shared = devicemap.DeviceMap(lambda x: tf.sin(x) + 1)

def call_functions(i):
    table = tf.fill([1000], float(i))
    options = [{}, {"batch_size": 16}, {"batched": True}, {"vectorize": False}, {"on_error": "skip"}][i % 5]
    result = devicemap.parallel_map(lambda x: tf.where(x > 3, x * table[0], tf.exp(-x)) + i, data, **options)
    np.testing.assert_allclose(result, np.where(data > 3, data * i, np.exp(-data)) + i, rtol=1e-5)

def train_models(i):
    layers = [keras.layers.Dense(16, "relu"), keras.layers.BatchNormalization(), keras.layers.Dropout(0.2)]
    model = keras.Sequential([keras.Input([6]), *layers[: 1 + i % 3], keras.layers.Dense(1)])
    model.compile("adam", "mse", jit_compile=False)
    devicemap.parallelize(model).fit(rows, rows[:, :1], batch_size=12, verbose=0)
    keras.backend.clear_session(free_memory=False)

def call_again(i):
    count = 1 + i % 7
    assert shared(data[:count]).shape == [count]

def memory():
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4 // 1024

name, count = sys.argv[1], int(sys.argv[2])
for i in range(count):
    if i == count // 10:
        print(memory())
    globals()[name](i)
print(memory())
"""


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("name", "count"), [("call_functions", 500), ("train_models", 200), ("call_again", 10_000)])
def test_memory_does_not_grow(name: str, count: int, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM, encoding="utf-8")
    command = [sys.executable, str(program), name, str(count)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    before, after = map(int, done.stdout.split())
    print(f"{name}: {before} MiB after a tenth, {after} MiB at the end")
    assert after < 1.05 * before
