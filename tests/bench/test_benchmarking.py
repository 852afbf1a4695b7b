"""devicemap.benchmark: that it measures the same thing in every way, keeps to its budget, and says what to do."""

from __future__ import annotations

import dataclasses
import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from cases import IN_CI, Case

import devicemap
from devicemap.bench.gauges import busy_shares, read_peak_memory, reset_peak_memory
from devicemap.bench.measurements import BenchmarkResult
from devicemap.bench.runner import benchmark
from devicemap.bench.timing import Budget
from devicemap.errors import DataError, DeviceError, DeviceMapError, FunctionError, OptionError, UnknownOptionError

ROWS = tf.constant(np.random.default_rng(0).normal(size=[23, 3]), tf.float32)
THREE = ["CPU:3", "CPU:0", "CPU:5"]
SHORT = {"rounds": 2, "devices": THREE}


def _row(row: Any) -> Any:
    return {"sum": tf.reduce_sum(row), "sines": tf.sin(row)}


@pytest.fixture(scope="module")
def swept() -> BenchmarkResult:
    return benchmark(_row, ROWS, batch_sizes=[None, 4], **SHORT)


def test_every_way_is_measured(swept: BenchmarkResult) -> None:
    ways = [(m.mode, len(m.devices), m.batch_size, m.vectorize) for m in swept.measurements]
    assert ways == [
        ("graph", 1, None, "auto"),
        ("graph", 3, None, "auto"),
        ("eager", 1, None, None),
        ("eager", 3, None, None),
        ("graph", 1, 4, "auto"),
        ("graph", 3, 4, "auto"),
        ("graph", 1, None, False),
        ("graph", 3, None, False),
    ]
    assert swept.skipped == ()
    assert swept.rounds == 2
    assert swept.rows == 23
    assert [device.name.rpartition("device:")[2] for device in swept.devices] == THREE
    assert swept.measurements[0].devices == (swept.devices[0].name,)
    for m in swept.measurements:
        assert m.rows == 23
        assert m.call_seconds > 0
        assert m.rows_per_second == pytest.approx(23 / m.call_seconds)
        assert len(m.round_seconds) == 2
        assert m.speedup_interval is not None
        assert m.efficiency == pytest.approx(m.speedup / len(m.devices))  # type: ignore[operator]
        assert m.busy_shares is None or set(m.busy_shares) <= set(m.devices)
        assert m.peak_memory_bytes is None
    assert swept.measurements[0].first_call_seconds > swept.measurements[0].call_seconds  # it traced


def test_the_result_is_frozen(swept: BenchmarkResult) -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        swept.rows = 1  # type: ignore[misc]
    with pytest.raises(dataclasses.FrozenInstanceError):
        swept.measurements[0].rows = 1  # type: ignore[misc]


def test_it_prints_what_was_measured_and_what_to_use(swept: BenchmarkResult) -> None:
    text = str(swept)
    assert text.startswith("_row over 23 rows, up to 3 CPUs, medians of 2 rounds\n\nmode ")
    assert " ".join(text.split()).endswith(swept.recommendation)  # in lines of the width of the terminal
    assert swept.recommendation.startswith("Use ")
    assert re.search(r"\ngraph +3 CPUs +4 +auto", text)
    assert "peak memory" not in text  # nothing is known for it
    assert f"TensorFlow {tf.__version__}, devicemap {devicemap.__version__}" in text


def test_it_is_saved_as_json(swept: BenchmarkResult, tmp_path: Path) -> None:
    swept.save(tmp_path / "result.json")
    read = json.loads((tmp_path / "result.json").read_text())
    assert read == swept.to_dict()
    assert swept._repr_html_().startswith("<pre>_row over 23 rows, ")
    assert repr(swept) == str(swept)
    assert read["measurements"][1]["devices"] == list(swept.measurements[1].devices)
    assert read["measurements"][4]["batch_size"] == 4
    assert read["recommendation"] == swept.recommendation
    assert set(read) == {field.name for field in dataclasses.fields(BenchmarkResult)}


@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_it_is_drawn(swept: BenchmarkResult, tmp_path: Path, suffix: str) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / f"result.{suffix}"
    swept.plot(path)
    assert path.stat().st_size > 5000


def test_a_missing_extra_says_what_to_install(swept: BenchmarkResult, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match="pip install matplotlib"):
        swept.plot("result.png")


@pytest.mark.in_ci(1)
@pytest.mark.parametrize("case", IN_CI, ids=str)
def test_eager_code_gives_what_the_graph_gives(case: Case) -> None:
    """For all the structures that a DeviceMap takes and returns: a difference would raise."""
    options = {"batched": case.batched, "vectorize": "auto", **case.options}
    if case.batched:
        options.pop("vectorize")
    result = benchmark(case.fn, case.data, devices=THREE[:2], batch_sizes=[None], rounds=1, **options)
    assert {m.mode for m in result.measurements} == {"eager", "graph"}
    assert [m.speedup_interval for m in result.measurements] == [None] * 4  # one round


def test_batches_are_swept_in_both_modes() -> None:
    called: list[int] = []

    def fn(batch: Any) -> Any:
        if tf.executing_eagerly():
            called.append(len(batch))
        return batch * 2

    result = benchmark(fn, ROWS, batched=True, batch_sizes=[8, None], **SHORT)
    ways = [(m.mode, m.batch_size) for m in result.measurements if len(m.devices) == 3]
    assert ways == [("graph", 8), ("eager", 8), ("graph", None), ("eager", None)]
    assert set(called) == {8, 7, 23}  # chunks of 8, shards of 8, 8 and 7, all of them
    assert all(m.vectorize is None for m in result.measurements)


def test_one_device_is_measured_alone() -> None:
    result = benchmark(_row, ROWS, devices="CPU:2", batch_sizes=[None], modes=["graph"], vectorize=True)
    ((m),) = result.measurements
    assert m.vectorize is True
    assert m.speedup == m.efficiency == 1
    assert result.rounds == 5
    assert result.recommendation.startswith("Use CPU:2 with batch_size=None and vectorize=True: ")


def test_eager_code_alone() -> None:
    result = benchmark(_row, ROWS, modes=["eager"], **SHORT)
    assert [(m.mode, len(m.devices)) for m in result.measurements] == [("eager", 1), ("eager", 3)]
    assert result.recommendation.startswith("In eager code, use ")


@pytest.mark.nightly
def test_seeds_are_passed_on() -> None:
    def fn(row: Any, seed: Any) -> Any:
        return row + tf.random.stateless_normal([3], seed)

    benchmark(fn, ROWS, seed=3, batch_sizes=[None], modes=["eager", "graph"], vectorize=False, rounds=1, devices=THREE)
    result = benchmark(
        lambda b, seed: b, ROWS, seed=3, batched=True, batch_sizes=[5], rounds=1, devices=THREE, name="mine"
    )
    assert result.name == "mine"


def test_results_that_differ_are_an_error() -> None:
    def fn(row: Any) -> Any:
        return {"x": row, "y": row + (1.0 if tf.executing_eagerly() else 0.0)}

    with pytest.raises(FunctionError) as caught:
        benchmark(fn, tf.zeros([4, 2]), **SHORT)
    message = str(caught.value)
    assert (
        "two ways give different results, eager on CPU:3, batch_size=None and graph on CPU:3, batch_size=None"
        in message
    )
    assert "the result['y'] has 1.0 and 0.0 at index [0, 0], a difference of 1; 8 of 8 numbers differ" in message
    assert "tolerance=0.001" in message
    benchmark(fn, tf.zeros([4, 2]), tolerance=2, batch_sizes=[None], rounds=1)


@pytest.mark.nightly
def test_random_functions_need_a_seed_or_no_comparison() -> None:
    def fn(row: Any) -> Any:
        return row + tf.random.normal([3])

    with pytest.raises(FunctionError, match=r"the option seed=\.\.\., or set tolerance=None"):
        benchmark(fn, ROWS, batch_sizes=[None], **SHORT)
    result = benchmark(fn, ROWS, batch_sizes=[None], tolerance=None, **SHORT)
    assert len(result.measurements) == 6


def test_an_error_in_eager_code_is_located() -> None:
    def fn(row: Any) -> Any:
        if tf.executing_eagerly():
            raise ZeroDivisionError("only here")
        return row

    with pytest.raises(ZeroDivisionError) as caught:
        benchmark(fn, ROWS, **SHORT)
    assert isinstance(caught.value, FunctionError)
    assert "fn failed in eager code on row 0 on CPU:3: ZeroDivisionError: only here" in str(caught.value)
    assert 'modes=["graph"]' in str(caught.value)


def test_a_way_that_runs_out_of_memory_is_skipped() -> None:
    def fn(batch: Any) -> Any:
        if tf.executing_eagerly() and len(batch) > 10:
            raise tf.errors.ResourceExhaustedError(None, None, "OOM when allocating")
        return batch

    result = benchmark(fn, ROWS, batched=True, batch_sizes=[None], **SHORT)
    assert [(way.mode, len(way.devices)) for way in result.skipped] == [("eager", 1)]
    assert result.skipped[0].reason.startswith("out of memory: fn failed in eager code on rows 0 to 22 on CPU:3: ")
    assert "\nskipped, as out of memory: " in str(result)
    assert {m.mode for m in result.measurements if len(m.devices) > 1} == {"eager", "graph"}

    def never(batch: Any) -> Any:
        raise tf.errors.ResourceExhaustedError(None, None, "OOM when allocating")

    with pytest.raises(
        FunctionError, match="nothing could be measured: eager on CPU:3, batch_size=None: out of memory"
    ):
        benchmark(never, ROWS, batched=True, modes=["eager"], **SHORT)


class _Clock:
    """A clock that shows how much `fn` has worked; ops that it does not count are free."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        self.seconds += 1e-6
        return self.seconds


@pytest.mark.nightly
def test_slow_eager_code_maps_fewer_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = _Clock()
    monkeypatch.setattr("devicemap.bench.runner.Budget", lambda seconds: Budget(seconds, clock))

    def fn(row: Any) -> Any:
        if tf.executing_eagerly():
            clock.seconds += 0.1
        return row

    result = benchmark(fn, ROWS, batch_sizes=[None], seconds=60.5, **SHORT)
    rows = {(m.mode, len(m.devices)): m.rows for m in result.measurements}
    assert rows == {("graph", 1): 23, ("graph", 3): 23, ("eager", 1): 10, ("eager", 3): 10}
    eager = next(m for m in result.measurements if m.mode == "eager")
    assert eager.rows_per_second == pytest.approx(10, rel=0.01)
    assert clock.seconds < 60.5

    result = benchmark(fn, ROWS, batch_sizes=[None], seconds=0.4, **SHORT)  # a row takes a quarter of it
    (reason,) = {way.reason for way in result.skipped if way.mode == "eager" and len(way.devices) == 3}
    assert reason == "half of the time went to ways that tell more; the budget is seconds=0.4, give more"
    (reason,) = {way.reason for way in result.skipped if way.mode == "eager" and len(way.devices) == 1}
    assert reason == "1 row(s) would take about 0.1 s; the budget is seconds=0.4, give more"


def test_the_first_way_is_measured_whatever_the_budget() -> None:
    result = benchmark(_row, ROWS, seconds=1e-6, devices=THREE)
    assert [(m.mode, len(m.devices)) for m in result.measurements] == [("graph", 1), ("graph", 3)]
    assert result.rounds == 1
    assert result.skipped
    assert "\nskipped, as half of the time went to ways that tell more" in str(result)


@pytest.mark.nightly
def test_datasets_are_read_into_memory_and_bounded() -> None:
    samples = tf.data.Dataset.range(3000).map(lambda n: {"n": n})
    result = benchmark(lambda row: row["n"] * 2, samples, modes=["graph"], batch_sizes=[None], rounds=1)
    assert result.rows == 1024
    batches = tf.data.Dataset.from_tensor_slices(ROWS).batch(5)
    options = {"batched": True, "batch_sizes": [None], "rounds": 1, "devices": THREE}
    assert benchmark(lambda b: b, batches, **options).rows == 23
    assert benchmark(lambda b: b, batches, max_rows=7, **options).rows == 7
    assert benchmark(lambda b: b, ROWS, max_rows=7, **options).rows == 7
    uneven = batches.map(lambda b: b[:, : tf.random.uniform([], 3, 4, tf.int32)])
    assert benchmark(lambda b: b, uneven, **options).rows == 23
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
        ({"modes": ["eager", "fast"]}, OptionError, r"modes=\['eager', 'fast'\]; expected a list of one or both of"),
        ({"modes": "graph"}, OptionError, "modes='graph'; expected a list"),
        ({"modes": []}, OptionError, "expected a list of one or both"),
        ({"modes": None}, OptionError, "expected a list of one or both"),
        ({"batch_sizes": []}, OptionError, r"batch_sizes=\[\]; expected a list of None, 'auto' and ints"),
        ({"batch_sizes": 8}, OptionError, "batch_sizes=8; expected a list"),
        ({"batch_sizes": [None, 0]}, OptionError, "batch_size=0; expected None, .auto. or an int of at least 1"),
        ({"batch_sizes": [True]}, OptionError, "batch_size=True; expected"),
        ({"batch_size": 8}, OptionError, r"batch_size=8 is what a benchmark varies; give batch_sizes=\[8\]"),
        ({"rounds": 0}, OptionError, "rounds=0; expected an int of at least 1"),
        ({"max_rows": 2.5}, OptionError, "max_rows=2.5; expected an int of at least 1"),
        ({"seconds": 0}, OptionError, "seconds=0; expected a time budget above 0"),
        ({"seconds": float("nan")}, OptionError, "seconds=nan; expected"),
        ({"tolerance": -1}, OptionError, "tolerance=-1; expected None or a number of at least 0"),
        ({"vectorise": True}, UnknownOptionError, "did you mean 'vectorize'"),
        ({"batched": 1}, OptionError, "batched=1; expected True or False"),
        ({"devices": ["GPU:99"]}, DeviceError, "'GPU:99', which is not a device here"),
        ({"output_device": "GPU:99"}, DeviceError, "output_device has 'GPU:99'"),
    ],
)
def test_bad_options_fail_before_anything_runs(options: dict[str, Any], error: Any, message: str) -> None:
    def fn(row: Any) -> Any:
        raise AssertionError("ran")

    with pytest.raises(error, match=message):
        benchmark(fn, ROWS, **options)


@pytest.mark.nightly
def test_batch_sizes_that_are_found_out(tmp_path: Path) -> None:
    result = benchmark(_row, ROWS, batch_sizes=[None, "auto", 4], rounds=2, seconds=20)
    assert {m.batch_size for m in result.measurements if m.mode == "graph"} == {None, "auto", 4}
    json.dumps(result.to_dict())
    result.plot(tmp_path / "sweep.png")


def test_inside_a_function_there_is_nothing_to_time() -> None:
    with pytest.raises(DeviceMapError, match="inside a tf"):
        tf.function(lambda x: benchmark(_row, x) and x, autograph=False)(ROWS)


def test_busy_shares_come_from_the_report_of_a_mapper() -> None:
    def on(device: str, busy_seconds: float | None, utilisation_percent: float | None) -> SimpleNamespace:
        return SimpleNamespace(device=device, busy_seconds=busy_seconds, utilisation_percent=utilisation_percent)

    def told(*devices: SimpleNamespace) -> SimpleNamespace:
        return SimpleNamespace(report=SimpleNamespace(wall_seconds=2.0, devices=devices))

    devices = [on("GPU:0", 1.0, None), on("GPU:1", 2.0, 40.0), on("GPU:2", None, None)]
    assert busy_shares(told(*devices)) == {"GPU:0": 0.5, "GPU:1": 0.4}
    assert busy_shares(told(*devices[2:])) is None
    assert busy_shares(SimpleNamespace(report=None)) is None  # no call has ended
    assert busy_shares(object()) is None


def test_peak_memory_is_asked_of_devices_that_count_it(monkeypatch: pytest.MonkeyPatch) -> None:
    peaks = {"/device:GPU:0": 7, "/device:GPU:1": 9}
    reset: list[str] = []

    def info(device: str) -> dict[str, int]:
        if device not in peaks:
            raise ValueError("Allocator stats not available")
        return {"current": 1, "peak": peaks[device]}

    monkeypatch.setattr(tf.config.experimental, "get_memory_info", info)
    monkeypatch.setattr(tf.config.experimental, "reset_memory_stats", reset.append)
    devices = ["/device:GPU:0", "/device:GPU:1", "/device:XPU:0", "/device:CPU:0"]
    reset_peak_memory(devices)
    assert reset == ["/device:GPU:0", "/device:GPU:1"]
    assert read_peak_memory(devices) == peaks
    assert read_peak_memory(devices[2:]) is None
