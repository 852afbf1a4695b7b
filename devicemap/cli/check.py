"""The commands `check` and `env`: whether devicemap works on the devices of this machine, and how fast."""

from __future__ import annotations

import json
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from devicemap.api import DeviceMap, parallel_map, parallel_reduce
from devicemap.devices import Device, choose_devices, list_devices, why_no_gpu
from devicemap.errors import error_text
from devicemap.events import short_name
from devicemap.inspect.render import size_text
from devicemap.pipelines.pipeline import Pipeline
from devicemap.pipelines.split import split
from devicemap.training.models import parallelize

_PACKAGES = "devicemap", "tensorflow", "tensorflow-cpu", "keras", "numpy", "rich", "ray", "pyarrow", "nvidia-ml-py"
_ROWS = 37
"""Rows of the small cases: uneven on any number of devices but 1 and 37."""


def print_environment(json_path: Path | None = None) -> dict[str, Any]:
    """Print versions and devices, save them as JSON if there is a path, and return them."""
    found = _environment()
    print("\n".join(f"{name:18}{value}" for name, value in found["versions"].items()))
    print()
    print_devices(list_devices())
    if json_path:
        _save(found, json_path)
    return found


def print_devices(devices: Sequence[Device]) -> None:
    """Print devices with their memory, and why there is no GPU."""
    for device in devices:
        memory = "" if device.memory is None else size_text(device.memory)
        print(f"{short_name(device.name):8} {device.kind:4} {memory:>10}  {device.description}")
    if not any(device.kind == "GPU" for device in devices):
        print(f"\nNo GPU: {why_no_gpu()}")


def _environment() -> dict[str, Any]:
    versions = {"Python": platform.python_version(), "system": platform.platform()}
    for package in _PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    build = tf.sysconfig.get_build_info()
    versions |= {key: str(build[f"{key}_version"]) for key in ("cuda", "cudnn") if f"{key}_version" in build}
    return {"versions": versions, "devices": [asdict(device) for device in list_devices()]}


def check(given: Any, seconds: float, json_path: Path | None = None) -> bool:
    """Test each guarantee on a small case, and measure speed-ups, on some devices; print all of it as it is found.

    Args:
        given: the devices, as in `parallel_map`.
        seconds: about how long one device takes for a call that is measured.
        json_path: a file for all of it as JSON.

    Returns:
        Whether every test passed. Speed-ups do not matter.
    """
    devices = choose_devices(given)
    environment = print_environment()
    print(f"\nGuarantees on {', '.join(map(short_name, devices))}:\n")
    outcomes = [_try(name, test, devices) for name, test in TESTS.items()]
    print("\nTime by number of devices (the median of 3 calls), and how many times as fast as one:\n")
    speeds: list[Speed] = []
    for name, workload in _WORKLOADS.items():
        try:
            speeds.extend(_speeds(name, workload, devices, seconds))
        except Exception as raised:  # for instance, too little memory
            print(f"  {name:16} FAILED: {error_text(raised)}")
            outcomes.append(GuaranteeTest(f"speed of a {name} function", 0.0, error_text(raised)))
    failed = [outcome.name for outcome in outcomes if outcome.error is not None]
    if failed:
        print(f"\nFAILED: {', '.join(failed)}. Please report it, with this output and, if possible, --json FILE.")
    else:
        print("\nAll guarantees hold on these devices.")
    if json_path:
        results = {"guarantees": [*map(asdict, outcomes)], "speed": [*map(asdict, speeds)], "ok": not failed}
        _save({**environment, "checked_devices": devices, **results}, json_path)
    return not failed


def _save(values: dict[str, Any], path: Path) -> None:
    path.write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")


@dataclass(frozen=True)
class GuaranteeTest:
    """The outcome of one small case."""

    name: str
    seconds: float
    error: str | None


@dataclass(frozen=True)
class Speed:
    """The time of one function on some devices."""

    function: str
    devices: int
    seconds: float
    speedup: float


def _try(name: str, test: Callable[[Sequence[str]], None], devices: Sequence[str]) -> GuaranteeTest:
    print(f"  {name:58}", end="", flush=True)
    began, error = time.perf_counter(), None
    try:
        test(devices)
    except Exception as raised:  # of whatever part of the installation is broken
        error = error_text(raised)
    seconds = time.perf_counter() - began
    print(f"{'ok' if error is None else 'FAILED':6} {seconds:5.1f} s" + ("" if error is None else f"\n    {error}"))
    return GuaranteeTest(name, seconds, error)


def _rows() -> Any:
    return tf.reshape(tf.range(3.0 * _ROWS), [_ROWS, 3]) / 100


def _values(devices: Sequence[str]) -> None:
    def fn(row: Any) -> Any:
        return {"sum": tf.reduce_sum(tf.sin(row)), "parts": (row * 2, tf.cast(row[0] * 100, tf.int32))}

    found = parallel_map(fn, _rows(), devices=devices)
    with tf.device("/CPU:0"):
        wanted = [fn(row) for row in _rows()]
    _assert_equal(len(found["sum"]), _ROWS)
    for i, row in enumerate(wanted):
        tf.nest.map_structure(lambda got, want, i=i: _assert_close(got[i], want), found, row)


def _order(devices: Sequence[str]) -> None:
    numbers = tf.range(50 * len(devices))
    for size in (1, 7, None):
        _assert_equal(parallel_map(lambda n: n * n, numbers, devices=devices, batch_size=size), numbers**2)


def _gradients(devices: Sequence[str]) -> None:
    weight = tf.Variable([1.0, 2.0, 3.0])

    def gradients(mapped: Callable[[Any], Any]) -> Any:
        x = _rows()
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = tf.reduce_sum(mapped(x))
        return tape.gradient(loss, [x, weight])

    found = gradients(DeviceMap(lambda row: tf.sin(row * weight), devices=devices))
    for got, want in zip(found, gradients(lambda x: tf.sin(x * weight))):
        _assert_close(got, want)


def _random_numbers(devices: Sequence[str]) -> None:
    def seeded(row: Any, seed: Any) -> Any:
        return row + tf.random.stateless_uniform([3], seed)

    one, several = (parallel_map(seeded, _rows(), seed=1, devices=used) for used in (devices[:1], devices))
    _assert_close(several, one)
    drawn = parallel_map(lambda row: tf.random.uniform([], dtype=tf.float64), _rows(), devices=devices)
    if len(np.unique(drawn)) != _ROWS:
        raise AssertionError("two rows drew the same number")


def _writes(devices: Sequence[str]) -> None:
    with tf.device("/CPU:0"):
        count = tf.Variable(0.0)
    mapper = DeviceMap(lambda row: (count.assign_add(1.0), row)[1], devices=devices)
    for _ in range(3):
        mapper(_rows())
    _assert_equal(count, 3.0 * _ROWS)


def _chunks(devices: Sequence[str]) -> None:
    mapper = DeviceMap(lambda row: row * 2, devices=devices, batch_size=2)
    chunks = [*mapper.stream(tf.data.Dataset.from_tensor_slices(_rows()))]
    _assert_equal(tf.concat(chunks, 0), _rows() * 2)
    _assert_close(parallel_reduce(lambda row: row, _rows(), "sum", devices=devices), tf.reduce_sum(_rows(), 0))


def _failing_rows(devices: Sequence[str]) -> None:
    def fn(row: Any) -> Any:
        return tf.debugging.check_numerics(tf.math.log(row[0]), "not positive")  # the first row is 0

    mapper = DeviceMap(fn, devices=devices, on_error="skip")
    _assert_close(mapper(_rows()), tf.math.log(_rows()[1:, 0]))
    report = mapper.report
    if report is None or [failed.row for failed in report.failed_rows] != [0]:
        raise AssertionError(f"row 0 fails, and the report has {report and report.failed_rows}")


def _disk(devices: Sequence[str]) -> None:
    with tempfile.TemporaryDirectory() as directory:
        results = DeviceMap(lambda row: row * 2, devices=devices, batch_size=5).write(_rows(), directory)
        _assert_equal(results.load(), _rows() * 2)


def _model() -> Any:
    import keras

    layers = [keras.layers.Dense(8, "tanh") for _ in range(max(3, len(list_devices())))]
    model = keras.Sequential([keras.Input([3]), *layers, keras.layers.Dense(1)])
    model.set_weights([np.cos(np.arange(w.size)).reshape(w.shape) / 2 for w in model.get_weights()])
    return model


def _training(devices: Sequence[str]) -> None:
    import keras

    def trained(used: Sequence[str]) -> list[Any]:
        with tf.device(devices[0]):
            model = parallelize(_model(), used)
            model.compile(keras.optimizers.SGD(0.1), "mse")
            model.fit(_rows(), tf.reduce_sum(_rows(), 1), batch_size=13, epochs=2, shuffle=False, verbose=0)
            return list(model.get_weights())

    for got, want in zip(trained(devices), trained(devices[:1])):
        _assert_close(got, want, 1e-3)


def _pipeline(devices: Sequence[str]) -> None:
    with tf.device(devices[0]):
        model = _model()
        wanted = model(_rows())
    stages = split(model, len(devices), devices=list(devices))
    _assert_close(Pipeline(stages, devices=list(devices))(_rows()), wanted, 1e-3)


TESTS: dict[str, Callable[[Sequence[str]], None]] = {
    "values: equal to one row at a time": _values,
    "order: each row once, in order": _order,
    "gradients: equal to those of one device": _gradients,
    "random numbers: independent of devices, never repeated": _random_numbers,
    "writes of variables: none lost": _writes,
    "chunks: streams and reductions": _chunks,
    "failing rows: left out and reported": _failing_rows,
    "results on disk": _disk,
    "training: weights equal to those of one device": _training,
    "pipeline: equal to the model": _pipeline,
}


def _assert_equal(found: Any, wanted: Any) -> None:
    np.testing.assert_array_equal(np.asarray(found), np.asarray(wanted))


def _assert_close(found: Any, wanted: Any, tolerance: float = 1e-5) -> None:
    np.testing.assert_allclose(np.asarray(found), np.asarray(wanted), tolerance, tolerance)


def _compute_bound(scale: int) -> tuple[Callable[[Any], Any], Any]:
    """Return a function of matrix products, and 128 rows of 16 KiB; the time grows with the scale."""
    with tf.device("/CPU:0"):
        weight = tf.eye(64) * 0.99

    def fn(rows: Any) -> Any:
        for _ in tf.range(scale):
            rows = tf.tanh(tf.matmul(rows, weight))
        return tf.reduce_sum(rows, [1, 2])

    return fn, np.ones([128, 64, 64], np.float32)


def _transfer_bound(scale: int) -> tuple[Callable[[Any], Any], Any]:
    """Return a function that adds 1, and rows of 1 MiB, as many as the scale."""
    return lambda rows: rows + 1, np.ones([scale, 2**18], np.float32)


_TRIED_CALLS = 5
"""Three calls in chunks and two in one graph; later ones use the faster engine (`run/engine.py`)."""

_WORKLOADS = {
    "compute-bound": (_compute_bound, 4, 10**6),
    "transfer-bound": (_transfer_bound, 16, 512),
}
"""How functions and data are made for a scale, and the smallest and the largest scale."""


def _speeds(name: str, workload: tuple[Any, int, int], devices: Sequence[str], seconds: float) -> Iterator[Speed]:
    make, scale, most = workload
    fn, data = make(scale)
    while scale < most and (measured := seconds_of(fn, data, devices[:1])) < seconds / 2:
        scale = min(most, max(2 * scale, int(scale * min(50.0, seconds / max(measured, 1e-3)))))
        fn, data = make(scale)
    first = None
    powers = {2**k for k in range(len(devices).bit_length())} if len(devices) > 8 else {*range(1, len(devices))}
    for count in sorted(powers | {len(devices)}):
        measured = seconds_of(fn, data, devices[:count])
        first = first or measured
        speed = Speed(name, count, measured, first / measured)
        print(f"  {name:16} {count:3} device(s) {measured:8.3f} s  {speed.speedup:6.2f} x")
        yield speed


def seconds_of(fn: Callable[[Any], Any], data: Any, devices: Sequence[str]) -> float:
    """Return the duration of a call that maps a function of batches: the median of 3, after those that try both engines."""
    mapper = DeviceMap(fn, batched=True, devices=list(devices))
    for _ in range(_TRIED_CALLS):
        mapper(data)

    def timed() -> float:
        began = time.perf_counter()
        mapper(data)
        return time.perf_counter() - began

    return statistics.median(timed() for _ in range(3))
