"""Law 1 for functions as users write them, and that "auto" vectorises all that TensorFlow vectorises right."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import tensorflow as tf
from compile.corpus import CASES, FIELDS, NOT_VECTORIZED_BY_TENSORFLOW, WITHOUT_GRADIENT
from compile.corpus.samples import ROWS
from graphs import traced
from oracle import assert_same, first_rows, tensors

import devicemap

DEVICES = ["CPU:1", "CPU:2"]
FEW_ROWS = 3
"""One device has a shard of two rows, the other a shard of one row."""


def _row_by_row(fn: Callable[..., Any], data: Any) -> Any:
    """`fn` of each row on its own, in a graph that is traced once."""
    row_fn = tf.function(lambda row: tensors(fn(*row) if type(row) is tuple else fn(row)))
    results = [row_fn(tf.nest.map_structure(lambda leaf: leaf[i], data)) for i in range(ROWS)]
    return tf.nest.map_structure(lambda *leaves: tf.stack(leaves), *results)


def _all_of(names: list[str]) -> tuple[Callable[..., Any], dict[str, Any]]:
    """One function of one row that calls them all, and its data: one trace takes less time than many."""

    def fn(rows: dict[str, Any]) -> dict[str, Any]:
        results = {}
        for i, name in enumerate(names):
            row = rows[str(i)]
            results[str(i)] = CASES[name][0](*row) if type(row) is tuple else CASES[name][0](row)
        return results

    return fn, {str(i): CASES[name][1] for i, name in enumerate(names)}


def _assert_equal(got: Any, wanted: Any, rows: int, name: str) -> None:
    try:
        assert_same(got, first_rows(wanted, rows), rtol=1e-3, atol=1e-4)
    except AssertionError as error:
        raise AssertionError(f"{name}: {error}") from error


@pytest.mark.parametrize("field", FIELDS)
def test_functions_are_vectorised_and_give_what_they_give_for_a_row(field: str) -> None:
    """All of a field in one function; where that is not vectorised, each is asked why."""
    names = [name for name in FIELDS[field] if name not in NOT_VECTORIZED_BY_TENSORFLOW]
    fn, data = _all_of(names)
    mapper = devicemap.DeviceMap(fn, devices=DEVICES)
    wanted = _row_by_row(fn, data)
    got = mapper(first_rows(data, FEW_ROWS))
    for i, name in enumerate(names):
        _assert_equal(got[str(i)], wanted[str(i)], FEW_ROWS, name)
    if not traced(mapper, data).vectorized:
        plans = {name: traced(devicemap.DeviceMap(CASES[name][0], devices=DEVICES), CASES[name][1]) for name in names}
        pytest.fail("\n".join(f"{name}: {plan.reason}" for name, plan in plans.items() if not plan.vectorized))


@pytest.mark.parametrize("name", NOT_VECTORIZED_BY_TENSORFLOW)
def test_functions_that_tensorflow_does_not_vectorise_are_right(name: str) -> None:
    fn, data = CASES[name]
    mapper, wanted = devicemap.DeviceMap(fn, devices=DEVICES), _row_by_row(fn, data)
    _assert_equal(mapper(first_rows(data, FEW_ROWS)), wanted, FEW_ROWS, name)


@pytest.mark.nightly
@pytest.mark.parametrize("vectorized", [True, False])
@pytest.mark.parametrize("field", FIELDS)
def test_results_and_gradients_on_any_devices(devices: list[str], field: str, vectorized: bool) -> None:
    """Each argument of each function has its own gradient. Gradients that are not finite for the row are not compared."""
    names = [name for name in FIELDS[field] if (name not in NOT_VECTORIZED_BY_TENSORFLOW) is vectorized]
    names = [name for name in names if name not in WITHOUT_GRADIENT]
    fn, data = _all_of(names)
    mapper = devicemap.DeviceMap(fn, devices=devices)
    got, wanted = _gradients(mapper, data), _gradients(lambda rows: _row_by_row(fn, rows), data)
    for i, name in enumerate(names):
        _assert_equal(got[0][str(i)], wanted[0][str(i)], ROWS, name)
        for a, b in zip(got[1][str(i)], wanted[1][str(i)]):
            if bool(tf.reduce_all(tf.math.is_finite(b))):
                scale = max(1.0, float(tf.reduce_max(tf.abs(b))))
                _assert_equal(a / scale, b / scale, ROWS, f"gradient of {name}")


def _gradients(mapped: Callable[[Any], Any], data: Any) -> tuple[Any, Any]:
    """Results, and the gradients of the sum of their squares by all real arguments of each function."""
    sources = {
        key: [leaf for leaf in tf.nest.flatten(value) if leaf.dtype in (tf.float32, tf.float64)]
        for key, value in data.items()
    }
    with tf.GradientTape() as tape:
        tape.watch(sources)
        results = mapped(data)
        real = [tf.abs(leaf) for leaf in tf.nest.flatten(results) if leaf.dtype.is_floating or leaf.dtype.is_complex]
        total = tf.add_n([tf.cast(tf.reduce_sum(leaf**2), tf.float64) for leaf in real])
    return results, tape.gradient(total, sources, unconnected_gradients="zero")
