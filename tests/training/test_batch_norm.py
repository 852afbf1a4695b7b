"""Ctrl-C while another thread traces the functions of all devices."""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import Any

import keras
import numpy as np
import pytest
import threads

import devicemap


class Interrupting(keras.layers.Layer):
    """Interrupts the main thread in each trace by another thread."""

    calls = 0

    def call(self, x: Any) -> Any:
        if threading.current_thread() is not threading.main_thread():
            self.calls += 1
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.5)
        return x


def test_ctrl_c_ends_the_trace_at_the_next_batch_normalization() -> None:
    layer = Interrupting()
    model = keras.Sequential([keras.Input([2]), layer, keras.layers.BatchNormalization(), keras.layers.Dense(1)])
    model.compile("sgd", "mse", jit_compile=False)
    devicemap.parallelize(model, ["CPU:0", "CPU:1", "CPU:2"])
    with pytest.raises(KeyboardInterrupt):
        model.fit(np.ones([6, 2], "f"), np.ones([6, 1], "f"), verbose=0)
    threads.wait_until_ended()
    assert layer.calls == 1
