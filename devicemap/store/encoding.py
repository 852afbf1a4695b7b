"""Result leaves as plain arrays, and specs as JSON.

| leaf | arrays |
| --- | --- |
| dense | `values` |
| ragged | `values`, flat, and `splits0`, `splits1`, ... |
| sparse | `values`, `indices` and `shape` |
| any of strings | `bytes`, of all of them, and `lengths`, in place of `values` |

Numbers of dtypes that NumPy does not have (bfloat16) are stored as unsigned integers of the same bits.
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

START_AGAIN = "Write to another directory, or delete this one to start again"
"""Advice for a directory that is refused."""

Array = np.ndarray[Any, Any]
Arrays = Mapping[tuple[int, str], Array]
"""The arrays of result leaves, by the index of the leaf and the name in the table above."""

_KINDS = {"dense": tf.TensorSpec, "ragged": tf.RaggedTensorSpec, "sparse": tf.SparseTensorSpec}

_MOST_LEVELS = 50
_MOST_DIMENSIONS = 32
_MOST_ELEMENTS = 2**40
"""Limits of a description: levels of a nest, dimensions, and elements of a row as far as its shape is known."""


def describe_nest(specs: Any) -> Any:
    """Return a nest of specs as JSON.

    >>> describe_nest({"x": tf.TensorSpec([None, 3], tf.float32)})
    {'dict': [['x', {'dense': 'float32', 'shape': [None, 3]}]]}

    Raises:
        JournalError: for anything but tuples, named tuples, dicts and objects of dense, ragged or sparse tensors.
    """
    if isinstance(specs, Node):
        if specs.kind is None:
            return {"value": repr(specs.static)}
        if specs.kind is list:
            return describe_nest(specs.parts)
        if not issubclass(specs.kind, Mapping):
            fields = [[str(name), describe_nest(part)] for name, part in zip(specs.names, specs.parts)]
            return {"namedtuple": specs.kind.__name__, "fields": fields, "metadata": repr(specs.static)}
        specs = dict(zip(specs.names, specs.parts))
    if isinstance(specs, Mapping):
        for key in specs:
            if not isinstance(key, str | int):
                raise JournalError(f"a dict has the key {key!r}; only keys that are str or int can be written to disk")
        return {"dict": [[key, describe_nest(specs[key])] for key in sorted(specs)]}
    if isinstance(specs, tuple) and hasattr(specs, "_fields"):
        fields = [[field, describe_nest(value)] for field, value in zip(specs._fields, specs)]
        return {"namedtuple": type(specs).__name__, "fields": fields}
    if isinstance(specs, tuple):
        return {"tuple": [describe_nest(spec) for spec in specs]}
    kind = next((name for name, spec_type in _KINDS.items() if type(specs) is spec_type), None)
    if kind is None or specs.dtype in (tf.resource, tf.variant):
        raise JournalError(
            f"{specs} cannot be written to disk; expected tuples, named tuples and dicts of dense, ragged and sparse "
            "tensors of numbers or strings"
        )
    described = {kind: specs.dtype.name, "shape": None if specs.shape.rank is None else specs.shape.as_list()}
    if kind == "ragged":
        described |= {"ragged_rank": specs.ragged_rank, "row_splits": specs.row_splits_dtype.name}
    return described


def structure_of(described: Any, directory: Path) -> Any:
    """Return the nest of specs that a header describes, with named tuples for objects; `JournalError` if it describes none."""
    try:
        structure = specs_of(described)
        describe_nest(structure)  # checks dtypes and keys
        tf.nest.flatten(structure)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError, JournalError) as error:
        raise JournalError(
            f"{directory} describes its results as devicemap never does: {type(error).__name__}: {error!s:.200}. "
            f"{START_AGAIN}"
        ) from error
    return structure


def specs_of(described: Any, depth: int = 0) -> Any:
    """Return the nest of specs that `describe_nest` described, or raise an error of Python if it is none."""
    if depth > _MOST_LEVELS:
        raise ValueError(f"a nest of more than {_MOST_LEVELS} levels")

    def inner(entries: Any) -> dict[Any, Any]:
        return {key: specs_of(value, depth + 1) for key, value in entries if "value" not in value}

    if "dict" in described:
        return inner(described["dict"])
    if "tuple" in described:
        return tuple(inner(enumerate(described["tuple"])).values())
    if "namedtuple" in described:
        fields = inner(described["fields"])
        kind: Any = namedtuple(described["namedtuple"], [*fields], rename=True)  # type: ignore[misc]
        return kind(*fields.values())
    shape = described["shape"]
    if shape is not None:
        known = [size for size in shape[1:] if size is not None]
        if shape[0] is not None or len(shape) > _MOST_DIMENSIONS or any(type(n) is not int or n < 0 for n in known):
            raise ValueError(f"a shape of {shape}")
        if math.prod(max(size, 1) for size in known) > _MOST_ELEMENTS:
            raise ValueError(f"rows of a shape of {shape[1:]}")
    (name,) = {*_KINDS} & {*described}
    more = [described["ragged_rank"], tf.as_dtype(described["row_splits"])] if name == "ragged" else []
    return _KINDS[name](shape, tf.as_dtype(described[name]), *more)


def encode_leaves(leaves: Sequence[Any]) -> Arrays:
    """Return the arrays of eager leaves, in the order of `parts_of`."""
    arrays: dict[tuple[int, str], Array] = {}
    for i, leaf in enumerate(leaves):
        more = {}
        if isinstance(leaf, tf.RaggedTensor):
            values = leaf.flat_values
            more = {f"splits{depth}": splits for depth, splits in enumerate(leaf.nested_row_splits)}
        elif isinstance(leaf, tf.SparseTensor):
            values, more = leaf.values, {"indices": leaf.indices, "shape": leaf.dense_shape}
        else:
            values = leaf
        named = encode_array(np.asarray(values)) | {name: np.asarray(array) for name, array in more.items()}
        arrays |= {(i, name): array for name, array in named.items()}
    return arrays


def encode_array(array: Array) -> dict[str, Array]:
    """Return an array of numbers, or the bytes and lengths of strings."""
    if array.dtype.hasobject:
        strings = array.ravel().tolist()
        lengths = np.fromiter(map(len, strings), np.int64, len(strings)).reshape(array.shape)
        return {"bytes": np.frombuffer(b"".join(strings), np.uint8), "lengths": lengths}
    array = np.asarray(array, order="C")
    return {"values": array if array.dtype.isbuiltin == 1 else array.view(f"u{array.dtype.itemsize}")}


def parts_of(specs: Sequence[Any]) -> dict[tuple[int, str], Any]:
    """Return the stored dtype of each array of leaves of these specs."""
    parts: dict[tuple[int, str], Any] = {}
    for i, spec in enumerate(specs):
        if spec.dtype == tf.string:
            named: dict[str, Any] = {"bytes": "u1", "lengths": "i8"}
        else:
            plain = np.dtype(spec.dtype.as_numpy_dtype)
            named = {"values": plain if plain.isbuiltin == 1 else f"u{plain.itemsize}"}
        if isinstance(spec, tf.RaggedTensorSpec):
            named |= {f"splits{depth}": spec.row_splits_dtype.as_numpy_dtype for depth in range(spec.ragged_rank)}
        elif isinstance(spec, tf.SparseTensorSpec):
            named |= {"indices": "i8", "shape": "i8"}
        parts |= {(i, name): np.dtype(dtype).newbyteorder("<") for name, dtype in named.items()}
    return parts


def decode_leaves(arrays: Arrays, specs: Sequence[Any], rows: int) -> list[Any]:
    """Return the leaves of a chunk, or raise `ValueError` if the arrays do not fit these specs and so many rows.

    Dense leaves are arrays (strings are bytes, of dtype object), others tensors.
    """
    with tf.device(HOST):
        return [_decode_leaf(arrays, i, spec, rows) for i, spec in enumerate(specs)]


def _decode_leaf(arrays: Arrays, i: int, spec: Any, rows: int) -> Any:
    values, shape = _decode_values(arrays, i, spec.dtype), spec.shape
    if isinstance(spec, tf.RaggedTensorSpec):
        splits = [arrays[i, f"splits{depth}"] for depth in range(spec.ragged_rank)]
        for outer, stop in zip(splits, [*(len(inner) - 1 for inner in splits[1:]), len(values)]):
            _require(outer.ndim == 1 and len(outer) and outer[0] == 0 and outer[-1] == stop)
            _require(not np.any(outer[1:] < outer[:-1]))
        _require(len(splits[0]) == rows + 1 and shape[spec.ragged_rank + 1 :].is_compatible_with(values.shape[1:]))
        return tf.RaggedTensor.from_nested_row_splits(tf.convert_to_tensor(values, spec.dtype), splits, validate=False)
    if isinstance(spec, tf.SparseTensorSpec):
        indices, sizes = arrays[i, "indices"], arrays[i, "shape"]
        _require(sizes.ndim == 1 and len(sizes) and sizes[0] == rows and not np.any(sizes < 0))
        _require(shape.is_compatible_with(sizes.tolist()) and math.prod(max(n, 1) for n in sizes.tolist()) < 2**62)
        _require(values.ndim == 1 and indices.shape == (len(values), len(sizes)))
        _require(not np.any((indices < 0) | (indices >= sizes)))
        return tf.SparseTensor(indices, tf.convert_to_tensor(values, spec.dtype), sizes)
    _require(values.shape[:1] == (rows,) and shape.is_compatible_with(values.shape))
    return values


def _decode_values(arrays: Arrays, i: int, dtype: Any) -> Array:
    if dtype != tf.string:
        values = arrays[i, "values"]
        _require(dtype != tf.bool or not np.any(values.view(np.uint8) > 1))
        return np.asarray(values, values.dtype.newbyteorder("=")).view(dtype.as_numpy_dtype)
    data, lengths = arrays[i, "bytes"].tobytes(), arrays[i, "lengths"]
    _require(not np.any((lengths < 0) | (lengths > len(data))) and int(lengths.sum()) == len(data))
    stops = np.cumsum(lengths, dtype=np.int64).tolist()
    strings = np.empty(len(stops), object)
    strings[:] = [data[start:stop] for start, stop in zip([0, *stops], stops)]
    return strings.reshape(lengths.shape)


def _require(condition: Any) -> None:
    if not condition:
        raise ValueError("their arrays do not fit the description of the results")
