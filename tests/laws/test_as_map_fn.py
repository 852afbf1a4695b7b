"""Law 1 for what people write in a `fn` of one sample: scans, inner loops and gradients, lists, segments, formats of data.

Each is held against its rows one by one, with its gradients; most of them broke when their graphs were rewritten.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from oracle import assert_same, gradients_of, one_by_one

import devicemap

_compare = partial(assert_same, rtol=1e-3, atol=1e-4)
_random = np.random.default_rng(3)
V = tf.Variable([0.5, -0.25, 2.0])
WEIGHTS = tf.Variable(_random.normal(size=[3, 3]) * 0.3, dtype=tf.float32)
BIAS = tf.constant([1.0, -2.0])
LSTM = tf.keras.layers.LSTM(4, use_cudnn=False)
LSTM.build([None, 3, 2])


def _normal(*shape: int) -> tf.Tensor:
    return tf.constant(_random.normal(size=shape), tf.float32)


def _loop(body: Any, row: Any) -> Any:
    return tf.while_loop(lambda i, x: i < 3, lambda i, x: (i + 1, body(x)), (0, row))[1]


_sines = partial(_loop, lambda x: tf.sin(x) * x)
_in_a_loop = partial(_loop, lambda x: tf.tanh(tf.linalg.matvec(WEIGHTS, x)))


def _repeated_variables(row: Any) -> Any:
    def body(a: Any, b: Any, c: Any, y: Any) -> Any:
        return a, b + 1, a, y * 2.0 + tf.cast(c, tf.float32)

    return tf.while_loop(lambda a, b, c, y: b < 3, body, (0, 0, 0, row))[3]


def _gradient(fn: Any, row: Any) -> Any:
    with tf.GradientTape() as tape:
        tape.watch(row)
        result = fn(row)
    return tape.gradient(result, row)


MATRICES = _normal(5, 3, 3)
SHORTS = tf.cast(tf.range(10) % 7, tf.uint16)
FUNCTIONS: dict[str, tuple[Callable[..., Any], Any]] = {
    "scan with a variable": (lambda r: tf.scan(lambda state, each: tf.sin(state) * V[0] + each, r), _normal(5, 3)),
    "expm": (tf.linalg.expm, MATRICES),
    "repeated loop variables": (_repeated_variables, _normal(5, 3)),
    "second gradient of a loop": (partial(_gradient, partial(_gradient, _sines)), _normal(5, 3) * 0.3),
    "gradient of an LSTM": (partial(_gradient, lambda r: LSTM(r[None])), _normal(5, 3, 2)),
    "gathered list": (lambda r: tf.TensorArray(tf.float32, 4, element_shape=[]).unstack(r).gather([3, 0]), _normal(5, 4)),
    "list that is never written": (lambda r: tf.TensorArray(tf.float32, 3, element_shape=[2]).stack() + r[:2], _normal(5, 3)),
    "bias of channels first": (lambda r: tf.nn.bias_add(r, BIAS, data_format="NCHW"), _normal(5, 3, 2, 4, 4)),
    "segments that are dropped": (lambda r: tf.math.unsorted_segment_sum(r, tf.constant([0, -1, 1]), 3), _normal(5, 3)),
    "conjugate, axes from the end": (
        lambda r: tf.transpose(tf.complex(r, 2 * r), [-1, -2], conjugate=True), _normal(5, 2, 3)),
    "cross entropy that broadcasts": (
        lambda r: tf.nn.softmax_cross_entropy_with_logits(tf.constant([[0.5, 0.5]]), r), _normal(5, 3, 2)),
    "uint16 that rows share": (lambda r: tf.stack([r, SHORTS[1]]) + tf.concat([[r], SHORTS[:1]], 0), SHORTS),
    "uint16 that is shared": (lambda r: tf.identity(SHORTS), SHORTS),
    "uint16": (lambda r: tf.maximum(r, tf.constant(3, tf.uint16)) + r, SHORTS),
    "rounded": (tf.round, _normal(5, 3)),
    "floor and slope": (lambda r: tf.floor(r) * r, _normal(5, 3)),
    "stopped": (lambda r: tf.stop_gradient(r) * 2, _normal(5, 3)),
    "step": (lambda r: tf.cast(r > 0, tf.float32), _normal(5, 3)),
    "serialised": (tf.io.serialize_tensor, _normal(5, 3)),
    "set": (lambda r: tf.sets.size(tf.sets.intersection(r[None], r[None, ::2])), tf.reshape(tf.range(12) % 5, [3, 4])),
    "norm": (lambda r: r / tf.norm(r), _normal(5, 3)),
    "roll": (lambda r: tf.roll(r, 1, -1), _normal(5, 3)),
    "padded with threes": (lambda r: tf.pad(r, [[1, 1]], constant_values=3.0), _normal(5, 3)),
    "one matrix times a shared one": (lambda r: tf.matmul(r[None, None], tf.eye(3)[None])[0, 0], _normal(5, 3)),
}  # fmt: skip
ENDS_THE_PROCESS = tf.__version__.startswith("2.16.")  # at a transposition by axes from the end
DEVICE_COUNTS = (1, 3)  # fewer sets than the laws have: each function takes long to trace
LONG = "expm", "second gradient of a loop", "gradient of an LSTM"  # take seconds to trace


@pytest.mark.in_ci(7)
@pytest.mark.parametrize("vectorize", ["auto", False])
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.nightly) if name in LONG else name for name in FUNCTIONS]
)
def test_values_and_gradients(devices: list[str], name: str, vectorize: Any) -> None:
    if name == "conjugate, axes from the end" and ENDS_THE_PROCESS:
        pytest.skip("not applicable: this TensorFlow ends the process")
    fn, data = FUNCTIONS[name]
    mapper, serial = devicemap.DeviceMap(fn, devices=devices, vectorize=vectorize), partial(one_by_one, fn)
    inside = tf.function(lambda x: mapper(x))
    got, wanted = mapper(data), serial(data)
    _compare(got, wanted)
    _compare(mapper(data[:1]), wanted[:1])
    has_gradients = wanted.dtype.is_floating and data.dtype.is_floating
    if has_gradients and name != "cross entropy that broadcasts":  # TensorFlow has none for it
        zeros = tf.zeros_like(data)
        gradient = _with_gradient(serial, data, zeros)[1]
        for mapped in (mapper, inside):
            some, its_gradient = _with_gradient(mapped, data, zeros)
            _compare(some, wanted)
            _compare(its_gradient, gradient)
    else:
        _compare(inside(data), wanted)


def _with_gradient(mapped: Callable[[Any], Any], data: Any, default: Any) -> tuple[Any, Any]:
    with tf.GradientTape() as tape:
        tape.watch(data)
        rows = mapped(data)
        total = tf.reduce_sum(rows**2)
    gradient = tape.gradient(total, data)
    return rows, default if gradient is None else gradient


@pytest.mark.in_ci(1)
@pytest.mark.parametrize("vectorize", ["auto", False])
def test_a_map_inside_of_a_map(devices: list[str], vectorize: Any) -> None:
    inner = devicemap.DeviceMap(_in_a_loop, devices=devices, vectorize=vectorize)
    mapper = devicemap.DeviceMap(lambda r: inner(tf.stack([r, r * 2])), devices=devices, vectorize=vectorize)
    x = _normal(7, 3)
    serial = lambda x: one_by_one(lambda r: one_by_one(_in_a_loop, tf.stack([r, r * 2])), x)
    _compare(mapper(x), serial(x))
    _compare(gradients_of(mapper, x, WEIGHTS), gradients_of(serial, x, WEIGHTS))
    for run in (tf.vectorized_map, tf.function(lambda fn, x: tf.vectorized_map(fn, x))):
        _compare(run(lambda rows: inner(rows), x[None]), one_by_one(_in_a_loop, x)[None])


def _in_a_branch(row: Any) -> Any:
    return tf.cond(WEIGHTS[0, 0] < 9.0, lambda: tf.linalg.matvec(WEIGHTS, row), lambda: row)


def _writing(count: Any, generator: Any, row: Any) -> Any:
    count.assign_add(1.0)
    return row * 2.0, generator.normal([3])


@pytest.mark.in_ci(2)
@pytest.mark.parametrize("options", [{}, {"vectorize": False}], ids=str)
@pytest.mark.parametrize(
    "fn",
    [lambda r: tf.tanh(tf.linalg.matvec(WEIGHTS, r)) * r, _in_a_loop, _in_a_branch],
    ids=["straight", "loop", "branch"],
)
def test_compiled_functions(devices: list[str], fn: Any, options: dict[str, Any]) -> None:
    """XLA takes variables of its own device alone, and hands nothing that a loop or branch keeps to its gradient."""
    if devices[0].startswith("GPU"):
        pytest.skip("not applicable: XLA does not compile for emulated GPUs")
    x, serial = _normal(7, 3), partial(one_by_one, fn)
    mapper = devicemap.DeviceMap(fn, devices=devices, jit_compile=True, **options)
    _compare(gradients_of(mapper, x, WEIGHTS), gradients_of(serial, x, WEIGHTS))
    mapper = devicemap.DeviceMap(fn, devices=devices, **options)
    around = tf.function(lambda x: mapper(x) + 1.0, jit_compile=True)
    for function in (around, tf.function(lambda x: around(x))) if options == {} else ():
        _compare(function(x), serial(x) + 1.0)
    count, generator = tf.Variable(0.0), tf.random.Generator.from_seed(1)
    writing = devicemap.DeviceMap(partial(_writing, count, generator), devices=devices, jit_compile=True, **options)
    doubled, drawn = writing(tf.ones([9, 3]))
    np.testing.assert_array_equal(doubled, 2 * np.ones([9, 3]))
    assert count.numpy() == 9
    assert len(np.unique(drawn)) == 27


def _by_sign(row: Any) -> Any:
    return tf.cond(row[0] > 0, lambda: tf.exp(row * WEIGHTS[0]), lambda: tf.sin(row) * WEIGHTS[1, 1] ** 2)


def _until_small(row: Any) -> Any:
    for _ in tf.range(8):
        if tf.norm(row) < 0.4:
            break
        row = tf.tanh(row * WEIGHTS[0]) * 0.9
    return row


@pytest.mark.private("knowing that XLA compiles")
@pytest.mark.parametrize(
    "fn",
    [
        pytest.param(_by_sign, id="branch", marks=pytest.mark.nightly),
        pytest.param(_in_a_loop, id="loop"),
        pytest.param(_until_small, id="loop that rows leave", marks=pytest.mark.nightly),  # takes 30 s
    ],
)
def test_what_xla_compiles_after_gradients(devices: list[str], fn: Any) -> None:
    """TensorFlow changes loops and branches for their gradients, so that XLA refuses them, or ends the process."""
    if devices[0].startswith("GPU"):
        pytest.skip("not applicable: XLA does not compile for emulated GPUs")
    x, mapper = _normal(7, 3), devicemap.DeviceMap(fn, devices=devices)
    with tf.GradientTape(), tf.GradientTape() as tape:
        total = tf.reduce_sum(mapper(x))
    tape.gradient(total, WEIGHTS)
    _compare(tf.function(lambda x: mapper(x), jit_compile=True)(x), one_by_one(fn, x))


@pytest.mark.private("another gradient for an op, where TensorFlow's own fails in a loop")
def test_what_the_user_passes_in_is_not_changed(devices: list[str]) -> None:
    inner = tf.function(
        lambda row: tf.gather(row, [2, 0]) * V[0] + tf.linalg.svd(tf.stack([row, row]), compute_uv=False)
    )
    x = _normal(6, 3)
    concrete = inner.get_concrete_function(tf.TensorSpec([3], tf.float32))
    before = concrete.graph.as_graph_def().SerializeToString(deterministic=True)

    def attributes() -> dict[str, list[str]]:
        return {op.name: sorted(getattr(op, "__dict__", {})) for op in concrete.graph.get_operations()}

    attributes_before = attributes()

    wanted = gradients_of(inner, x[0])[0]
    for options in ({}, {"vectorize": False}, {"batch_size": 2}):
        mapper = devicemap.DeviceMap(lambda row: inner(row) * 2.0, devices=devices, **options)
        np.testing.assert_allclose(mapper(x)[0], inner(x[0]) * 2.0, rtol=1e-4)
        if "batch_size" not in options:
            np.testing.assert_allclose(gradients_of(mapper, x)[0][0], 4 * wanted, rtol=1e-3)
    assert inner.get_concrete_function(tf.TensorSpec([3], tf.float32)) is concrete
    assert concrete.graph.as_graph_def().SerializeToString(deterministic=True) == before
    assert attributes() == attributes_before
    np.testing.assert_allclose(gradients_of(inner, x[0])[0], wanted, rtol=1e-6)
