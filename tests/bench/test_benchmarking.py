"""devicemap.benchmark: what it measures, when it stops, and which arguments it refuses."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from cases import IN_CI, Case

from devicemap import benchmark
from devicemap.errors import DataError, DeviceError, FunctionError, OptionError, UnknownOptionError
from devicemap.types import BenchmarkResult

ROWS = tf.constant(np.random.default_rng(0).normal(size=[23, 3]), tf.float32)
THREE = ["CPU:3", "CPU:0", "CPU:5"]
SHORT = {"rounds": 2, "devices": THREE}


def _row(row: Any) -> Any:
    return {"sum": tf.reduce_sum(row), "sines": tf.sin(row)}


@pytest.fixture(scope="module")
def swept() -> BenchmarkResult:
    return benchmark(_row, ROWS, batch_sizes=[None, 4], **SHORT)


def test_each_mode_and_batch_size_is_measured(swept: BenchmarkResult) -> None:
    assert [(m.mode, len(m.devices), m.batch_size, m.rows) for m in swept.measurements] == [
        ("graph", 1, None, 23),
        ("graph", 3, None, 23),
        ("eager", 1, None, 16),
        ("graph", 1, 4, 23),
        ("graph", 3, 4, 23),
    ]
    assert swept.rows == 23
    assert [device.name.rpartition("device:")[2] for device in swept.devices] == THREE
    assert swept.measurements[0].devices == (swept.devices[0].name,)
    for m in swept.measurements:
        assert m.error is None
        assert m.call_seconds > 0
        assert m.rows_per_second == pytest.approx(m.rows / m.call_seconds)
        assert len(m.round_seconds) == 2
        assert m.peak_memory_bytes is None
    assert swept.measurements[0].first_call_seconds > swept.measurements[0].call_seconds  # it traced


def test_the_speedup_is_relative_to_the_fastest_on_one_device(swept: BenchmarkResult) -> None:
    best = max((m for m in swept.measurements if len(m.devices) == 1), key=lambda m: m.rows_per_second)
    assert best.speedup == 1
    for m in swept.measurements:
        ratios = [b * m.rows / best.rows / a for a, b in zip(m.round_seconds, best.round_seconds)]
        assert m.speedup == pytest.approx(np.median(ratios))


def test_the_result_is_printed_saved_and_plotted(swept: BenchmarkResult, tmp_path: Path) -> None:
    text = str(swept)
    assert text.startswith("_row: 23 row(s) on up to 3 device(s)\n\nmode ")
    assert re.search(r"\ngraph, 3 devices +4 +23 ", text)
    assert "peak memory" not in text  # empty columns are left out
    swept.save(tmp_path / "result.json")
    read = json.loads((tmp_path / "result.json").read_text())
    assert read == swept.to_dict()
    swept.plot(tmp_path / "result.svg")
    assert (tmp_path / "result.svg").read_bytes().startswith(b"<?xml")


@pytest.mark.in_ci(1)
@pytest.mark.parametrize("case", IN_CI, ids=str)
def test_eager_code_takes_what_the_graph_takes(case: Case) -> None:
    result = benchmark(
        case.fn, case.data, devices=THREE[:2], batch_sizes=[None], rounds=1, batched=case.batched, **case.options
    )
    assert [(m.mode, m.error) for m in result.measurements] == [("graph", None), ("graph", None), ("eager", None)]


def test_batch_sizes_are_swept_in_both_modes() -> None:
    called: list[int] = []

    def fn(batch: Any) -> Any:
        if tf.executing_eagerly():
            called.append(len(batch))
        return batch * 2

    result = benchmark(fn, ROWS, batched=True, batch_sizes=[8, None], **SHORT)
    assert [(m.mode, m.batch_size, m.rows) for m in result.measurements if len(m.devices) == 1] == [
        ("graph", 8, 23),
        ("eager", 8, 8),
        ("graph", None, 23),
        ("eager", None, 23),
    ]
    assert {*called} == {8, 23}


def test_one_device_is_measured_once() -> None:
    result = benchmark(_row, ROWS, devices="CPU:2", batch_sizes=[None])
    assert [m.mode for m in result.measurements] == ["graph", "eager"]
    assert len(result.measurements[0].round_seconds) == 5


@pytest.mark.nightly
def test_seeds_are_passed_on() -> None:
    def fn(row: Any, seed: Any) -> Any:
        return row + tf.random.stateless_normal([3], seed)

    options = {"seed": 3, "batch_sizes": [None], "rounds": 1, "devices": THREE}
    assert all(m.error is None for m in benchmark(fn, ROWS, **options).measurements)
    result = benchmark(lambda batch, seed: batch, ROWS, batched=True, name="mine", **options)
    assert all(m.error is None for m in result.measurements)
    assert result.name == "mine"


def test_an_error_in_eager_code_is_reported() -> None:
    def fn(row: Any) -> Any:
        if tf.executing_eagerly():
            raise ZeroDivisionError("only here")
        return row

    result = benchmark(fn, ROWS, batch_sizes=[None], **SHORT)
    assert [m.error for m in result.measurements] == [None, None, "ZeroDivisionError: only here"]
    assert "\neager, CPU:3, batch_size=None: ZeroDivisionError: only here" in str(result)


def test_an_error_in_a_graph_is_raised() -> None:
    with pytest.raises(FunctionError, match="broken"):
        benchmark(lambda row: tf.debugging.check_numerics(row / 0.0, "broken"), ROWS, **SHORT)


def test_batches_that_run_out_of_memory_are_reported() -> None:
    def fn(batch: Any) -> Any:
        columns = tf.where(tf.shape(batch, tf.int64)[0] > 10, 2**50, 1)
        return tf.reduce_sum(batch) + tf.reduce_sum(tf.fill([tf.shape(batch, tf.int64)[0], columns], 1.0), 1)

    options = {"batched": True, "max_retries": 0, "rounds": 1}
    result = benchmark(fn, ROWS, batch_sizes=[None, 8], devices=THREE, **options)
    failed = [(m.mode, len(m.devices), m.batch_size) for m in result.measurements if m.error]
    assert failed == [("graph", 1, None), ("eager", 1, None)]
    with pytest.raises(FunctionError, match="batch_size=None: "):
        benchmark(fn, ROWS, batch_sizes=[None], devices="CPU:0", **options)


def test_the_first_batch_size_is_measured_whatever_the_budget() -> None:
    result = benchmark(_row, ROWS, seconds=1e-6, devices=THREE)
    assert [m.batch_size for m in result.measurements if m.error is None] == [None] * 3
    assert len(result.measurements[0].round_seconds) == 1
    assert {m.error for m in result.measurements[3:]} == {"seconds=1e-06 were used up; give more"}


@pytest.mark.nightly
def test_datasets_are_read_into_memory_and_bounded() -> None:
    samples = tf.data.Dataset.range(3000).map(lambda n: {"n": n})
    assert benchmark(lambda row: row["n"] * 2, samples, batch_sizes=[None], rounds=1).rows == 1024
    batches = tf.data.Dataset.from_tensor_slices(ROWS).batch(5)
    options = {"batched": True, "batch_sizes": [None], "rounds": 1, "devices": THREE}
    assert benchmark(lambda b: b, batches, **options).rows == 23
    assert benchmark(lambda b: b, batches, max_rows=7, **options).rows == 7
    assert benchmark(lambda b: b, ROWS, max_rows=7, **options).rows == 7
    wider = tf.data.Dataset.from_generator(
        lambda: (np.zeros([2, n]) for n in (1, 2)), output_signature=tf.TensorSpec([None, None])
    )
    with pytest.raises(DataError, match="different inner shapes, and cannot be held in memory together"):
        benchmark(lambda b: b, wider, **options)


def test_data_without_rows_is_an_error() -> None:
    with pytest.raises(DataError, match="data has no rows; expected at least one"):
        benchmark(_row, tf.zeros([0, 3]))
    with pytest.raises(DataError, match="the dataset is empty"):
        benchmark(_row, tf.data.Dataset.from_tensor_slices(tf.zeros([0, 3])))


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"batch_sizes": []}, OptionError, r"batch_sizes=\[\]; expected a list of None, 'auto' and ints"),
        ({"batch_sizes": 8}, OptionError, "batch_sizes=8; expected a list"),
        ({"batch_sizes": [None, 0]}, OptionError, "batch_size=0; expected None, .auto. or an int of at least 1"),
        ({"batch_size": 8}, OptionError, r"batch_size=8: a benchmark varies it; give batch_sizes=\[8\]"),
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
