"""Whose results a folder holds: functions that give others are told apart, and the same one is known again, anywhere."""

from __future__ import annotations

import functools
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from journals import untouched

import devicemap
from devicemap.base.options import check_options
from devicemap.compile.trace import trace
from devicemap.errors import JournalError
from devicemap.store.fingerprint import fingerprint

DATA = np.arange(6, dtype=np.float32)


def _digest(fn: Callable[..., Any], check_variables: bool = False, **options: Any) -> Any:
    traced = trace(fn, tf.TensorSpec([None], tf.float32), check_options(fn, options))
    found = fingerprint(traced, check_variables)
    return {name: value for name, value in found.items() if name != "parts"}


def _model(units: int) -> Callable[..., Any]:
    model = tf.keras.Sequential([tf.keras.Input([1]), tf.keras.layers.Dense(units), tf.keras.layers.Dense(1)])
    return lambda row: model(tf.reshape(row, [1, 1]))[0, 0]


def _loop(times: int, by: float) -> Callable[..., Any]:
    return lambda row: tf.while_loop(lambda i, r: i < times, lambda i, r: (i + 1, r * by), (0, row))[1]


def _python(fn: Callable[..., Any]) -> Callable[..., Any]:
    return lambda row: tf.ensure_shape(tf.numpy_function(fn, [row], tf.float32), [])


def _printing(text: str) -> Callable[..., Any]:
    def fn(row: Any) -> Any:
        tf.print(text, output_stream="file:///dev/null")
        return row

    return fn


_LARGE = [np.arange(500, dtype=np.float32) + i for i in range(2)]

OTHERS: dict[str, Any] = {
    "constants": (lambda r: r * 2, lambda r: r * 3),
    "ops": (lambda r: r + 2, lambda r: r - 2),
    "how ops are connected": (lambda r: (r + 1) * 2 - r, lambda r: r * 2 - (r + 1)),
    "attributes": (lambda r: tf.cumsum(r[None])[0], lambda r: tf.cumsum(r[None], reverse=True)[0]),
    "captured tensors": tuple((lambda c: lambda r: r * c[7])(tf.constant(c)) for c in _LARGE),
    "large constants": tuple((lambda c: lambda r: r * tf.constant(c)[7])(c) for c in _LARGE),
    "shapes of variables": tuple((lambda v: lambda r: r * v[0])(tf.Variable(tf.ones([n]))) for n in (1, 2)),
    "seeds": tuple((lambda s: lambda r: r + tf.random.uniform([], seed=s))(s) for s in (1, 2)),
    "how often it draws": (
        lambda r: tf.random.uniform([]) - tf.random.uniform([]) + r,
        lambda r: (lambda u: u - u)(tf.random.uniform([])) + r,
    ),
    "conditions of loops": (_loop(3, 2.0), _loop(4, 2.0)),
    "bodies of loops": (_loop(3, 2.0), _loop(3, 1.0)),
    "effects": (_printing("one"), _printing("two")),
    "partials": tuple(functools.partial(lambda k, r: r + k, k) for k in (1, 2)),
    "what XLA compiles": (tf.function(lambda r: r * 2), tf.function(lambda r: r * 2, jit_compile=True)),
    "models of one name": (_model(3), _model(4)),
    "code in Python": (_python(lambda r: r * 2), _python(lambda r: r * 3)),
    "nested code in Python": (_python(lambda r: sum([r for _ in "ab"])), _python(lambda r: sum([r for _ in "abc"]))),
    "what code in Python closes over": tuple(_python((lambda k: lambda r: r * k)(k)) for k in (2, 3)),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_functions_are_told_apart(name: str) -> None:
    one, other = OTHERS[name]
    assert _digest(one)["graph"] == _digest(one)["graph"] != _digest(other)["graph"]


@pytest.mark.parametrize("name", ["constants", "partials", "models of one name"])
def test_results_of_another_function_are_refused(name: str, tmp_path: Path) -> None:
    """Unless somebody says that it makes no difference, who is believed."""
    one, other = (devicemap.DeviceMap(fn, batch_size=2) for fn in OTHERS[name])
    results = one.write(DATA, tmp_path).load()
    with untouched(tmp_path):
        with pytest.raises(JournalError, match=r"another function.*there, .*now.*trust_function"):
            other.write(DATA, tmp_path)
        np.testing.assert_array_equal(other.write(DATA, tmp_path, trust_function=True).load(), results)


def test_names_and_the_way_rows_run_are_no_difference() -> None:
    def scaled(row: Any) -> Any:
        return tf.multiply(row, 2.0, name="scaled")

    def other(some: Any) -> Any:
        return some * 2.0

    same = [scaled, other, tf.function(other), functools.partial(other)]
    assert len({_digest(fn)["graph"] for fn in same}) == 1
    assert _digest(scaled, vectorize=True) == _digest(scaled, vectorize=False)


def test_another_number_stream_is_another_function() -> None:
    """XLA draws other numbers, and so does a vectorised op with a seed of its own."""
    assert _digest(lambda r: r * 2, jit_compile=True) != _digest(lambda r: r * 2)
    draws = lambda r: r + tf.random.uniform([])
    assert _digest(draws, vectorize=True) != _digest(draws, vectorize=False)


def test_values_of_variables_count_on_request(tmp_path: Path) -> None:
    variable = tf.Variable([1.0, 2.0])
    mapper = devicemap.DeviceMap(lambda r: r * variable[0], batch_size=2)
    mapper.write(DATA, tmp_path / "values", check_variables=True)
    mapper.write(DATA, tmp_path / "shapes")
    variable.assign([3.0, 2.0])
    assert mapper.write(DATA, tmp_path / "shapes").complete
    for options in ({"check_variables": True}, {}):
        with pytest.raises(JournalError, match=r"captured 0: variable float32|check_variables"):
            mapper.write(DATA, tmp_path / "values", **options)
    variable.assign([1.0, 2.0])
    assert mapper.write(DATA, tmp_path / "values", check_variables=True).complete


ELSEWHERE = """
import sys
import tensorflow as tf
import devicemap
devicemap.simulate_devices(int(sys.argv[1]))
for i in range(int(sys.argv[2])):  # names and tokens are counted on
    tf.function(lambda r: tf.py_function(lambda x: x + i, [r], tf.float32)).get_concrete_function(tf.TensorSpec([]))
tf.random.set_seed(5)
table = tf.lookup.StaticHashTable(tf.lookup.KeyValueTensorInitializer(tf.range(3), tf.range(3)), -1)
model = tf.keras.Sequential([tf.keras.Input([1]), tf.keras.layers.Dense(2), tf.keras.layers.Dropout(0.5)])
def python(x):
    return x * len({"a", "b", "c"} & {"c", "d"}) if x in (1, 2) or str(x) in {"a", "b", "c", "d"} else x
def fn(r):
    r += tf.reduce_sum(model(tf.reshape(r, [1, 1]), training=True)) + tf.random.normal([])
    for _ in tf.range(3):
        if r > 1.0:
            r *= 2.0
    found = table.lookup(tf.cast(r, tf.int32))
    return {"b": tf.py_function(python, [r], tf.float32), "a": tf.cast(found, tf.float32) + r}
mapper = devicemap.DeviceMap(fn, batch_size=1, name="fn")
print(mapper.write(tf.range(4.0), "out").complete)
"""


def test_it_is_the_same_in_another_process(tmp_path: Path) -> None:
    """With another number of devices, other counters in names, and strings hashed otherwise."""
    (tmp_path / "elsewhere.py").write_text(ELSEWHERE)  # autograph reads it
    for devices, before, seed in [("1", "0", "1"), ("3", "4", "2")]:
        process = subprocess.run(
            [sys.executable, "elsewhere.py", devices, before],
            env={"PYTHONPATH": str(Path(devicemap.__file__).parents[1]), "PYTHONHASHSEED": seed},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert process.stdout == "True\n", process.stderr
