"""Law 1 for functions as users write them, and that "auto" vectorises all that TensorFlow vectorises right."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf
from compile.corpus import CASES, FIELDS, NOT_VECTORIZED_BY_TENSORFLOW, VARIABLES, WITHOUT_GRADIENT, control_flow
from graphs import traced
from oracle import assert_same, first_rows, tensors

import devicemap

DEVICES = ["CPU:1", "CPU:2"]
FEW_ROWS = 3
"""One device has a shard of two rows, the other a shard of one row."""

PARTS = [
    (field, vectorized) for vectorized in (True, False) for field in FIELDS if vectorized or field != "control_flow"
]
GRADIENTS = [pytest.param(*part, marks=pytest.mark.nightly) for part in PARTS]


def _call(fn: Callable[..., Any], row: Any) -> Any:
    return fn(*row) if type(row) is tuple else fn(row)


def _row_by_row(fn: Callable[..., Any], data: Any) -> Any:
    """`fn` of each row on its own, in eager code, which traces nothing."""
    rows = tf.nest.flatten(data)[0].shape[0]
    results = [tensors(fn(tf.nest.map_structure(lambda leaf: leaf[i], data))) for i in range(rows)]
    return tf.nest.map_structure(lambda *leaves: tf.stack(leaves), *results)


def _of_field(field: str, vectorized: bool) -> list[str]:
    return [name for name in FIELDS[field] if (name not in NOT_VECTORIZED_BY_TENSORFLOW) is vectorized]


def _all_of(names: list[str]) -> tuple[Callable[..., Any], dict[str, Any]]:
    """One function that calls all of them, and its data: one trace takes less time than many."""

    def fn(rows: dict[str, Any]) -> dict[str, Any]:
        return {name: _call(CASES[name][0], rows[name]) for name in names}

    return fn, {name: CASES[name][1] for name in names}


def _differences(got: dict[str, Any], wanted: dict[str, Any]) -> Iterator[str]:
    for name in wanted:
        try:
            assert_same(got[name], wanted[name], rtol=1e-3, atol=1e-4)
        except AssertionError as error:
            yield f"{name}: {error}"


def _not_vectorized(names: list[str]) -> Iterator[str]:
    for name in names:
        fn, data = CASES[name]
        plan = traced(devicemap.DeviceMap(fn, devices=DEVICES), first_rows(data, FEW_ROWS))
        if not plan.vectorized:
            yield f"{name}: {plan.reason}"


@pytest.mark.parametrize(("field", "vectorized"), PARTS)
def test_results_are_those_of_single_rows(field: str, vectorized: bool) -> None:
    """Functions that TensorFlow vectorises are vectorised. If a field is not, each function gives its reason."""
    names = _of_field(field, vectorized)
    fn, data = _all_of(names)
    data = first_rows(data, FEW_ROWS)
    mapper = devicemap.DeviceMap(fn, devices=DEVICES)
    failures = [*_differences(mapper(data), _row_by_row(fn, data))]
    if vectorized and not traced(mapper, data).vectorized:
        failures += _not_vectorized(names)
    assert not failures, "\n".join(failures)


@pytest.mark.parametrize(("field", "vectorized"), GRADIENTS)
def test_gradients_are_those_of_single_rows(devices: list[str], field: str, vectorized: bool) -> None:
    """Each argument of each function has its own gradient. Gradients that are not finite for the row are not compared."""
    names = [name for name in _of_field(field, vectorized) if name not in WITHOUT_GRADIENT]
    fn, data = _all_of(names)
    mapper = devicemap.DeviceMap(fn, devices=devices)
    (got, got_gradients), (wanted, gradients) = _gradients(mapper, data), _gradients(lambda x: _row_by_row(fn, x), data)
    for name in gradients:
        for i, leaf in enumerate(gradients[name]):
            finite = bool(tf.reduce_all(tf.math.is_finite(leaf)))
            scale = max(1.0, float(tf.reduce_max(tf.abs(leaf)))) if finite else 0.0
            gradients[name][i] = leaf / scale if finite else tf.zeros_like(leaf)
            got_gradients[name][i] = got_gradients[name][i] / scale if finite else tf.zeros_like(leaf)
    failures = [*_differences(got, wanted), *("gradient of " + line for line in _differences(got_gradients, gradients))]
    assert not failures, "\n".join(failures)


def test_functions_that_were_traced_before(tmp_path: Path) -> None:
    """TensorFlow does not save the shapes of the elements of lists."""
    names = ["nested loops", "branch in a loop", "until an element", "cases of pairs", "lookups in a loop", "LSTM"]
    reader, rows = CASES["elements that some rows read"]
    fn, data = _all_of(names)
    data = first_rows(data, FEW_ROWS)
    module = tf.Module()
    module.fn = tf.function(fn, input_signature=[_row_of(data)])
    module.reader = tf.function(reader, input_signature=[_row_of(rows)])
    module.state = [control_flow.LEVELS, *module.fn.get_concrete_function().graph.variables]
    tf.saved_model.save(module, str(tmp_path))
    loaded = tf.saved_model.load(str(tmp_path))
    wanted = _row_by_row(fn, data)
    for given in (module.fn.get_concrete_function(), loaded.fn):
        mapper = devicemap.DeviceMap(given, devices=DEVICES)
        failures = [*_differences(mapper(data), wanted)]
        assert not failures, "\n".join(failures)
        assert traced(mapper, data).vectorized
    mapper = devicemap.DeviceMap(loaded.reader, devices=DEVICES)
    assert_same(mapper(rows), _row_by_row(reader, rows), rtol=1e-5, atol=1e-6)
    assert "a list whose elements have an unknown shape" in traced(mapper, rows).reason


def _row_of(data: Any) -> Any:
    return tf.nest.map_structure(lambda leaf: tf.TensorSpec.from_tensor(tf.convert_to_tensor(leaf[0])), data)


def _gradients(mapped: Callable[[Any], Any], data: Any) -> tuple[Any, Any]:
    """Results, and the gradients of the sum of their squares by variables and by all real arguments of each function."""
    sources = {
        name: [leaf for leaf in tf.nest.flatten(value) if leaf.dtype in (tf.float32, tf.float64)]
        for name, value in data.items()
    }
    with tf.GradientTape() as tape:
        tape.watch(sources)
        results = mapped(data)
        real = [tf.abs(leaf) for leaf in tf.nest.flatten(results) if leaf.dtype.is_floating or leaf.dtype.is_complex]
        total = tf.add_n([tf.cast(tf.reduce_sum(leaf**2), tf.float64) for leaf in real])
    gradients = tape.gradient(total, {**sources, "variables": VARIABLES}, unconnected_gradients="zero")
    return results, tf.nest.map_structure(tf.convert_to_tensor, gradients)
