"""devicemap.benchmark: what it measures and when it stops."""

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

import devicemap
from devicemap import benchmark
from devicemap.errors import DataError, FunctionError, OptionError

ROWS = tf.constant(np.random.default_rng(0).normal(size=[23, 3]), tf.float32)
THREE = ["CPU:3", "CPU:0", "CPU:5"]
SHORT: dict[str, Any] = {"rounds": 1, "devices": THREE, "batch_sizes": [6]}
MODES = ("batch", "eager", "one device", "all devices")


def _measured(result: Any) -> list[tuple[str, int]]:
    return [(m.mode, m.rows) for m in result.measurements]


def _errors(result: Any) -> dict[str, str | None]:
    return {m.mode: m.error for m in result.measurements}


def _row(row: Any) -> Any:
    return {"sum": tf.reduce_sum(row), "sines": tf.sin(row)}


def test_each_mode_and_batch_size_is_measured_printed_saved_and_plotted(tmp_path: Path) -> None:
    result = benchmark(_row, ROWS, batch_sizes=[24, 6], rounds=2, seconds=1e9, devices=THREE)
    assert _measured(result) == [("batch", 6), ("batch", 24), ("eager", 16), ("one device", 23), ("all devices", 23)]
    assert [device.name.rpartition("device:")[2] for device in result.devices] == THREE
    for m in result.measurements:
        assert (m.error, m.peak_memory_bytes, m.rows_per_second) == (None, None, m.rows / m.seconds)
    assert result.measurements[0].first_call_seconds > result.measurements[0].seconds > 0  # it traced
    assert (result.largest_batch(), result.lines) == (None, ())
    assert result.no_memory == "TensorFlow does not count the memory of CPU:3, CPU:0, CPU:5"
    text = str(result)
    assert text.startswith("_row on 3 devices\n\nmode ")
    assert re.search(r"\nall devices +23 ", text)
    assert result.no_memory in text
    assert "peak memory" not in text  # empty columns are left out
    assert re.search(r"\nbatch +6 .* m?s *\n", text)  # no speed-up, because it starts chunks
    result.save(tmp_path / "result.json")
    assert json.loads((tmp_path / "result.json").read_text()) == result.to_dict()
    counted = [replace(m, peak_memory_bytes=(2**20,)) if m.mode == "batch" else m for m in result.measurements]
    gpu = replace(result.devices[0], memory=2**30)
    for each in (result, replace(result, no_memory=None, devices=(gpu,), measurements=tuple(counted))):
        each.plot(tmp_path / "result.svg")
        assert (tmp_path / "result.svg").read_bytes().startswith(b"<?xml")


def test_eager_code_takes_a_batch_and_seeds() -> None:
    called: list[int] = []

    def fn(batch: Any, seed: Any) -> Any:
        if tf.executing_eagerly():
            called.append(len(batch))
        return batch * 2

    result = benchmark(fn, ROWS, seed=3, batched=True, name="mine", rounds=1, seconds=1e9, devices=THREE)
    assert result.name == "mine"
    assert [rows for mode, rows in _measured(result) if mode == "batch"] == [3, 21]
    assert {*called} == {23}


def test_an_error_in_eager_code_is_reported_and_one_in_a_graph_is_raised() -> None:
    def fn(row: Any) -> Any:
        if tf.executing_eagerly():
            raise ZeroDivisionError("only here")
        return row

    result = benchmark(fn, ROWS, **SHORT)
    assert _errors(result) == {**dict.fromkeys(MODES), "eager": "ZeroDivisionError: only here"}
    assert (
        json.loads(json.dumps(result.to_dict(), allow_nan=False))["measurements"][MODES.index("eager")]["seconds"]
        is None
    )
    assert "\neager, 16 rows: ZeroDivisionError: only here" in str(result)
    with pytest.raises(FunctionError, match="broken"):
        benchmark(lambda row: tf.debugging.check_numerics(row / 0.0, "broken"), ROWS, **SHORT)


def test_the_first_batch_and_one_round_run_whatever_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("devicemap.bench.measurements._START_SECONDS", 1e9)
    assert _measured(benchmark(_row, ROWS, seconds=1e-6, devices=THREE)) == list(zip(MODES, (3, 16, 23, 23)))
    monkeypatch.setattr("devicemap.bench.measurements._START_SECONDS", 0.0)  # each batch counts as slow
    for batched in (False, True):
        message = "sin: one device and all devices map 3 of 23 rows, because fn is slow. Raise seconds for more rows"
        with pytest.warns(RuntimeWarning, match=message) as caught:
            result = benchmark(tf.sin, ROWS, seconds=1e-6, devices=THREE, batched=batched)
        assert _measured(result) == list(zip(MODES, (3, 3, 3, 3)))
        assert [each.filename for each in caught if each.category is RuntimeWarning] == [__file__]


def test_datasets_are_read_into_memory_and_bounded() -> None:
    samples = tf.data.Dataset.range(3000).map(lambda n: {"n": n})
    assert benchmark(lambda row: row["n"] * 2, samples, **SHORT).measurements[-1].rows == 1024
    batches = tf.data.Dataset.from_tensor_slices(ROWS).batch(5)
    for data in (batches, ROWS):
        assert benchmark(lambda b: b, data, batched=True, max_rows=7, **SHORT).measurements[-1].rows == 7


def test_training_steps_leave_a_model_as_it_was() -> None:
    keras.utils.set_random_seed(1)
    layers = keras.layers.BatchNormalization(), keras.layers.Dropout(0.5), keras.layers.Dense(1)
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
        assert (_measured(result), _errors(result)) == ([*zip(MODES, (12, 23, 23, 23))], dict.fromkeys(MODES))
        assert (result.name, model.report().steps) == (model.name, steps)
        after = state()
        assert all(np.array_equal(value, after[key]) for key, value in before.items())
        assert set(model.fit(*data, verbose=0, batch_size=23).history) == {"loss", "mae"}
    with pytest.raises(OptionError, match="expected a compiled one, and neither devices="):
        benchmark(model, data, batched=True)
    for bad, message in (
        (ROWS, r"a training step failed, and data has no targets: pass \(x, y\) or .*: \w+Error: "),
        (
            tf.data.Dataset.from_tensor_slices(data),
            r"different numbers of rows: data\[0\] has 3, data\[1\] has 1",
        ),
    ):
        with pytest.raises(DataError, match=message):
            benchmark(model, bad)
