"""DeviceMap.verify: functions that are known to be right or wrong, and the findings about them."""

from __future__ import annotations

import importlib
import itertools
import json
from types import SimpleNamespace
from typing import Any

import pytest
import tensorflow as tf

from devicemap import DeviceMap
from devicemap.errors import FunctionError

verify = importlib.import_module("devicemap.inspect.verify")

X = tf.random.stateless_normal([20, 4], [1, 2])
THREE = ["CPU:0", "CPU:1", "CPU:2"]
WEIGHTS = tf.random.stateless_normal([512, 64], [1, 3])
RAGGED = tf.RaggedTensor.from_row_lengths(tf.range(190), tf.range(20))


def modes(fn: Any, data: Any = X, **options: Any) -> dict[str | None, str]:
    """The mode in which each output differs."""
    verification = DeviceMap(fn, devices=THREE, **options).verify(data)
    assert verification.ok == (not verification.findings)
    return {finding.output: finding.mode for finding in verification.findings}


def _noise(row: Any, seed: Any) -> Any:
    return row + tf.random.stateless_normal([4], seed)


@pytest.mark.in_ci(4)
@pytest.mark.parametrize(
    ("fn", "data", "options"),
    [
        (_noise, X, {"seed": 7}),
        (lambda a, b, seed: _noise(a, seed) + b, (X, X), {"seed": 7}),
        (lambda row: {"a": row * 2, "b": (row[0], row > 0)}, X, {}),
        (lambda text: tf.strings.join([text, "!"]), tf.strings.as_string(tf.range(20)), {}),
        (lambda text: tf.strings.split(text), tf.constant(["a b", "c", "", "d e f"]), {"batched": True}),
        (lambda row: row * 2, RAGGED, {"batch_size": 3}),
        (lambda batch: batch * 2, tf.sparse.from_dense(tf.cast(X > 0.5, tf.int32)), {"batched": True}),
        (lambda row: (row / 0.0, tf.math.log(-tf.abs(row))), X, {}),
        (lambda row: (tf.cast(row, tf.bfloat16) * 3, tf.complex(row, 1.0)), X, {"jit_compile": True}),
        (lambda batch: batch + 1, tf.data.Dataset.from_tensor_slices(X).batch(3), {"batched": True}),
        (lambda batch: tf.matmul(batch, WEIGHTS), tf.random.stateless_normal([20, 512], [4, 5]), {"batched": True}),
    ],
)
def test_nothing_is_found_where_nothing_is_wrong(fn: Any, data: Any, options: dict[str, Any]) -> None:
    assert modes(fn, data, **options) == {}


GENERATOR = tf.random.Generator.from_seed(1)
DIFFERENT: dict[str, tuple[str, Any]] = {  # the mode in which a function of a batch differs
    "mean": ("one by one", lambda b: b - tf.reduce_mean(b, 0)),
    "ragged": ("one by one", lambda b: tf.ragged.boolean_mask(b, b >= tf.reduce_mean(b))),
    "sparse": ("one by one", lambda b: tf.sparse.from_dense(tf.cast(b > tf.reduce_mean(b), tf.float32))),
    "random": ("again", lambda b: b + tf.random.normal(tf.shape(b))),
    "generator": ("again", lambda b: b + GENERATOR.normal(tf.shape(b))),
    "shards": ("over devices", lambda b: b + tf.cast((tf.shape(b)[0] > 1) & (tf.shape(b)[0] < 16), tf.float32)),
}


@pytest.mark.parametrize("name", DIFFERENT)
def test_results_that_differ(name: str) -> None:
    mode, fn = DIFFERENT[name]
    assert modes(lambda batch: (batch * 2, fn(batch)), batched=True) == {"the result[1]": mode}
    if mode == "again":
        assert modes(fn) == {"the result": mode}
        as_list = {"fn_output_signature": {"a": [tf.float32] * 2}}
        assert modes(lambda row: {"a": [row, fn(row[None])[0]]}, **as_list) == {"the result['a'][1]": mode}


def test_tolerance_rows_and_devices() -> None:
    mapper = DeviceMap(lambda batch: batch + 1e-3 * tf.reduce_mean(batch), batched=True, devices=THREE)
    assert not mapper.verify(X, tolerance=0).ok
    assert mapper.verify(X, tolerance=0.1).ok  # relative to the largest number
    assert (mapper.verify(X).rows, mapper.verify(X, rows=3).rows) == (16, 3)
    one = mapper.verify(X[:1])
    assert "One row does not show" in str(one)
    assert [name[-5:] for name in one.devices] == THREE


def test_fn_that_fails() -> None:
    def pairs(batch: Any) -> Any:
        tf.debugging.assert_greater(tf.shape(batch)[0], 1, message="at least two rows")
        return batch * 2

    [finding] = DeviceMap(pairs, batched=True, devices=THREE).verify(X).findings
    assert (finding.mode, finding.output) == ("one by one", None)
    assert finding.difference.startswith("fn failed with InvalidArgumentError: ")
    assert "at least two rows" in finding.difference
    inverse = lambda n: tf.debugging.check_numerics(1 / (n - 5), "broken")
    with pytest.raises(FunctionError, match=r"failed on row 5 on CPU:0: .*broken"):
        DeviceMap(inverse, devices=THREE).verify(tf.range(20.0))


@pytest.mark.parametrize("data", [tf.range(40.0), tf.ragged.range(tf.range(40.0))])
@pytest.mark.parametrize("batched", [False, True])
def test_rows_that_on_error_leaves_out(data: Any, batched: bool) -> None:
    def fn(row: Any, seed: Any) -> Any:
        total = tf.reduce_sum(row, -1) if isinstance(data, tf.RaggedTensor) else row
        noise = tf.reduce_sum(tf.cast(seed, tf.float32), -1)
        with tf.control_dependencies([tf.debugging.assert_none_equal(total, 3.0)]):
            return total + noise - (tf.reduce_mean(total) if shared else 0.0)

    for shared in (False, batched):
        mapper = DeviceMap(fn, devices=THREE, batched=batched, seed=1, on_error="skip")
        verification = mapper.verify(data)
        assert (verification.rows, verification.expected_rows, verification.ok) == (15, 15, not shared)
        assert "time limit" not in str(verification)
    with pytest.raises(FunctionError, match=r"failed on row 0 on CPU:0: .*broken"):
        DeviceMap(lambda row: tf.debugging.check_numerics(row / 0.0, "broken"), on_error="skip").verify(X)


def test_prints_and_saves() -> None:
    verification = DeviceMap(lambda b: b - tf.reduce_mean(b), batched=True, devices=THREE, name="centre").verify(X)
    text = str(verification).replace("\n", " ")
    assert text.startswith("centre: NOT the same results in all modes; 16 row(s) on CPU:0, CPU:1, CPU:2")
    assert " one by one: the result has " in text
    assert " at index [0, 0]; 64 of 64 values differ. A row's result depends on" in text
    saved = json.loads(json.dumps(verification.to_dict()))
    assert (saved["ok"], saved["findings"][0]["mode"]) == (False, "one by one")
    with pytest.raises(TypeError, match=r"verification\.ok"):
        bool(verification)


@pytest.mark.parametrize("batched", [False, True])
def test_a_slow_function_is_verified_on_fewer_rows(batched: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = itertools.count()  # each look at the clock takes a second
    monkeypatch.setattr(verify, "time", SimpleNamespace(perf_counter=lambda: next(ticks)))
    mapper = DeviceMap(lambda row: row * 2, batched=batched, vectorize="auto" if batched else False, devices=THREE)
    with pytest.warns(RuntimeWarning, match=r"verify compares 9 of 16 rows, because fn is slow\. Pass seconds=None"):
        verification = mapper.verify(X)
    assert (verification.rows, verification.expected_rows, verification.ok) == (9, 16, True)
    assert "The time limit left out 7 of 16 rows." in str(verification)
    with pytest.warns(RuntimeWarning, match="verify compares 2 of 16 rows"):
        assert mapper.verify(X, seconds=0).rows == 2
    assert mapper.verify(X, seconds=None).rows == 16
