"""The ways in which a map runs, each of which is to give what `tf.map_fn` gives, and the gradients that go through them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from oracle import assert_same, first_rows, serial

import devicemap

ONE = ["CPU:1"]
SEVERAL = ["CPU:2", "CPU:0", "CPU:5"]
NO_GRADIENT = (LookupError, NotImplementedError)
ALL = [f"CPU:{i}" for i in (3, 0, 5, 1, 2, 4, 6, 7)]


@dataclass(frozen=True)
class Client:
    """A function of others, with its data, and what is needed to compare its results."""

    fn: Any
    data: Any
    signature: Any = None
    batched: bool = False
    tolerances: dict[str, float] = field(default_factory=dict)
    """`rtol` and `atol`, where others than those of the oracle are meant."""

    empty: bool = True
    """Whether it takes no rows: convolutions of Keras's models fail on an empty batch, in a graph with oneDNN."""

    @functools.cached_property
    def row_count(self) -> int:
        leaf = tf.nest.flatten(self.data)[0]
        return int(leaf.dense_shape[0] if isinstance(leaf, tf.SparseTensor) else leaf.shape[0])

    def rows(self, count: int) -> Any:
        return first_rows(self.data, count)

    @functools.cached_property
    def serial(self) -> Any:
        """`tf.map_fn`, or the function itself for batches, in a `tf.function` that does not know the number of rows."""
        return self.within(lambda data: serial(self.fn, data, self.batched, self.signature))

    @functools.cached_property
    def wanted(self) -> tuple[Any, list[Any]]:
        """The results of the serial map, and their static shapes."""
        return self.serial(self.data), _shapes(self.serial)

    @property
    def differentiable(self) -> bool:
        """Whether there are numbers that a gradient could be asked for."""
        return bool(_leaves(self.data)) and bool(_leaves(self.wanted[0]))

    @functools.cached_property
    def gradients(self) -> list[Any]:
        """Those of the serial map.

        `tf.map_fn` has none in some cases where a row for itself has: values without their vectors (`eigvals`), `py_function`s,
        sparse and ragged rows. There, they are those of each row for itself, in eager code.
        """
        try:
            return _gradients(self.serial, self.data)
        except Exception:
            return _gradients(self._row_by_row, self.data)

    def _row_by_row(self, data: Any) -> Any:
        rows = [tf.nest.map_structure(functools.partial(_row, i), data) for i in range(self.row_count)]
        results = [self.fn(*row) if type(data) is tuple else self.fn(row) for row in rows]
        join = functools.partial(tf.concat, axis=0) if isinstance(self.signature, tf.RaggedTensorSpec) else tf.stack
        return tf.nest.map_structure(lambda *leaves: join(leaves), *results)

    def within(self, mapped: Callable[[Any], Any]) -> Any:
        """`mapped` inside a `tf.function` that does not know the number of rows."""

        def relaxed(leaf: Any) -> Any:
            shape = [None, *leaf.shape[1:]]
            if isinstance(leaf, tf.RaggedTensor):
                return tf.RaggedTensorSpec(shape, leaf.dtype, leaf.ragged_rank, leaf.row_splits.dtype)
            return (tf.SparseTensorSpec if isinstance(leaf, tf.SparseTensor) else tf.TensorSpec)(shape, leaf.dtype)

        signature = [tf.nest.map_structure(relaxed, self.data)]
        return tf.function(lambda data: mapped(data), input_signature=signature, autograph=False)

    def mapper(self, **options: Any) -> Any:
        if self.signature is not None:
            options["fn_output_signature"] = self.signature
        return devicemap.DeviceMap(self.fn, batched=self.batched, **options)

    def assert_same(self, got: Any, wanted: Any) -> None:
        halves = {leaf.dtype for leaf in tf.nest.flatten(wanted)} & {tf.float16, tf.bfloat16}
        assert_same(got, wanted, **({"rtol": 1e-2, "atol": 1e-2} if halves else {}) | self.tolerances)


def check_results(client: Client, **options: Any) -> None:
    """On eight devices and with fewer rows than those, in chunks on three, and inside a `tf.function` on one.

    Without rows too, where the shape of a row's results can be told without running.
    """
    wanted, shapes = client.wanted
    mapper = client.mapper(devices=ALL, **options)
    client.assert_same(mapper(client.data), wanted)
    client.assert_same(mapper(client.rows(1)), client.serial(client.rows(1)))
    if not client.empty:
        assert [leaf.shape.as_list() for leaf in tf.nest.flatten(mapper(client.rows(0)))] == [
            [0, *s[1:]] for s in shapes
        ]
    elif all(shape is not None and None not in shape[1:] for shape in shapes):
        client.assert_same(mapper(client.rows(0)), client.serial(client.rows(0)))
    client.assert_same(client.mapper(devices=SEVERAL, batch_size=2, **options)(client.data), wanted)
    within = client.within(client.mapper(devices=ONE, **options))
    client.assert_same(within(client.data), wanted)
    assert _shapes(within) == shapes


def _shapes(function: Any) -> list[Any]:
    leaves = tf.nest.flatten(function.get_concrete_function().structured_outputs)
    return [leaf.shape.as_list() if leaf.shape.rank is not None else None for leaf in leaves]


def check_gradients(client: Client, **options: Any) -> None:
    """On several devices, inside a `tf.function` or in eager code: that depends on whether rows are mapped one by one.

    None in the one and zeros in the other count as equal: where an op's gradient is known to be zero, TensorFlow says so
    in either way, depending on whether the op is in a loop. Where the serial map has no gradient at all (an error that names
    the op), the map has to say so too.
    """
    mapper = client.mapper(devices=SEVERAL, **options)
    run = functools.partial(_gradients, mapper)
    if options.get("vectorize") is False:
        run = tf.function(run, autograph=False)
    try:
        wanted = client.gradients
    except NO_GRADIENT:
        with pytest.raises(NO_GRADIENT):
            run(client.data)
    else:
        _assert_same_gradients(client, run(client.data), wanted)


def _row(index: int, leaf: Any) -> Any:
    if isinstance(leaf, tf.SparseTensor):
        start, size = [index] + [0] * (leaf.shape.rank - 1), [1, *leaf.shape[1:]]
        return tf.sparse.reshape(tf.sparse.slice(leaf, start, size), leaf.shape[1:])
    return leaf[index]


def _leaves(nest: Any) -> list[Any]:
    """The tensors with numbers in it that are not whole."""
    flat = [leaf.flat_values if isinstance(leaf, tf.RaggedTensor) else leaf for leaf in tf.nest.flatten(nest)]
    flat = [leaf.values if isinstance(leaf, tf.SparseTensor) else leaf for leaf in flat]
    return [leaf for leaf in flat if leaf.dtype.is_floating or leaf.dtype.is_complex]


def _gradients(mapped: Callable[[Any], Any], data: Any) -> list[Any]:
    watched = _leaves(data)
    with tf.GradientTape() as tape:
        tape.watch(watched)
        loss = tf.zeros([], tf.float64)
        for leaf in _leaves(mapped(data)):
            loss += tf.reduce_sum(_weighed(leaf))
    return list(tape.gradient(loss, watched))


def _weighed(leaf: Any) -> Any:
    """Each number times one of its own, so that gradients that would cancel each other show."""
    parts = [tf.math.real(leaf), tf.math.imag(leaf)] if leaf.dtype.is_complex else [leaf]
    weights = tf.cos(tf.cast(tf.reshape(tf.range(tf.size(leaf)), tf.shape(leaf)), tf.float64))
    return tf.add_n([tf.cast(part, tf.float64) * (weights + i) for i, part in enumerate(parts)])


def _assert_same_gradients(client: Client, got: list[Any], wanted: list[Any]) -> None:
    for leaf, a, b in zip(_leaves(client.data), got, wanted, strict=True):
        a, b = (np.zeros(leaf.shape) if g is None else np.asarray(tf.convert_to_tensor(g)) for g in (a, b))
        assert a.shape == b.shape
        half = leaf.dtype in (tf.float16, tf.bfloat16)
        tolerances = {"rtol": 2e-2, "atol": 2e-2} if half else {"rtol": 1e-4, "atol": 1e-5}
        wide = np.complex128 if leaf.dtype.is_complex else np.float64
        np.testing.assert_allclose(a.astype(wide), b.astype(wide), **tolerances | client.tolerances)
