"""Where TensorFlow lacks what is not public, devicemap takes public ways, to the same answers."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import keras
import numpy as np
import processes
import pytest
import tensorflow as tf

import devicemap
from devicemap import _tensorflow
from devicemap._tensorflow import Private, calls, functions, gradients, pfor
from devicemap.errors import FunctionError

PRIVATE = {
    f"{module.__name__.rpartition('.')[2]}.{name}": value
    for module in (pfor, functions, gradients, calls)
    for name, value in vars(module).items()
    if isinstance(value, Private)
}
X = tf.reshape(tf.range(12.0), [6, 2])
SCALE = tf.Variable([2.0, 3.0])
TWO = ["CPU:0", "CPU:1"]


def _assert_answers(devices: list[str]) -> None:
    """In memory, under a tape, in chunks, in the user's function, with effects, ragged rows and random numbers."""
    inner = tf.function(lambda row: tf.cos(row * SCALE))
    mapper, chunked = (
        devicemap.DeviceMap(lambda row: inner(row) * tf.range(2.0), devices=devices, batch_size=size)
        for size in (None, 4)
    )
    for way in (mapper, tf.function(lambda x: mapper(x)), chunked):
        np.testing.assert_allclose(way(X), np.cos(X * SCALE) * np.arange(2), rtol=1e-5)
    with tf.GradientTape() as tape:
        tape.watch(X)
        rows = mapper(X)
    by_x, by_scale = tape.gradient(rows, [X, SCALE])
    slopes = -np.sin(X * SCALE) * np.arange(2)
    np.testing.assert_allclose(by_x, slopes * SCALE, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(by_scale, np.sum(slopes * X, 0), rtol=1e-4, atol=1e-5)
    count = tf.Variable(0.0)

    def counting(row: Any) -> Any:
        count.assign_add(tf.reduce_sum(row))
        return tf.constant(1.0)

    ones = devicemap.DeviceMap(counting, devices=devices)
    assert ones(X).numpy().tolist() == [1.0] * 6
    tf.function(lambda x: (ones(x), 0)[1])(X)  # the result is unused
    assert float(count) == 2 * 66.0
    ragged = tf.ragged.constant([[1.0], [], [2.0, 3.0]])
    sums = devicemap.DeviceMap(tf.reduce_sum, devices=devices, batch_size=2)(ragged)
    assert sums.numpy().tolist() == [1.0, 0.0, 5.0]
    drawn = devicemap.DeviceMap(lambda row: row * 0.0 + tf.random.normal([2], seed=1), devices=devices)(X)
    assert len({*drawn.numpy().flatten().tolist()}) == 12


def test_the_public_interface_alone(monkeypatch: pytest.MonkeyPatch, devices: list[str]) -> None:
    monkeypatch.setattr(_tensorflow, "private", False)
    _assert_answers(devices)
    doubled = devicemap.parallel_map(lambda row: row * 2, X, devices=devices, vectorize=True)
    np.testing.assert_array_equal(doubled, X * 2)


def test_batch_normalization_is_local_with_the_public_interface_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_tensorflow, "private", False)
    model = keras.Sequential([keras.Input([2]), keras.layers.BatchNormalization()])
    model.compile("sgd", "mse", jit_compile=False)
    with pytest.raises(FunctionError, match="set batch_norm='local'"):
        devicemap.parallelize(model, TWO).train_on_batch(X, X)
    devicemap.parallelize(model.detach(), TWO, batch_norm="local").train_on_batch(X, X)


@pytest.mark.nightly
@pytest.mark.parametrize("gone", ["calls", "functions", "gradients", "pfor", *PRIVATE])
def test_a_tensorflow_without_some_of_the_names(monkeypatch: pytest.MonkeyPatch, gone: str) -> None:
    """Those of a module, or one of them."""
    for name, private in PRIVATE.items():
        if name == gone or name.startswith(f"{gone}."):
            monkeypatch.setitem(vars(private), "is_available", False)
    _assert_answers(["CPU:1", "CPU:0"])


@pytest.mark.nightly
def test_a_tensorflow_without_any_of_the_modules() -> None:
    processes.run("""
        import importlib, types
        from devicemap import _tensorflow

        def refuse(name):
            if name.startswith(("tensorflow.python", "tensorflow.core")):
                refused.add(name)
                raise ModuleNotFoundError(name)
            return importlib.import_module(name)

        refused = set()
        _tensorflow.importlib = types.SimpleNamespace(import_module=refuse)
        import sys
        import devicemap
        devicemap.simulate_devices(3)
        sys.path.append(sys.argv[1])
        import test_plain
        test_plain._assert_answers(["CPU:1", "CPU:0", "CPU:2"])
        assert len(refused) > 5, refused
    """, str(Path(__file__).parent))  # fmt: skip


def test_missing_modules_and_names_are_reported() -> None:
    assert Private("tensorflow.python.eager.context", "context", "Context.function_call_options").is_available
    assert not Private("tensorflow.python.eager.context", "Context.gone").is_available
    assert not Private("tensorflow.python.gone").is_available
    with pytest.raises(AttributeError):
        _ = Private("tensorflow", "gone").gone


def test_nothing_private_is_imported_with_the_package() -> None:
    for path in Path(devicemap.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not any(name.startswith(("tensorflow.python", "tensorflow.core")) for name in names), path
