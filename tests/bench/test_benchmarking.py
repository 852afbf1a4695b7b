"""devicemap.benchmark: what it measures, when it stops, and which arguments it refuses."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from cases import IN_CI, Case

import devicemap
from devicemap import benchmark
from devicemap.errors import DataError, DeviceError, FunctionError, OptionError, UnknownOptionError
from devicemap.types import BenchmarkResult

ROWS = tf.constant(np.random.default_rng(0).normal(size=[23, 3]), tf.float32)
THREE = ["CPU:3", "CPU:0", "CPU:5"]
SHORT = {"rounds": 2, "devices": THREE}
MODES = ("batch", "eager", "one device", "all devices")


def _row(row: Any) -> Any:
    return {"sum": tf.reduce_sum(row), "sines": tf.sin(row)}


@pytest.fixture(scope="module")
def swept() -> BenchmarkResult:
    return benchmark(_row, ROWS, batch_sizes=[24, 6], **SHORT)


def test_each_mode_and_batch_size_is_measured(swept: BenchmarkResult) -> None:
    assert [(m.mode, m.rows) for m in swept.measurements] == [
        ("batch", 6),
        ("batch", 24),
        ("eager", 16),
        ("one device", 23),
        ("all devices", 23),
    ]
    assert [device.name.rpartition("device:")[2] for device in swept.devices] == THREE
    for m in swept.measurements:
        assert m.error is None
        assert m.seconds > 0
        assert m.rows_per_second == m.rows / m.seconds
        assert m.peak_memory_bytes is None
    assert swept.measurements[0].first_call_seconds > swept.measurements[0].seconds  # it traced


def test_cpus_do_not_report_their_memory(swept: BenchmarkResult) -> None:
    assert swept.largest_batch() is None
    assert swept.lines == ()
    assert swept.no_memory == "TensorFlow does not count the memory of CPU:3, CPU:0, CPU:5"
    assert swept.no_memory in str(swept)


def test_the_result_is_printed_saved_and_plotted(swept: BenchmarkResult, tmp_path: Path) -> None:
    text = str(swept)
    assert text.startswith("_row on 3 device(s)\n\nmode ")
    assert re.search(r"\nall devices +23 ", text)
    assert "peak memory" not in text  # empty columns are left out
    swept.save(tmp_path / "result.json")
    assert json.loads((tmp_path / "result.json").read_text()) == swept.to_dict()
    counted = [replace(m, peak_memory_bytes=(2**20,)) if m.mode == "batch" else m for m in swept.measurements]
    gpu = replace(swept.devices[0], memory=2**30)
    for result in (swept, replace(swept, no_memory=None, devices=(gpu,), measurements=tuple(counted))):
        result.plot(tmp_path / "result.svg")
        assert (tmp_path / "result.svg").read_bytes().startswith(b"<?xml")


@pytest.mark.in_ci(1)
@pytest.mark.parametrize("case", IN_CI, ids=str)
def test_eager_code_takes_what_the_graph_takes(case: Case) -> None:
    options = {"devices": THREE[:2], "batch_sizes": [2], "rounds": 1, "batched": case.batched, **case.options}
    assert {m.mode: m.error for m in benchmark(case.fn, case.data, **options).measurements} == dict.fromkeys(MODES)


def test_eager_code_takes_a_batch() -> None:
    called: list[int] = []

    def fn(batch: Any) -> Any:
        if tf.executing_eagerly():
            called.append(len(batch))
        return batch * 2

    result = benchmark(fn, ROWS, batched=True, rounds=1, devices=THREE)
    assert [m.rows for m in result.measurements if m.mode == "batch"] == [3, 21]
    assert {*called} == {23}


def test_seeds_are_passed_on() -> None:
    def fn(row: Any, seed: Any) -> Any:
        return row + tf.random.stateless_normal([3], seed)

    options = {"seed": 3, "batch_sizes": [6], **SHORT}
    assert all(m.error is None for m in benchmark(fn, ROWS, **options).measurements)
    result = benchmark(lambda batch, seed: batch, ROWS, batched=True, name="mine", **options)
    assert all(m.error is None for m in result.measurements)
    assert result.name == "mine"


def test_an_error_in_eager_code_is_reported() -> None:
    def fn(row: Any) -> Any:
        if tf.executing_eagerly():
            raise ZeroDivisionError("only here")
        return row

    result = benchmark(fn, ROWS, batch_sizes=[3], **SHORT)
    assert {m.mode: m.error for m in result.measurements} == {
        **dict.fromkeys(MODES),
        "eager": "ZeroDivisionError: only here",
    }
    assert "\neager, 16 rows: ZeroDivisionError: only here" in str(result)


def test_an_error_in_a_graph_is_raised() -> None:
    with pytest.raises(FunctionError, match="broken"):
        benchmark(lambda row: tf.debugging.check_numerics(row / 0.0, "broken"), ROWS, **SHORT)


def test_no_larger_batch_follows_one_that_runs_out_of_memory() -> None:
    def fn(batch: Any) -> Any:
        columns = tf.where(tf.shape(batch, tf.int64)[0] > 10, 2**50, 1)
        return tf.reduce_sum(batch) + tf.reduce_sum(tf.fill([tf.shape(batch, tf.int64)[0], columns], 1.0), 1)

    result = benchmark(fn, ROWS, batch_sizes=[90, 60, 30], batched=True, devices=THREE, rounds=1, max_rows=9)
    failed = [(m.mode, m.rows, bool(m.error)) for m in result.measurements]
    assert failed[:2] == [("batch", 30, False), ("batch", 60, True)]
    assert [mode for mode, _, _ in failed[2:]] == ["eager", "one device", "all devices"]


def test_the_first_batch_and_one_round_run_whatever_the_budget() -> None:
    result = benchmark(_row, ROWS, seconds=1e-6, devices=THREE)
    assert [(m.mode, m.rows) for m in result.measurements] == list(zip(MODES, (3, 16, 23, 23)))


def test_datasets_are_read_into_memory_and_bounded() -> None:
    samples = tf.data.Dataset.range(3000).map(lambda n: {"n": n})
    options = {"batch_sizes": [6], "rounds": 1, "devices": THREE}
    assert benchmark(lambda row: row["n"] * 2, samples, **options).measurements[-1].rows == 1024
    batches = tf.data.Dataset.from_tensor_slices(ROWS).batch(5)
    for data, max_rows, rows in ((batches, None, 23), (batches, 7, 7), (ROWS, 7, 7)):
        result = benchmark(lambda b: b, data, batched=True, max_rows=max_rows, **options)
        assert result.measurements[-1].rows == rows


def test_training_steps_leave_a_model_as_it_was() -> None:
    keras.utils.set_random_seed(1)
    layers = [
        keras.layers.Dense(4),
        keras.layers.BatchNormalization(),
        keras.layers.Dropout(0.5),
        keras.layers.Dense(1),
    ]
    model = keras.Sequential([keras.Input([3]), *layers])
    model.compile("adam", "mse", metrics=["mae"], jit_compile=False)
    devicemap.parallelize(model, THREE)
    data = ROWS, ROWS[:, :1]

    def state() -> dict[int, Any]:
        variables = *model.variables, *model.metrics_variables, *model.optimizer.variables
        return {id(variable): variable.numpy() for variable in variables}

    for _ in range(2):  # before its first step, and after
        before, steps = state(), model.report().steps
        result = benchmark(model, data, rounds=1, batch_sizes=[12])
        assert [(m.mode, m.rows, m.error) for m in result.measurements] == [*zip(MODES, (12, 23, 23, 23), [None] * 4)]
        assert result.name == model.name
        assert model.report().steps == steps
        after = state()
        assert all(np.array_equal(value, after[key]) for key, value in before.items())
        history = model.fit(*data, verbose=0, batch_size=23).history
        assert set(history) == {"loss", "mae"}
    with pytest.raises(OptionError, match="expected a compiled one, and neither devices="):
        benchmark(model, data, batched=True)


def test_data_without_rows_is_an_error() -> None:
    with pytest.raises(DataError, match="data has no rows; expected at least one"):
        benchmark(_row, tf.zeros([0, 3]))
    with pytest.raises(DataError, match="the dataset is empty"):
        benchmark(_row, tf.data.Dataset.from_tensor_slices(tf.zeros([0, 3])))


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"batch_sizes": 8.5}, OptionError, "batch_sizes=8.5; expected"),
        ({"batch_sizes": [8, 0]}, OptionError, "batch_sizes=0; expected an int of at least 1"),
        ({"batch_size": 8}, OptionError, "batch_size=8: a benchmark varies it; use batch_sizes="),
        ({"rounds": 0}, OptionError, "rounds=0; expected an int of at least 1"),
        ({"max_rows": 2.5}, OptionError, "max_rows=2.5; expected an int of at least 1"),
        ({"seconds": 0}, OptionError, "seconds=0; expected a time budget above 0"),
        ({"vectorise": True}, UnknownOptionError, "did you mean 'vectorize'"),
        ({"devices": ["GPU:99"]}, DeviceError, "'GPU:99', which is not a device here"),
    ],
)
def test_bad_options_fail_before_anything_runs(options: dict[str, Any], error: Any, message: str) -> None:
    def fn(row: Any) -> Any:
        raise AssertionError("ran")

    with pytest.raises(error, match=message):
        benchmark(fn, ROWS, **options)
