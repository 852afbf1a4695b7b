"""The commands `devices`, `env` and `check`: devices and versions, and tests and speeds of devicemap on these devices."""

from __future__ import annotations

import platform
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from importlib import metadata
from typing import Any

import numpy as np
import tensorflow as tf

from devicemap.api import DeviceMap, parallel_map, parallel_reduce
from devicemap.bench.runner import median_seconds
from devicemap.devices import choose_devices, list_devices, why_no_gpu
from devicemap.errors import error_text
from devicemap.events import short_name
from devicemap.inspect.render import size_text
from devicemap.options import check_number
from devicemap.pipelines.pipeline import Pipeline
from devicemap.pipelines.split import split
from devicemap.training.models import parallelize

_PACKAGES = "devicemap", "tensorflow", "tensorflow-cpu", "keras", "numpy", "rich", "ray", "pyarrow", "nvidia-ml-py"
_ROWS = 37
"""Rows of the small cases. Shards are uneven on any number of devices except 1 and 37."""

_TOLERANCE = 1e-3
"""Relative and absolute tolerance. GPUs may multiply matrices in TF32."""


def show_devices() -> list[dict[str, Any]]:
    """Print the devices with their memory, and why there is no GPU; return them as JSON values."""
    devices = list_devices()
    for device in devices:
        memory = "" if device.memory is None else size_text(device.memory)
        print(f"{short_name(device.name):8} {device.kind:4} {memory:>10}  {device.description}")
    if not any(device.kind == "GPU" for device in devices):
        print(f"\nNo GPU: {why_no_gpu()}")
    return [*map(asdict, devices)]


def show_environment() -> dict[str, Any]:
    """Print versions and devices; return them as JSON values."""
    versions = {"Python": platform.python_version(), "system": platform.platform()}
    for package in _PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            versions[package] = metadata.version(package)
    build = tf.sysconfig.get_build_info()
    versions |= {key: str(build[f"{key}_version"]) for key in ("cuda", "cudnn") if f"{key}_version" in build}
    print("\n".join(f"{name:18}{value}" for name, value in versions.items()), end="\n\n")
    return {"versions": versions, "devices": show_devices()}


def check(given: Any, seconds: float) -> dict[str, Any]:
    """Test each guarantee on a small case, and measure speed-ups, on some devices. Print each result at once.

    `given`: the devices, as in `parallel_map`. `seconds`: the approximate duration of a measured call on one device. Returns
    JSON values. `"ok"` is whether every test passed, whatever the speed-ups are.
    """
    check_number("seconds", seconds)
    devices = choose_devices(given)
    environment = show_environment()
    print(f"\nGuarantees on {', '.join(map(short_name, devices))}:\n")
    outcomes = [_try(name, case, devices) for name, case in CASES.items()]
    print("\nTime by number of devices (the median of 3 calls), and how many times as fast as one:\n")
    speeds: list[dict[str, Any]] = []
    for name, workload in _WORKLOADS.items():
        try:
            speeds += _speeds(name, *workload, devices, seconds)
        except Exception as raised:  # for instance, too little memory
            print(f"  {name:16} FAILED: {error_text(raised)}")
            outcomes.append({"name": f"speed of a {name} function", "seconds": 0.0, "error": error_text(raised)})
    failed = [outcome["name"] for outcome in outcomes if outcome["error"]]
    if failed:
        print(f"\nFAILED: {', '.join(failed)}. Please report it, with this output and, if possible, --json FILE.")
    else:
        print("\nAll guarantees hold on these devices.")
    return {**environment, "checked_devices": devices, "guarantees": outcomes, "speed": speeds, "ok": not failed}


def _try(name: str, case: Callable[[Sequence[str]], tuple[Any, Any]], devices: Sequence[str]) -> dict[str, Any]:
    """Run a case, and print and return whether its results are as expected."""
    print(f"  {name:58}", end="", flush=True)
    began, error = time.perf_counter(), None
    try:
        tf.nest.map_structure(partial(np.testing.assert_allclose, rtol=_TOLERANCE, atol=_TOLERANCE), *case(devices))
    except Exception as raised:  # any part of the installation may be broken
        error = error_text(raised)
    seconds = time.perf_counter() - began
    print(f"{'FAILED' if error else 'ok':6} {seconds:5.1f} s" + (f"\n    {error}" if error else ""))
    return {"name": name, "seconds": seconds, "error": error}


def _rows() -> Any:
    return tf.reshape(tf.range(3.0 * _ROWS), [_ROWS, 3]) / 100


def _fn(row: Any) -> Any:
    return {"sum": tf.reduce_sum(tf.sin(row)), "parts": (row * 2, tf.cast(row[0] * 100, tf.int32))}


def _wanted() -> Any:
    """Return the results of `_fn`, one row at a time on the host."""
    with tf.device("/CPU:0"):
        return tf.nest.map_structure(lambda *leaves: tf.stack(leaves), *map(_fn, _rows()))


def _mapped(devices: Sequence[str], batch_size: int | None = None) -> tuple[Any, Any]:
    return parallel_map(_fn, _rows(), devices=devices, batch_size=batch_size), _wanted()


def _gradients(devices: Sequence[str]) -> tuple[Any, Any]:
    weight = tf.Variable([1.0, 2.0, 3.0])

    def gradients(mapped: Callable[[Any], Any]) -> Any:
        x = _rows()
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = tf.reduce_sum(mapped(x))
        return tape.gradient(loss, [x, weight])

    mapper = DeviceMap(lambda row: tf.sin(row * weight), devices=devices)
    return gradients(mapper), gradients(lambda x: tf.sin(x * weight))


def _random_numbers(devices: Sequence[str]) -> tuple[Any, Any]:
    def seeded(row: Any, seed: Any) -> Any:
        return row + tf.random.stateless_uniform([3], seed)

    one, several = (parallel_map(seeded, _rows(), seed=1, devices=used) for used in (devices[:1], devices))
    drawn = parallel_map(lambda row: tf.random.uniform([], dtype=tf.float64), _rows(), devices=devices)
    return (several, len(np.unique(drawn))), (one, _ROWS)


def _writes(devices: Sequence[str]) -> tuple[Any, Any]:
    with tf.device("/CPU:0"):
        count = tf.Variable(0.0)
    mapper = DeviceMap(lambda row: (count.assign_add(1.0), row)[1], devices=devices)
    for _ in range(3):
        mapper(_rows())
    return count, 3 * _ROWS


def _chunks(devices: Sequence[str]) -> tuple[Any, Any]:
    chunks = DeviceMap(_fn, devices=devices, batch_size=2).stream(tf.data.Dataset.from_tensor_slices(_rows()))
    streamed = tf.nest.map_structure(lambda *leaves: tf.concat(leaves, 0), *chunks)
    total = parallel_reduce(lambda row: row, _rows(), "sum", devices=devices)
    return (streamed, total), (_wanted(), tf.reduce_sum(_rows(), 0))


def _failing_rows(devices: Sequence[str]) -> tuple[Any, Any]:
    def fn(row: Any) -> Any:
        return tf.debugging.check_numerics(tf.math.log(row[0]), "not positive")  # the first row is 0

    mapper = DeviceMap(fn, devices=devices, on_error="skip")
    found = mapper(_rows())
    failed = [row.row for row in mapper.report.failed_rows] if mapper.report else []
    return (found, failed), (tf.math.log(_rows()[1:, 0]), [0])


def _disk(devices: Sequence[str]) -> tuple[Any, Any]:
    with tempfile.TemporaryDirectory() as directory:
        return DeviceMap(_fn, devices=devices, batch_size=5).write(_rows(), directory).load(), _wanted()


def _model() -> Any:
    import keras

    layers = [keras.layers.Dense(8, "tanh") for _ in range(max(3, len(list_devices())))]
    model = keras.Sequential([keras.Input([3]), *layers, keras.layers.Dense(1)])
    model.set_weights([np.cos(np.arange(w.size)).reshape(w.shape) / 2 for w in model.get_weights()])
    return model


def _training(devices: Sequence[str]) -> tuple[Any, Any]:
    import keras

    def trained(used: Sequence[str]) -> list[Any]:
        with tf.device(devices[0]):
            model = parallelize(_model(), used)
            model.compile(keras.optimizers.SGD(0.1), "mse", jit_compile=False)
            model.fit(_rows(), tf.reduce_sum(_rows(), 1), batch_size=13, epochs=2, shuffle=False, verbose=0)
            return list(model.get_weights())

    return trained(devices), trained(devices[:1])


def _pipeline(devices: Sequence[str]) -> tuple[Any, Any]:
    with tf.device(devices[0]):
        model = _model()
        wanted = model(_rows())
    stages = split(model, len(devices), devices=list(devices))
    return Pipeline(stages, devices=list(devices))(_rows()), wanted


CASES: dict[str, Callable[[Sequence[str]], tuple[Any, Any]]] = {
    "values: equal to one row at a time": _mapped,
    "order: each row once, in order": partial(_mapped, batch_size=1),
    "gradients: equal to those of one device": _gradients,
    "random numbers: independent of devices, never repeated": _random_numbers,
    "writes of variables: none lost": _writes,
    "chunks: streams and reductions": _chunks,
    "failing rows: left out and reported": _failing_rows,
    "results on disk": _disk,
    "training: weights equal to those of one device": _training,
    "pipeline: equal to the model": _pipeline,
}


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

_WORKLOADS = {"compute-bound": (_compute_bound, 10**6), "transfer-bound": (_transfer_bound, 512)}
"""By name: a factory of a function and its data for a scale, and the largest scale."""


def _speeds(
    name: str, make: Callable[[int], Any], most: int, devices: Sequence[str], seconds: float
) -> list[dict[str, Any]]:
    """Print and return the times on 1, 2, 4, ... and all devices, at a scale at which one device takes about `seconds`."""
    scale = 16
    while scale < most and _seconds_of(make(scale), [devices[:1]])[0] < seconds / 2:
        scale = min(most, 4 * scale)
    counts = sorted({2**k for k in range(len(devices).bit_length())} | {len(devices)})
    times = _seconds_of(make(scale), [devices[:count] for count in counts])
    found: list[dict[str, Any]] = [
        {"function": name, "devices": count, "seconds": measured, "speedup": times[0] / measured}
        for count, measured in zip(counts, times)
    ]
    for speed in found:
        print("  {function:16} {devices:3} device(s) {seconds:8.3f} s  {speedup:6.2f} x".format(**speed))
    return found


def _seconds_of(workload: tuple[Any, Any], choices: Sequence[Sequence[str]]) -> list[float]:
    """Return the median of 3 calls that map a function over batches of data on some devices, for each choice of devices."""
    fn, data = workload
    calls = [partial(DeviceMap(fn, batched=True, devices=list(devices)), data) for devices in choices]
    for call in calls * _TRIED_CALLS:
        call()
    return median_seconds(calls, 3)
