"""Interruptions: Ctrl-C, and exceptions of other signal handlers, stop a running call at once, in every way of calling."""

from __future__ import annotations

import processes
import pytest

WAYS = """
import os, signal, sys, tempfile, threading, time
import keras
import tensorflow as tf
import devicemap

devicemap.simulate_devices(3)

class OutOfTime(TimeoutError):
    "What a soft time limit raises."

def out_of_time(number, frame):
    raise OutOfTime

signal.signal(signal.SIGALRM, out_of_time)
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs are started without one
sent = []

def send(*_):
    "Interrupt the call, once."
    if not sent:
        sent.append(time.monotonic())
        os.kill(os.getpid(), number)
    return 0.0

def endless(row, python=send):
    if row[0] == 0.0:
        return row
    row += tf.py_function(python, [], tf.float32)  # before the loops take all threads
    while tf.reduce_sum(row) >= 0.0:
        row = row + 1e-9
    return row

failed, traces = [], []

def fail_once():
    "Fails the first time, and interrupts the call when that is to be located."
    if not failed:
        failed.append(True)
        raise ValueError("odd value")
    return send()

DATA, QUICK = tf.ones([6, 2]), tf.zeros([6, 2])

def quick_before(call, data=DATA):
    for _ in range(3):
        call(QUICK)
    call(data)

def mapper(fn=endless, **options):
    return devicemap.DeviceMap(fn, **options)

class Interrupting(keras.layers.Layer):
    "Interrupts the call in each trace by another thread."

    def call(self, x):
        if threading.current_thread() is not threading.main_thread():
            traces.append(send())
            time.sleep(0.5)
        return x

def train():
    traces.clear()
    layers = Interrupting(), keras.layers.BatchNormalization(), keras.layers.Dense(1)
    model = keras.Sequential([keras.Input([2]), *layers])
    model.compile("sgd", "mse", jit_compile=False)
    devicemap.parallelize(model, "CPU").fit(DATA, DATA[:, :1], verbose=0)

WAYS = {
    "one graph": lambda: mapper()(DATA),
    "quick calls before": lambda: quick_before(mapper()),
    "quick calls on fewer rows before": lambda: quick_before(mapper(), tf.ones([100_000, 2])),
    "the second run of what failed": lambda: mapper(lambda row: endless(row, fail_once))(DATA),
    "chunks": lambda: mapper(batch_size=1)(DATA),
    "a dataset": lambda: mapper()(tf.data.Dataset.from_tensor_slices(DATA)),
    "a stream": lambda: list(mapper(batch_size=1).stream(DATA)),
    "to disk": lambda: mapper(batch_size=1).write(DATA, tempfile.mkdtemp()),
    "verify": lambda: mapper().verify(DATA),
    "a pipeline": lambda: devicemap.Pipeline([tf.identity, lambda rows: tf.map_fn(endless, rows)], "CPU")(DATA),
    "training with batch normalization": train,
}

SIGNALS = (signal.SIGALRM, "OutOfTime"), (signal.SIGINT, "KeyboardInterrupt")
for i, (name, call) in enumerate(WAYS.items()):
    for number, raised in SIGNALS if sys.argv[1] == "all" else SIGNALS[i % 2 :][:1]:
        failed.clear()
        sent.clear()
        try:
            call()
            outcome = "nothing"
        except BaseException as error:
            outcome = type(error).__name__
        name = f"{number.name}: {name}"
        assert outcome == raised, (name, outcome)
        assert (seconds := time.monotonic() - sent[0]) < 2, (name, seconds)
        deadline = time.monotonic() + 10
        while left := [thread.name for thread in threading.enumerate() if thread.name.startswith("devicemap")]:
            assert time.monotonic() < deadline, (name, left)
            time.sleep(0.01)
        assert len(traces) < 2, name  # the first trace ends at the batch normalization, and no other starts
        assert signal.getsignal(signal.SIGALRM) is out_of_time, name
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler, name
print("right")
"""


def test_what_a_handler_raises_comes_out_at_once(pytestconfig: pytest.Config) -> None:
    """From a whole process, which ends well: what was not cancelled would keep it. The two signals take turns."""
    assert processes.run(WAYS, "all" if pytestconfig.getoption("all") else "each") == ["right"]


AT_EXIT = """
import atexit, threading
import tensorflow as tf
import devicemap

devicemap.simulate_devices(3)
mapper = devicemap.DeviceMap(lambda n: n * n, batch_size=1)
chunks, dataset = mapper.stream(tf.data.Dataset.range(10**9)), mapper.as_dataset(tf.data.Dataset.range(10**9))
elements = iter(dataset)
print(next(chunks)[0].numpy(), next(elements)[0].numpy())
atexit._run_exitfuncs()
print([thread.name for thread in threading.enumerate() if thread.name.startswith("devicemap")])
"""


def test_a_program_that_ends_while_streams_are_open() -> None:
    """Threads that run TensorFlow while the interpreter ends would abort the process."""
    assert processes.run(AT_EXIT) == ["0 0", "[]"]
