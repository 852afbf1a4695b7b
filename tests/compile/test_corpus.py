"""Law 1 for functions as users write them, all of which are vectorised."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from compile.corpus import CASES, FIELDS, LEVELS, WEIGHTS
from graphs import traced
from oracle import assert_same, first_rows, gradients_of, one_by_one

import devicemap

DEVICES = ["CPU:1", "CPU:2"]
FEW_ROWS = 3
"""One device has a shard of two rows, the other a shard of one row."""


def _all_of(names: list[str]) -> tuple[Callable[..., Any], dict[str, Any]]:
    """One function that calls all of them, and its data: one trace takes less time than many."""

    def fn(rows: dict[str, Any]) -> dict[str, Any]:
        given = {name: rows[name] if type(rows[name]) is tuple else (rows[name],) for name in names}
        return {name: CASES[name][0](*given[name]) for name in names}

    return fn, {name: CASES[name][1] for name in names}


def _differences(got: dict[str, Any], wanted: dict[str, Any]) -> Iterator[str]:
    for name in wanted:
        try:
            assert_same(got[name], wanted[name], rtol=1e-3, atol=1e-4)
        except AssertionError as error:
            yield f"{name}: {error}"


@pytest.mark.parametrize("field", FIELDS)
def test_results_are_those_of_single_rows(field: str) -> None:
    fn, data = _all_of([*FIELDS[field]])
    data = first_rows(data, FEW_ROWS)
    mapper = devicemap.DeviceMap(fn, devices=DEVICES)
    failures = [*_differences(mapper(data), one_by_one(fn, data))]
    plan = traced(mapper, data)
    assert not failures, "\n".join(failures)
    assert plan.vectorized, plan.reason


@pytest.mark.nightly
@pytest.mark.parametrize("field", FIELDS)
def test_gradients_are_those_of_single_rows(devices: list[str], field: str) -> None:
    """Gradients that are not finite for the row are not compared."""
    fn, data = _all_of([*FIELDS[field]])
    mapper = devicemap.DeviceMap(fn, devices=devices)
    alone = gradients_of(lambda x: one_by_one(fn, x), data, WEIGHTS)
    for got, wanted in zip(gradients_of(mapper, data, WEIGHTS), alone):
        finite = np.isfinite(wanted)
        scale = np.max(np.abs(wanted), initial=1.0, where=finite)
        np.testing.assert_allclose(np.where(finite, got, 0), np.where(finite, wanted, 0), rtol=1e-3, atol=1e-4 * scale)


def test_functions_that_were_traced_before(tmp_path: Path) -> None:
    """TensorFlow does not save the shapes of the elements of lists."""
    names = ["nested loops", "branch in a loop", "until an element", "cases of pairs", "lookups in a loop", "LSTM"]
    reader, rows = CASES["elements that some rows read"]
    fn, data = _all_of(names)
    data = first_rows(data, FEW_ROWS)
    module = tf.Module()
    module.fn = tf.function(fn, input_signature=[_row_of(data)])
    module.reader = tf.function(reader, input_signature=[_row_of(rows)])
    module.state = [LEVELS, *module.fn.get_concrete_function().graph.variables]
    tf.saved_model.save(module, str(tmp_path))
    loaded = tf.saved_model.load(str(tmp_path))
    wanted = one_by_one(fn, data)
    for given in (module.fn.get_concrete_function(), loaded.fn):
        mapper = devicemap.DeviceMap(given, devices=DEVICES)
        failures = [*_differences(mapper(data), wanted)]
        assert not failures, "\n".join(failures)
        assert traced(mapper, data).vectorized
    mapper = devicemap.DeviceMap(loaded.reader, devices=DEVICES)
    assert_same(mapper(rows), one_by_one(reader, rows), rtol=1e-5, atol=1e-6)
    assert "a list whose elements have an unknown shape" in traced(mapper, rows).reason


def _row_of(data: Any) -> Any:
    return tf.nest.map_structure(lambda leaf: tf.TensorSpec.from_tensor(tf.convert_to_tensor(leaf[0])), data)
