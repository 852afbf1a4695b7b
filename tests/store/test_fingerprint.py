"""Whose results a folder holds: write refuses results of other functions, and continues those of the same one anywhere."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import processes
import pytest
import tensorflow as tf
from stored import untouched

import devicemap
from devicemap.errors import JournalError

DATA = np.arange(6, dtype=np.float32)


def _write(fn: Callable[..., Any], folder: Path, trust_function: bool = False, **options: Any) -> Any:
    mapper = devicemap.DeviceMap(fn, batch_size=2, devices="CPU:0", name="fn", **options)
    return mapper.write(DATA, folder, trust_function=trust_function)


def _of(variable: Any, other: Any = 0.0) -> Callable[..., Any]:
    return lambda row: row * tf.cast(tf.reduce_sum(variable), row.dtype) + other


def _loop(times: int, by: float) -> Callable[..., Any]:
    return lambda row: tf.while_loop(lambda i, r: i < times, lambda i, r: (i + 1, r * by), (0, row))[1]


def _printing(text: str) -> Callable[..., Any]:
    return lambda row: tf.print(text, output_stream="file:///dev/null") and row


def _python(function: Callable[[Any], Any], op: Any = tf.py_function) -> Callable[..., Any]:
    return lambda row: tf.ensure_shape(op(function, [row], tf.float32), [])


def _abs(x: Any) -> Any:
    return abs(x)


def _object_with(call: Callable[..., Any]) -> Any:
    return type("Own", (), {"__call__": call})()


LARGE = [np.arange(500, dtype=np.float32) + i for i in range(2)]
OTHERS: dict[str, Any] = {
    "constants": (lambda r: r * 2, lambda r: r * 3),
    "how ops are connected": (lambda r: (r + 1) * 2 - r, lambda r: r * 2 - (r + 1)),
    "attributes": (lambda r: tf.cumsum(r[None])[0], lambda r: tf.cumsum(r[None], reverse=True)[0]),
    "captured tensors": [_of(tf.constant(values)) for values in LARGE],
    "large constants": [_of(values) for values in LARGE],
    "captured scalars of bfloat16": [_of(tf.constant(n, tf.bfloat16)) for n in (1, 2)],
    "values of variables": [_of(tf.Variable([n])) for n in (1.0, 2.0)],
    "exchanged variables": [_of(tf.Variable(n), tf.Variable(3.0 - n)) for n in (1.0, 2.0)],
    "seeds": [functools.partial(lambda seed, r: r + tf.random.uniform([], seed=seed), seed) for seed in (1, 2)],
    "how often it draws": (
        lambda r: tf.random.uniform([]) - tf.random.uniform([]) + r,
        lambda r: (lambda u: u - u)(tf.random.uniform([])) + r,
    ),
    "conditions of loops": (_loop(3, 2.0), _loop(4, 2.0)),
    "bodies of loops": (_loop(3, 2.0), _loop(3, 1.0)),
    "effects": (_printing("one"), _printing("two")),
    "code of Python functions": (_python(lambda x: x * 2), _python(lambda x: x * 3)),
    "code of partials": [_python(functools.partial(f, 2)) for f in (lambda k, x: x * k, lambda k, x: x + k)],
    "code of objects": [_python(_object_with(call)) for call in (lambda self, x: x * 2, lambda self, x: x + 2)],
    "code of vectorized functions": [
        _python(np.vectorize(f), tf.numpy_function) for f in (lambda x: x * np.float32(2), lambda x: x + np.float32(2))
    ],
    "names of Python functions": (_python(abs), _python(_abs)),
}
OF_VARIABLES = "values of variables", "exchanged variables"
"""Differences that `trust_function` does not waive."""


@pytest.mark.in_ci(5)
@pytest.mark.parametrize("name", OTHERS)
def test_results_of_another_function_are_refused(name: str, tmp_path: Path) -> None:
    one, other = OTHERS[name]
    _write(one, tmp_path)
    with untouched(tmp_path):
        with pytest.raises(JournalError, match=r"another function.*( differs| was .* there, and is .* now)") as raised:
            _write(other, tmp_path)
        assert ("trust_function" in str(raised.value)) == (name not in OF_VARIABLES)
        trusted = pytest.raises(JournalError, match="other variables") if name in OF_VARIABLES else nullcontext()
        with trusted, warnings.catch_warnings():
            warnings.simplefilter("ignore" if "Python" in name or "code" in name else "error")
            _write(other, tmp_path, trust_function=True)


def _table() -> Callable[..., Any]:
    table = tf.lookup.StaticHashTable(tf.lookup.KeyValueTensorInitializer([3, 1, 2], [0, 0, 5]), -1)
    return lambda row: row + tf.cast(table.lookup(tf.cast(row, tf.int32)), tf.float32)


def _writing() -> Callable[..., Any]:
    total, last, generator = tf.Variable(0.0), tf.Variable(0.0), tf.random.Generator.from_seed(1)
    dropout = tf.keras.layers.Dropout(0.5)

    def fn(row: Any) -> Any:
        total.assign_add(row)
        last.assign(row * last)
        return row + generator.uniform([]) + dropout(row, training=True)

    return fn


def _records(row: Any) -> Any:
    length = lambda record: tf.cast(tf.strings.length(record), tf.float32)
    records = tf.data.Dataset.from_tensors(os.devnull).interleave(tf.data.TFRecordDataset)
    return records.reduce(row, lambda total, record: total + length(record))


PYTHON, FILES, TABLES = "Python code", "files", "lookup tables, datasets or iterators"
SAME: dict[str, tuple[Any, str | None]] = {  # functions, and what the warning says that is not compared
    "names of ops and arguments": ([lambda row: tf.multiply(row, 2.0, name="scaled"), lambda some: some * 2.0], None),
    "a tf.function": ([lambda row: row * 2.0, tf.function(lambda row: row * 2.0)], None),
    "variables that fn writes": ([_writing()] * 2, None),
    "py_function": ([_python(lambda x: x)] * 2, PYTHON),
    "values of partials": ([_python(functools.partial(pow, n)) for n in (1, 1.0)], PYTHON),
    "what Python code refers to": ([_python(lambda x, log=[]: log.append(float(x)) or x)] * 2, PYTHON),
    "datasets of files": ([_records] * 2, FILES),
    "table": ([_table()] * 2, TABLES),
}


@pytest.mark.parametrize("name", SAME)
def test_results_of_the_same_function_are_kept(name: str, tmp_path: Path) -> None:
    (one, other), uncovered = SAME[name]
    results = _write(one, tmp_path).load()
    warns = pytest.warns(RuntimeWarning, match=f"fn uses {uncovered}: .*not detect") if uncovered else nullcontext([])
    with untouched(tmp_path), warns as caught:
        np.testing.assert_array_equal(_write(other, tmp_path).load(), results)
    assert [warning.filename for warning in caught] == [__file__] * len(caught)


def _seeded() -> Callable[..., Any]:
    tf.random.set_seed(1)
    return lambda row: row + tf.random.uniform([])


def _in_row_order() -> Callable[..., Any]:
    total = tf.Variable(0.0)
    return lambda row: total.assign(total + row)


@pytest.mark.parametrize(
    ("make", "state"),
    [
        (_seeded, "draws from seeds"),
        (_in_row_order, "row order"),
    ],
)
def test_new_rows_warn_of_state_that_begins_again(make: Any, state: str, tmp_path: Path) -> None:
    """As in a program that starts again after a crash: new rows repeat numbers, or lack the state after the stored rows."""
    for rows, expected in ((4, nullcontext([])), (6, pytest.warns(RuntimeWarning, match=state)), (6, nullcontext([]))):
        with expected as caught:
            devicemap.DeviceMap(make(), batch_size=2, devices="CPU:0", name="fn").write(DATA[:rows], tmp_path)
        assert [warning.filename for warning in caught] == [__file__] * len(caught)


def test_another_number_stream_is_another_function(tmp_path: Path) -> None:
    """XLA draws other numbers, and so does a vectorized op with a seed of its own."""
    _write(lambda r: r * 2, tmp_path / "a")
    with untouched(tmp_path):
        _write(lambda r: r * 2, tmp_path / "a", vectorize=False)
        with pytest.raises(JournalError, match="jit_compile"):
            _write(lambda r: r * 2, tmp_path / "a", jit_compile=True)
    _write(lambda r: r + tf.random.uniform([]), tmp_path / "b", vectorize=True)
    with pytest.raises(JournalError, match="vectorized"):
        _write(lambda r: r + tf.random.uniform([]), tmp_path / "b", vectorize=False)


ELSEWHERE = """
import sys
import tensorflow as tf
import devicemap
devicemap.simulate_devices(int(sys.argv[1]))
for i in range(int(sys.argv[2])):  # advances the counters in names
    tf.function(lambda r: tf.py_function(lambda x: x + i, [r], tf.float32)).get_concrete_function(tf.TensorSpec([]))
tf.random.set_seed(5)
model = tf.keras.Sequential([tf.keras.Input([1]), tf.keras.layers.Dense(2, "relu", kernel_initializer="ones"),
                             tf.keras.layers.Dropout(0.5)])
def fn(r):
    r += tf.reduce_sum(model(tf.reshape(r, [1, 1]), training=True)) + tf.random.normal([])
    for _ in tf.range(3):
        if r > 1.0:
            r *= 2.0
    return {"b": tf.py_function(lambda x: x, [r], tf.float32), "a": tf.map_fn(lambda x: x * r, tf.range(3.0))}
mapper = devicemap.DeviceMap(fn, batch_size=1, name="fn")
print(mapper.write(tf.range(4.0), sys.argv[3]).complete)
"""


@pytest.mark.nightly
def test_it_is_the_same_in_another_process(tmp_path: Path) -> None:
    """With another number of devices, other counters in names, and strings hashed otherwise."""
    folder = str(tmp_path / "out")
    assert processes.run(ELSEWHERE, "1", "0", folder) == ["True"]
    (tmp_path / "elsewhere.py").write_text(ELSEWHERE)  # autograph reads it
    environment = {"PYTHONPATH": str(Path(devicemap.__file__).parents[1]), "PYTHONHASHSEED": "2"}
    command = [sys.executable, "elsewhere.py", "3", "4", folder]
    assert subprocess.check_output(command, env=environment, cwd=tmp_path, text=True, timeout=120) == "True\n"
