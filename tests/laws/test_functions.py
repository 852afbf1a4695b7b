"""Laws 1 and 6 for functions as users write them: results and gradients of single rows, and what is vectorised.

The functions of a field run as one, which is vectorised if each of them is.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

import functions
import numpy as np
import pytest
import tensorflow as tf
from functions import FIELDS, NESTED, VECTORIZED
from graphs import traced
from oracle import assert_same, first_rows, gradients_of, one_by_one
from ways import CALLS, PLACES

import devicemap

DEVICE_COUNTS = (2, 8)
ROWS = 3
"""Each of two devices has a shard, one of two rows and one of one row."""
CASES = {name: case for functions in FIELDS.values() for name, case in functions.items()}
ALL_OPS = "every op of fn has a vectorised form"
QUICK = "lists and kernels", "loops of variables", "values alone", "shared"
"""Fields of which CI takes gradients."""
OTHERS = "many axes", *NESTED
"""Fields whose gradients need kernels for more axes than TensorFlow has, or take long."""


def _nightly(fields: Collection[str]) -> list[Any]:
    return [pytest.param(field, marks=[pytest.mark.nightly] * (field in fields)) for field in FIELDS]


def _all_of(names: list[str]) -> tuple[Callable[..., Any], dict[str, Any]]:
    """One function that calls all of them, and its first rows."""

    def fn(rows: dict[str, Any]) -> dict[str, Any]:
        given = {name: rows[name] if type(rows[name]) is tuple else (rows[name],) for name in names}
        return {name: CASES[name][0](*given[name]) for name in names}

    return fn, first_rows({name: CASES[name][1] for name in names}, ROWS)


def _differences(got: dict[str, Any], wanted: dict[str, Any]) -> Iterator[str]:
    for name in wanted:
        try:
            assert_same(got[name], wanted[name], rtol=1e-4, atol=1e-5)
        except AssertionError as error:
            yield f"{name}: {error}"


CALLED = {**CALLS, "chunks": lambda mapper, _: lambda data: mapper(tf.data.Dataset.from_tensor_slices(data))}


@pytest.mark.parametrize("field", _nightly(NESTED))
@pytest.mark.parametrize("how", CALLED)
def test_results_are_those_of_single_rows(devices: list[str], field: str, how: str) -> None:
    fn, data = _all_of([*FIELDS[field]])
    mapper = devicemap.DeviceMap(fn, devices=devices)
    plan = traced(mapper, data)
    if field in VECTORIZED:
        assert plan.reason == ALL_OPS
    if field == "shared":  # only indices are copied for each row
        assert tf.float32 not in {op.get_attr("T") for op in plan.concrete.graph.get_operations() if op.type == "Tile"}
    differences = [*_differences(CALLED[how](mapper, data)(data), one_by_one(fn, data))]
    assert not differences, "\n".join(differences)


TAPES = [
    ("auto", "eager"),
    ("auto", "unknown rows"),
    ("auto", "tape inside tf.function"),
    ("auto", "tape outside tf.function"),
    (False, "eager"),
    (False, "unknown rows"),
]


@pytest.mark.parametrize("field", [field for field in _nightly(FIELDS.keys() - QUICK) if field.values[0] not in OTHERS])
@pytest.mark.parametrize(("vectorize", "place"), TAPES)
def test_gradients_are_those_of_single_rows(devices: list[str], field: str, place: str, vectorize: Any) -> None:
    """Gradients that are not finite for the row are not compared."""
    # TensorFlow's kernel of batch normalization returns another shape than a loop keeps for its gradient.
    fn, data = _all_of([name for name in FIELDS[field] if vectorize or name != "two results"])
    mapper = devicemap.DeviceMap(fn, devices=devices, vectorize=vectorize)
    take = lambda call, data: gradients_of(call, data, functions.VARIABLES)
    found = PLACES[place](take, mapper, data)
    for got, wanted in zip(found, take(lambda data: one_by_one(fn, data), data), strict=True):
        finite = np.isfinite(wanted)
        scale = np.max(np.abs(wanted), initial=1.0, where=finite)
        np.testing.assert_allclose(np.where(finite, got, 0), np.where(finite, wanted, 0), rtol=1e-4, atol=1e-5 * scale)


@pytest.mark.nightly
@pytest.mark.parametrize("field", NESTED)
def test_gradients_of_nested_blocks(devices: list[str], field: str) -> None:
    test_gradients_are_those_of_single_rows(devices, field, "unknown rows", "auto")


PLANS = functions.PARTLY | functions.ROW_BY_ROW | functions.MANY_AXES | functions.NOT_COMPARED


@pytest.mark.parametrize("name", PLANS)
def test_reasons(name: str, capfd: pytest.CaptureFixture[str]) -> None:
    fn, data, reason = PLANS[name]
    plan = traced(devicemap.DeviceMap(fn), data)
    assert reason in plan.reason
    assert plan.vectorized or name not in functions.PARTLY
    assert "pfor" not in capfd.readouterr().err  # which logs the ops that it cannot convert


def test_functions_that_were_traced_before(tmp_path: Path) -> None:
    """TensorFlow does not save the shapes of the elements of lists."""
    fn, data = _all_of(
        ["nested loops", "branch in a loop", "until an element", "cases of pairs", "lookups in a loop", "LSTM"]
    )
    reader, rows = CASES["elements that some rows read"]
    module = tf.Module()
    module.fn = tf.function(fn, input_signature=[_row_of(data)])
    module.reader = tf.function(reader, input_signature=[_row_of(rows)])
    module.state = [functions.LEVELS, *module.fn.get_concrete_function().graph.variables]
    tf.saved_model.save(module, str(tmp_path))
    loaded = tf.saved_model.load(str(tmp_path))
    wanted = one_by_one(fn, data)
    for given in (module.fn.get_concrete_function(), loaded.fn):
        mapper = devicemap.DeviceMap(given, devices=["CPU:1", "CPU:2"])
        assert not [*_differences(mapper(data), wanted)]
        assert traced(mapper, data).vectorized
    mapper = devicemap.DeviceMap(loaded.reader)
    assert_same(mapper(rows), one_by_one(reader, rows), rtol=1e-5, atol=1e-6)
    assert "a list whose elements have an unknown shape" in traced(mapper, rows).reason


def _row_of(data: Any) -> Any:
    return tf.nest.map_structure(lambda leaf: tf.TensorSpec.from_tensor(tf.convert_to_tensor(leaf[0])), data)
