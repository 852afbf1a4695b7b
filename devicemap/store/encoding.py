"""Tensors as what can be written down: leaves as plain arrays, specs as JSON.

An array here is of one of NumPy's own number types: strings are bytes and lengths, ragged rows are flat values and row
splits, sparse ones are indices and values, and numbers that NumPy does not know (bfloat16) are the integers of their bits.
"""

from __future__ import annotations

import math
from collections import namedtuple
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from devicemap.data.rows import HOST
from devicemap.data.structure import Node
from devicemap.errors import JournalError
from devicemap.options import Options
from devicemap.store.chunks import Array
from devicemap.store.header import Header
from devicemap.store.records import START_ANEW

_DEEPEST_NEST = 50
_MOST_DIMENSIONS = 32
_MOST_ELEMENTS = 2**40
"""What no description goes beyond: levels of a nest; dimensions; elements of a row, as far as its shape is known."""


def describe_call(
    results: Any,
    inputs: Any,
    options: Options,
    rows: int | None,
    chunk_rows: int | None,
    function: Mapping[str, Any],
    name: str,
    reducer: Sequence[str] | None = None,
) -> Header:
    """The header for the results of a call.

    Args:
        results, inputs: nests of `tf.TypeSpec`s, of shapes `[None, ...]`.
        options: of which `batched`, `batch_size` and `seed` matter here.
        rows: how many rows the data has, where that is known.
        chunk_rows: the rows of its first chunk, where it is a dataset of batches that are not cut.
        function: what the function is, as `fingerprint.fingerprint` writes it.
        name: of the function.
        reducer: how the results are reduced, by leaf, where they are.

    Raises:
        JournalError: the results, or the data, are of a type that cannot be written down.
    """
    described = describe_nest(results)
    try:
        specs_of(described)
    except ValueError as error:  # found out now, and not when they are read
        raise JournalError(f"what fn returns cannot be written to disk: {error}") from error
    seed, size = None if options.seed is None else int(options.seed), options.batch_size
    return Header(
        described, describe_nest(inputs), options.batched, size, chunk_rows, seed, rows, function, name, reducer
    )


def describe_nest(specs: Any) -> Any:
    """A nest of specs as JSON.

    >>> describe_nest({"x": tf.TensorSpec([None, 3], tf.float32)})
    {'dict': [['x', {'dense': 'float32', 'shape': [None, 3], 'stored': 'f4'}]]}

    Raises:
        JournalError: for what is not a tuple, named tuple, dict or object of dense, ragged or sparse tensors.
    """
    if isinstance(specs, Mapping):
        for key in specs:
            if not isinstance(key, str | int):
                raise JournalError(f"a dict has the key {key!r}; only keys that are str or int can be written to disk")
        return {"dict": [[key, describe_nest(specs[key])] for key in sorted(specs)]}
    if isinstance(specs, Node):
        return _describe_object(specs)
    if isinstance(specs, tuple) and hasattr(specs, "_fields"):
        fields = [[field, describe_nest(value)] for field, value in zip(specs._fields, specs)]
        return {"namedtuple": type(specs).__name__, "fields": fields}
    if isinstance(specs, tuple):
        return {"tuple": [describe_nest(spec) for spec in specs]}
    kinds = {tf.TensorSpec: "dense", tf.RaggedTensorSpec: "ragged", tf.SparseTensorSpec: "sparse"}
    kind = kinds.get(type(specs))
    if kind is None or specs.dtype in (tf.resource, tf.variant):
        raise JournalError(
            f"{specs} cannot be written to disk; expected tuples, named tuples and dicts of dense, ragged and sparse "
            "tensors of numbers or strings"
        )
    shape = None if specs.shape.rank is None else specs.shape.as_list()
    described = {kind: specs.dtype.name, "shape": shape, "stored": _stored(specs.dtype)}
    if kind == "ragged":
        described |= {"ragged_rank": specs.ragged_rank, "row_splits": specs.row_splits_dtype.name}
    return described


def _describe_object(node: Node) -> Any:
    if node.kind is None:
        return {"value": repr(node.static)}
    if node.kind is list:
        return describe_nest(node.parts)
    parts = dict(zip(node.names, node.parts))
    if issubclass(node.kind, Mapping):
        return describe_nest(parts)
    fields = [[str(name), describe_nest(part)] for name, part in parts.items()]
    return {"namedtuple": node.kind.__name__, "fields": fields, "metadata": repr(node.static)}


def structure_of(described: Any, directory: Path) -> Any:
    """The nest of specs that a header describes.

    Raises:
        JournalError: it is nothing that `describe_nest` writes.
    """
    try:
        structure = specs_of(described)
        describe_nest(structure)  # and of dtypes that can be written down, in an order that leaves can have
        tf.nest.flatten(structure)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError, JournalError) as error:
        raise JournalError(
            f"{directory} says of its results what devicemap never writes: {type(error).__name__}: {error!s:.200}. {START_ANEW}"
        ) from error
    return structure


def specs_of(described: Any, depth: int = 0) -> Any:
    """The nest of specs that `describe_nest` described; its named tuples are of classes of the same name and fields.

    Objects are named tuples too, of what they hold besides values that are no tensors.
    """
    if depth > _DEEPEST_NEST:
        raise ValueError(f"a nest of more than {_DEEPEST_NEST} levels")

    def inner(entries: Any) -> list[tuple[Any, Any]]:
        return [(key, specs_of(value, depth + 1)) for key, value in entries if "value" not in value]

    if "dict" in described:
        return dict(inner(described["dict"]))
    if "tuple" in described:
        return tuple(spec for _, spec in inner(enumerate(described["tuple"])))
    if "namedtuple" in described:
        fields = inner(described["fields"])
        kind: Any = namedtuple(described["namedtuple"], [field for field, _ in fields], rename=True)  # type: ignore[misc]
        return kind(*(spec for _, spec in fields))
    shape = described["shape"]
    if shape is not None:
        rows, *sizes = shape
        known = [size for size in sizes if size is not None]
        if (
            rows is not None
            or len(shape) > _MOST_DIMENSIONS
            or any(type(size) is not int or size < 0 for size in known)
        ):
            raise ValueError(f"a shape of {shape}")
        if math.prod(max(size, 1) for size in known) > _MOST_ELEMENTS:
            raise ValueError(f"rows of a shape of {sizes}")
    if "ragged" in described:
        splits = tf.as_dtype(described["row_splits"])
        return tf.RaggedTensorSpec(shape, tf.as_dtype(described["ragged"]), described["ragged_rank"], splits)
    if "sparse" in described:
        return tf.SparseTensorSpec(shape, tf.as_dtype(described["sparse"]))
    return tf.TensorSpec(shape, tf.as_dtype(described["dense"]))


def _stored(dtype: Any) -> str:
    """The dtype that arrays of this one are written in, as `"f4"`, or `"strings"`."""
    if dtype == tf.string:
        return "strings"
    plain = np.dtype(dtype.as_numpy_dtype)
    return f"{plain.kind}{plain.itemsize}" if plain.isbuiltin == 1 else f"u{plain.itemsize}"


def encode_leaves(leaves: Sequence[Any]) -> dict[str, Array]:
    """The arrays of several eager leaves, under the names that they have in a chunk's file: `0.values`, `1.splits0`."""
    return {f"{i}.{part}": array for i, leaf in enumerate(leaves) for part, array in _encode_leaf(leaf).items()}


def decode_leaves(leaves: Sequence[Mapping[str, Array]], specs: Sequence[Any]) -> list[Any]:
    """The leaves that were encoded, of arrays that are known to fit: dense ones as arrays (strings as bytes, of dtype
    object), others as tensors."""
    with tf.device(HOST):
        return list(map(_decode_leaf, leaves, specs))


def _encode_leaf(leaf: Any) -> dict[str, Array]:
    if isinstance(leaf, tf.RaggedTensor):
        splits = {f"splits{i}": splits.numpy() for i, splits in enumerate(leaf.nested_row_splits)}
        return encode_array(leaf.flat_values.numpy()) | splits
    if isinstance(leaf, tf.SparseTensor):
        place = {"indices": leaf.indices.numpy(), "shape": leaf.dense_shape.numpy()}
        return encode_array(leaf.values.numpy()) | place
    return encode_array(leaf.numpy())


def _decode_leaf(parts: Mapping[str, Array], spec: Any) -> Any:
    values = _decode_array(parts, spec.dtype)
    if isinstance(spec, tf.RaggedTensorSpec):
        splits = [parts[f"splits{i}"] for i in range(spec.ragged_rank)]
        return tf.RaggedTensor.from_nested_row_splits(tf.convert_to_tensor(values, spec.dtype), splits, validate=False)
    if isinstance(spec, tf.SparseTensorSpec):
        return tf.SparseTensor(parts["indices"], tf.convert_to_tensor(values, spec.dtype), parts["shape"])
    return values


def encode_array(array: Array) -> dict[str, Array]:
    """The array, or those that stand for it."""
    if array.dtype.hasobject:
        strings = array.ravel().tolist()
        lengths = np.fromiter(map(len, strings), np.int64, len(strings)).reshape(array.shape)
        return {"bytes": np.frombuffer(b"".join(strings), np.uint8), "lengths": lengths}
    array = np.asarray(array, order="C")
    return {"values": array if array.dtype.isbuiltin == 1 else array.view(f"u{array.dtype.itemsize}")}


def _decode_array(parts: Mapping[str, Array], dtype: Any) -> Array:
    if dtype == tf.string:
        data, lengths = parts["bytes"].tobytes(), parts["lengths"]
        stops = np.cumsum(lengths, dtype=np.int64).tolist()
        strings = np.empty(len(stops), object)
        strings[:] = [data[start:stop] for start, stop in zip([0, *stops], stops)]
        return strings.reshape(lengths.shape)
    values = parts["values"]
    native = np.asarray(values, values.dtype.newbyteorder("="))
    return native.view(dtype.as_numpy_dtype)
