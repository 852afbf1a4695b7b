"""Law 1 for random functions: ops, slices, loops, branches, captured variables, random numbers and writes in any nesting."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import tensorflow as tf
from hypothesis import Phase, given, reject, settings
from hypothesis import strategies as st
from oracle import assert_same, gradients_of
from programs import MATRIX, PURE, STATE, STEPS, TABLE, TOTAL, K, X, programs, run

import devicemap

pytestmark = [
    pytest.mark.nightly,  # tests/compile/test_corpus.py has functions that were chosen
    pytest.mark.timeout(3600),
]


def _function(program: Any) -> Callable[..., Any]:
    def fn(v: Any, k: Any, seed: Any) -> Any:
        return run(program, v, k, seed)

    return fn


def _serial(fn: Callable[..., Any], seeds: Any) -> Callable[[Any], Any]:
    """`tf.map_fn` in a graph, one row after another."""

    @tf.function
    def mapped(x: Any) -> Any:
        signature = tf.TensorSpec([3], tf.float32)
        rows = (x, K, seeds)
        return tf.map_fn(lambda row: fn(*row), rows, fn_output_signature=signature, parallel_iterations=1)

    return mapped


def _with_state(call: Callable[[Any], Any]) -> tuple[Any, Any, Any]:
    """Return the result of a call on all rows, and what it writes."""
    TOTAL.assign(tf.zeros([3]))
    STATE.assign(1.0)
    return call(X), TOTAL.read_value(), STATE.read_value()


OPTIONS = st.fixed_dictionaries(
    {
        "devices": st.sampled_from([["CPU:1"], ["CPU:2", "CPU:0", "CPU:1"]]),
        "vectorize": st.sampled_from(["auto", False]),
    }
)


def check(program: Any, options: dict[str, Any], batch_size: int) -> None:
    """Compare the results of a program, and what it writes, with `tf.map_fn`."""
    serial, mapper, inside = _ways(program, options)
    chunked = devicemap.DeviceMap(_function(program), seed=7, batch_size=batch_size, **options)
    static = tf.function(lambda x: mapper((x, K)))
    wanted = _with_state(serial)
    for call in (lambda x: mapper((x, K)), lambda x: chunked((x, K)), static, lambda x: inside(x, K)):
        assert_same(_with_state(call), wanted, rtol=1e-4, atol=1e-5)


def check_gradients(program: Any, options: dict[str, Any]) -> None:
    """Compare the gradients of a program with those of `tf.map_fn`, where TensorFlow has one."""
    serial, mapper, inside = _ways(program, options)
    try:
        wanted = gradients_of(serial, X, MATRIX, TABLE)
    except (AssertionError, LookupError, TypeError, ValueError, tf.errors.OpError):
        reject()
    for call in (lambda x: mapper((x, K)), lambda x: inside(x, K)):
        assert_same(gradients_of(call, X, MATRIX, TABLE), wanted, rtol=1e-3, atol=1e-4)


def _ways(program: Any, options: dict[str, Any]) -> tuple[Any, Any, Any]:
    """Return the serial map, a parallel one, and one inside a `tf.function` that does not know the number of rows."""
    fn = _function(program)
    mapper = devicemap.DeviceMap(fn, seed=7, **options)
    signature = [tf.TensorSpec([None, 3]), tf.TensorSpec([None], tf.int32)]
    inside = tf.function(lambda x, k: mapper((x, k)), input_signature=signature)
    return _serial(fn, devicemap.parallel_map(lambda k, seed: seed, K, seed=7)), mapper, inside


# No shrinking, which would trace many functions.
MANY = settings(max_examples=300, deadline=None, phases=[Phase.generate])


def test_values() -> None:
    MANY(given(programs(STEPS), OPTIONS, st.integers(1, 4))(check))()


def test_gradients() -> None:
    MANY(given(programs(PURE), OPTIONS)(check_gradients))()
