"""What verify finds: functions that are known to be right or wrong, and what it says of them."""

from __future__ import annotations

import dataclasses
import json
import re
from typing import Any

import pytest
import tensorflow as tf

from devicemap import DeviceMap
from devicemap.errors import DataError, DeviceMapError, FunctionError, OptionError
from devicemap.tell.verify.comparison import Difference
from devicemap.tell.verify.diagnosis import Facts, diagnose
from devicemap.tell.verify.findings import Comparison

X = tf.random.stateless_normal([20, 4], [1, 2])
THREE = ["CPU:0", "CPU:1", "CPU:2"]
WEIGHTS = tf.random.stateless_normal([512, 64], [1, 3])


def kinds(fn: Any, data: Any = X, **options: Any) -> dict[str | None, str]:
    """The kind of finding for each output."""
    verification = DeviceMap(fn, devices=THREE, **options).verify(data)
    assert verification.ok == (not any(finding.changes_results for finding in verification.findings))
    return {finding.output: finding.kind for finding in verification.findings}


RAGGED = tf.RaggedTensor.from_row_lengths(tf.range(190), tf.range(20))


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
        (lambda row: row / 0.0, X, {}),
        (lambda row: tf.cast(row, tf.bfloat16) * 3, X, {}),
        (lambda row: row + 1, tf.data.Dataset.from_tensor_slices(X), {}),
        (lambda batch: batch + 1, tf.data.Dataset.from_tensor_slices(X).batch(3), {"batched": True}),
    ],
)
def test_nothing_is_found_where_nothing_is_wrong(fn: Any, data: Any, options: dict[str, Any]) -> None:
    verification = DeviceMap(fn, devices=THREE, **options).verify(data)
    assert verification.ok
    assert not verification.findings
    assert all(comparison.same and not comparison.differences for comparison in verification.comparisons)


@pytest.mark.nightly
@pytest.mark.parametrize("batched", [False, True])
def test_the_same_with_seed_wherever_a_row_stands(batched: bool) -> None:
    def row(x: Any, seed: Any) -> Any:
        return x + tf.random.stateless_normal([4], seed)

    def batch(x: Any, seed: Any) -> Any:
        return tf.map_fn(lambda pair: row(*pair), (x, seed), fn_output_signature=tf.float32)

    assert kinds(batch if batched else row, batched=batched, seed=7) == {}
    assert kinds(lambda a, b, seed: row(a, seed) + b, (X, X), seed=7) == {}


def test_mean_over_the_batch_couples_rows() -> None:
    def fn(batch: Any) -> Any:
        return {"centred": batch - tf.reduce_mean(batch, 0), "twice": batch * 2}

    verification = DeviceMap(fn, batched=True, devices=THREE).verify(X)
    [finding] = verification.findings
    assert not verification.ok
    assert (finding.kind, finding.output) == ("coupled", "the result['centred']")
    assert "differs by at most" in finding.difference
    assert "in row" in finding.difference
    assert "mean over the batch" in finding.meaning
    assert "batch_size" in finding.meaning


def test_coupling_by_the_number_of_rows_alone() -> None:
    assert kinds(lambda batch: batch / tf.cast(tf.shape(batch)[0], tf.float32), batched=True) == {
        "the result": "coupled"
    }


def test_position_in_the_batch_couples_rows() -> None:
    assert kinds(lambda batch: tf.range(tf.shape(batch)[0]), batched=True) == {"the result": "coupled"}


def test_batch_normalisation_in_training_mode() -> None:
    layer = tf.keras.layers.BatchNormalization()
    layer.build([None, 4])
    assert kinds(lambda batch: layer(batch, training=False), batched=True) == {}
    assert kinds(lambda batch: layer(batch, training=True), batched=True) == {"the result": "coupled", None: "writes"}


@pytest.mark.nightly
@pytest.mark.parametrize("batched", [False, True])
def test_hidden_randomness(batched: bool) -> None:
    generator = tf.random.Generator.from_seed(1)
    dropout = tf.keras.layers.Dropout(0.5)
    assert kinds(lambda x: x + tf.random.normal(tf.shape(x)), batched=batched) == {"the result": "random"}
    assert kinds(lambda x: x + tf.random.normal(tf.shape(x), seed=3), batched=batched) == {"the result": "random"}
    assert kinds(lambda x: x + generator.normal(tf.shape(x)), batched=batched) == {"the result": "random"}
    assert kinds(lambda x: dropout(x, training=True), batched=batched) == {"the result": "random"}
    assert kinds(lambda x: (x, x + tf.random.normal(tf.shape(x))), batched=batched) == {"the result[1]": "random"}


def test_a_counter_that_fn_writes() -> None:
    count = tf.Variable(0.0, name="count")

    def fn(row: Any) -> Any:
        return {"n": count.assign_add(1.0), "row": row}

    verification = DeviceMap(fn, devices=THREE).verify(X)
    state, writes = verification.findings
    assert (state.kind, state.output, writes.kind, writes.output) == ("state", "the result['n']", "writes", None)
    assert "(count)" in state.meaning
    assert writes.difference == "fn writes count"
    assert "one after another" in writes.meaning


def test_writing_alone_is_ok_and_nothing_is_put_back() -> None:
    total = tf.Variable(0.0, name="total")

    def fn(row: Any) -> Any:
        total.assign_add(1.0)
        return row

    verification = DeviceMap(fn, devices=THREE).verify(X, rows=5)
    assert verification.ok
    assert [finding.kind for finding in verification.findings] == ["writes"]
    assert "in any order" not in verification.findings[0].meaning
    assert "stay parallel" in verification.findings[0].meaning
    assert total.numpy() == 7 * 5  # four ways in a graph, three in eager code


def test_a_python_counter_is_frozen_in_a_graph() -> None:
    calls = []

    def fn(row: Any) -> Any:
        calls.append(None)
        return row + float(len(calls))

    assert kinds(fn) == {"the result": "python"}
    assert kinds(lambda row: row + float(tf.executing_eagerly())) == {"the result": "graph"}
    assert kinds(lambda batch: batch + float(tf.executing_eagerly()), batched=True) == {"the result": "graph"}


def test_python_in_a_graph() -> None:
    calls: list[None] = []

    def count(x: Any) -> Any:
        calls.append(None)
        return x + len(calls)

    assert kinds(lambda row: tf.ensure_shape(tf.py_function(count, [row], tf.float32), [4])) == {"the result": "python"}


def test_rounding_is_told_and_ok() -> None:
    difference = Difference("the result", 1e-6, 1e-7, 3, None)
    comparisons = [Comparison("coupled", ("one by one", "at once"), (difference,))]
    [finding] = diagnose(comparisons, ["the result"], Facts(True, (), (), False, ()))
    assert (finding.kind, finding.changes_results) == ("rounding", False)
    verification = DeviceMap(lambda batch: tf.matmul(batch, WEIGHTS), batched=True, devices=THREE).verify(
        tf.random.stateless_normal([20, 512], [4, 5])
    )
    assert verification.ok
    assert {finding.kind for finding in verification.findings} <= {"rounding"}


def test_tolerance_says_what_rounding_is() -> None:
    mapper = DeviceMap(lambda batch: batch + 1e-3 * tf.reduce_mean(batch), batched=True, devices=THREE)
    assert not mapper.verify(X, tolerance=0).ok
    assert mapper.verify(X, tolerance=0.1).ok


def test_a_cause_hides_its_consequences() -> None:
    wrong = Difference("the result", 1.0, 0.5, 3, "the result has 1 and 2")
    facts = Facts(True, (), (), False, ())
    found = []
    for questions in (["eager", "devices"], ["eager", "devices", "coupled"], ["order", "coupled", "graph again"]):
        comparisons = [Comparison(question, ("a", "b"), (wrong,)) for question in questions]
        found += [finding.kind for finding in diagnose(comparisons, ["the result"], facts)]
    assert found == ["devices", "coupled", "state"]


def test_fails_on_a_single_row() -> None:
    def pairs(batch: Any) -> Any:
        tf.debugging.assert_greater(tf.shape(batch)[0], 1, message="at least two rows")
        return batch * 2

    verification = DeviceMap(pairs, batched=True, devices=THREE).verify(X)
    [finding] = verification.findings
    assert (finding.kind, finding.output, finding.changes_results) == ("coupled", None, True)
    assert "at least two rows" in finding.difference


def test_fails_in_eager_code_alone() -> None:
    def fn(batch: Any) -> Any:
        if tf.executing_eagerly():
            raise RuntimeError("graphs only")
        return batch * 2

    verification = DeviceMap(fn, batched=True, devices=THREE).verify(X)
    [finding] = verification.findings
    assert verification.ok
    assert finding.kind == "eager"
    assert "RuntimeError: graphs only" in finding.difference


def test_fails_everywhere() -> None:
    with pytest.raises(FunctionError, match="broken"):
        DeviceMap(lambda row: tf.debugging.check_numerics(row / 0.0, "broken"), devices=THREE).verify(X)


def test_rows_and_devices_that_are_told() -> None:
    mapper = DeviceMap(lambda row: row, devices=THREE)
    assert mapper.verify(X).rows == 16
    assert mapper.verify(X, rows=3).rows == 3
    assert DeviceMap(lambda row: row).verify(tf.range(50)).rows == 16
    one = mapper.verify(X[:1])
    assert "One row does not tell" in str(one)
    assert [name[-5:] for name in one.devices] == THREE


def test_prints_and_saves() -> None:
    verification = DeviceMap(lambda b: b - tf.reduce_mean(b), batched=True, devices=THREE, name="centre").verify(X)
    text = str(verification)
    assert text.startswith("centre: NOT the same results in all ways; 16 row(s) on CPU:0, CPU:1, CPU:2")
    assert re.search(r"\neager code on one row at a time against eager code  +DIFFERENT: the result differs", text), (
        text
    )
    assert "\n* coupled: the result differs by at most" in text
    assert repr(verification) == str(verification)
    assert verification._repr_html_().startswith("<pre>")
    saved = json.loads(json.dumps(verification.to_dict()))
    assert saved["ok"] is False
    assert saved["findings"][0]["kind"] == "coupled"
    assert {comparison["question"] for comparison in saved["comparisons"]} >= {"coupled", "order", "devices", "eager"}
    with pytest.raises(dataclasses.FrozenInstanceError):
        verification.rows = 1  # type: ignore[misc]
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
    with pytest.raises(DataError, match="no rows"):
        mapper.verify(X[:0])
    assert not ran


def test_not_inside_a_function() -> None:
    mapper = DeviceMap(lambda row: row)
    with pytest.raises(DeviceMapError, match=r"verify was called inside a tf\.function"):
        tf.function(lambda: mapper.verify(X).rows)()
