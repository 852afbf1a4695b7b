"""Objects of classes that TensorFlow takes for structure: attrs, dataclasses of its protocol, extension types."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attr
import numpy as np
import pytest
import tensorflow as tf
from oracle import assert_same
from ways import SEVERAL, Options, X, ways

import devicemap
from devicemap.data.structure import as_nodes, as_objects, freeze
from devicemap.errors import DataError, FunctionError

Pair = attr.make_class("Pair", {"x": attr.ib(default=None), "y": attr.ib(default=None)})


@dataclasses.dataclass
class Scaled:
    factor: int
    x: Any

    def __tf_flatten__(self) -> Any:
        return (self.factor,), (self.x,)

    @classmethod
    def __tf_unflatten__(cls, metadata: Any, components: Any) -> Any:
        return cls(*metadata, *components)


class Batchable(tf.experimental.BatchableExtensionType):
    x: tf.Tensor
    power: int
    more: Mapping[str, tf.Tensor] = {}
    names: tuple[str, ...] = ()


class Masked(tf.experimental.ExtensionType):
    """With a constructor that takes something else than its fields."""

    values: tf.Tensor
    unit: str

    def __init__(self, unit: str, values: Any):
        self.unit = unit
        self.values = tf.convert_to_tensor(values)


class Holder(tf.experimental.ExtensionType):
    lengths: tf.RaggedTensor
    masked: Masked


class Point(tf.experimental.ExtensionType):
    """A single number, never several."""

    x: tf.Tensor

    def __validate__(self) -> None:
        if self.x.shape.rank != 0:
            raise ValueError(f"expected a number, not shape {self.x.shape}")


RAGGED = tf.ragged.constant([[[1], [2, 3]], [[4]], [], [[5, 6]], [[7]], [[8]]])


def _raise(value: Any) -> Any:
    return Batchable(value.x**value.power, value.power + 1, {"b": value.more["a"]}, value.names)


def _unmask(masked: Any) -> Any:
    return Masked(masked.unit + "s", masked.values + 1)


def _several(pair: Any, nest: Any) -> Any:
    return {"both": (Pair(pair.x, Scaled(2, pair.y)), nest["m"]), "other": Masked("k", nest["m"].values)}


CASES: dict[str, tuple[Any, Any]] = {
    "attrs": (lambda pair: Pair(pair.y, pair.x * 2), lambda x: Pair(x, x[:, 0])),
    "dataclass": (lambda scaled: Scaled(scaled.factor + 1, scaled.x * scaled.factor), lambda x: Scaled(3, x)),
    "batchable": (_raise, lambda x: Batchable(x, 2, {"a": x[:, 1]}, ("n", "m"))),
    "extension type": (_unmask, lambda x: Masked("m", x)),
    "nested": (_several, lambda x: (Pair(x, x + 1), {"m": Masked("m", x)})),
}


def _assert_same(got: Any, wanted: Any) -> None:
    """Also the classes, and what is no tensor."""
    a, b = as_nodes(got), as_nodes(wanted)
    assert freeze(tf.nest.map_structure(lambda _: None, a)) == freeze(tf.nest.map_structure(lambda _: None, b))
    assert_same(a, b)


@pytest.mark.in_ci(6)
@ways
@pytest.mark.parametrize("batched", [False, True])
@pytest.mark.parametrize("rows", [6, 1, 0])
@pytest.mark.parametrize(("fn", "data"), CASES.values(), ids=list(CASES))
def test_objects(fn: Any, data: Any, rows: int, batched: bool, way: Options) -> None:
    """The functions treat a batch like its rows, so that their result for all rows is wanted."""
    given = data(X[:rows])
    mapper = devicemap.DeviceMap(fn, **way, batched=batched)
    got = mapper(given)
    wanted = fn(*given) if type(given) is tuple else fn(given)
    _assert_same(got, wanted)
    assert type(got) is type(wanted)
    if "batch_size" not in way:
        for signature in (None, [tf.TensorSpec([None, 2])]):
            inside = tf.function(lambda x: mapper(data(x)), autograph=False, input_signature=signature)
            _assert_same(inside(X[:rows]), got)


def test_ragged_fields() -> None:
    fn = lambda holder: (holder, tf.reduce_sum(holder.lengths.values))
    got, sums = devicemap.parallel_map(fn, Holder(RAGGED, Masked("m", X)), **SEVERAL, batch_size=4)
    assert (type(got), got.masked.unit, got.lengths.to_list()) == (Holder, "m", RAGGED.to_list())
    np.testing.assert_array_equal(sums, [6, 4, 0, 11, 7, 8])


def test_static_fields_are_a_part_of_the_key() -> None:
    traced: list[Any] = []

    def fn(value: Any) -> Any:
        traced.append(value.power)
        return value.x * (1 if value.power is True else 10 * value.power)

    mapper = devicemap.DeviceMap(fn, **SEVERAL)
    for power in (1, 2, 1, 2):
        np.testing.assert_array_equal(mapper(Batchable(X, power)), X * 10 * power)
    assert traced == [1, 2]
    keys = {freeze(as_nodes(Scaled(factor, None))) for factor in (1, True, 1.0)}
    assert len(keys) == 3


def test_objects_of_a_dataset() -> None:
    data = Batchable(X, 2, {"a": X[:, 1]}, ("n",))
    wanted = _raise(data)
    samples = tf.data.Dataset.from_tensor_slices(data)
    _assert_same(devicemap.parallel_map(_raise, samples, **SEVERAL), wanted)
    _assert_same(devicemap.parallel_map(_raise, samples.batch(4), **SEVERAL, batched=True), wanted)
    batches = tf.data.Dataset.from_tensors(Masked("m", X))
    _assert_same(devicemap.parallel_map(_unmask, batches, **SEVERAL, batched=True), _unmask(Masked("m", X)))
    with pytest.raises(DataError, match=r"samples with a Masked, which .*BatchableExtensionType, or set batched=True"):
        devicemap.parallel_map(_unmask, batches, **SEVERAL)


def test_streams_and_plans() -> None:
    fn, data = CASES["nested"]
    mapper = devicemap.DeviceMap(fn, **SEVERAL, batch_size=4)
    wanted = mapper(data(X))
    for chunks in (list(mapper.stream(data(X))), list(mapper.as_dataset(data(X)))):
        parts = [tf.nest.flatten(as_nodes(chunk)) for chunk in chunks]
        joined = [tf.concat(leaves, 0) for leaves in zip(*parts)]
        _assert_same(as_objects(tf.nest.pack_sequence_as(as_nodes(chunks[0]), joined)), wanted)
    assert mapper.explain(data(X)).rows == 6
    assert mapper.verify(data(X)).ok


def test_written_objects_are_named_tuples(tmp_path: Path) -> None:
    mapper = devicemap.DeviceMap(_raise, **SEVERAL, batch_size=4)
    loaded = mapper.write(Batchable(X, 2, {"a": X[:, 1]}), tmp_path).load()
    assert type(loaded).__name__ == "Batchable"
    assert loaded._fields == ("x", "more", "names")
    np.testing.assert_array_equal(loaded.x, X**2)
    np.testing.assert_array_equal(loaded.more["b"], X[:, 1])
    with pytest.raises(devicemap.errors.JournalError):  # other objects
        mapper.write(Batchable(X, 3, {"a": X[:, 1]}), tmp_path)


def test_gradients_go_through_objects() -> None:
    x = tf.Variable(X)
    with tf.GradientTape() as tape:
        result = devicemap.parallel_map(lambda m: Masked("s", m.values**2), Masked("m", x), **SEVERAL)
    np.testing.assert_allclose(tape.gradient(result.values, x), 2 * X)


def test_signatures() -> None:
    signature = Batchable.Spec(x=tf.RaggedTensorSpec([None], tf.float32), power=2, more={}, names=())

    def fn(row: Any) -> Any:
        return Batchable(row[: tf.cast(row[0] / 4, tf.int32)], 2)

    got = devicemap.parallel_map(fn, X, **SEVERAL, fn_output_signature=signature)
    assert got.x.to_list() == [row[: int(row[0] / 4)] for row in X.numpy().tolist()]
    signature = Batchable.Spec(x=tf.TensorSpec([None]), power=3, more={}, names=())
    with pytest.raises(
        FunctionError, match=r"fn_output_signature is .*power=3.*fn returns .*power=2.*must be the same$"
    ):
        devicemap.parallel_map(fn, X, **SEVERAL, fn_output_signature=signature)


def test_an_extension_type_that_cannot_hold_rows() -> None:
    with pytest.raises(FunctionError, match=r"^fn returns a Point, which cannot hold .* number, not shape \(None,\)"):
        devicemap.parallel_map(lambda row: {"p": Point(row[0])}, X, **SEVERAL)


def test_lists_in_objects_and_fields_of_different_lengths() -> None:
    data = Scaled([1], X[:1])  # lists are as good as tuples
    _assert_same(devicemap.parallel_map(lambda value: value, data, **SEVERAL), data)
    with pytest.raises(DataError, match=r"data\.lengths has 6, data\.masked\.values has 2\. They must share"):
        devicemap.parallel_map(lambda value: value, Holder(RAGGED, Masked("m", X[:2])), **SEVERAL)
