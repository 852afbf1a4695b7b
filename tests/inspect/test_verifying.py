"""DeviceMap.verify: functions that are known to be right or wrong, and the findings about them."""

from __future__ import annotations

import importlib
import itertools
import json
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import tensorflow as tf

from devicemap import DeviceMap, benchmark
from devicemap.errors import DataError, DeviceMapError, FunctionError, OptionError
from devicemap.types import CallFinished, CallStarted, ChunkFinished

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


@pytest.mark.in_ci(2)
@pytest.mark.parametrize(
    ("fn", "data", "options"),
    [
        (lambda row: {"a": row * 2, "b": (row[0], row > 0)}, X, {}),
        (lambda row: row * 2, X, {"vectorize": False}),
        (lambda row: row * 2, X, {"batch_size": 3}),
        (lambda row: row * 2, X, {"jit_compile": True}),
        (lambda batch: (batch * 2, tf.argmax(batch, 1)), X, {"batched": True}),
        (lambda a, b: a + b["c"], (X, {"c": X}), {}),
        (lambda text: tf.strings.join([text, "!"]), tf.strings.as_string(tf.range(20)), {}),
        (lambda text: tf.strings.split(text), tf.constant(["a b", "c", "", "d e f"]), {"batched": True}),
        (lambda row: row * 2, RAGGED, {}),
        (lambda batch: batch * 2, tf.sparse.from_dense(tf.cast(X > 0.5, tf.int32)), {"batched": True}),
        (lambda row: (row / 0.0, tf.math.log(-tf.abs(row))), X, {}),
        (lambda row: tf.cast(row, tf.bfloat16) * 3, X, {}),
        (lambda row: tf.complex(row, 1.0), X, {}),
        (lambda row: row + 1, tf.data.Dataset.from_tensor_slices(X), {}),
        (lambda batch: batch + 1, tf.data.Dataset.from_tensor_slices(X).batch(3), {"batched": True}),
        (lambda batch: tf.matmul(batch, WEIGHTS), tf.random.stateless_normal([20, 512], [4, 5]), {"batched": True}),
    ],
)
def test_nothing_is_found_where_nothing_is_wrong(fn: Any, data: Any, options: dict[str, Any]) -> None:
    assert modes(fn, data, **options) == {}


@pytest.mark.nightly
@pytest.mark.parametrize("batched", [False, True])
def test_a_seed_is_the_same_in_all_modes(batched: bool) -> None:
    def row(x: Any, seed: Any) -> Any:
        return x + tf.random.stateless_normal([4], seed)

    def batch(x: Any, seed: Any) -> Any:
        return tf.map_fn(lambda pair: row(*pair), (x, seed), fn_output_signature=tf.float32)

    assert modes(batch if batched else row, batched=batched, seed=7) == {}
    assert modes(lambda a, b, seed: row(a, seed) + b, (X, X), seed=7) == {}


@pytest.mark.parametrize(
    "fn",
    [
        lambda batch: batch - tf.reduce_mean(batch, 0),
        lambda batch: batch / tf.cast(tf.shape(batch)[0], tf.float32),
        lambda batch: tf.range(tf.shape(batch)[0]),
        lambda batch: tf.ragged.boolean_mask(batch, batch >= tf.reduce_mean(batch)),
        lambda batch: tf.sparse.from_dense(tf.cast(batch > tf.reduce_mean(batch), tf.float32)),
    ],
)
def test_rows_that_depend_on_their_batch(fn: Any) -> None:
    assert modes(lambda batch: (batch * 2, fn(batch)), batched=True) == {"the result[1]": "one by one"}


@pytest.mark.nightly
@pytest.mark.parametrize("batched", [False, True])
def test_hidden_randomness(batched: bool) -> None:
    generator = tf.random.Generator.from_seed(1)
    dropout = tf.keras.layers.Dropout(0.5)
    assert modes(lambda x: x + tf.random.normal(tf.shape(x)), batched=batched) == {"the result": "again"}
    assert modes(lambda x: x + tf.random.normal(tf.shape(x), seed=3), batched=batched) == {"the result": "again"}
    assert modes(lambda x: x + generator.normal(tf.shape(x)), batched=batched) == {"the result": "again"}
    assert modes(lambda x: dropout(x, training=True), batched=batched) == {"the result": "again"}
    assert modes(lambda x: (x, x + tf.random.normal(tf.shape(x))), batched=batched) == {"the result[1]": "again"}


def test_state_that_fn_writes() -> None:
    count, total = tf.Variable(0.0), tf.Variable(0.0)

    def fn(row: Any) -> Any:
        total.assign_add(1.0)
        return {"n": count.assign_add(1.0), "row": row}

    assert modes(fn, X[:5]) == {"the result['n']": "again"}
    assert total.numpy() == 4 * 5  # on one device, again, one by one, over devices


def test_devices_that_compute_something_else() -> None:
    def fn(batch: Any) -> Any:  # as with all rows on one device, and with one row
        rows = tf.shape(batch)[0]
        return batch + tf.cast((rows > 1) & (rows < 16), tf.float32)

    assert modes(fn, batched=True) == {"the result": "over devices"}


def test_the_tolerance_is_relative_to_the_largest_number() -> None:
    mapper = DeviceMap(lambda batch: batch + 1e-3 * tf.reduce_mean(batch), batched=True, devices=THREE)
    assert not mapper.verify(X, tolerance=0).ok
    assert mapper.verify(X, tolerance=0.1).ok


def test_fails_on_a_single_row() -> None:
    def pairs(batch: Any) -> Any:
        tf.debugging.assert_greater(tf.shape(batch)[0], 1, message="at least two rows")
        return batch * 2

    [finding] = DeviceMap(pairs, batched=True, devices=THREE).verify(X).findings
    assert (finding.mode, finding.output) == ("one by one", None)
    assert finding.difference.startswith("fn failed with InvalidArgumentError: ")
    assert "at least two rows" in finding.difference


def test_fails_everywhere() -> None:
    with pytest.raises(FunctionError, match="broken"):
        DeviceMap(lambda row: tf.debugging.check_numerics(row / 0.0, "broken"), devices=THREE).verify(X)


def test_rows_and_devices() -> None:
    mapper = DeviceMap(lambda row: row, devices=THREE)
    assert mapper.verify(X).rows == 16
    assert mapper.verify(X, rows=3).rows == 3
    assert DeviceMap(lambda row: row).verify(tf.range(50)).rows == 16
    one = mapper.verify(X[:1])
    assert "One row does not show" in str(one)
    assert [name[-5:] for name in one.devices] == THREE


def test_prints_and_saves() -> None:
    verification = DeviceMap(lambda b: b - tf.reduce_mean(b), batched=True, devices=THREE, name="centre").verify(X)
    text = str(verification).replace("\n", " ")
    assert text.startswith("centre: NOT the same results in all modes; 16 row(s) on CPU:0, CPU:1, CPU:2")
    assert " one by one: the result has " in text
    assert " at index [0, 0]; 64 of 64 values differ. A row's result depends on" in text
    assert repr(verification) == str(verification)
    assert verification._repr_html_().startswith("<pre>")
    saved = json.loads(json.dumps(verification.to_dict()))
    assert saved["ok"] is False
    assert saved["findings"][0]["mode"] == "one by one"
    with pytest.raises(TypeError, match=r"verification\.ok"):
        bool(verification)


def test_bad_arguments_fail_before_anything_runs() -> None:
    ran = []
    mapper = DeviceMap(lambda row: ran.append(None) or row)
    for rows in (0, -1, 1.5, True, "all"):
        with pytest.raises(OptionError, match=r"rows=.*an int of at least 1"):
            mapper.verify(X, rows)
    for tolerance in (-1, float("inf"), "x"):
        with pytest.raises(OptionError, match="tolerance="):
            mapper.verify(X, tolerance=tolerance)
        with pytest.raises(OptionError, match=r"seconds=.*expected None or a number of at least 0"):
            mapper.verify(X, seconds=tolerance)
    with pytest.raises(DataError, match="no rows"):
        mapper.verify(X[:0])
    assert not ran


@pytest.mark.parametrize("call", ["verify", "explain", "benchmark"])
def test_not_inside_a_function(call: str) -> None:
    mapper = DeviceMap(tf.sin, devices=["CPU:0"])
    run = partial(benchmark, tf.sin) if call == "benchmark" else getattr(mapper, call)
    with pytest.raises(DeviceMapError, match=r"inside a tf\.function"):
        tf.function(lambda x: run(x) and x, autograph=False)(X)


def _rounded(batch: Any) -> Any:
    """The batch, whose last digits are others in a batch of one row, as with a kernel that sums in another order."""
    alone = tf.cast(tf.shape(batch)[0] == 1, tf.float32)
    return batch * (1 + 2.0**-22 * alone)


EDGE = tf.fill([20, 4], 1.0)


def _steps(batch: Any) -> Any:
    def step(steps: Any, rest: Any) -> Any:
        return steps + tf.cast(rest[:, 0] > 1.0, tf.int32), tf.where(rest > 1.0, rest / 2, rest)

    start = tf.zeros(tf.shape(batch)[:1], tf.int32), batch
    return tf.while_loop(lambda steps, rest: tf.reduce_any(rest[:, 0] > 1.0), step, start)[0]


@pytest.mark.parametrize(
    "fn",
    [
        lambda batch: tf.where(_rounded(batch) > 1.0, 1.0, -1.0),
        lambda batch: tf.argmax(_rounded(batch) > 1.0, 1) + tf.argmax(tf.stack([batch, _rounded(batch)], 1)[..., 0], 1),
        lambda batch: _steps(_rounded(batch)),
        lambda batch: 1e6 * (_rounded(batch) - 1.0),
        lambda batch: tf.cast(_rounded(batch) > 1.0, tf.bfloat16) / tf.constant(0.0, tf.bfloat16),
    ],
)
def test_rounding_that_decides_a_result_is_not_called_a_dependence(fn: Any) -> None:
    [finding] = DeviceMap(lambda batch: (batch, fn(batch)), batched=True, devices=THREE).verify(EDGE).findings
    assert (finding.mode, finding.output) == ("rounding", "the result[1]")
    assert "do not depend on each other" in finding.meaning


@pytest.mark.parametrize(
    "fn",
    [
        lambda batch: tf.floor(batch) + tf.reduce_mean(batch * tf.range(20.0)[: tf.shape(batch)[0], None], 0),
        lambda batch: tf.where(_rounded(batch) > 1.0, 1.0, -1.0) + tf.cast(tf.shape(batch)[0], tf.float32),
        lambda batch: tf.argmax(tf.cumsum(batch, 0) > 3.0, 0)[None] + tf.zeros_like(batch, tf.int64),
    ],
)
def test_a_dependence_is_found_where_rounding_decides_results_too(fn: Any) -> None:
    assert modes(fn, EDGE, batched=True) == {"the result": "one by one"}


def test_a_function_that_fails_on_rounded_rows() -> None:
    def picky(batch: Any) -> Any:
        with tf.control_dependencies([tf.debugging.assert_equal(batch, tf.ones_like(batch))]):
            return tf.where(_rounded(batch) > 1.0, 1.0, -1.0)

    assert modes(picky, EDGE, batched=True) == {"the result": "one by one"}


@pytest.mark.parametrize("dtype", [tf.bfloat16, tf.float64])
def test_rounding_in_other_precisions(dtype: Any) -> None:
    def fn(batch: Any) -> Any:
        return tf.where(_rounded(tf.cast(batch, tf.float32)) > 1.0, 1.0, -1.0)

    [finding] = DeviceMap(fn, batched=True, devices=THREE).verify(tf.cast(EDGE, dtype)).findings
    assert finding.mode == "rounding"


@pytest.mark.parametrize("vectorize", [False, True])
def test_an_iteration_to_convergence(vectorize: bool) -> None:
    matrix = tf.random.stateless_normal([64, 64], [6, 7])
    matrix = tf.matmul(matrix, matrix, transpose_b=True) / 64 + tf.eye(64)

    def solve(row: Any) -> Any:
        x, residual, steps = tf.zeros_like(row), row, 0
        while tf.norm(residual) > 1e-5:
            x += 0.2 * residual
            residual = row - tf.linalg.matvec(matrix, x)
            steps += 1
        return x, steps

    rows = tf.random.stateless_normal([50, 64], [3, 4])
    found = {f.mode for f in DeviceMap(solve, vectorize=vectorize, devices=THREE).verify(rows, 50).findings}
    assert found <= {"rounding"}


def _clock(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """Let each look at the clock of verify take so long."""
    ticks = itertools.count()
    monkeypatch.setattr(verify, "time", SimpleNamespace(perf_counter=lambda: seconds * next(ticks)))


def test_no_time() -> None:
    with pytest.warns(
        RuntimeWarning, match=r"checked 0 of 16 rows in .* s; not finished: again, one by one and over dev"
    ):
        verification = DeviceMap(lambda row: row * 2, devices=THREE, name="double").verify(X, seconds=0)
    assert (verification.rows, verification.expected_rows, verification.ok) == (0, 16, False)
    assert verification.unfinished == ("again", "one by one", "over devices")
    assert "double: NOT verified in all modes" in str(verification)
    assert "seconds=None" in str(verification)


@pytest.mark.parametrize("batched", [False, True])
def test_a_slow_function_is_verified_on_fewer_rows(batched: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    _clock(monkeypatch, 1.0)
    mapper = DeviceMap(lambda row: row * 2, batched=batched, vectorize="auto" if batched else False, devices=THREE)
    with pytest.warns(RuntimeWarning, match=r"verify checked \d of 16 rows in \d+ s\. Pass seconds=None"):
        verification = mapper.verify(X)
    assert 2 <= verification.rows < 10
    assert verification.ok
    assert f"; {verification.rows} row(s) on" in str(verification)


def test_a_mode_that_time_left_out_is_not_passed(monkeypatch: pytest.MonkeyPatch) -> None:
    _clock(monkeypatch, 1.0)
    with pytest.warns(RuntimeWarning, match="checked 2 of 16 rows in .* s; not finished: over devices"):
        verification = DeviceMap(lambda row: row * 2, vectorize=False, devices=THREE).verify(X, seconds=12)
    assert (verification.rows, verification.ok, verification.unfinished) == (2, False, ("over devices",))


def test_no_time_to_test_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    _clock(monkeypatch, 1.0)
    with pytest.warns(RuntimeWarning, match="not finished: over devices and rounding"):
        verification = DeviceMap(lambda b: b - tf.reduce_mean(b, 0), batched=True, devices=THREE).verify(X, seconds=12)
    assert [finding.mode for finding in verification.findings] == ["one by one"]
    assert str(verification).startswith("<lambda>: NOT the same results in all modes; ")


def test_progress_of_a_long_verification(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[Any] = []
    names: list[str] = []

    def bar(name: str) -> Any:
        names.append(name)
        return events.append

    monkeypatch.setattr(verify, "ProgressBar", bar)
    mapper = DeviceMap(lambda row: row * 2, vectorize=False, devices=THREE, name="double")
    mapper.verify(X, rows=4)
    assert not events
    _clock(monkeypatch, 0.1)
    mapper.verify(X, rows=4, seconds=None)
    assert names[0].startswith("verify double, up to ")
    assert isinstance(events[0], CallStarted)
    assert events[0].rows == 16
    assert sum(len(event.shard) for event in events if isinstance(event, ChunkFinished)) == 4 + 4 + 3
    assert isinstance(events[-1], CallFinished)
