"""Whose results a folder holds: functions that give others are told apart, and the same one is known again, anywhere."""

from __future__ import annotations

import dataclasses
import functools
import re
import subprocess
import sys
import threading
import types
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import processes
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


def _dataset(rows: Any) -> Callable[..., Any]:
    dataset = tf.data.Dataset.from_tensor_slices(rows).map(lambda x: x + 1.0)
    return lambda row: dataset.reduce(row, lambda a, b: a * b)


def _table(value: int) -> Callable[..., Any]:
    initializer = tf.lookup.KeyValueTensorInitializer([3, 1, 2], [0, 0, value])
    table = tf.lookup.StaticHashTable(initializer, -1)
    return lambda row: row + tf.cast(table.lookup(tf.cast(row, tf.int32)), tf.float32)


def _returning(value: Any) -> Callable[..., Any]:
    """A function that closes over a value."""
    return lambda r: r if value is None else r + 0


def _wrapped(fn: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(len)
    def wrapper(r: Any) -> Any:
        return fn(r)

    return wrapper


def _with_default(*, by: float) -> Callable[..., Any]:
    def fn(r: Any, *, by: float = by) -> Any:
        return r * by

    return fn


class _Scaled:
    def __init__(self, by: Any):
        self.by = by

    def __call__(self, r: Any) -> Any:
        return r * self.by

    def scale(self, r: Any) -> Any:
        return r * self.by


class _Shifted(_Scaled):
    def __call__(self, r: Any) -> Any:
        return r + self.by


@dataclasses.dataclass(frozen=True)
class _Frozen:
    by: float


def _double(r: Any) -> Any:
    return r * 2


def _triple(r: Any) -> Any:
    return r * 3


def _calling(subtract: Any) -> Any:
    return lambda r: subtract(a=r, b=1)


def _acting(ufunc: Any) -> Any:
    return type("_Acting", (), {"__call__": staticmethod(ufunc), "__module__": __name__})


def _in_module(fn: Any) -> Any:
    """A function that calls one of a module of the user's, which is in another one that names it, too."""
    outer, inner = types.ModuleType("outer"), types.ModuleType("inner")
    inner.fn, outer.inner, inner.outer = fn, inner, outer  # type: ignore[attr-defined]
    return eval("lambda r: outer.inner.fn(r)", {"outer": outer})


def _circle(value: Any) -> list[Any]:
    inside: list[Any] = [value]
    inside.append(inside)
    return inside


PYTHON: dict[str, tuple[Any, Any]] = {
    "code": (lambda r: r * 2, lambda r: r * 3),
    "arguments": (lambda *r: r[0] + 0, lambda r: r[0:] + 0),
    "names of arguments": tuple(map(_calling, (lambda a, b: a - b, lambda b, a: b - a))),
    "what classes do": (_acting(np.sin)(), _acting(np.cos)()),
    "functions of modules": tuple(map(_in_module, (_double, _triple))),
    "nested code": (lambda r: sum([r for _ in "ab"]), lambda r: sum([r for _ in "abc"])),
    "functions that it calls": (lambda r: _double(r), lambda r: _triple(r)),
    "ufuncs": (np.sin, np.cos),
    "builtins": (abs, float),
    "partials": tuple(functools.partial(np.multiply, k) for k in (2, 3)),
    "keyword-only defaults": tuple(_with_default(by=k) for k in (2.0, 3.0)),
    "what is wrapped": (_wrapped(_double), _wrapped(_triple)),
    "objects that are called": (_Scaled(2), _Scaled(3)),
    "classes of objects": (_Scaled(2), _Shifted(2)),
    "bound methods": (_Scaled(2).scale, _Scaled(3).scale),
} | {
    f"{type(one).__name__} that it closes over": (_returning(one), _returning(other))
    for one, other in [
        (2, 3), (np.arange(9.0), np.arange(9.0) + 1), (np.array(["a", 1], object), np.array(["a", 2], object)),
        ([1, [2]], [1, [3]]), ({"a": 1}, {"a": 2}), ({1, 2}, {1, 3}), (np.float32(1), np.float32(2)), (_Frozen(1), _Frozen(2)),
        (tf.constant(1), tf.constant(2)), (range(2), range(3)), (np.random.RandomState(1), np.random.RandomState(2)),
        (re.compile("a"), re.compile("b")), (_circle(1), _circle(2)), (_Scaled, _Shifted), (np.float32, np.float64),
    ]
}  # fmt: skip

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
    "contents of datasets": tuple(_dataset([1.0, k]) for k in (2.0, 3.0)),
    "entries of tables": (_table(1), _table(2)),
    **{f"Python: {name}": tuple(map(_python, pair)) for name, pair in PYTHON.items()},
}


@pytest.mark.in_ci(5)
@pytest.mark.parametrize("name", OTHERS)
def test_other_functions_are_told_apart(name: str) -> None:
    one, other = OTHERS[name]
    first, again, another = _digest(one), _digest(one), _digest(other)
    assert first == again
    assert first["graph"] != another["graph"]
    assert not first["unknown"]


@pytest.mark.parametrize("name", ["constants", "partials", "models of one name"])
def test_results_of_another_function_are_refused(name: str, tmp_path: Path) -> None:
    """Unless somebody says that it makes no difference, who is believed."""
    one, other = (devicemap.DeviceMap(fn, batch_size=2) for fn in OTHERS[name])
    results = one.write(DATA, tmp_path).load()
    with untouched(tmp_path):
        with pytest.raises(JournalError, match=r"another function.*there, .*now.*trust_function"):
            other.write(DATA, tmp_path)
        np.testing.assert_array_equal(other.write(DATA, tmp_path, trust_function=True).load(), results)


def _resource() -> Callable[..., Any]:
    iterator = iter(tf.data.Dataset.range(9).repeat())
    return lambda row: row + tf.cast(next(iterator), tf.float32)


def _generated() -> Callable[..., Any]:
    lock = threading.Lock()

    def rows() -> Any:
        with lock:
            yield 1.0

    dataset = tf.data.Dataset.from_generator(rows, output_signature=tf.TensorSpec([], tf.float32))
    return lambda row: dataset.reduce(row, lambda a, b: a * b)


UNKNOWN: dict[str, Callable[..., Any]] = {
    "an iterator": _resource(),
    "a dataset of a generator with a lock": _generated(),
    "a lock": _python(_returning(threading.Lock())),
    "a generator": _python(_returning(r for r in "ab")),
    "a ufunc without a name": _python(_returning(np.frompyfunc(_double, 1, 1))),
    "a state in C": _python(_returning(weakref.ref(_double))),
    "a deep nest": _python(_returning(functools.reduce(lambda nest, _: [nest], range(9999), []))),
    "a wide nest": _python(_returning([[] for _ in range(30_000)])),
}


@pytest.mark.in_ci(4)
@pytest.mark.parametrize("name", UNKNOWN)
def test_what_cannot_be_told_from_others_is_not_gone_on_with(name: str, tmp_path: Path) -> None:
    mapper = devicemap.DeviceMap(UNKNOWN[name], batch_size=2, devices="CPU:0")
    assert mapper.write(DATA, tmp_path).complete
    with untouched(tmp_path), pytest.raises(JournalError, match=r"nobody can tell.*trust_function"):
        mapper.write(DATA, tmp_path)
    assert mapper.write(DATA, tmp_path, trust_function=True).complete


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
import collections, dataclasses, sys
import numpy as np
import tensorflow as tf
import devicemap
devicemap.simulate_devices(int(sys.argv[1]))
for i in range(int(sys.argv[2])):  # names and tokens are counted on
    tf.function(lambda r: tf.py_function(lambda x: x + i, [r], tf.float32)).get_concrete_function(tf.TensorSpec([]))
tf.random.set_seed(5)
table = tf.lookup.StaticHashTable(tf.lookup.KeyValueTensorInitializer(tf.range(3), tf.range(3)), -1)
model = tf.keras.Sequential([tf.keras.Input([1]), tf.keras.layers.Dense(2), tf.keras.layers.Dropout(0.5)])
import logging
helper = lambda x: {"a": x, "b": Scale(1.0, frozenset("abc"))}["a"]
log = logging.getLogger("elsewhere")
@dataclasses.dataclass
class Scale:
    by: float
    names: frozenset
    @property
    def half(self): return self.by / 2
scale, numbers = Scale(2.0, frozenset("abcd")), collections.defaultdict(list, {"x": [np.arange(3), np.float32(3)]})
dataset = tf.data.Dataset.from_tensor_slices([1, 2]).map(lambda x: x * 2).batch(2)
def python(x):
    log.debug("%s %s", scale.half, numbers)
    x = helper(np.sin(x))
    return x * len({"a", "b", "c"} & {"c", "d"}) if x in (1, 2) or str(x) in {"a", "b", "c", "d"} else x
def fn(r):
    r += tf.reduce_sum(model(tf.reshape(r, [1, 1]), training=True)) + tf.random.normal([])
    for _ in tf.range(3):
        if r > 1.0:
            r *= 2.0
    found = table.lookup(tf.cast(r, tf.int32)) + dataset.reduce(0, lambda a, b: a + tf.reduce_sum(b))
    return {"b": tf.py_function(python, [r], tf.float32), "a": tf.cast(found, tf.float32) + r}
mapper = devicemap.DeviceMap(fn, batch_size=1, name="fn")
print(mapper.write(tf.range(4.0), sys.argv[3]).complete)
"""


@pytest.mark.nightly
def test_it_is_the_same_in_another_process(tmp_path: Path) -> None:
    """With another number of devices, other counters in names, and strings hashed otherwise."""
    folder = str(tmp_path / "out")
    assert processes.run(ELSEWHERE, "1", "0", folder) == ["True"]
    (tmp_path / "elsewhere.py").write_text(ELSEWHERE)  # autograph reads it
    process = subprocess.run(
        [sys.executable, "elsewhere.py", "3", "4", folder],
        env={"PYTHONPATH": str(Path(devicemap.__file__).parents[1]), "PYTHONHASHSEED": "2"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert process.stdout == "True\n", process.stderr
